"""Is every difference between methods in bf16 one that rounding explains? `python -m benchmarks.divergence`.

In fp32 all methods emit the same greedy tokens. In bf16 each of them sums in another order, so two tokens whose logits
nearly tie may swap. This audit decodes in bf16 with `ar` and with other methods, scores every text with an fp32 copy of
the same weights in one causal pass without caches, and fails (status 1) unless

    gap <= bound,   gap = best fp32 logit - fp32 logit of the token,
                    bound = depth + u (|best| + |token|),   u = eps(bf16) / 2 = 2**-8

holds for both tokens of each first difference and for every other token emitted. Where the two are fp32's best two,
the gap is the top-2 gap. Why this bound: a run that prefers x to y although fp32 has y ahead by g has got the
difference of these two logits wrong by at least g. How wrong bf16 gets it is measured: `depth` is the largest

    |(logit of fp32's best - logit of its second) in bf16 - the same in fp32|

over all positions of the `ar` texts, where bf16 is scored in the same pass as fp32 and so through none of the code
under audit (caches, trees, commits). It holds what all layers add up. A run under audit rounds in another order: its
error at a position is another draw of the same kind, which tops all N measured ones with a chance of 1 / (N + 1); the
second term leaves room for two roundings of its own, one in each logit, of at most half an eps each.

A text that ends before another with no token different is no matter of rounding and fails too.
"""

import argparse
import dataclasses
import gc
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

import dflash_jax
from benchmarks.methods import parse_methods
from benchmarks.prompt_sets import SET_NAMES, prompt_set
from dflash_jax import SamplingParams, UserError
from dflash_jax.prompts import encode_prompt
from dflash_jax.target import Rows, Target
from pallas_kernels.dispatch import Implementation

REFERENCE = "ar"
UNIT_ROUNDOFF = float(jnp.finfo(jnp.bfloat16).eps) / 2
_CHUNK = 64  # lengths are padded to a multiple, so that few programs serve all texts


