# %% [markdown]
# # Inside a round
#
# One round of speculative decoding, part by part: **draft** (one pass of the drafter over a block of masks), **tree** (the
# most probable prefixes), **verify** (one pass of the target over all rows), **walk** (down while the target agrees),
# **commit**. `dflash_jax.trace` runs the parts of the real round and keeps what they give.

# %% setup

# %%
import numpy as np

import dflash_jax
from dflash_jax import SamplingParams, plots
from dflash_jax.trace import trace_rounds

engine = dflash_jax.load(MODEL, DRAFT_MODEL, max_slots=1)


def word(token):
    return engine.tokenizer.decode([token], skip_special=False)


prompt = engine.encode_chat([{"role": "user", "content": "Tell my sister how to write a letter"}])
rounds = list(trace_rounds(engine, prompt, rounds=24, budget=31))
for number, one in enumerate(rounds[:12]):
    print(f"round {number:2d}: {len(one.tokens):2d} tokens  {''.join(map(word, one.tokens))!r}")
print(f"τ over {len(rounds)} rounds: {np.mean([len(one.tokens) for one in rounds]):.2f}")

# %% [markdown]
# The tokens are those of autoregressive decoding, and each round's last one is the **bonus**: the target's own token after
# the last draft that it accepted.

# %%
plain = engine.generate([prompt], SamplingParams(max_new_tokens=400, method="ar"))[0]
emitted = [token for one in rounds for token in one.tokens]
print("tokens equal those of ar:", plain.token_ids[1 : 1 + len(emitted)] == emitted)
assert engine.target.dtype != "float32" or plain.token_ids[1 : 1 + len(emitted)] == emitted

# %% [markdown]
# ## The drafter's marginals
#
# The drafter sees the anchor, fifteen masks, and features of the target's hidden layers for all that came before. In one
# pass it gives a distribution for each of the next fifteen places, none of which knows what the others will be. We look at
# a round in which the walk leaves the drafter's best guess early.

# %%
def leaves_the_spine(one):
    """Whether one of the first accepted drafts was not the drafter's best token of its depth."""
    rows = np.asarray(one.tree.tokens[0])[one.path[1:9]]
    return any(token != best for token, best in zip(rows, one.log_probs.argmax(axis=1), strict=False))


shown = max(rounds, key=lambda one: (leaves_the_spine(one), len(one.path)))
plots.marginals(shown.log_probs, word, truth=shown.tokens, title="The drafter's marginals, and what the target says")

# %% [markdown]
# ## The tree
#
# The tree keeps the 31 most probable prefixes. Blue is the drafter's
# probability of the whole prefix; orange is what the target accepted, dashed its bonus.

# %%
plots.token_tree(shown.tree, word, path=shown.path, bonus=shown.bonus)

# %% [markdown]
# ## The ancestor mask
#
# One pass of the target verifies all rows. A row may see the committed context, itself and its ancestors; siblings and
# cousins do not exist for it. The Gated DeltaNet layers use the same mask ([04_gdn_on_a_tree](04_gdn_on_a_tree.ipynb)).

# %%
plots.ancestor_mask(shown.tree, path=shown.path)

# %% [markdown]
# ## The walk
#
# The target has chosen one token after every row. Starting at node 0, the walk goes to the child that carries the chosen
# token, if there is one. Where there is none, the chosen token is the bonus. Whatever the tree held, the tokens emitted
# are the target's own.

# %%
tokens, parents = np.asarray(shown.tree.tokens[0]), np.asarray(shown.tree.parents[0])
for row in shown.path:
    children = [word(int(t)) for t in tokens[np.flatnonzero(parents == row)]]
    choice = word(int(shown.chosen[row]))
    print(f"at {word(int(tokens[row]))!r:12} children {children!r:40} the target says {choice!r}", end="")
    print("" if choice in children else "  <- bonus")

# %% [markdown]
# ## Acceptance by depth
#
# Of the rounds whose walk came to depth d − 1, how many took a draft of depth d? A chain has one chance at each depth, a
# tree several.

# %%
from benchmarks.acceptance import Variant, accepted
from dflash_jax.loading import BUNDLED_PROMPTS
from dflash_jax.prompts import encode_prompt, read_prompt_file

entries = read_prompt_file(str(BUNDLED_PROMPTS))[:8]
prompts = [encode_prompt(engine, entry, chat=None, system=None, thinking=None) for entry in entries]
shares = {}
for name, params in (
    ("dflash, 15 nodes", SamplingParams(max_new_tokens=80, method="dflash")),
    ("ddtree, 31 nodes", SamplingParams(max_new_tokens=80, method="ddtree", tree_budget=31)),
):
    counts = accepted(engine, prompts, Variant(params))
    # Attempts never rise with the depth: what was hardly ever tried is left out.
    shares[name] = counts.by_depth[: sum(n >= 5 for n in counts.attempts)]
    print(f"{name}: {counts.attempts[0]} rounds, depth 1 {shares[name][0]:.0%}, depth 2 {shares[name][1]:.0%}")
plots.acceptance_by_depth(shares, title=f"Acceptance by depth, {len(prompts)} held-out prompts, {engine.names[0]}")
