"""Makes drafters.safetensors: what the package `dflash` 0.1.0 computes for the drafter cases.

Set the environment up as `make_targets` says, then `pip install --no-deps dflash==0.1.0` (its model needs torch and
transformers only). From the repository's root:

    python -m tests.goldens.make_drafters

Everything is fp32 on the CPU. A case runs rounds as the package's own loop does: the block's forward adds the new
context tokens to the draft cache, and the cache is then cropped to the block's start. For each case and context:
    CASE.CONTEXT.R       hidden states of the block of round R, after the final norm, [block, 64]
and for the pair, a hybrid target whose own taps feed the drafter:
    pair.R               the same;  pair.logits.R: the drafts' logits through the target's head, [block - 1, vocabulary]
"""

import importlib.metadata
import json
import platform

import numpy as np
import torch  # pyrefly: ignore[missing-import]
import transformers  # pyrefly: ignore[missing-import]
from dflash.model import DFlashDraftModel, _crop_to, _make_cache, extract_context_feature  # pyrefly: ignore[missing-import]
from safetensors.numpy import save_file

from tests.goldens import cases, make_targets, weights


def build(case: str) -> DFlashDraftModel:
    """The package's model of a case, with the case's weights."""
    config = {k: v for k, v in cases.DRAFTERS[case].items() if k not in ("architectures", "model_type")}
    model = DFlashDraftModel(transformers.Qwen3Config(**config)).float().eval()
    missing, unexpected = model.load_state_dict(
        {name: torch.from_numpy(value) for name, value in cases.drafter_weights(case).items()}, strict=False
    )
    assert not unexpected and not missing, (missing, unexpected)
    assert model.block_size == cases.block_size(case)
    assert model.mask_token_id == cases.MASK_TOKEN
    return model


def rounds(
    model: DFlashDraftModel,
    taps: torch.Tensor,
    counts: tuple[int, ...],
    anchors: list[int],
    table: torch.Tensor,
) -> list[np.ndarray]:
    """Hidden states of each round; `taps` [tokens, width] are handed over `counts` tokens at a time."""
    cache, start, hidden = _make_cache(model.config), 0, []
    for count, anchor in zip(counts, anchors, strict=True):
        context = taps[None, start : start + count]
        block = torch.tensor([[anchor] + [model.mask_token_id] * (model.block_size - 1)])
        positions = torch.arange(start, start + count + model.block_size)[None]
        start += count
        out = model(
            target_hidden=context,
            noise_embedding=table[block],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        _crop_to(cache, start)
        hidden.append(out[0].numpy())
    return hidden


def pair() -> dict[str, np.ndarray]:
    """The drafter on a real target's taps."""
    target, drafter = make_targets.build(cases.PAIR["target"]), build(cases.PAIR["drafter"])
    tokens = cases.prompts(cases.PAIR["target"])[cases.PAIR["prompt"]]
    output = target(torch.from_numpy(tokens)[None], output_hidden_states=True)
    taps = extract_context_feature(output.hidden_states, drafter.target_layer_ids)[0]
    counts = cases.PAIR["accepted"]
    anchors = [int(tokens[sum(counts[: r + 1])]) for r in range(len(counts))]
    hidden = rounds(drafter, taps, counts, anchors, target.get_input_embeddings().weight)
    out = {f"pair.{r}": value for r, value in enumerate(hidden)}
    for r, value in enumerate(hidden):
        out[f"pair.logits.{r}"] = drafter.compute_logits(torch.from_numpy(value[1:]), target.lm_head).numpy()
    return out


def main() -> None:
    """Runs all cases and writes the file."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    arrays: dict[str, np.ndarray] = {}
    with torch.no_grad():
        for case in cases.DRAFTERS:
            model, table = build(case), torch.from_numpy(cases.drafter_embedding(case))
            for context, counts in cases.ROUNDS.items():
                taps = torch.from_numpy(cases.drafter_taps(case, context))
                hidden = rounds(model, taps, counts, cases.anchors(case, context), table)
                arrays |= {f"{case}.{context}.{r}": value for r, value in enumerate(hidden)}
        arrays |= pair()
    metadata = {
        "dflash": importlib.metadata.version("dflash"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "digests": {case: weights.digest(cases.drafter_weights(case)) for case in cases.DRAFTERS},
    }
    arrays = {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in arrays.items()}
    # One entry only: safetensors writes several in random order, and the file should be reproducible.
    save_file(arrays, cases.FOLDER / "drafters.safetensors", {"about": json.dumps(metadata)})
    print(f"{sum(a.nbytes for a in arrays.values()) / 1e6:.2f} MB in {len(arrays)} tensors")


if __name__ == "__main__":
    main()
