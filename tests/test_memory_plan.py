"""The memory plan against published sizes, against what an engine really holds, and at limits."""

import dataclasses
import json
import re
import shutil
import types
from pathlib import Path

import jax
import pytest
from flax import nnx

import convert
import dflash_jax
from benchmarks.shapes import configs
from convert import save_target
from convert.load import read_target_config
from dflash_jax import SamplingParams, UserError, memory_plan
from dflash_jax.config import parse_target_config
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.memory_plan import MemoryPlanner, context_capacity, device_limit
from dflash_jax.target import Target
from tests.models import random_mtp

TARGET, DRAFTER = configs("qwen3.6-27b")
LARGE = MemoryPlanner(TARGET, DRAFTER, "bfloat16", shards=2)
SMALL = MemoryPlanner(read_target_config(BUNDLED_TARGET), configs("bundled")[1], "float32")


def test_27b_with_its_drafter_at_32k_on_two_devices():
    """Parameter counts and bytes a token as worked out by hand from the published configs."""
    plan = LARGE.plan(1, 32_768)
    assert plan.weights["target"] == pytest.approx(
        26.896e9, rel=1e-4
    )  # 26.896 B parameters × 2 bytes / 2 devices
    assert plan.weights["drafter"] == pytest.approx(3.46e9 / 2, rel=1e-3)
    assert plan.caches["attention pages"] == 65_536 * 32_768 // 2
    assert plan.caches["recurrent states"] == (150_994_944 + 2_949_120) // 2
    assert plan.caches["draft pages"] == 5 * 2 * 8 * 128 * 2 * 32_768 // 2
    taps = 16 * 5 * 5120 * 2  # on every device
    assert taps < plan.caches["taps, tables"] < taps + 10_000
    assert plan.total < 45e9
    text = str(plan).splitlines()
    assert text[0] == "memory of each of 2 devices, 1 slot(s) of 32,768 tokens"
    assert text[1].split() == ["target", "weights", "26.90", "GB"]
    assert text[3].split() == ["attention", "pages", "1.07", "GB"]
    assert "target 26.90 + drafter 1.73 + caches of 1 slot(s) of 32,768 tokens 1.49 + " in plan.arithmetic()


def test_27b_with_its_own_draft_head():
    plan = dataclasses.replace(LARGE, drafter=None, mtp=True).plan(1, 32_768)
    assert sum(plan.weights.values()) == pytest.approx(27.3e9, rel=2e-3)
    assert plan.weights["MTP head"] == pytest.approx(0.849e9 / 2, rel=1e-3)
    assert plan.caches["draft pages"] == 4096 * 32_768 // 2
    assert "MTP head weights" in str(plan)


@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_holds_what_was_planned(tp):
    engine = dflash_jax.load(dtype="float32", tp=tp, max_slots=2)
    plan = dataclasses.replace(SMALL, shards=tp).plan(2, 600)
    device = jax.devices()[0]

    def here(tree) -> int:
        arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
        return sum(s.data.nbytes for x in arrays for s in x.addressable_shards if s.device == device)

    assert plan.weights == {
        "target": here(nnx.state(engine.target)),
        "drafter": here(nnx.state(engine.drafter)),
    }
    state = engine.programs.init(engine.drafter.config, 2, plan.tokens, engine.page_size)
    assert plan.tokens == 1024 and sum(plan.caches.values()) == here(state)


def test_slots_are_lowered_to_what_fits():
    four = LARGE.plan(4, 30_000)
    assert four.tokens == 32_768
    assert dataclasses.replace(LARGE, limit=four.total).fit(8, 30_000).slots == 4
    assert dataclasses.replace(LARGE, limit=four.total - 1).fit(8, 30_000).slots == 2
    assert dataclasses.replace(LARGE, limit=four.total).fit(3, 30_000).slots == 4
    assert LARGE.fit(8, 30_000).slots == 8


