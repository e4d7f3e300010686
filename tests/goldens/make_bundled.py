"""Logits of the bundled target as Hugging Face transformers computes them.

Run as

    python -m tests.goldens.make_bundled

in an environment with torch 2.13.0 and transformers 5.17.0 (see make_targets.py). Writes bundled.safetensors: token ids
of two prompts with their greedy answers, and fp32 logits at every eighth position.
"""

import json
from pathlib import Path

import torch  # pyrefly: ignore[missing-import]
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
ASSETS = HERE.parents[1] / "dflash_jax" / "assets"


def main() -> None:
    """Loads the folder as any checkpoint, answers two prompts, writes the golden."""
    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target")
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "target", dtype=torch.float32).eval()
    entries = json.loads((ASSETS / "prompts.json").read_text(encoding="utf-8"))
    chat = next(entry for entry in entries if "messages" in entry)
    plain = next(entry for entry in entries if "text" in entry)
    texts = [
        tokenizer.apply_chat_template(chat["messages"], tokenize=False, add_generation_prompt=True),
        plain["text"],
    ]
    tensors = {}
    for index, text in enumerate(texts):
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            answer = model.generate(ids, max_new_tokens=60, do_sample=False)
            logits = model(answer).logits[0, ::8]
        tensors[f"ids.{index}"] = answer[0].to(torch.int32)
        tensors[f"prompt.{index}"] = torch.tensor([ids.shape[1]], dtype=torch.int32)
        tensors[f"logits.{index}"] = logits.contiguous()
    save_file(tensors, HERE / "bundled.safetensors")
    print({name: tuple(value.shape) for name, value in tensors.items()})


if __name__ == "__main__":
    main()