@dataclasses.dataclass(frozen=True)
class Scores:
    """What fp32 says of one text; one entry a generated token.

    Attributes:
      top: fp32's best two tokens after the tokens before.
      top_logits: their logits.
      logits: those of the tokens that the text has.
    """

    top: Int[np.ndarray, "n 2"]
    top_logits: Float[np.ndarray, "n 2"]
    logits: Float[np.ndarray, " n"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A first difference, or else a token that no rounding explains.

    Attributes:
      method: whose text.
      prompt: its number.
      position: of the generated token, from 0.
      tokens: the one of `ar` and that of `method`; None where a text had ended.
      top_gap: fp32's best logit - its second.
      gap: fp32's best logit - that of the worse one of `tokens`; None where a text had ended.
      bound: what rounding can explain of it.
    """

    method: str
    prompt: int
    position: int
    tokens: tuple[int | None, int | None]
    top_gap: float | None
    gap: float | None
    bound: float | None

    @property
    def explained(self) -> bool:
        """Whether rounding explains it."""
        return self.gap is not None and self.bound is not None and self.gap <= self.bound


class Scorer:
    """Logits of a target along given texts, in one causal pass each, without a cache."""

    def __init__(self, target: Target, prompts: list[list[int]], most: int, implementation: Implementation):
        """For texts of at most `most` tokens after these prompts."""
        self._prompts = prompts
        # The slice below starts one before the text and must not be moved at the end.
        self._length = -(-(max(map(len, prompts)) + most) // _CHUNK) * _CHUNK
        graph, self._state = nnx.split(target)

        def run(state: Any, tokens: Int[Array, " T"], start: Int[Array, ""]) -> Float[Array, "n V"]:
            model = nnx.merge(graph, state)
            order = jnp.arange(tokens.shape[0])
            rows = Rows(tokens[None], order[None], jnp.ones((1, tokens.shape[0]), bool))
            hidden = model(rows, model.empty_context(1), implementation=implementation).hidden[0]
            return model.logits(jax.lax.dynamic_slice_in_dim(hidden, start, most))

        self._run = jax.jit(run)

    def __call__(self, number: int, text: Sequence[int]) -> Float[np.ndarray, "n V"]:
        """fp32 logits, given prompt `number`, that each token of the text would be chosen from."""
        prompt = self._prompts[number]
        tokens = np.zeros((self._length,), np.int32)
        tokens[: len(prompt) + len(text)] = [*prompt, *text]
        return np.asarray(self._run(self._state, tokens, len(prompt) - 1))[: len(text)]


def score(logits: Float[np.ndarray, "n V"], text: Sequence[int]) -> Scores:
    """Best two and own logits of each token."""
    top = np.argsort(-logits, axis=1, kind="stable")[:, :2]
    return Scores(top, np.take_along_axis(logits, top, axis=1), logits[np.arange(len(text)), list(text)])


def depth_errors(half: Float[np.ndarray, "n V"], exact: Scores) -> Float[np.ndarray, " n"]:
    """How wrong bf16 gets the difference of fp32's best two logits, at each position of a text."""
    rounded = np.take_along_axis(half, exact.top, axis=1)
    return np.abs((rounded[:, 0] - rounded[:, 1]) - (exact.top_logits[:, 0] - exact.top_logits[:, 1]))


def first_difference(one: Sequence[int], two: Sequence[int]) -> int | None:
    """Where two texts part; the shorter one's length if it is the beginning of the other; None if they are equal."""
    for position, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            return position
    return None if len(one) == len(two) else min(len(one), len(two))


def _finding(
    method: str, prompt: int, position: int, sides: list[tuple[list[int], Scores]], depth: float
) -> Finding:
    """The finding about the tokens that some texts with a common beginning have at a position."""
    tokens = [text[position] if position < len(text) else None for text, _ in sides]
    pair = (tokens[0], tokens[-1])
    if None in tokens:
        return Finding(method, prompt, position, pair, None, None, None)
    best, second = (float(x) for x in sides[0][1].top_logits[position])
    worst = min(float(scores.logits[position]) for _, scores in sides)
    bound = depth + UNIT_ROUNDOFF * (abs(best) + abs(worst))
    return Finding(method, prompt, position, pair, best - second, best - worst, bound)


def audit(texts: dict[str, list[list[int]]], scores: dict[str, list[Scores]], depth: float) -> list[Finding]:
    """First differences of all methods from `ar`, and each text's first token, `ar`'s too, that is beyond rounding.

    Args:
      texts: by method, then by prompt.
      scores: of those texts.
      depth: error of bf16 in a difference of two logits.
    """
    findings = []
    for method in texts:
        for prompt, (text, exact) in enumerate(zip(texts[method], scores[method], strict=True)):
            base = texts[REFERENCE][prompt], scores[REFERENCE][prompt]
            parted = first_difference(base[0], text)
            if parted is not None:
                findings.append(_finding(method, prompt, parted, [base, (text, exact)], depth))
            for position in range(len(text)):
                own = _finding(method, prompt, position, [(text, exact)], depth)
                if not own.explained:
                    if position != parted:
                        findings.append(own)
                    break
    return findings


def inject(text: list[int], exact: Scores) -> list[int]:
    """The text up to an ordinary token, which is swapped for fp32's second choice.

    The token is the one whose top-2 gap is the median, so the audit must see an error no larger than usual.
    """
    gaps = exact.top_logits[:, 0] - exact.top_logits[:, 1]
    position = int(np.argsort(gaps)[len(gaps) // 2])
    best, second = (int(token) for token in exact.top[position])
    return [*text[:position], second if text[position] == best else best]


def _same_weights(target: Target, dtypes: list[Any]) -> None:
    """Rounds an fp32 target's weights to what the bf16 one has (nothing changes where the checkpoint is bf16)."""
    leaves, structure = jax.tree.flatten(nnx.state(target))
    rounded = [leaf.astype(dtype).astype(leaf.dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
    nnx.update(target, jax.tree.unflatten(structure, rounded))


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What the bf16 copy leaves behind.

    Attributes:
      prompts: token ids.
      texts: generated ids by method, then by prompt.
      half: logits of the `ar` texts in bf16, scored in one pass each.
      dtypes: of the target's parameters.
      decode: token id -> text.
      device: its name.
    """

    prompts: list[list[int]]
    texts: dict[str, list[list[int]]]
    half: list[Float[np.ndarray, "n V"]]
    dtypes: list[Any]
    decode: Callable[[int], str]
    device: str


def decode_texts(args: argparse.Namespace) -> Decoded:
    """Decodes all prompts with all methods in bf16; frees the model, since a device may not hold both copies."""
    base = SamplingParams(max_new_tokens=args.max_new_tokens, method=REFERENCE)
    methods = {REFERENCE: base} | parse_methods(args.methods, base)
    entries = [entry for name in args.set for entry in prompt_set(name, args.limit)]
    engine = dflash_jax.load(
        args.model, args.draft_model, dtype="bfloat16", max_slots=args.batch, kernels=args.kernels
    )
    prompts = [encode_prompt(engine, entry, chat=None, system=None, thinking=None) for entry in entries]
    texts = {
        name: [c.token_ids for c in engine.generate(prompts, params)] for name, params in methods.items()
    }
    scorer = Scorer(engine.target, prompts, args.max_new_tokens, args.kernels)
    half = [scorer(*pair) for pair in enumerate(texts[REFERENCE])]
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(nnx.state(engine.target))]
    tokenizer = engine.tokenizer
    decoded = Decoded(
        prompts,
        texts,
        half,
        dtypes,
        lambda i: tokenizer.decode([i], skip_special=False),
        engine.device.device_kind,
    )
    del engine, scorer
    gc.collect()
    return decoded


def judge(decoded: Decoded, args: argparse.Namespace) -> dict[str, Any]:
    """Scores the texts in fp32 and audits them; returns the record that `--json` writes."""
    target = dflash_jax.load(
        args.model, args.draft_model, dtype="float32", max_slots=1, kernels=args.kernels
    ).target
    _same_weights(target, decoded.dtypes)
    scorer = Scorer(target, decoded.prompts, args.max_new_tokens, args.kernels)
    known: dict[tuple[int, tuple[int, ...]], Scores] = {}

    def exact(number: int, text: list[int]) -> Scores:
        key = number, tuple(text)
        if key not in known:
            known[key] = score(scorer(number, text), text)
        return known[key]

    texts = {name: list(runs) for name, runs in decoded.texts.items()}
    errors = np.concatenate(
        [
            depth_errors(half, exact(number, text))
            for number, (half, text) in enumerate(zip(decoded.half, texts[REFERENCE], strict=True))
        ]
    )
    if args.inject:
        last = texts[list(texts)[-1]]
        last[0] = inject(last[0], exact(0, last[0]))
    scores = {name: [exact(*pair) for pair in enumerate(runs)] for name, runs in texts.items()}
    depth = float(errors.max())
    findings = audit(texts, scores, depth)
    shown = [
        dataclasses.asdict(f)
        | {"explained": f.explained, "text": [None if t is None else decoded.decode(t) for t in f.tokens]}
        for f in findings
    ]
    return {
        "device": decoded.device,
        "jax": jax.__version__,
        "model": args.model or "bundled",
        "sets": args.set,
        "methods": list(texts),
        "prompts": len(decoded.prompts),
        "tokens": {name: sum(map(len, runs)) for name, runs in texts.items()},
        "parted": {
            name: sum(f.method == name and f.tokens[0] != f.tokens[1] for f in findings) for name in texts
        },
        "positions_measured": len(errors),
        "depth_error": depth,
        "depth_error_median": float(np.median(errors)),
        "unit_roundoff": UNIT_ROUNDOFF,
        "findings": shown,
        "passed": all(f.explained for f in findings),
    }


def table(record: dict[str, Any]) -> str:
    """The record as text."""
    lines = [
        (
            f"{record['prompts']} prompts ({', '.join(record['sets'])}), {record['model']} in bfloat16, greedy, "
            f"{record['device']}, jax {record['jax']}"
        ),
        (
            f"error of bf16 in the difference of fp32's best two logits, {record['positions_measured']} positions: "
            f"median {record['depth_error_median']:.3f}, largest {record['depth_error']:.3f}"
        ),
        f"{'method':12s} {'prompt':>6s} {'position':>8s} {'tokens':30s} {'top-2 gap':>9s} {'gap':>8s} {'bound':>7s}",
    ]
    for f in record["findings"]:
        tokens = " -> ".join("(end)" if text is None else repr(text) for text in f["text"])
        columns = ((f["top_gap"], 9), (f["gap"], 8), (f["bound"], 7))
        numbers = [f"{'-':>{width}s}" if x is None else f"{x:{width}.3f}" for x, width in columns]
        verdict = "" if f["explained"] else "  BEYOND ROUNDING"
        lines.append(
            f"{f['method']:12s} {f['prompt']:6d} {f['position']:8d} {tokens:30s} {' '.join(numbers)}{verdict}"
        )
    for name, parted in record["parted"].items():
        shares = f"{parted} of {record['prompts']} texts part from {REFERENCE}"
        lines.append(f"{name}: {record['tokens'][name]} tokens, {shares}")
    beyond = sum(not f["explained"] for f in record["findings"])
    lines.append(
        "passed: rounding explains every token" if record["passed"] else f"FAILED: {beyond} beyond rounding"
    )
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.divergence", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", help="target (default: the bundled pair)")
    parser.add_argument("--draft-model", help="its drafter")
    parser.add_argument("--methods", default="dflash,ddtree", help="held against ar (default: %(default)s)")
    parser.add_argument(
        "--set",
        nargs="+",
        default=["heldout"],
        metavar="SET",
        help=f"{', '.join(SET_NAMES)} or a prompt file",
    )
    parser.add_argument("--limit", type=int, help="only the first so many prompts of each set")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--inject", action="store_true", help="spoil one token of the last method: it must fail"
    )
    parser.add_argument("--json", type=Path, help="write the record there")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the audit; returns the exit status: 0 passed, 1 failed, 2 wrong use."""
    args = build_parser().parse_args(argv)
    try:
        record = judge(decode_texts(args), args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(record))
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
