"""Measures a model's products of few rows on this GPU: `python -m benchmarks.tune --model DIR --draft-model DIR`.

For every product of a round (16, 32 and 64 rows) it times XLA's own kernels and the Pallas kernel in many configs, and
keeps the winners in the user's cache folder, where every later run finds them (`pallas_kernels.linear.table`). Until
then products of a device without a shipped table are XLA's.

Products of shapes that the published models share are measured for the package with `--shape NAME,NAME --ship`.
"""

import argparse
import contextlib
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from benchmarks.shapes import NAMES, configs
from benchmarks.timing import Loop, medians
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.drafter import Drafter
from dflash_jax.errors import UserError
from dflash_jax.layers import Embedding, Joined, Linear, join
from dflash_jax.sharding import check_divides
from dflash_jax.target import Target
from pallas_kernels.dispatch import target_device, unsupported_device
from pallas_kernels.linear import kernel, reference, table
from pallas_kernels.linear.configs import Config
from pallas_kernels.linear.table import Product

# Weights of a loop, more than a cache holds; and calls of one body, after which the host looks whether it goes on.
ROTATED_BYTES, CALLS = 300e6, 64
# Seconds of a call within which two ways count as equally fast. XLA tries its tilings out in every process anew, too
# roughly to tell times of a few microseconds apart, and those of small products differ by as much between programs.
SPREAD = 0.5e-6


