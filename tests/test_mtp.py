"""The checkpoint's own draft head: drafts against an independent one (tests/goldens/make_mtp.py), lossless decoding."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from convert import load_mtp, load_target, save_target
from convert.load import has_head
from dflash_jax import Engine, SamplingParams, UserError
from dflash_jax import round as rounds
from dflash_jax.cache import init_cache
from dflash_jax.config import FULL, LINEAR, parse_target_config
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.mtp import MTP, draft_chain
from dflash_jax.programs import Programs
from dflash_jax.round import DecodeState, RoundSpec
from dflash_jax.sharding import make_mesh
from dflash_jax.target import Target
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.train.data import Answers
from dflash_jax.train.draft_loss import loss_mask
from dflash_jax.train.mtp_loop import merge_head, train_mtp
from dflash_jax.train.mtp_loss import chain_agreement, chain_hidden, make_chains
from dflash_jax.train.settings import LoopSettings, MTPRecipe, OptimizerSettings, ResponseSettings
from tests.goldens import cases
from tests.goldens.load import assert_close, build, goldens, page_tables, relative
from tests.models import random_drafter, random_mtp, random_target, randomise

BOUND, BROKEN = 1e-5, 1e-3
PAGE, LIMIT = 16, 12
SPEC = RoundSpec(cases.MTP_STEPS, cases.MTP_STEPS + 1, mtp=True)
LENGTHS = np.array([len(prompt) for prompt in cases.mtp_prompts()], np.int32)


@functools.cache
def models() -> tuple[Target, MTP]:
    config, values = parse_target_config(cases.TARGETS[cases.MTP_TARGET]), cases.mtp_weights()
    goldens("mtp").check_weights("mtp", values)
    target = build(lambda: Target(config, rngs=nnx.Rngs(0)), cases.target_weights(cases.MTP_TARGET))
    return target, build(lambda: MTP(config, rngs=nnx.Rngs(0)), values)


def empty_state() -> DecodeState:
    """One slot a prompt; pages of the head are poisoned, so that reading a slot never written shows."""
    config, slots = models()[0].config, len(LENGTHS)
    tables = page_tables(LENGTHS + LIMIT, PAGE)
    cache = init_cache(
        config, None, slots=slots, pages=tables.size, page_size=PAGE, dtype=jnp.float32, mtp=True
    )
    assert cache.draft_kv is not None and cache.draft_kv.shape[0] == 1
    zeros = jnp.zeros((slots,), jnp.int32)
    return DecodeState(
        cache=dataclasses.replace(cache, draft_kv=jnp.full_like(cache.draft_kv, jnp.nan)), block_tables=tables,
        lengths=zeros, anchor=zeros, taps=jnp.full((slots, SPEC.block_size, config.hidden_size), jnp.nan),
        num_taps=zeros, active=jnp.zeros((slots,), bool), remaining=jnp.full((slots,), LIMIT),
        stop_ids=jnp.full((slots, 1), -1), histogram=jnp.zeros((slots, SPEC.block_size + 1), jnp.int32),
        next_tokens=jnp.zeros((slots, SPEC.block_size), jnp.int32),
    )  # fmt: skip


@functools.cache
def programs() -> tuple[Callable, Callable, Callable]:
    target, mtp = models()

    @jax.jit
    def prefill(state: DecodeState, slots: jax.Array, tokens: jax.Array, count: jax.Array, last: jax.Array) -> tuple:
        return rounds.prefill(target, mtp, state, slots, tokens, count, last, SPEC)

    @jax.jit
    def step(state: DecodeState, forced: jax.Array) -> tuple:
        """A round that verifies other drafts than its own, and the logits of its own."""
        seen: list[jax.Array] = []

        def other(*args: object) -> tuple:
            pages, _, logits = draft_chain(*args)  # type: ignore[arg-type]
            seen.append(logits)
            return pages, forced, logits

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rounds, "draft_chain", other)
            state, output = rounds.speculative_round(target, mtp, state, SPEC)
        return state, output, seen[0]

    return prefill, step, jax.jit(lambda state: draft_chain(target, mtp, state, SPEC))


CHUNK = 32  # one prompt ends with a chunk of one token


def prefilled() -> DecodeState:
    """The prompts, a chunk at a time, each slot alone as the engine does it."""
    state = empty_state()
    for slot, prompt in enumerate(cases.mtp_prompts()):
        for start in range(0, len(prompt), CHUNK):
            piece = np.asarray(prompt[start : start + CHUNK], np.int32)
            padded = np.pad(piece, (0, CHUNK - len(piece)), constant_values=201)
            arguments = ([slot], padded[None], [len(piece)], [start + CHUNK >= len(prompt)])
            state, output = programs()[0](state, *map(jnp.asarray, arguments))
        assert int(output.tokens[0, 0]) == int(goldens("mtp")[f"text.{slot}"][0])
    return state


def forced_drafts(places: np.ndarray, right: list[int]) -> jax.Array:
    """For each slot so many tokens of its own text, then tokens that are not."""
    drafts = np.zeros((len(right), cases.MTP_STEPS), np.int32)
    for slot, good in enumerate(right):
        text = goldens("mtp")[f"text.{slot}"].astype(np.int32)
        following = np.resize(text[places[slot] + 1 :], cases.MTP_STEPS)
        drafts[slot] = np.where(np.arange(cases.MTP_STEPS) < good, following, (following + 1) % 256)
    return jnp.asarray(drafts)


def test_drafts_equal_an_independent_head() -> None:
    """After a prompt in chunks, and after rounds that accept any number of drafts."""
    state, golden = prefilled(), goldens("mtp")
    for right in ([2, 0], [0, 1], [3, 3], [0, 1]):
        places = np.asarray(state.lengths) - LENGTHS
        state, output, logits = programs()[1](state, forced_drafts(places, right))
        for slot, place in enumerate(places):
            assert_close(logits[slot], golden[f"logits.{slot}"][place], BOUND, f"slot {slot}, place {place}")
            np.testing.assert_array_equal(logits[slot].argmax(-1), golden[f"drafts.{slot}"][place])
            count = int(output.count[slot])
            assert count == right[slot] + 1
            text = golden[f"text.{slot}"][place + 1 : place + 1 + count]
            np.testing.assert_array_equal(output.tokens[slot, :count], text)
    assert (np.asarray(state.lengths) - LENGTHS).tolist() == [9, 9]
    np.testing.assert_array_equal(state.histogram, [[0, 2, 0, 1, 1], [0, 1, 2, 0, 1]])


def swapped(self: MTP, embeddings: jax.Array, hidden: jax.Array) -> jax.Array:
    parts = [self.pre_fc_norm_hidden(hidden), self.pre_fc_norm_embedding(embeddings)]
    return self.fc(jnp.concatenate(parts, axis=-1))


def test_the_comparison_is_sharp(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that joins the other way round, or reads another context, is far from the golden."""
    state, (target, mtp), draft = prefilled(), models(), programs()[2]
    want = goldens("mtp")["logits.0"][0]
    assert relative(draft(state)[2][0], want) < BOUND
    other = dataclasses.replace(state.cache, draft_kv=jnp.nan_to_num(state.cache.draft_kv)[:, ::-1])
    assert relative(draft(dataclasses.replace(state, cache=other))[2][0], want) > BROKEN
    monkeypatch.setattr(MTP, "join", swapped)
    assert relative(jax.jit(lambda state: draft_chain(target, mtp, state, SPEC)[2])(state)[0], want) > BROKEN


