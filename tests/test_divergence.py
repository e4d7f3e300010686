"""The divergence audit: rounding passes, real bugs in bf16 do not."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax.round
from benchmarks.divergence import (
    UNIT_ROUNDOFF,
    audit,
    build_parser,
    decode_texts,
    depth_errors,
    first_difference,
    inject,
    judge,
    main,
    score,
    table,
)
from tests.models import save_random_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that audit a small random pair on two prompts."""
    target, drafter = save_random_pair(tmp_path_factory.mktemp("pair"))
    pair = ["--model", str(target), "--draft-model", str(drafter), "--set", "code", "--limit", "2"]
    return [*pair, "--max-new-tokens", "24", "--methods", "dflash"]


def test_the_unit_roundoff_is_that_of_bfloat16():
    halfway = 1 + UNIT_ROUNDOFF
    assert (
        float(jnp.bfloat16(halfway)) == 1.0 and float(jnp.bfloat16(halfway * 1.001)) == 1 + 2 * UNIT_ROUNDOFF
    )


def test_a_sound_pair_passes_and_an_injected_token_fails(pair: list[str]):
    args = build_parser().parse_args(pair)
    decoded = decode_texts(args)
    record = judge(decoded, args)
    assert record["passed"] and record["tokens"]["ar"] == record["positions_measured"] > 24
    assert 0 < record["depth_error_median"] < record["depth_error"]
    assert "passed: rounding" in table(record)
    args.inject = True
    record = judge(decoded, args)
    assert not record["passed"] and "BEYOND ROUNDING" in table(record)
    wrong = [f for f in record["findings"] if not f["explained"]]
    assert [(f["method"], f["prompt"]) for f in wrong] == [("dflash", 0)]
    assert wrong[0]["gap"] == wrong[0]["top_gap"]  # it was the second choice


def test_a_walk_that_accepts_a_draft_unseen_is_caught(pair: list[str], tmp_path: Path, monkeypatch, capsys):
    walk = dflash_jax.settle.walk

    def careless(tree, chosen):
        if tree.max_depth == 0:
            return walk(tree, chosen)
        return walk(tree, chosen.at[:, 0].set(tree.tokens[:, 1]))

    monkeypatch.setattr(dflash_jax.settle, "walk", careless)
    file = tmp_path / "audit.json"
    assert main([*pair, "--json", str(file)]) == 1
    findings = json.loads(file.read_text())["findings"]
    assert {f["method"] for f in findings if not f["explained"]} == {"dflash"}
    capsys.readouterr()


def test_a_stale_cache_is_caught_in_the_text_of_ar(pair: list[str], monkeypatch, capsys):
    """A bug that all methods share leaves no difference between them, so `ar` is not taken at its word."""
    commit = dflash_jax.round.commit

    def forgetful(cache, updates, tables, lengths, path, count, implementation):
        new = commit(cache, updates, tables, lengths, path, count, implementation)
        return dataclasses.replace(new, recurrent=cache.recurrent, conv=cache.conv)

    monkeypatch.setattr(dflash_jax.round, "commit", forgetful)
    assert main([*pair, "--methods", "ar"]) == 1
    out = capsys.readouterr().out
    assert any(line.startswith("ar ") and "BEYOND" in line for line in out.splitlines())


def test_the_bound_tells_near_ties_from_errors():
    """Three tokens, 8.00, 7.95 and 5.00: the first two may swap, the third never wins."""
    logits = np.asarray([[8.0, 7.95, 5.0]] * 3, np.float32)
    texts = {
        "ar": [[0, 0, 0]],
        "near": [[0, 1, 0]],
        "wrong": [[0, 0, 2]],
        "short": [[0, 0]],
        "same": [[0, 0, 0]],
    }
    scores = {name: [score(logits[: len(t)], t) for t in runs] for name, runs in texts.items()}
    near, wrong, short = audit(texts, scores, depth=0.1)
    assert (near.method, near.position, near.tokens, near.explained) == ("near", 1, (0, 1), True)
    assert near.gap == near.top_gap == pytest.approx(0.05, abs=1e-5)
    assert near.bound == pytest.approx(0.1 + 15.95 / 256, abs=1e-6)
    assert (wrong.method, wrong.position, wrong.tokens, wrong.explained) == ("wrong", 2, (0, 2), False)
    assert wrong.gap == pytest.approx(3.0) and wrong.top_gap == pytest.approx(0.05, abs=1e-5)
    assert (short.method, short.position, short.tokens, short.explained) == ("short", 2, (0, None), False)
    assert inject([0, 0, 0], scores["ar"][0]) in ([1], [0, 1], [0, 0, 1])
    # A token that both have and fp32 does not: no difference, yet caught; a text's first such token only.
    both = {"ar": [[2, 2, 2]], "dflash": [[2, 2, 2]]}
    found = audit(both, {name: [score(logits, [2, 2, 2])] for name in both}, depth=0.1)
    assert [(f.method, f.position, f.explained) for f in found] == [("ar", 0, False), ("dflash", 0, False)]


def test_depth_error_is_of_the_difference_of_the_best_two():
    exact = np.asarray([[8.0, 7.0, 5.0], [1.0, 2.0, 4.0]], np.float32)
    half = exact + np.asarray([[0.5, 0.5, 9.0], [9.0, -0.25, 0.125]], np.float32)
    np.testing.assert_allclose(depth_errors(half, score(exact, [0, 2])), [0.0, 0.375])


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2], [1, 2]) is None


def test_wrong_use_is_one_line(pair: list[str], capsys):
    for words, said in (
        (["--methods", "ddtree:x"], "--methods ddtree:x"),
        (["--methods", "dflash:3"], "only ddtree and mtp"),
        (["--methods", "dflash,dflash"], "names dflash twice"),
        (["--set", "nosuch"], "--set must be one of heldout"),
        (["--limit", "0"], "--limit must be at least 1"),
    ):
        assert main([*pair, *words]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1