def products_of(target: TargetConfig, drafter: DrafterConfig | None, tp: int) -> set[Product]:
    """The products of a device's rounds, for every number of rows."""

    def make() -> list[nnx.Module]:
        models: list[nnx.Module] = [Target(target, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), shards=tp)]
        if drafter is not None:
            models.append(Drafter(drafter, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), shards=tp))
        for model in models:
            join(model)
        return models

    found = set()
    for model in nnx.eval_shape(make):
        for path, module in nnx.iter_modules(model):
            if not isinstance(module, Linear | Joined | Embedding):
                continue
            name = str(path[-1]) if path else ""
            if isinstance(module, Embedding) and not target.tie_word_embeddings:
                continue  # a table to look up, not a product
            out, columns = module.weight.shape
            swiglu = name == "gate_up_proj"
            for rows in table.ROWS:
                found.add(Product(rows, out // (2 if swiglu else 1), columns, swiglu))
    return found


def candidates(product: Product, most: int) -> list[Config]:
    """Configs worth a try, at most so many, the same in every run."""
    large = product.out * product.columns > 4e6
    shared = 0.9 * 227 * 1024 if "H" in target_device().device_kind else 0.9 * 99 * 1024
    rows = (64,) if large or product.rows <= 16 else (16, 64)
    found = []
    for block_out, block_in, splits, warps, stages, block_rows in itertools.product(
        (16, 32, 64, 128), (64, 128, 256), (1, 2, 4, 8), (2, 4, 8), (3, 4, 5), rows
    ):
        programs = math.ceil(product.out / block_out) * splits
        tiles = product.rows + block_out * (2 if product.swiglu else 1)
        if (
            (splits > 1 and product.swiglu)
            or product.columns % (block_in * splits)
            or 2 * stages * tiles * block_in > shared
            or block_out * block_in > 16384
            or (large and (not 100 <= programs <= 2400 or block_out * block_in < 2048 or warps == 2))
            or (not large and (programs < 8 or (warps == 8 and block_out < 64) or stages != 4))
        ):
            continue
        found.append(Config(block_out, block_in, splits, warps, stages, block_rows))
    random.Random(1).shuffle(found)
    return found[:most]


Call = Callable[[Array, Array], Array]


def calls(product: Product, most: int, interpret: bool) -> Iterator[tuple[str | Config, Call]]:
    """What to time, by name or config: x and weights -> product."""
    options: dict[str, Any] = {"swiglu": product.swiglu, "dtype": jnp.bfloat16}
    yield "xla", lambda x, w: reference.linear(x, w, None, **options)
    for config in candidates(product, most):

        def call(x: Array, w: Array, config: Config = config) -> Array:
            return kernel.linear(x, w, None, **options, config=config, interpret=interpret)

        yield config, call


def looped(call: Call, x: Float[Array, "M K"], weights: Sequence[Float[Array, "N K"]]) -> Any:
    """Compiled: (trips, x, weights) -> products of the last trip, each of which waits for the one before.

    Of calls that do not, XLA would join what comes after its own kernels, sums of splits and SwiGLU, into one launch.
    """

    def run(trips: Array, x: Array, weights: Sequence[Array]) -> Any:
        results = [jnp.zeros(y.shape, y.dtype) for y in jax.eval_shape(lambda: [call(x, w) for w in weights])]

        def body(_: Array, carry: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
            x, results = carry
            x, results = x + (0 * results[-1][:, :1]).astype(x.dtype), []
            for w in weights:
                x, y = jax.lax.optimization_barrier((x, call(x, w)))
                results.append(y)
            return x, results

        return jax.lax.fori_loop(0, trips, body, (x, results))

    return jax.jit(run).lower(jnp.int32(1), x, weights).compile()


def measure(product: Product, most: int, seconds: float, interpret: bool, threads: int) -> dict[str | Config, float]:
    """Seconds of a call by what was timed; of what does not compile nothing."""
    size = product.out * (2 if product.swiglu else 1) * product.columns * 2
    count = 1 if interpret else max(1, min(8, int(ROTATED_BYTES / size) + 1))
    keys = jax.random.split(jax.random.key(0), count + 1)
    shape = (product.out * (2 if product.swiglu else 1), product.columns)
    weights = [0.02 * jax.random.normal(key, shape, jnp.bfloat16) for key in keys[1:]]
    # The host's look takes as long as ten calls of a small product: it must be a small part of a body.
    weights *= max(1, CALLS // count) if size < ROTATED_BYTES / CALLS and not interpret else 1
    x = jax.random.normal(keys[0], (product.rows, product.columns), jnp.bfloat16)
    names, jobs = zip(*calls(product, most, interpret), strict=True)

    def build(call: Call) -> Any:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # no room in shared memory, for one
            return Loop(looped(call, x, weights), (x, weights), calls=len(weights))
        return None

    with ThreadPoolExecutor(threads) as pool:
        loops = dict(zip(names, pool.map(build, jobs), strict=True))
    built = {name: loop for name, loop in loops.items() if loop is not None}
    return dict(zip(built, medians(list(built.values()), samples=3, seconds=seconds), strict=True))


def choose(times: dict[Product, dict[str | Config, float]]) -> dict[Product, Config | None]:
    """The fastest config of each product, None for XLA's.

    Of ways that are equally fast it is the one that is so in every program: the kernel's before XLA's tiles; XLA's of a
    single row, which have none and take a neighbour in; and no sum of splits, which is another launch.
    """
    chosen: dict[Product, Config | None] = {}
    for product, own in times.items():
        cost = {c: t + SPREAD * (c.splits > 1) for c, t in own.items() if isinstance(c, Config)}
        config = min(cost, key=lambda c: cost[c], default=None)
        lead = SPREAD if product.rows > 1 else -SPREAD
        chosen[product] = None if config is None or own["xla"] + lead <= own[config] else config
    return chosen


def run(args: argparse.Namespace, pairs: Iterable[tuple[TargetConfig, DrafterConfig | None]]) -> int:
    """Measures and writes; returns how many products the kernel serves."""
    products: set[Product] = set()
    for target, drafter in pairs:
        check_divides(target, drafter, args.tp)
        products |= products_of(target, drafter, args.tp)
    kind = target_device().device_kind
    path = (table.SHIPPED if args.ship else table.user_folder()) / table.file_name(kind)
    if args.new and path.is_file():
        products -= table.read(path).keys()
    print(f"{len(products)} products of a round on {kind}; the winners go to {path}", flush=True)
    began, times = time.monotonic(), {}
    for product in sorted(products):
        if time.monotonic() - began > args.seconds:
            print(f"stopped after {args.seconds:.0f} s: {len(products) - len(times)} products are left", flush=True)
            break
        own = times[product] = measure(product, args.configs, args.sample, args.interpret, args.threads)
        config = min((c for c in own if isinstance(c, Config)), key=lambda c: own[c], default=None)
        found = "nothing compiled" if config is None else f"{own[config] * 1e6:8.1f} us, {config}"
        print(f"{product}: XLA {own['xla'] * 1e6:8.1f} us, Pallas {found}", flush=True)
    chosen = choose(times)
    if path.is_file():
        chosen = table.read(path) | chosen
    table.write(path, chosen, {"device": kind, "jax": jax.__version__})
    table.forget()
    served = sum(config is not None for config in chosen.values())
    print(f"{served} of {len(chosen)} products run with the Pallas kernel", flush=True)
    return served


def main(argv: list[str] | None = None) -> int:
    """The command line. Status 1: a model that cannot be used; 2: no GPU that the kernels run on."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="target: a folder, GGUF file or Hub id; only its config is read")
    parser.add_argument("--draft-model", help="its drafter")
    parser.add_argument(
        "--shape", type=lambda text: text.split(","), default=[], metavar="NAMES", help=f"of {', '.join(NAMES)}"
    )
    parser.add_argument("--tp", type=int, default=1, help="devices that share the model (default: 1)")
    parser.add_argument("--configs", type=int, default=40, help="at most so many a product (default: 40)")
    parser.add_argument("--seconds", type=float, default=900.0, help="stop after so many (default: 900)")
    parser.add_argument("--sample", type=float, default=0.01, help="seconds of one sample (default: 0.01)")
    parser.add_argument("--threads", type=int, default=8, help="that compile (default: 8)")
    parser.add_argument("--new", action="store_true", help="only products that the table does not have yet")
    parser.add_argument("--ship", action="store_true", help="write the package's table of this device")
    parser.add_argument("--interpret", action="store_true", help="without a GPU, to see that it runs")
    args = parser.parse_args(argv)
    reason = unsupported_device(target_device())
    if reason is not None and not args.interpret:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    try:
        pairs: list[tuple[TargetConfig, DrafterConfig | None]] = [configs(name) for name in args.shape]
        if args.model is not None:
            pairs.append(named(args.model, args.draft_model))
        run(args, pairs or [configs("bundled")])
    except (UserError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def named(model: str, draft_model: str | None) -> tuple[TargetConfig, DrafterConfig | None]:
    """The configs of a pair, as `load` takes them."""
    from convert import resolve_model
    from convert.load import open_drafter, read_target_config

    target = read_target_config(Path(resolve_model(model)))
    return target, None if draft_model is None else open_drafter(resolve_model(draft_model), target)[0]


if __name__ == "__main__":
    sys.exit(main())
