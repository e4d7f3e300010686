"""The bundled pair is a real checkpoint: transformers' logits, published layouts, sizes."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from convert import load_target
from dflash_jax.loading import ASSETS, BUNDLED_DRAFTER, BUNDLED_TARGET
from dflash_jax.target import Rows, Target
from dflash_jax.tokenizer import Tokenizer

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