def test_drafts_stay_in_the_pages_of_their_slot() -> None:
    """A slot at its end drafts past it, where its table names a page that is not its own."""
    state, (target, mtp) = prefilled(), models()
    draft = jax.jit(lambda state: draft_chain(target, mtp, state, RoundSpec(5, 6, mtp=True))[0])
    before, tables = np.asarray(state.cache.draft_kv), np.asarray(state.block_tables)
    # Slot 0 has 95 tokens, the anchor at position 95 its last, and after its six pages the other slot's first.
    foreign = jnp.asarray(np.where(np.arange(tables.shape[1]) < 6, tables, tables[::-1, :1]))
    ending = dataclasses.replace(
        state, block_tables=foreign, lengths=state.lengths.at[0].set(95), remaining=jnp.asarray([0, LIMIT])
    )
    after = np.asarray(draft(ending))
    same = (after == before) | (np.isnan(after) & np.isnan(before))
    touched = {tuple(place) for place in np.argwhere(~same.all(axis=(0, 3, 4, 5))).tolist()}
    # Slot 94 was written with the prompt and may come out the same.
    own = [(tables[0], 95), *((tables[1], i) for i in (40, 41, 42, 43))]
    assert touched - {(int(tables[0][5]), 14)} == {(int(table[i // PAGE]), i % PAGE) for table, i in own}
    idle = dataclasses.replace(state, active=jnp.zeros((2,), bool))
    np.testing.assert_array_equal(draft(idle), before)


AR = SamplingParams(max_new_tokens=60, method="ar", ignore_eos=True)
CHAIN = dataclasses.replace(AR, method="mtp")
TOKENIZER = functools.cache(lambda: Tokenizer.from_folder(BUNDLED_TARGET))
FEW = 5  # a vocabulary so small that random heads are often right


@functools.cache
def engine() -> Engine:
    target = random_target(3, vocab_size=FEW, layers=2, layer_types=(LINEAR, FULL), eos_token_ids=())
    randomise(target, seed=3, std=0.3)
    return Engine(target, None, TOKENIZER(), max_slots=4, prefill_chunk=16, mtp=random_mtp(target, seed=5))


def test_chains_equal_autoregressive_decoding() -> None:
    """Prompts shorter than, equal to and longer than a chunk, in a batch and alone; texts that end inside a chain."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, FEW, length).tolist() for length in (1, 16, 17, 50)]
    expected = [result.token_ids for result in engine().generate(prompts, AR)]
    assert len({tuple(ids) for ids in expected}) == 4 and all(len(set(ids)) > 2 for ids in expected)
    together = engine().generate(prompts, CHAIN)
    assert [r.token_ids for r in together] == expected
    histogram = np.sum([r.accepted_length_histogram for r in together], axis=0)
    assert (histogram[1:] > 0).all(), f"every length from 1 to 4 should occur: {histogram}"
    assert {(r.method, r.tree_budget, r.draft_model) for r in together} == {("mtp", 3, None)}
    for prompt, ids, limit in zip(prompts, expected, (1, 2, 60, 17), strict=True):
        params = dataclasses.replace(CHAIN, max_new_tokens=limit, mtp_steps=1)
        result = engine().generate([prompt], params)[0]
        assert result.token_ids == ids[:limit] and result.tree_budget == 1


def test_auto_and_what_cannot_be_served() -> None:
    target = random_target(1)
    drafter, mtp, auto = random_drafter(target), random_mtp(target), SamplingParams()
    make = lambda drafter, mtp: Engine(target, drafter, TOKENIZER(), mtp=mtp)  # noqa: E731
    assert make(drafter, mtp).method_of(auto) == "ddtree"
    assert make(None, mtp).method_of(auto) == "mtp"
    assert make(None, None).method_of(auto) == "ar"
    with pytest.raises(UserError, match=r"--method mtp needs .*mtp\.\*"):
        make(drafter, None).method_of(SamplingParams(method="mtp"))
    with pytest.raises(UserError, match="--method dflash needs a drafter"):
        make(None, mtp).method_of(SamplingParams(method="dflash"))
    for steps in (0, 16):
        with pytest.raises(UserError, match=f"--mtp-steps must be 1 to 15, found {steps}"):
            SamplingParams(mtp_steps=steps)
    with pytest.raises(UserError, match="'mtp_num_hidden_layers' = 2 is not supported"):
        parse_target_config(cases.TARGETS["hybrid"] | {"mtp_num_hidden_layers": 2})


# --- training -----------------------------------------------------------------------------------------------------


def test_chains_of_training_are_those_of_decoding() -> None:
    """Every chain at once equals each one run behind its true slots with the module that decodes."""
    target = random_target(2)
    mtp, (rows, width, steps) = random_mtp(target), (9, target.config.hidden_size, 3)
    embeddings, hidden = jax.random.normal(jax.random.key(0), (2, 2, rows, width))
    together = jax.jit(lambda e, h: chain_hidden(mtp, e, h, steps))(embeddings, hidden)
    causal = jax.jit(
        lambda e, h: mtp(mtp.join(e, h), jnp.broadcast_to(jnp.arange(rows), (2, rows)), None, None, None)[0]
    )
    for start in (0, 4, 6):
        states = hidden
        for step in range(steps):
            place = start + step
            newest = causal(embeddings, states)[:, place]
            np.testing.assert_allclose(together[step, :, place], newest, atol=2e-5)
            states = states.at[:, (place + 1) % rows].set(newest)


def test_labels_and_counted_rows_of_chains() -> None:
    tokens = jnp.arange(10, 18)[None]
    mask = loss_mask(jnp.array([2]), jnp.array([7]), 8)  # the answer is at positions 2 to 6
    chains = make_chains(tokens, mask, 3)
    np.testing.assert_array_equal(chains.labels, [[12, 13, 14, 15, 16, 17, 0, 0]])
    # Step 1: anchors 2 to 5 (row p has anchor p + 1), labels 3 to 6. Later steps: the same chains, one row on.
    rows = [np.flatnonzero(chains.counted[step, 0]).tolist() for step in range(3)]
    assert rows == [[1, 2, 3, 4], [2, 3, 4], [3, 4]]
    wrong = jnp.zeros((3, 1, 8), int)
    assert float(chain_agreement(chains, wrong)["tau"]) == 1.0
    right = jnp.broadcast_to(chains.labels, (3, 1, 8))
    result = chain_agreement(chains, right)
    assert float(result["tau"]) == 1 + (4 + 3 + 2) / 4 and result["accuracy"].tolist() == [1, 1, 1]
    # Chain of slot 2 wrong in step 2, of slot 1 in step 1: what comes after does not count.
    result = chain_agreement(chains, right.at[1, 0, 3].set(0).at[0, 0, 1].set(0))
    np.testing.assert_allclose(result["chain_accuracy"], [3 / 4, 1 / 4, 0])
    np.testing.assert_allclose(result["accuracy"], [3 / 4, 2 / 3, 1])


def test_a_head_learns_and_joins_its_target(tmp_path: Path) -> None:
    """A text in which every token follows from the one before; the target is random and stays as it is."""
    raw = cases.TARGETS["hybrid"] | {"vocab_size": 32, "num_hidden_layers": 1}
    target = Target(parse_target_config(raw), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    randomise(target, 1)
    save_target(tmp_path / "target", raw, target)
    (tmp_path / "target" / "tokenizer.json").write_text("{}")
    before = load_file(tmp_path / "target" / "model.safetensors")
    assert not has_head(tmp_path / "target")
    rows = np.stack([(start + 7 * np.arange(24)) % 32 for start in range(16)]).astype(np.uint16)
    answers = Answers(rows, np.full(16, 2, np.int32), np.full(16, 24, np.int32))
    recipe = MTPRecipe(
        ResponseSettings(16), LoopSettings(batch=8, steps=12, steps_per_dispatch=1, dtype="float32"),
        OptimizerSettings(peak_lr=1e-2, warmup_steps=4, weight_decay=0.01), steps=2,
    )  # fmt: skip
    out = tmp_path / "run"
    summary = train_mtp(recipe, tmp_path / "target", answers, answers, out, say=lambda text: None)
    lines = [json.loads(line) for line in (out / "mtp_run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["tau"] < 1.5 and summary["heldout"]["tau"] > 2.5  # the first line is of the untrained head
    assert summary["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(nnx.state(random_mtp(target))))
    after = load_file(out / "target" / "model.safetensors")
    assert {name for name in after if name not in before} == {name for name in after if name.startswith("mtp.")}
    for name, array in before.items():
        assert after[name].dtype == array.dtype and after[name].tobytes() == array.tobytes(), name
    assert json.loads((out / "target" / "config.json").read_text()) == raw | {"mtp_num_hidden_layers": 1}
    assert (out / "target" / "tokenizer.json").exists()
    loaded = load_mtp(out / "target", jnp.bfloat16, progress=False)
    assert loaded is not None and has_head(out / "target")
    merge_head(out / "target", out / "target", loaded)  # in place, once more
    again = load_file(out / "target" / "model.safetensors")
    assert {k: v.tobytes() for k, v in again.items()} == {k: v.tobytes() for k, v in after.items()}


def test_two_devices_draft_what_one_does(tmp_path: Path) -> None:
    """The head's part of each device, read from a checkpoint; the same rounds, hence the same drafts."""
    raw = cases.TARGETS["hybrid"] | {"num_hidden_layers": 1, "full_attention_interval": 1, "mtp_num_hidden_layers": 1}
    target = Target(parse_target_config(raw), rngs=nnx.Rngs(0))
    randomise(target, 1, std=0.05)
    save_target(tmp_path, raw, target, mtp=random_mtp(target))
    found = []
    for mesh in (None, make_mesh(2)):
        _, loaded = load_target(tmp_path, "float32", mesh, progress=False)
        mtp = load_mtp(tmp_path, "float32", mesh, progress=False)
        assert mtp is not None
        programs = Programs(loaded, None, mesh, mtp)
        state = programs.init(None, 1, 64, PAGE, mtp_steps=3)
        state = programs.admit(state, 0, np.arange(4), 40, [-1])
        prompt = cases.mtp_prompts()[1][:24].astype(np.int32)
        state, _ = programs.prefill(state, 0, prompt, 24, True, SPEC)
        tokens, pages = [], []
        for _ in range(8):
            state, (results, _) = programs.decode(state, 1, SPEC, 64)
            output, _ = results.fetch()
            tokens += output.tokens[0, : int(output.count[0])].tolist()
            pages.append(np.asarray(state.cache.draft_kv))
        found.append((tokens, np.stack(pages)))
    (one, pages), (two, others) = found
    assert one == two and len(set(one)) > 4
    # Tokens are the target's whatever is drafted; behind them in the pages lies what the round's own draft left.
    np.testing.assert_allclose(others, pages, atol=1e-4)
