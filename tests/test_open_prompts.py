"""Prompts and training of a drafter for a target from elsewhere: a small random Llama here."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import dflash_jax
from benchmarks.published import SMOLLM2_135M
from convert import load_tokenizer
from convert.keymap import abstract_drafter
from dflash_jax import SamplingParams
from dflash_jax.config import check_pair, parse_drafter_config, parse_target_config
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.train import bundled, open_prompts
from dflash_jax.train.__main__ import main
from dflash_jax.train.data import Answers
from dflash_jax.train.settings import RECIPES, load_draft_recipe
from tests.models import random_target, save_random_pair

RECIPE = RECIPES / "smollm2_draft.json"


def test_the_splits_share_no_prompt_and_hold_every_kind():
    train, heldout = (open_prompts.made_prompts(split, count, 1) for split, count in (("train", 800), ("heldout", 60)))
    assert (len(train), len(heldout)) == (800, 60)
    assert not {str(entry) for entry in train} & {str(entry) for entry in heldout}
    assert train == open_prompts.made_prompts("train", 800, 1) != open_prompts.made_prompts("train", 800, 2)
    texts = [entry["text"] for entry in train if "text" in entry]
    assert texts and all(text.startswith("def ") and text.endswith(("'\n", '"\n')) for text in texts)
    asked = [entry["messages"][0]["content"] for entry in train if "messages" in entry]
    for part in ("How many", "Write a Python function", "Write a poem about"):
        assert sum(part in text for text in asked) > 5


def test_problems_and_questions_vary():
    rng = np.random.default_rng(0)
    for kind in (open_prompts.word_problems, open_prompts.questions):
        texts = [entry["messages"][0]["content"] for entry in itertools.islice(kind(rng), 200)]
        assert len(set(texts)) > 150 and not any("{" in text for text in texts)


def test_a_target_is_asked_where_a_users_words_begin():
    tokenizer = load_tokenizer(BUNDLED_TARGET)
    turn = open_prompts.empty_turn(tokenizer)
    assert tokenizer.decode(turn, skip_special=False).endswith("<|im_start|>user\n")
    end = tokenizer.token_to_id("<|im_end|>")
    texts = ("What is a fox?", "What is a fox?", "Hm", "Tell me about owls")
    written = [[*tokenizer.encode(text), end] for text in texts]
    written.append(tokenizer.encode("It never stops"))
    kept = open_prompts.own_prompts(tokenizer, written, (end,))
    assert [entry["messages"][0]["content"] for entry in kept] == ["What is a fox?", "Tell me about owls"]


def test_the_shipped_recipe_is_for_smollm2_and_small_enough():
    recipe = load_draft_recipe(RECIPE)
    config, notes = parse_drafter_config(recipe.model)
    target = parse_target_config(SMOLLM2_135M)
    check_pair(target, config)
    assert notes == [] and config.rope == target.rope
    # In 8 bits, as it ships; twice that in bf16, as it is trained.
    assert sum(leaf.size for leaf in abstract_drafter(config, "bfloat16").values()) < 10.6e6
    assert recipe.responses.source == "open"


def tiny_recipe(folder: Path, drafter: Path) -> Path:
    raw = json.loads(RECIPE.read_text())
    raw["model"] = json.loads((drafter / "config.json").read_text())
    raw["responses"] |= {"prompts": 48, "heldout_prompts": 8, "own_prompts": 16, "batch": 16}
    raw["responses"] |= {"max_prompt_tokens": 200, "max_new_tokens": 24}
    raw["loop"] |= {"batch": 8, "dtype": "float32", "steps_per_dispatch": 20, "steps": 200, "max_seconds": None}
    raw["optimizer"] |= {"peak_lr": 0.01, "warmup_steps": 4}
    raw["anchors"] = 8
    path = folder / "recipe.json"
    path.write_text(json.dumps(raw))
    return path


def test_a_drafter_is_trained_from_a_path_and_decodes_losslessly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    target, drafter = save_random_pair(tmp_path, architecture="llama")
    shutil.copy(BUNDLED_TARGET / "chat_template.jinja", target)
    recipe, out = tiny_recipe(tmp_path, drafter), tmp_path / "run"
    status = main(["draft", "--target", str(target), "--config", str(recipe), "--out", str(out)])
    assert status == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "own prompts: 16 answers" in said and "train prompts: " in said
    lines = [json.loads(line) for line in (out / "draft_run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) > 3 and lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    assert lines[-1]["step"] == lines[-1]["total_steps"]

    engine = dflash_jax.load(target, out / "drafter", dtype="float32")
    assert engine.drafter is not None
    heldout = Answers.load(out / "responses" / "heldout.npz")
    prompts = [ids[:end].tolist() for ids, end in zip(heldout.tokens, heldout.prompt_lengths, strict=True)]
    done = {
        method: engine.generate(prompts, SamplingParams(max_new_tokens=24, method=method))
        for method in ("ar", "dflash", "ddtree")
    }
    for method in ("dflash", "ddtree"):
        assert [c.token_ids for c in done[method]] == [c.token_ids for c in done["ar"]]
    # What training measured on the same answers, at other places in them; a drafter that knows nothing has 1.
    measured = json.loads((out / "draft_run" / "summary.json").read_text())["heldout"]["tau"]
    assert np.mean([c.mean_accepted_length for c in done["dflash"]]) > max(1.5, 0.6 * measured)


def test_a_boxed_run_answers_and_trains_within_its_seconds():
    recipe, clock = bundled.boxed(load_draft_recipe(RECIPE), 100.0)
    assert (recipe.loop.steps, recipe.loop.max_seconds, recipe.responses.max_seconds) == (None, 100.0, 25.0)
    # The clock runs from here on, so that what answering took is not there for training.
    clock.started -= 60
    left = 100 - recipe.loop.reserve_seconds - 60
    assert clock.total_steps(20, 0.1, 0) == 20 + int(left / 0.1) // 20 * 20


def test_a_target_without_a_chat_template_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target, drafter = save_random_pair(tmp_path, architecture="llama")
    config = json.loads((target / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    recipe = tiny_recipe(tmp_path, drafter)
    assert main(["draft", "--target", str(target), "--config", str(recipe), "--out", str(tmp_path / "run")]) == 2
    assert "no chat template" in capsys.readouterr().err
    assert main(["draft", "--target", str(tmp_path / "no"), "--config", str(recipe), "--out", str(tmp_path)]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_random_targets_draw_different_prompts():
    """Drawing at a temperature: distinct rows of one prompt, the same again with the same seed."""
    from dflash_jax.train.responses import answer
    from dflash_jax.train.settings import ResponseSettings

    target = random_target(3)
    settings = ResponseSettings(prompts=8, max_prompt_tokens=4, max_new_tokens=12, batch=8)
    drawn = [answer(target, [[5, 6, 7]] * 8, settings, say=lambda text: None, temperature=1.0) for _ in range(2)]
    np.testing.assert_array_equal(drawn[0].tokens, drawn[1].tokens)
    assert len({tuple(row) for row in drawn[0].tokens.tolist()}) > 4
    greedy = answer(target, [[5, 6, 7]] * 8, settings, say=lambda text: None)
    assert len({tuple(row) for row in greedy.tokens.tolist()}) == 1