def test_too_little_for_one_slot_is_refused_with_the_sum():
    planner = dataclasses.replace(LARGE, limit=LARGE.plan(1, 262_144).total - 1)
    with pytest.raises(UserError) as caught:
        planner.fit(8, 262_144)
    message = str(caught.value)
    assert "\n" not in message and "--max-model-len" in message
    assert (
        f"target 26.90 + drafter 1.73 + caches of 1 slot(s) of 262,144 tokens {11.35:.2f} + workspace"
        in message
    )
    assert planner.longest(262_144) == 131_072
    assert LARGE.longest(262_144) == 262_144
    with pytest.raises(UserError, match=r"of which 20.00 GB are there"):
        dataclasses.replace(LARGE, limit=20 * 10**9).longest(262_144)


def test_workspace_covers_the_logits_of_every_row():
    rows = 8 * (LARGE.budget + 1)
    assert LARGE.workspace(8) > 2 * 4 * rows * TARGET.vocab_size // 2
    assert LARGE.workspace(1) < 4e9


def test_load_plans_before_it_reads_weights(monkeypatch, capsys):
    ships = dataclasses.replace(SMALL, mtp=True)  # the bundled target has a draft head
    half = ships.plan(1, 1024).total
    monkeypatch.setattr(memory_plan, "device_limit", lambda devices: half)
    engine = dflash_jax.load(dtype="float32", progress=True)
    err = capsys.readouterr().err
    assert engine.max_model_len == 1024  # of 2048
    assert "the model's 2,048 tokens do not fit in device memory; --max-model-len is 1024" in err
    assert "1 of 8 slots fit in device memory at 1,024 tokens each" in err
    assert "memory of a device, 1 slot(s) of 1,024 tokens" in err
    assert f"available{half / 1e6:21.2f} MB" in err

    slots = []
    monkeypatch.setattr(
        engine.programs, "init", lambda drafter, count, *rest, **more: slots.append(count) or 1 / 0
    )
    for new_tokens in (8, 600):
        with pytest.raises(ZeroDivisionError):
            engine.generate(["a"] * 4, SamplingParams(max_new_tokens=new_tokens))
    short = ships.plan(4, 512)
    assert slots == [4 if short.total <= half else 2 if ships.plan(2, 512).total <= half else 1, 1]

    monkeypatch.setattr(convert, "load_target", lambda *args, **kwargs: pytest.fail("weights were read"))
    with pytest.raises(UserError, match="not enough device memory"):
        dflash_jax.load(dtype="float32", max_model_len=2048)


def test_nothing_is_said_where_everything_fits(capsys):
    dflash_jax.load(dtype="float32", progress=False)
    assert capsys.readouterr().err == ""


def test_the_fullest_device_of_this_process_counts():
    def device(process: int, stats: dict | None) -> types.SimpleNamespace:
        return types.SimpleNamespace(process_index=process, memory_stats=lambda: stats)

    one = device(0, {"bytes_limit": 100, "bytes_in_use": 10})
    two = device(0, {"bytes_limit": 95})
    elsewhere = device(1, {"bytes_limit": 5})
    assert device_limit([one, two, elsewhere]) == 90
    assert device_limit([device(0, None), device(0, {"num_allocs": 3})]) is None
    assert device_limit(jax.devices()) is None  # a CPU


def test_capacity_is_whole_pages():
    assert [context_capacity(n, 64) for n in (1, 512, 513)] == [512, 512, 1024]
    assert context_capacity(1, 96) == 576


def test_the_documented_plan_is_the_planned_one():
    page = Path(__file__).parents[1] / "docs" / "architecture.md"
    assert f"```text\n{LARGE.plan(1, 32_768)}\n```" in page.read_text()


def test_a_checkpoint_with_a_draft_head_is_planned_with_it(tmp_path, capsys):
    raw = json.loads((BUNDLED_TARGET / "config.json").read_text())
    raw |= {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mtp_num_hidden_layers": 1}
    target = Target(parse_target_config(raw), rngs=nnx.Rngs(0))
    save_target(tmp_path, raw, target, mtp=random_mtp(target))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_TARGET / name, tmp_path)
    engine = dflash_jax.load(tmp_path, dtype="float32", progress=True)
    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(engine.mtp)))
    assert re.search(rf"MTP head weights +{size / 1e6:.2f} MB", capsys.readouterr().err)
