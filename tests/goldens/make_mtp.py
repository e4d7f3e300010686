"""Makes mtp.safetensors: what a multi-token-prediction head of transformers' own parts drafts behind its target.

Run as

    python -m tests.goldens.make_mtp

in the environment of make_targets.py. transformers has no such head; this one is put together from its Qwen3.5 decoder
layer, norm and rotary embedding as vLLM's qwen3_5_mtp.py wires them, and keeps no cache: every chain is run from the
first token again, true hidden states first, its own behind them. Target, prompts and weights come from `cases`. For
each prompt K:
    text.K      greedy continuation of the prompt, the first token included
    drafts.K    argmax drafts behind text.K[:1], text.K[:2], …: [places, steps]
    logits.K    their logits: [places, steps, vocabulary]
"""

import json
import platform

import numpy as np
import torch  # pyrefly: ignore[missing-import]
import transformers  # pyrefly: ignore[missing-import]
from safetensors.numpy import save_file
from transformers.models.qwen3_5 import modeling_qwen3_5 as parts  # pyrefly: ignore[missing-import]

from tests.goldens import cases, weights
from tests.goldens.make_targets import build


class Head(torch.nn.Module):
    """One full-attention layer between a projection and a norm."""

    def __init__(self, raw: dict):
        super().__init__()
        raw = {k: v for k, v in raw.items() if k not in ("architectures", "model_type")}
        config = transformers.Qwen3_5TextConfig(**(raw | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}))
        config._attn_implementation = "eager"
        width = config.hidden_size
        self.fc = torch.nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding = parts.Qwen3_5RMSNorm(width, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = parts.Qwen3_5RMSNorm(width, eps=config.rms_norm_eps)
        self.layers = torch.nn.ModuleList([parts.Qwen3_5DecoderLayer(config, 0)])
        self.norm = parts.Qwen3_5RMSNorm(width, eps=config.rms_norm_eps)
        self.rotary = parts.Qwen3_5TextRotaryEmbedding(config)

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Embeddings and hidden states [T, D] of all slots from the first -> the head's hidden states [T, D]."""
        joined = torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], dim=-1)
        x = self.fc(joined)[None]
        length = x.shape[1]
        rope = self.rotary(x, torch.arange(length).expand(3, 1, length))
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        return self.norm(self.layers[0](x, rope, attention_mask=mask))[0]


def run(target: torch.nn.Module, head: Head, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Continuation, drafts and their logits of one prompt."""
    embed = target.model.embed_tokens
    free = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = target.generate(torch.from_numpy(prompt)[None], max_new_tokens=cases.MTP_TEXT, **free)[0]
    true = target.model(ids[None]).last_hidden_state[0]  # after the final norm
    drafts, logits = [], []
    for place in range(1, cases.MTP_TEXT + 1):
        known = ids[: len(prompt) + place]
        hidden, chain = true[: len(known) - 1], known[1:]
        for _ in range(cases.MTP_STEPS):
            newest = head(embed(chain), hidden)[-1:]
            logits.append(target.lm_head(newest)[0].numpy())
            chain = torch.cat([chain, torch.from_numpy(logits[-1]).argmax()[None]])
            hidden = torch.cat([hidden, newest])
        drafts.append(chain[-cases.MTP_STEPS :].numpy())
    shape = (cases.MTP_TEXT, cases.MTP_STEPS, -1)
    return ids[len(prompt) :].numpy(), np.stack(drafts), np.stack(logits).reshape(shape)


def main() -> None:
    """Runs the prompts and writes the file."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    target, head = build(cases.MTP_TARGET), Head(cases.TARGETS[cases.MTP_TARGET]).float().eval()
    values = cases.mtp_weights()
    head.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()})
    arrays: dict[str, np.ndarray] = {}
    with torch.no_grad():
        for k, prompt in enumerate(cases.mtp_prompts()):
            text, drafts, logits = run(target, head, prompt)
            arrays |= {f"text.{k}": text, f"drafts.{k}": drafts, f"logits.{k}": logits}
    metadata = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "digests": {"mtp": weights.digest(values)},
    }
    arrays = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    save_file(arrays, cases.FOLDER / "mtp.safetensors", {"about": json.dumps(metadata)})
    print({name: (value.shape, str(value.dtype)) for name, value in arrays.items()})
    print({name: value.tolist() for name, value in arrays.items() if not name.startswith("logits")})


if __name__ == "__main__":
    main()
