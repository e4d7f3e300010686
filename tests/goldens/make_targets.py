"""Makes targets.safetensors and plains.safetensors: what Hugging Face transformers computes for the target cases.

Torch and transformers are oracles and no dependency of this project. From the repository's root, in an environment
of their own (Python 3.11; `pip install torch==2.13.0 transformers==5.17.0 safetensors numpy`):

    python -m tests.goldens.make_targets

Everything is fp32 on the CPU with eager attention. Weights and inputs come from `cases`. For each case:
    CASE.logits.K        logits of prompt K run alone in one go, at every position (cases with a tied head: the last 32)
    CASE.left.K          logits of prompt K in a left-padded batch, every fourth position of the prompt
    CASE.right.K         ... in a right-padded batch
    CASE.taps            residual stream after every layer, prompt 0, at TAP_POSITIONS: [layers, positions, 64]
    CASE.recurrent.K     state of every Gated DeltaNet layer after prompt K
    CASE.conv.K          the last three raw convolution inputs after prompt K, [layers, 3, channels]
plains.safetensors has, for each of its cases, every fourth row of CASE.logits.0 and CASE.taps alone.
"""

import json
import platform
from collections.abc import Callable, Iterable

import numpy as np
import torch  # pyrefly: ignore[missing-import]
import transformers  # pyrefly: ignore[missing-import]
from safetensors.numpy import save_file

from tests.goldens import cases, weights

FULL_LOGITS = ("hybrid", "dense")
PAD_STRIDE = 4


def build(case: str) -> torch.nn.Module:
    """The Hugging Face model of a case, with the case's weights."""
    config = {k: v for k, v in cases.config_of(case).items() if k not in ("architectures", "model_type")}
    match cases.config_of(case)["model_type"]:
        case "qwen3":
            model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config))
        case "llama":
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
        case "qwen3_5_moe_text":
            model = transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**config))
        case _:
            model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**config))
    model.set_attn_implementation("eager")
    model = model.float().eval()
    state = {
        name if name.startswith("lm_head") else f"model.{name}": torch.from_numpy(value)
        for name, value in cases.target_weights(case).items()
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= ({"lm_head.weight"} if config["tie_word_embeddings"] else set()), missing
    model.tie_weights()
    return model


class LayerOutputs:
    """Records the residual stream after every layer; `hidden_states[-1]` of transformers is past the final norm."""

    def __init__(self, model: torch.nn.Module):
        self.values: list[torch.Tensor] = []
        self.handles = [layer.register_forward_hook(self._keep) for layer in model.model.layers]

    def _keep(self, module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        self.values.append(output[0] if isinstance(output, tuple) else output)

    def take(self) -> torch.Tensor:
        """Everything since the last call, [layers, batch, tokens, hidden]."""
        values, self.values = self.values, []
        return torch.stack(values)


def padded(tokens: list[np.ndarray], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask of a batch padded on one side; padding holds a token that is none of a pad's zeros."""
    width = max(map(len, tokens))
    ids = np.full((len(tokens), width), 7, np.int64)
    mask = np.zeros((len(tokens), width), np.int64)
    for row, value in enumerate(tokens):
        where = slice(width - len(value), width) if side == "left" else slice(0, len(value))
        ids[row, where], mask[row, where] = value, 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


def run(case: str) -> dict[str, np.ndarray]:
    """All tensors of one case."""
    model = build(case)
    recorder = LayerOutputs(model)
    tokens = cases.prompts(case)
    hybrid = cases.TARGETS[case]["model_type"] == "qwen3_5_text"
    out: dict[str, np.ndarray] = {}
    full: list[np.ndarray] = []
    for k, ids in enumerate(tokens):
        result = model(torch.from_numpy(ids)[None], use_cache=True, output_hidden_states=True)
        layers = recorder.take()
        for i in range(len(layers) - 1):
            assert torch.equal(result.hidden_states[i + 1], layers[i])
        full.append(result.logits[0].numpy())
        out[f"{case}.logits.{k}"] = full[k] if case in FULL_LOGITS else full[k][-32:]
        if k == 0:
            out[f"{case}.taps"] = layers[:, 0, list(cases.TAP_POSITIONS)].numpy()
        if hybrid and case in FULL_LOGITS:
            states = [x for x in result.past_key_values.layers if getattr(x, "recurrent_states", None)]
            out[f"{case}.recurrent.{k}"] = torch.stack([x.recurrent_states[0][0] for x in states]).numpy()
            out[f"{case}.conv.{k}"] = torch.stack([x.conv_states[0][0, :, -3:].T for x in states]).numpy()
    for side in ("left", "right"):
        ids, mask = padded(tokens, side)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits.numpy()
        recorder.take()
        for k, value in enumerate(tokens):
            start = ids.shape[1] - len(value) if side == "left" else 0
            rows = logits[k, start : start + len(value)]
            print(f"{case:12} {side:5} prompt {k}: {relative(rows, full[k]):.1e} from the prompt alone")
            out[f"{case}.{side}.{k}"] = rows[::PAD_STRIDE]
    return out


def run_plain(case: str) -> dict[str, np.ndarray]:
    """The tensors of one case of plains.safetensors."""
    model = build(case)
    recorder = LayerOutputs(model)
    logits = model(torch.from_numpy(cases.prompts(case)[0])[None], use_cache=False).logits[0].numpy()
    taps = recorder.take()[:, 0, list(cases.TAP_POSITIONS)].numpy()
    return {f"{case}.logits.0": logits[::PAD_STRIDE], f"{case}.taps": taps}


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """‖a − b‖ / ‖b‖."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def main() -> None:
    """Runs all cases and writes both files."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.no_grad():
        write("targets", cases.TARGETS, run)
        write("plains", cases.PLAINS, run_plain)


def write(name: str, names: Iterable[str], run_case: Callable[[str], dict[str, np.ndarray]]) -> None:
    """Runs some cases into one file."""
    arrays: dict[str, np.ndarray] = {}
    metadata = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "digests": {case: weights.digest(cases.target_weights(case)) for case in names},
    }
    for case in names:
        arrays |= run_case(case)
    arrays = {key: np.ascontiguousarray(value, dtype=np.float32) for key, value in arrays.items()}
    # One entry only: safetensors writes several in random order, and the file should be reproducible.
    save_file(arrays, cases.FOLDER / f"{name}.safetensors", {"about": json.dumps(metadata)})
    print(f"{sum(a.nbytes for a in arrays.values()) / 1e6:.2f} MB in {len(arrays)} tensors")


if __name__ == "__main__":
    main()
