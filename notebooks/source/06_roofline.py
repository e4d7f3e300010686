# %% [markdown]
# # Roofline: what a round must cost
#
# At batch 1 a pass of a large model is bound by the bytes that it must read, and it reads the same weights for 1 row as for
# 64. So a round of speculative decoding costs little more than an autoregressive step and emits τ tokens instead of one:
# the speed-up is τ / c, c being the round's time over the step's.
#
# This notebook counts the bytes of Qwen3.6-27B and its DFlash drafter in bf16 (the same function as `benchmarks.round`), and
# puts measured times beside them. **Predicted** is arithmetic; nothing here is timed on your machine. **Measured** is the
# table of [docs/performance.md](../docs/performance.md), one NVIDIA H200.

# %% setup

# %% [markdown]
# ## Bytes of a round

# %%
import jax.numpy as jnp
from flax import nnx

from benchmarks.round import Case, floor_bytes
from benchmarks.shapes import configs
from dflash_jax.random_weights import abstract_drafter, abstract_target

target, drafter = configs("qwen3.6-27b")


def weight_bytes(module):  # an embedding is read a row at a time
    flat = nnx.to_flat_state(nnx.state(module))
    return sum(leaf.get_value().size * 2 for path, leaf in flat if path[0] != "embed_tokens")


weights = [
    weight_bytes(abstract_target(target, jnp.bfloat16, None)), weight_bytes(abstract_drafter(drafter, jnp.bfloat16, None))
]


def gigabytes(method, context):
    return floor_bytes(Case(method, context, 1), target, drafter, *weights, 2) / 1e9


print(f"weights: target {weights[0] / 1e9:.2f} GB, drafter {weights[1] / 1e9:.2f} GB")
for context in (1024, 8192, 32768, 122880):
    step, chain = gigabytes("ar", context), gigabytes("chain", context)
    print(f"{context:7,} tokens: step {step:6.2f} GB, round {chain:6.2f} GB, at least c = {chain / step:.3f}")

# %% [markdown]
# The round's extra bytes are the drafter and one more read of the head. The bytes of a chain and of any tree are the same;
# what a wider tree costs beyond them is arithmetic.
#
# ## Measured on one H200

# %%
page = (ROOT / "docs" / "performance.md").read_text()
rows_of = {"ar": 1, "chain": 16, "tree 31": 32, "tree 63": 64}
contexts = (1024, 8192, 32768, 122880)
measured = {}  # method -> context -> milliseconds
for line in page.splitlines():
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    if cells[0] in rows_of and len(cells) == 6 and cells[1] == str(rows_of[cells[0]]):
        measured[cells[0]] = {c: float(cell.split()[0]) for c, cell in zip(contexts, cells[2:], strict=True)}
copy = 4.25e12  # bytes a second of a copy, in the same run
assert "4.25 TB/s" in page and len(measured) == 4
print("method      rows  context  predicted   measured  ratio   (ms a round)")
for method, times in measured.items():
    for context in (1024, 32768):
        floor = 1e12 * gigabytes("ar" if method == "ar" else "chain", context) / copy
        print(f"{method:10} {rows_of[method]:5} {context:8,} {floor:10.2f} {times[context]:10.2f} {times[context] / floor:6.2f}")

# %% [markdown]
# ## Other machines, predicted
#
# The same bytes over the bandwidth of the data sheets, times the share of it that copies reach on the H200 (4.25 of
# 4.8 TB/s), times the ratio of measured to predicted that this method has on the H200. Two assumptions, then: that another
# card reaches the same share of its bandwidth, and that it loses as much beside. Not counted: the all-reduces between two
# cards (129 to 142 a pass, see docs/performance.md), and that slower arithmetic may bound a tree of 64 rows earlier. **No figure of an A100 or
# an A6000 is measured.**

# %%
from pallas_kernels.devices import GPUS

share = copy / 4.8e12
machines = {
    "H200": copy,
    "A100 80 GB": GPUS["a100"].bandwidth * share,
    "2 × RTX A6000": 2 * GPUS["a6000"].bandwidth * share,
}
context, methods = 1024, ("ar", "chain", "tree 31", "tree 63")


def predicted(method, bandwidth, ratio):
    floor = 1e12 * gigabytes("ar" if method == "ar" else "chain", context) / bandwidth
    on_h200 = 1e12 * gigabytes("ar" if method == "ar" else "chain", context) / copy
    return floor * (measured[method][context] / on_h200 if ratio else 1.0)


print("milliseconds a round at 1K of context: by bytes alone, and with the H200's ratio")
for name, bandwidth in machines.items():
    text = "  ".join(f"{m} {predicted(m, bandwidth, False):5.1f} / {predicted(m, bandwidth, True):5.1f}" for m in methods)
    print(f"{name:14} ({bandwidth / 1e12:.2f} TB/s)  {text}", "(measured)" if name == "H200" else "(predicted)")

# %%
from dflash_jax import plots

rows = [rows_of[m] for m in methods]
curves = [plots.Curve("H200, bytes alone", rows, [predicted(m, copy, False) for m in methods], "predicted")]
curves += [plots.Curve("H200", rows, [measured[m][context] for m in methods], "measured")]
curves += [
    plots.Curve(name, rows, [predicted(m, machines[name], True) for m in methods], "predicted")
    for name in ("A100 80 GB", "2 × RTX A6000")
]
plots.round_times(curves, title="Time of a round, Qwen3.6-27B and its drafter, bf16, batch 1, 1K of context")

# %% [markdown]
# ## Budget sweep
#
# Which budget pays is τ against c. τ here is **measured now, with the bundled pair** on its own toy text; a 27B drafter on
# your text will have another one (published: τ of 5.5 to 9.1 for a 27B chain, DFlash, table 11). So the speed-ups are a
# what-if: these τ at those round times. The A100 and the A6000 would lie on the H200's line, since their times were made
# with its ratios.

# %%
import dflash_jax
from dflash_jax import SamplingParams
from dflash_jax.loading import BUNDLED_PROMPTS
from dflash_jax.prompts import encode_prompt, read_prompt_file

engine = dflash_jax.load(max_slots=1)
entries = read_prompt_file(str(BUNDLED_PROMPTS))[:6]
prompts = [encode_prompt(engine, entry, chat=None, system=None, thinking=None) for entry in entries]
taus = {1: 1.0}
for budget in (15, 31, 63):
    runs = engine.generate(prompts, SamplingParams(max_new_tokens=80, method="ddtree", tree_budget=budget))
    taus[budget + 1] = sum(r.completion_tokens - 1 for r in runs) / sum(r.rounds for r in runs)
    print(f"{budget} nodes: τ = {taus[budget + 1]:.2f}")
plots.budget_sweep(taus, curves[:2], title="τ of the bundled pair (measured here) at the round times of a 27B pair: a what-if")
