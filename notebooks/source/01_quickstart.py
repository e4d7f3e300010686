# %% [markdown]
# # Quickstart
#
# Load a target and its drafter, stream a text, compare the methods. The bundled pair (a target of 10 million parameters
# and a drafter of 2 million) runs on a CPU; its world is small: stories, instructions, animals, jobs, sums. With a GPU, or
# with real Qwen folders named in the environment, the same cells use those.

# %% setup

# %%
import dflash_jax
from dflash_jax import SamplingParams

engine = dflash_jax.load(MODEL, DRAFT_MODEL, tp=TP, max_slots=1)
print(f"target {engine.names[0]}, drafter {engine.names[1]}, {engine.target.dtype}, on {engine.device.device_kind}")
print(f"the drafter proposes {engine.drafter.config.block_size - 1} tokens in one pass")

# %% [markdown]
# ## Stream
#
# The first call compiles. `ddtree` verifies a whole tree of drafts in one pass of the target; several tokens may come at
# once. (The default, `method="auto"`, also chooses the size of the tree while it decodes; here it is fixed, which compiles
# less.)

# %%
messages = [{"role": "user", "content": "Tell my sister how to write a letter"}]
prompt = engine.encode_chat(messages)
params = SamplingParams(max_new_tokens=100, method="ddtree", tree_budget=31)
for chunk in engine.stream(prompt, params):
    print(chunk.text, end="", flush=True)
done = chunk.completion
print(f"\n\n{done.completion_tokens} tokens in {done.rounds} rounds: τ = {done.mean_accepted_length:.2f} tokens a round")

# %% [markdown]
# ## Compare the methods
#
# `ar` emits one token a pass, `dflash` verifies a chain of drafts, `ddtree` a tree. All three emit the same text. A call
# in one device loop is what counts for speed, so the first run of each, which compiles, is not timed. (The speeds that you
# see before you run this are of a busy machine with two processor cores.)

# %%
from dflash_jax.loading import BUNDLED_PROMPTS
from dflash_jax.prompts import encode_prompt, read_prompt_file

entries = read_prompt_file(str(BUNDLED_PROMPTS))[:6]
prompts = [encode_prompt(engine, entry, chat=None, system=None, thinking=None) for entry in entries]
rows, texts = [], {}
for method in ("ar", "dflash", "ddtree"):
    chosen = SamplingParams(max_new_tokens=80, method=method, tree_budget=31)
    engine.generate(prompts[:1], chosen)
    runs = [engine.generate([one], chosen)[0] for one in prompts]
    tokens, rounds = (sum(r.completion_tokens - 1 for r in runs), sum(r.rounds for r in runs))
    rate = tokens / sum(r.decode_seconds for r in runs)
    texts[method] = [r.token_ids for r in runs]
    rows.append(
        {"set": "held-out", "prompts": len(runs), "method": method, "tau": tokens / rounds, "tokens_per_second": rate}
    )
    same = texts[method] == texts["ar"]
    print(f"{method:7s} {rounds:4d} rounds, τ = {tokens / rounds:5.2f}, {rate:6.0f} tokens/s, same text as ar: {same}")
assert engine.target.dtype != "float32" or texts["ar"] == texts["dflash"] == texts["ddtree"]

# %%
from benchmarks.acceptance_plots import speed

figure = speed(rows)
figure.suptitle(f"Tokens a round and decoding speed, {engine.names[0]}, {engine.device.device_kind}", fontsize=10)
figure

# %% [markdown]
# On a CPU, and for a model this small anywhere, a pass over 16 rows costs a good deal more than a pass over one, so τ is
# not the speed-up. For a large model on a GPU nearly all of a pass is reading weights, whatever the number of rows
# ([06_roofline](06_roofline.ipynb)).
#
# ## Sampling
#
# A token's noise depends on seed, position and token alone, so a seed gives one text, whatever the method and the batch
# (`python -m dflash_jax.generate --compare --temperature 0.8` checks it for all methods).

# %%
for seed in (3, 3, 4):
    params = SamplingParams(max_new_tokens=40, method="dflash", temperature=0.8, top_p=0.95, seed=seed)
    print(f"seed {seed}: {engine.generate([prompt], params)[0].text!r}")

# %% [markdown]
# ## Next
#
# - [02_inside_a_round](02_inside_a_round.ipynb): marginals, tree, mask, walk
# - [03_your_own_tree_policy](03_your_own_tree_policy.ipynb): ten lines
# - [04_gdn_on_a_tree](04_gdn_on_a_tree.ipynb): how a recurrent layer verifies a tree without copying its state
# - [05_train_a_small_drafter](05_train_a_small_drafter.ipynb): watch τ rise
# - [06_roofline](06_roofline.ipynb): what a round must cost, and what it does cost
