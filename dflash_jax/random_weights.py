"""Models of a given shape with random weights, made where they will live: for benchmarks and compile checks."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.drafter import Drafter
from dflash_jax.layers import join
from dflash_jax.sharding import parameter_spec
from dflash_jax.target import Target


def abstract_target(config: TargetConfig, dtype: jax.typing.DTypeLike, mesh: Mesh | None) -> Target:
    """One device's part of a target, its products joined, with abstract parameters of the whole model on the mesh."""
    return _abstract(
        lambda shards: Target(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0), shards=shards), mesh
    )


def abstract_drafter(config: DrafterConfig, dtype: jax.typing.DTypeLike, mesh: Mesh | None) -> Drafter:
    """The same for a drafter."""
    return _abstract(
        lambda shards: Drafter(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0), shards=shards), mesh
    )


def random_target(
    config: TargetConfig, dtype: jax.typing.DTypeLike, mesh: Mesh | None = None, seed: int = 0
) -> Target:
    """A target whose every device makes its own weights; as wide as trained ones, so that nothing overflows."""
    return _fill(abstract_target(config, dtype, mesh), seed)


def random_drafter(
    config: DrafterConfig, dtype: jax.typing.DTypeLike, mesh: Mesh | None = None, seed: int = 1
) -> Drafter:
    """The same for a drafter."""
    return _fill(abstract_drafter(config, dtype, mesh), seed)


def _abstract[M: nnx.Module](make: Callable[[int], M], mesh: Mesh | None) -> M:
    def joined(shards: int) -> M:
        module = make(shards)
        join(module)
        return module

    shards = 1 if mesh is None else mesh.size
    module = nnx.eval_shape(functools.partial(joined, shards))
    whole = nnx.to_flat_state(nnx.state(nnx.eval_shape(functools.partial(joined, 1))))
    for (path, leaf), (_, full) in zip(nnx.to_flat_state(nnx.state(module)), whole, strict=True):
        name = ".".join(map(str, path))
        sharding = None if mesh is None else NamedSharding(mesh, parameter_spec(name))
        value = full.get_value()
        leaf.set_value(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))
    return module


def _fill[M: nnx.Module](module: M, seed: int) -> M:
    for index, (path, leaf) in enumerate(nnx.to_flat_state(nnx.state(module))):
        value = leaf.get_value()
        make = _maker(path[-1] if path[-1] != "weight" else path[-2], value.shape, value.dtype, value.sharding)
        leaf.set_value(make(seed * 10_000 + index))
    return module


@functools.cache
def _maker(
    name: str, shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding | None
) -> Callable[[int], Float[Array, "..."]]:
    """A compiled maker of one parameter, by the last part of its module's name."""

    def make(seed: int) -> Float[Array, "..."]:
        key = jax.random.key(seed)
        if name == "A_log":
            return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0)).astype(dtype)
        if name == "dt_bias":
            return jax.random.uniform(key, shape, jnp.float32, -7.0, -2.0).astype(dtype)
        if len(shape) == 1 and name != "bias":  # norms: near the identity, zero-centred or not
            return jax.random.uniform(key, shape, dtype, 0.5, 1.0)
        return 0.02 * jax.random.normal(key, shape, dtype)

    return jax.jit(make, out_shardings=sharding)
