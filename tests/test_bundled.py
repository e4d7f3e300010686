"""The bundled pair and the drafter of SmolLM2 are real checkpoints: published layouts, sizes, transformers' logits."""

import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.published import SMOLLM2_135M
from convert import load_drafter, load_target
from convert.keymap import module_names
from convert.quantise import quantization_config
from dflash_jax.config import parse_drafter_config, parse_target_config
from dflash_jax.loading import ASSETS, BUNDLED_DRAFTER, BUNDLED_TARGET, SMOLLM2_DRAFTER
from dflash_jax.target import Rows, Target
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.train.settings import RECIPES, load_draft_recipe

GOLDEN = Path(__file__).parent / "goldens" / "bundled.safetensors"


@functools.cache
def target() -> Target:
    return load_target(BUNDLED_TARGET, "float32", progress=False)[1]


def test_logits_equal_transformers() -> None:
    golden, model = load_file(GOLDEN), target()

    @jax.jit
    def logits(tokens: jax.Array) -> jax.Array:
        rows = Rows(tokens[None], jnp.arange(len(tokens))[None], jnp.ones((1, len(tokens)), bool))
        return model.logits(model(rows, model.empty_context(1)).hidden)[0]

    for index in range(2):
        ids, prompt = golden[f"ids.{index}"], int(golden[f"prompt.{index}"][0])
        got, want = np.asarray(logits(jnp.asarray(ids))), golden[f"logits.{index}"]
        assert np.linalg.norm(got[::8] - want) <= 1e-5 * np.linalg.norm(want)
        # Its greedy answer is ours too.
        np.testing.assert_array_equal(got[prompt - 1 : -1].argmax(axis=-1), ids[prompt:])


def test_prompts_are_tokenised_as_transformers_does() -> None:
    golden, tokenizer = load_file(GOLDEN), Tokenizer.from_folder(BUNDLED_TARGET)
    entries = json.loads((ASSETS / "prompts.json").read_text(encoding="utf-8"))
    chat = next(entry for entry in entries if "messages" in entry)
    plain = next(entry for entry in entries if "text" in entry)
    rendered = tokenizer.encode(tokenizer.apply_chat_template(chat["messages"]), add_special_tokens=False)
    for index, ids in enumerate((rendered, tokenizer.encode(plain["text"]))):
        assert ids == golden[f"ids.{index}"][: int(golden[f"prompt.{index}"][0])].tolist()


def test_both_folders_are_small_and_complete() -> None:
    files = [path for folder in (BUNDLED_TARGET, BUNDLED_DRAFTER) for path in folder.iterdir()]
    assert sum(path.stat().st_size for path in files) <= 26e6
    names = {path.name for path in BUNDLED_TARGET.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
                     "generation_config.json", "chat_template.jinja", "README.md"}  # fmt: skip
    assert {path.name for path in BUNDLED_DRAFTER.iterdir()} >= {"config.json", "model.safetensors", "README.md"}


@pytest.fixture(params=["config.json", "config_v5.json"])
def smollm2_drafter(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The shipped folder with either of its configs as config.json."""
    for source, name in ((request.param, "config.json"), ("model.safetensors", "model.safetensors")):
        shutil.copy(SMOLLM2_DRAFTER / source, tmp_path / name)
    return tmp_path


def test_smollm2_drafter_loads_in_both_layouts(smollm2_drafter: Path) -> None:
    target = parse_target_config(SMOLLM2_135M)
    config, drafter, notes = load_drafter(smollm2_drafter, target, jnp.float32)
    expected, module, _ = load_drafter(SMOLLM2_DRAFTER, target, jnp.float32)
    assert config == expected and config.rope == target.rope and notes == []
    # What was trained, and nothing else.
    assert config == parse_drafter_config(load_draft_recipe(RECIPES / "smollm2_draft.json").model)[0]
    weights = {name: np.asarray(leaf.get_value()) for name, leaf in module_names(drafter).items()}
    for name, leaf in module_names(module).items():
        np.testing.assert_array_equal(weights[name], np.asarray(leaf.get_value()))
    assert sum(value.size for value in weights.values()) == 10_512_512


def test_smollm2_drafters_configs_say_the_same() -> None:
    """transformers v4 writes the rotary base at top level, v5 in an object; see the folder's card."""
    v4, v5 = (json.loads((SMOLLM2_DRAFTER / name).read_text()) for name in ("config.json", "config_v5.json"))
    rope = {"rope_theta": v4.pop("rope_theta"), "rope_type": "default"}
    assert v4.pop("rope_scaling") is None and v5.pop("rope_parameters") == rope
    assert "rope_theta" not in v5 and v4 == v5
    assert v4["quantization_config"] == quantization_config(64)


def test_smollm2_drafter_is_small_and_complete() -> None:
    assert {path.name for path in SMOLLM2_DRAFTER.iterdir()} == {
        "README.md", "config.json", "config_v5.json", "model.safetensors"
    }  # fmt: skip
    assert sum(path.stat().st_size for path in SMOLLM2_DRAFTER.iterdir()) < 11e6
    stored = load_file(SMOLLM2_DRAFTER / "model.safetensors")
    assert {str(value.dtype) for value in stored.values()} == {"int32", "int64", "bfloat16"}
