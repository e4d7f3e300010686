"""`python -m convert.quantise`: its folders, read by the format's definition, and what such a drafter drafts."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dflash_jax
from convert import load_drafter, save_drafter
from convert.keymap import module_names
from convert.quantise import main, pack_groups
from dflash_jax import SamplingParams
from tests.models import save_random_pair
from tests.test_parity_drafter import Rounds
from tests.test_quantised import GROUP, Packed


def defined(packed: np.ndarray, scales: np.ndarray, columns: int) -> np.ndarray:
    """The weight that the format's definition gives, one value at a time."""
    parts = {"weight_packed": packed, "weight_scale": scales}
    form = Packed(bits=8)
    return np.array([[form.read(parts, row, c) for c in range(columns)] for row in range(len(packed))], np.float32)


def loaded(folder: Path, dtype: Any = jnp.float32) -> dict[str, np.ndarray]:
    module = load_drafter(folder, None, dtype)[1]
    return {name: np.asarray(leaf.get_value()) for name, leaf in module_names(module).items()}


def quantised(folder: Path, *arguments: str) -> Path:
    out = folder.with_name(f"{folder.name}-8bit")
    assert main([str(folder), str(out), "--group-size", str(GROUP), "--quiet", *arguments]) == 0
    return out


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_no_value_is_off_by_more_than_half_a_scale(dtype: Any):
    rng = np.random.default_rng(3)
    # Groups of very different size, among them one of zeros, one with an outlier and one of a single magnitude.
    weight = (rng.normal(size=(7, 6 * GROUP)) * np.repeat(10.0 ** np.arange(-4, 2), GROUP)).astype(np.float32)
    weight[0, :GROUP], weight[1, 3], weight[2, :GROUP] = 0, -50.0, -0.75
    packed, scales = pack_groups(weight, GROUP, np.dtype(dtype))
    assert (packed.dtype, packed.shape, scales.dtype, scales.shape) == (np.int32, (7, 6 * GROUP // 4), dtype, (7, 6))
    off = np.abs(defined(packed, scales, weight.shape[1]) - weight)
    off /= np.repeat(scales.astype(np.float32), GROUP, axis=1)
    assert 0.45 < off.max() <= 0.5 + 1e-6
    # Nothing is wasted: the largest value of every group is at the end of the range.
    largest = np.abs(packed.view(np.uint8).reshape(7, 6, GROUP).astype(int) - 128).max(axis=-1)
    assert largest[0, 0] == 0 and np.delete(largest.ravel(), 0).min() >= 126


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_drafter_comes_back_within_the_rounding(tmp_path: Path, dtype: Any):
    random = save_random_pair(tmp_path)[1]
    raw, plain = json.loads((random / "config.json").read_text()), tmp_path / "plain"
    save_drafter(plain, raw, load_drafter(random, None, dtype)[1])
    folder = quantised(plain)
    stored, before, after = load_file(folder / "model.safetensors"), loaded(plain), loaded(folder)
    assert before.keys() == after.keys()
    for name, value in before.items():
        if value.ndim == 1:
            assert stored[name].dtype == dtype
            np.testing.assert_array_equal(after[name], value)
            continue
        scales = stored[f"{name}_scale"]
        assert scales.dtype == dtype and stored[f"{name}_shape"].tolist() == list(value.shape)
        np.testing.assert_array_equal(after[name], defined(stored[f"{name}_packed"], scales, value.shape[1]))
        assert (np.abs(after[name] - value) <= 0.501 * np.repeat(scales.astype(np.float32), GROUP, axis=1)).all()
        assert np.linalg.norm(after[name] - value) < 0.01 * np.linalg.norm(value)
    assert (folder / "model.safetensors").stat().st_size < 0.6 * (plain / "model.safetensors").stat().st_size
    written = json.loads((folder / "config.json").read_text())
    settings = written.pop("quantization_config")
    assert written == raw
    weights = settings["config_groups"]["group_0"]["weights"]
    assert (settings["quant_method"], settings["format"]) == ("compressed-tensors", "pack-quantized")
    assert (weights["num_bits"], weights["group_size"], weights["symmetric"]) == (8, GROUP, True)
    # What is quantised can be made plain again, and quantised once more.
    save_drafter(tmp_path / "again", written, load_drafter(folder, None, jnp.float32)[1])
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    assert main([str(folder), str(tmp_path / "twice"), "--quiet"]) == 0
    assert set(load_file(tmp_path / "twice" / "model.safetensors")) == set(stored)


def test_a_quantised_drafter_drafts_about_the_same(tmp_path: Path):
    target, plain = save_random_pair(tmp_path)
    folder = quantised(plain)
    drafters = [load_drafter(path, None, jnp.float32)[1] for path in (plain, folder)]
    rng, config = np.random.default_rng(5), drafters[0].config
    taps = rng.normal(size=(9, len(config.target_layer_ids) * config.hidden_size)).astype(np.float32)
    block = rng.normal(size=(config.block_size, config.hidden_size)).astype(np.float32)
    before, after = (Rounds(drafter, [(9,)]).run([taps], [[block]])[0][0] for drafter in drafters)
    assert 0 < np.linalg.norm(after - before) < 0.02 * np.linalg.norm(before)

    engine = dflash_jax.load(target, folder, dtype="float32")
    texts = [
        engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=24, method=method, tree_budget=7))[0].token_ids
        for method in ("ar", "dflash", "ddtree")
    ]
    assert texts[0] == texts[1] == texts[2]


def test_command_line_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target, drafter = save_random_pair(tmp_path)
    out = tmp_path / "out"

    def fails(*arguments: object) -> str:
        assert main([*map(str, arguments), "--quiet"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("python -m convert.quantise: error: ") and said.count("\n") == 1
        return said

    assert "no DFlash drafter; only drafters are quantised" in fails(target, out)
    assert "no such folder" in fails(tmp_path / "nowhere", out)
    assert "--group-size 48: must be a multiple of 4 that divides the 128 columns of fc.weight" in fails(
        drafter, out, "--group-size", 48
    )
    assert "--group-size 2: must be" in fails(drafter, out, "--group-size", 2)
    assert "it is the source" in fails(drafter, drafter, "--overwrite")
    assert not out.exists()
    assert main([str(drafter), str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: ")
    assert "exists; name another folder or pass --overwrite" in fails(drafter, out)
    assert main([str(drafter), str(out), "--overwrite", "--quiet", "--group-size", "32"]) == 0
    weights = load_file(drafter / "model.safetensors")
    weights["fc.weight"][0, 0] = np.inf
    save_file(weights, drafter / "model.safetensors")
    assert "fc.weight has values that are not finite" in fails(drafter, tmp_path / "infinite")
    assert not (tmp_path / "infinite").exists()
