# %% [markdown]
# # Your own tree policy
#
# A policy decides which guesses deserve a row of the verified tree. It gives a score to each edge (log-probabilities of
# the drafter come in, scores ≤ 0 go out, best first) and says how much of the top-1 chain, the *spine*, is kept in any
# case (`SpineFirst`: all of it, `BestFirst`: none). The search for the best tree under that score is exact, and any tree is lossless: a policy changes how many tokens
# a round emits, never which.

# %% setup

# %% [markdown]
# ## Ten lines
#
# This one trusts the drafter less with every depth, and takes at most three siblings.

# %%
import dataclasses

import jax.numpy as jnp

from dflash_jax import BestFirst, SpineFirst


@dataclasses.dataclass(frozen=True)
class Cautious(BestFirst):
    doubt: float = 0.1  # nats a depth

    def edge_scores(self, log_probs):  # [batch, depth, rank], best first
        depth = jnp.arange(log_probs.shape[1])[None, :, None]
        rank = jnp.arange(log_probs.shape[2])
        return jnp.where(rank < 3, log_probs - self.doubt * depth, -jnp.inf)


policies = {"SpineFirst": SpineFirst(), "BestFirst": BestFirst(), "Cautious": Cautious()}
print(policies)

# %% [markdown]
# ## Look at one of its trees
#
# The fifth round of a text, 31 nodes. Blue is the policy's score of a prefix, read as a probability; orange is what the
# target accepted.

# %%
import dflash_jax
from dflash_jax import plots
from dflash_jax.trace import trace_rounds

engine = dflash_jax.load(MODEL, DRAFT_MODEL, max_slots=1)
prompt = engine.encode_chat([{"role": "user", "content": "Tell my sister how to write a letter"}])


def word(token):
    return engine.tokenizer.decode([token], skip_special=False)


*_, one = trace_rounds(engine, prompt, rounds=5, budget=31, policy=policies["Cautious"])
plots.token_tree(one.tree, word, path=one.path, bonus=one.bonus, title="Cautious, round 5")

# %% [markdown]
# ## Does it pay?
#
# τ, the mean number of tokens a round emits, on held-out prompts: the same prompts, the same number of nodes.
# `python -m benchmarks.acceptance --policies spine,best` does this for many prompts, temperatures and budgets.

# %%
from benchmarks.accepted import count_accepted
from dflash_jax import SamplingParams
from dflash_jax.loading import BUNDLED_PROMPTS
from dflash_jax.prompts import encode_prompt, read_prompt_file

entries = read_prompt_file(str(BUNDLED_PROMPTS))[:12]
prompts = [encode_prompt(engine, entry, chat=None, system=None, thinking=None) for entry in entries]
params = SamplingParams(max_new_tokens=80, method="ddtree", tree_budget=15)
texts, shares = {}, {}
for name, policy in policies.items():
    ranks = [[] for _ in prompts]
    engine.policy, engine.on_ranks = policy, lambda index, more, ranks=ranks: ranks[index].extend(more)
    runs = engine.generate(prompts, params)
    rounds = sum(r.rounds for r in runs)
    tau = sum(r.completion_tokens - 1 for r in runs) / rounds
    texts[name] = [r.token_ids for r in runs]
    counts = count_accepted(ranks, engine.drafter.config.block_size - 1)
    shares[f"{name}, τ = {tau:.2f}"] = counts.by_depth[: sum(n >= 5 for n in counts.attempts)]
    print(f"{name:11s} {rounds:4d} rounds, τ = {tau:.3f}")
print("every policy gives the same texts:", texts["SpineFirst"] == texts["BestFirst"] == texts["Cautious"])
assert engine.target.dtype != "float32" or texts["SpineFirst"] == texts["BestFirst"] == texts["Cautious"]

# %%
plots.acceptance_by_depth(shares, title=f"Acceptance by depth, 15 nodes, {len(prompts)} held-out prompts")

# %% [markdown]
# With 15 nodes and a block of 16, `SpineFirst` is the plain chain. `BestFirst` gives up the end of the chain for siblings
# near the anchor, which is why it is the engine's default. `Cautious` goes further that way, and on these prompts loses by it: what sounds sensible need not pay, and
# costs a minute to try. To use a policy everywhere, assign it: `engine.policy = Cautious()`.
