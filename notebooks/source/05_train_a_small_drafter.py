# %% [markdown]
# # Train a small drafter and watch τ rise
#
# A DFlash drafter learns from its frozen target's **own answers**: random places of them are anchors, the block after an
# anchor is masked, and the drafter fills it from the target's residual stream before the anchor, the *taps* (DFlash, arXiv
# 2602.06036, section 4). Here the bundled target gets a new drafter, from random weights, in about a minute on a CPU.
#
# What makes that possible is a small problem: one layer instead of two, blocks of 8 rows instead of 16, and **one kind of
# prompt**, how to do an everyday task. A drafter for every kind takes a GPU for some minutes
# (`python -m dflash_jax.train draft`, [docs/training.md](../docs/training.md)).

# %% setup

# %% [markdown]
# ## Recipe
#
# The shipped drafter's recipe, made smaller. `cache_taps` runs the target over all answers once, so that a step trains the
# drafter alone. Every key is checked, and explained in `dflash_jax/train/settings.py`. This notebook trains the bundled
# target's drafter, whatever `DFLASH_MODEL` says.

# %%
import json
import tempfile

from dflash_jax.train.settings import RECIPES, load_draft_recipe

run = Path(tempfile.mkdtemp(prefix="drafter-"))
raw = json.loads((RECIPES / "bundled_draft.json").read_text())
one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "max_window_layers": 1}
raw["model"] |= one_layer | {"intermediate_size": 512, "block_size": 8}
raw["responses"] |= {"prompts": 128, "heldout_prompts": 32, "max_prompt_tokens": 32, "max_new_tokens": 64, "batch": 32}
raw["loop"] |= {"steps": 350, "steps_per_dispatch": 50, "batch": 8, "dtype": "float32", "remat": False, "seed": 0}
raw["optimizer"] |= {"peak_lr": 0.004, "warmup_steps": 20}
raw |= {"anchors": 12, "cache_taps": True}
(run / "recipe.json").write_text(json.dumps(raw))
recipe = load_draft_recipe(run / "recipe.json")
print(recipe.responses, recipe.loop, sep="\n")

# %% [markdown]
# ## The target's own answers
#
# Tasks and audiences are combined; one combination in sixteen is held out. So the drafter will have seen each task, but not
# for these people.

# %%
import contextlib
import io

from convert import load_target, load_tokenizer
from dflash_jax.loading import BUNDLED_TARGET
from dflash_jax.train.bundled import sample_lines
from dflash_jax.train.corpus import prompts
from dflash_jax.train.responses import answer, prompt_texts

_, target = load_target(BUNDLED_TARGET, "float32", progress=False)
tokenizer = load_tokenizer(BUNDLED_TARGET)
answers = {}
for split, count in (("train", recipe.responses.prompts), ("heldout", recipe.responses.heldout_prompts)):
    entries = [entry for entry in prompts(split, 40 * count, seed=2) if entry["kind"] == "chat_howto"]
    encoded = [tokenizer.encode(text) for text in prompt_texts(entries)]
    short = [ids for ids in encoded if len(ids) <= recipe.responses.max_prompt_tokens][:count]
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        answers[split] = answer(target, short, recipe.responses, name=f"{split} answers")
for line in sample_lines(answers["heldout"], BUNDLED_TARGET / "tokenizer.json", 2):
    print(line)

# %% [markdown]
# ## How good is a drafter?
#
# `chain_tau` gives the τ of *decoding* the held-out prompts with a chain. Decoding greedily, the target's text does not
# depend on the drafter, so the known answers tell exactly how far each round would get. The mark to reach: the shipped
# drafter, asked for blocks of 8 too (no drafter can exceed 8 tokens a round then).

# %%
from convert import load_drafter
from dflash_jax.loading import BUNDLED_DRAFTER
from dflash_jax.train.draft_loop import chain_tau

tau_of = chain_tau(target, answers["heldout"], recipe)
_, shipped, _ = load_drafter(BUNDLED_DRAFTER, target.config, "float32", progress=False)
mark = tau_of(shipped)
print(f"the shipped drafter: τ = {mark:.2f} tokens a round on {len(answers['heldout'])} held-out prompts")

# %% [markdown]
# ## Train
#
# `watch` is called before the first step and after every 50: the new drafter is measured on the held-out prompts.

# %%
from dflash_jax.train.draft_loop import train_draft

curve = []


def watch(step, drafter):
    curve.append((step, tau_of(drafter)))
    print(f"{step:4d} steps: τ = {curve[-1][1]:.2f}", flush=True)


with contextlib.redirect_stderr(io.StringIO()):
    summary = train_draft(
        recipe, run / "recipe.json", target, answers["train"], answers["heldout"], run, say=lambda line: None, watch=watch
    )
print(f"{summary['parameters']:,} parameters, {summary['epochs']:.0f} epochs, {summary['seconds']:.0f} s with compilation")

# %%
from dflash_jax import plots

metrics = [json.loads(line) for line in (run / "draft_run" / "metrics.jsonl").read_text().splitlines()]
blocks = metrics[-1]["step"] * recipe.loop.batch * recipe.anchors
title = f"A drafter of {summary['parameters']:,} parameters, {blocks:,} blocks, {jax.devices()[0].device_kind}"
plots.training_curve(metrics, heldout=curve, reference=("the shipped drafter", mark), title=title)

# %%
first, last = curve[0][1], curve[-1][1]
assert first < 1.1 and last > 2.5, "τ did not rise"
print(f"τ on held-out prompts: {first:.2f} before training, {last:.2f} after {curve[-1][0]} steps, {mark:.2f} shipped")

# %% [markdown]
# Training sees a higher τ than decoding, because a round of decoding begins where the last guess went wrong, which is where
# guessing is hard; and it has seen these few answers many times. The new drafter knows one kind of prompt; on a story it would guess next to nothing.
#
# ## Decode with it
#
# `drafter/` is a Hugging Face folder like any other, with weights rounded to bf16. The text is the target's, whoever drafts.

# %%
import dflash_jax
from dflash_jax import SamplingParams

engine = dflash_jax.load(BUNDLED_TARGET, run / "drafter", max_slots=1)
prompt = engine.encode_chat([{"role": "user", "content": "Tell my sister how to write a letter"}])
params = SamplingParams(max_new_tokens=64, method="dflash")
for chunk in engine.stream(prompt, params):
    print(chunk.text, end="", flush=True)
done = chunk.completion
print(f"\n\n{done.completion_tokens} tokens in {done.rounds} rounds: τ = {done.mean_accepted_length:.2f}")
