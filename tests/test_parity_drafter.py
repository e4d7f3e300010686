"""The drafter against the package `dflash` 0.1.0: fp32, random weights (tests/goldens/make_drafters.py)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax import cache as caches
from dflash_jax.config import parse_drafter_config, parse_target_config
from dflash_jax.drafter import Drafter
from dflash_jax.target import Rows, Target
from tests.goldens import cases
from tests.goldens.load import assert_close, build, goldens, page_tables, relative

BOUND = 1e-5
BROKEN = 1e-3
PAGE = 16
CONTEXTS = tuple(cases.ROUNDS)


def load(case: str, values: dict[str, np.ndarray] | None = None, **config: Any) -> Drafter:
    """The JAX drafter of a case, with the case's weights or those given, and with config fields changed."""
    if values is None:
        values = cases.drafter_weights(case)
        goldens("drafters").check_weights(case, values)
    parsed, notes = parse_drafter_config(cases.DRAFTERS[case])
    assert not notes
    parsed = dataclasses.replace(parsed, **config)
    return build(lambda: Drafter(parsed, rngs=nnx.Rngs(0)), values)


@functools.cache
def loaded(case: str) -> Drafter:
    return load(case)


@functools.partial(jax.jit, static_argnames="graph")
def draft(
    graph: Any,
    state: Any,
    pages: Float[Array, "L P S 2 K d"],
    tables: Int[Array, "B T"],
    taps: Float[Array, "B M F"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    block: Float[Array, "B N D"],
    rotate_by: Int[Array, ""],
) -> tuple[Float[Array, "L P S 2 K d"], Float[Array, "B N D"]]:
    """Writes `count` new context tokens of each slot from position `start` on, then runs the block after them.

    `rotate_by` adds to the positions that the context's keys are rotated by; anything but 0 is wrong.
    """
    model = nnx.merge(graph, state)
    order = jnp.arange(taps.shape[1])
    positions = start[:, None] + order
    pages = caches.write_pages(
        pages, model.context_kv(taps, positions + rotate_by), tables, positions, order < count[:, None]
    )
    return pages, model(block, pages, tables, start + count)


class Rounds:
    """Rounds of several slots at once over paged draft KV; slots have different contexts."""

    def __init__(self, model: Drafter, counts: list[tuple[int, ...]]):
        self.graph, self.state = nnx.split(model)
        self.counts = np.asarray(counts)
        self.width = int(self.counts.max())
        c = model.config
        # What the pages held before must not matter.
        self.tables = page_tables(self.counts.sum(1), PAGE)
        shape = (c.num_layers, self.tables.size, PAGE, 2, c.num_kv_heads, c.head_dim)
        self.pages = jnp.full(shape, jnp.nan, jnp.float32)

    def run(
        self, taps: list[np.ndarray], blocks: list[list[np.ndarray]], rotate_by: int = 0
    ) -> list[list[np.ndarray]]:
        """Hidden states by slot and round. `taps[slot]` holds all rounds' rows; `blocks[slot][round]` embeddings."""
        hidden: list[list[np.ndarray]] = [[] for _ in taps]
        for r in range(self.counts.shape[1]):
            start, count = self.counts[:, :r].sum(1), self.counts[:, r]
            # Rows that were not accepted hold rubbish, as a round's rejected rows do.
            fresh = np.full((len(taps), self.width, taps[0].shape[1]), 3.0, np.float32)
            for slot, rows in enumerate(taps):
                fresh[slot, : count[slot]] = rows[start[slot] : start[slot] + count[slot]]
            block = np.stack([blocks[slot][r] for slot in range(len(taps))])
            self.pages, out = draft(
                self.graph,
                self.state,
                self.pages,
                self.tables,
                jnp.asarray(fresh),
                jnp.asarray(start, jnp.int32),
                jnp.asarray(count, jnp.int32),
                jnp.asarray(block),
                jnp.asarray(rotate_by),
            )
            for slot in range(len(taps)):
                hidden[slot].append(np.asarray(out[slot]))
        return hidden


def block_embeddings(case: str, context: str, size: int, anchored: bool = True) -> list[np.ndarray]:
    """Embeddings of [anchor, mask, …] of every round."""
    table = cases.drafter_embedding(case)
    return [
        table[[anchor if anchored else cases.MASK_TOKEN] + [cases.MASK_TOKEN] * (size - 1)]
        for anchor in cases.anchors(case, context)
    ]


def run(
    case: str, model: Drafter, taps_shift: int = 0, rotate_by: int = 0, **block: Any
) -> dict[str, list[np.ndarray]]:
    """Hidden states by context and round; both contexts run as slots of one batch."""
    taps = [np.roll(cases.drafter_taps(case, context), taps_shift, axis=1) for context in CONTEXTS]
    blocks = [block_embeddings(case, context, model.config.block_size, **block) for context in CONTEXTS]
    rounds = Rounds(model, [cases.ROUNDS[context] for context in CONTEXTS])
    return dict(zip(CONTEXTS, rounds.run(taps, blocks, rotate_by), strict=True))


def errors(case: str, model: Drafter, **options: Any) -> dict[str, list[float]]:
    """Relative error by context and round."""
    gold, found = goldens("drafters"), run(case, model, **options)
    return {
        c: [relative(x, gold[f"{case}.{c}.{r}"]) for r, x in enumerate(rounds)] for c, rounds in found.items()
    }


@pytest.mark.parametrize("case", cases.DRAFTERS)
def test_block_hidden_states(case: str):
    """Contexts shorter and longer than the window, over three rounds whose accepted rows extend the context."""
    model, gold = loaded(case), goldens("drafters")
    assert model.config.block_size == cases.block_size(case)
    for context, rounds in run(case, model).items():
        assert len(rounds) == 3
        for r, found in enumerate(rounds):
            assert_close(found, gold[f"{case}.{context}.{r}"], BOUND, f"{context} context, round {r}")


@functools.cache
def pair_target() -> tuple[Target, np.ndarray, np.ndarray]:
    """The pair's target; taps after every layer [tokens, layers, hidden] and logits of its prompt, without a cache."""
    config = parse_target_config(cases.TARGETS[cases.PAIR["target"]])
    values = cases.target_weights(cases.PAIR["target"])
    tokens = jnp.asarray(cases.prompts(cases.PAIR["target"])[cases.PAIR["prompt"]], jnp.int32)[None]

    @nnx.jit
    def score(model: Target) -> tuple[jax.Array | None, jax.Array]:
        order = jnp.arange(tokens.shape[1])[None]
        rows = Rows(tokens=tokens, positions=order, valid=order >= 0)
        out = model(rows, model.empty_context(1), taps=tuple(range(config.num_layers)))
        return out.taps, model.logits(out.hidden)

    target = build(lambda: Target(config, rngs=nnx.Rngs(0)), values)
    taps, logits = score(target)
    return target, np.asarray(taps)[0].reshape(tokens.shape[1], config.num_layers, -1), np.asarray(logits)[0]


def pair_hidden(shift: int = 0) -> list[np.ndarray]:
    """Block hidden states by round, on the taps of the drafter's target layers plus `shift`."""
    target, taps, _ = pair_target()
    drafter = loaded(cases.PAIR["drafter"])
    tokens = cases.prompts(cases.PAIR["target"])[cases.PAIR["prompt"]]
    layers = [layer + shift for layer in drafter.config.target_layer_ids]
    counts = cases.PAIR["accepted"]
    blocks = []
    for r in range(len(counts)):
        anchor = int(tokens[sum(counts[: r + 1])])
        ids = [anchor] + [cases.MASK_TOKEN] * (drafter.config.block_size - 1)
        blocks.append(np.asarray(target.embed(jnp.asarray(ids)[None])[0]))
    return Rounds(drafter, [counts]).run([taps[:, layers].reshape(len(tokens), -1)], [blocks])[0]


def test_pair_end_to_end():
    """A hybrid target, without a cache; its taps through the drafter; and back through the target's head."""
    gold = goldens("drafters")
    target, _, logits = pair_target()
    expected = goldens("targets")[f"{cases.PAIR['target']}.logits.{cases.PAIR['prompt']}"]
    assert_close(logits, expected, BOUND, "the target's logits")
    for r, found in enumerate(pair_hidden()):
        assert_close(found, gold[f"pair.{r}"], BOUND, f"hidden states of round {r}")
        logits = target.logits(jnp.asarray(found[1:]))
        assert_close(logits, gold[f"pair.logits.{r}"], BOUND, f"logits of round {r}")


# What follows must fail: each way of being wrong is far outside of the bound.


@pytest.mark.parametrize("shift", [-1, 1])
def test_taps_off_by_one_are_seen(shift: int):
    for r, found in enumerate(pair_hidden(shift)):
        assert relative(found, goldens("drafters")[f"pair.{r}"]) > BROKEN


def test_taps_in_another_order_are_seen():
    found = errors("full", loaded("full"), taps_shift=64)
    assert min(found["short"] + found["long"]) > BROKEN


@pytest.mark.parametrize("case", ["sliding", "sliding_b8", "yarn_v5"])
def test_ignored_window_is_seen(case: str):
    config = loaded(case).config
    found = errors(case, load(case, layer_windows=(None,) * config.num_layers))
    # Eight tokens of context and a block of 8: no row is 16 or more from another.
    if config.block_size == 8:
        assert found["short"][0] <= BOUND
    assert min(found["long"]) > BROKEN


@pytest.mark.parametrize("by", [-1, 1])
def test_window_off_by_one_is_seen(by: int):
    windows = tuple(w and w + by for w in loaded("sliding").config.layer_windows)
    assert min(errors("sliding", load("sliding", layer_windows=windows))["long"]) > BROKEN


@pytest.mark.parametrize("case", ["full", "full_causal", "sliding", "sliding_bidirectional"])
def test_flipped_causality_is_seen(case: str):
    flipped = tuple(not causal for causal in loaded(case).config.layer_causal)
    found = errors(case, load(case, layer_causal=flipped))
    assert min(found["short"] + found["long"]) > BROKEN


@pytest.mark.parametrize("case", ["full", "sliding"])
def test_masked_anchor_is_seen(case: str):
    found = errors(case, loaded(case), anchored=False)
    assert min(found["short"] + found["long"]) > BROKEN


@pytest.mark.parametrize("case", ["yarn", "yarn_v5"])
def test_ignored_yarn_is_seen(case: str):
    rope = dataclasses.replace(loaded(case).config.rope, scaling=None)
    found = errors(case, load(case, rope=rope))
    assert min(found["short"] + found["long"]) > BROKEN


@pytest.mark.parametrize("by", [-1, 1])
def test_context_rotated_by_the_wrong_position_is_seen(by: int):
    found = errors("full", loaded("full"), rotate_by=by)
    assert min(found["short"] + found["long"]) > BROKEN


def test_zero_centred_norms_are_seen():
    """The drafter's norms are plain whatever its target's are: 1 + w on the same weights is another model."""
    values = cases.drafter_weights("full")
    for name in [n for n in values if n.endswith("norm.weight")]:
        values[name] = values[name] + np.float32(1)
    found = errors("full", load("full", values))
    assert min(found["short"] + found["long"]) > BROKEN
