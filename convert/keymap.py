"""Which tensor of a checkpoint is which parameter.

The parameter trees mirror the published names, so the map is a rule about prefixes and no table:

    model.language_model.X, model.X  ->  X of the target      (multimodal and text-only layouts)
    lm_head.weight                   ->  lm_head.weight, or nothing where the head is tied
    mtp.X                            ->  X of the multi-token-prediction head, kept under its own name
    model.visual.X, visual.X         ->  skipped
    a drafter's X                    ->  X

What is left after the rules is an error: a parameter without a tensor, a tensor without a parameter, two tensors for
one parameter, a shape that the config does not give. Everything here works on names and shapes; no bytes are read.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.drafter import Drafter
from dflash_jax.errors import UserError
from dflash_jax.mtp import MTP
from dflash_jax.target import Target

Shape = tuple[int, ...]
# Names with shapes. Pairs, not a mapping, where one name may come twice (two shards that hold the same tensor).
Tensors = Mapping[str, Shape] | Iterable[tuple[str, Shape]]
Abstract = dict[str, jax.ShapeDtypeStruct]

HEAD = "lm_head.weight"
MTP_PREFIX = "mtp."
VISION_PREFIXES = ("model.visual.", "visual.")
# The longer one first: it starts with the other.
TEXT_PREFIXES = ("model.language_model.", "model.")
NAMES_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class KeyMap:
    """The outcome of a match that left nothing over.

    Attributes:
      weights: parameter name -> tensor name in the checkpoint.
      mtp: the same for the multi-token-prediction head (full names, `mtp.…`); empty where the checkpoint has none.
      skipped: tensors left out by rule (vision tower, the copy of a tied head).
    """

    weights: dict[str, str]
    mtp: dict[str, str]
    skipped: tuple[str, ...]


def module_names(module: nnx.Module) -> dict[str, nnx.Variable]:
    """Parameters of a (possibly abstract) module by checkpoint name, in definition order."""
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param))}


def module_shapes(module: nnx.Module) -> Abstract:
    """Shapes and dtypes of a module's parameters by checkpoint name."""
    return {
        name: jax.ShapeDtypeStruct(leaf.get_value().shape, leaf.get_value().dtype)
        for name, leaf in module_names(module).items()
    }


def abstract_target_module(config: TargetConfig, dtype: DTypeLike, shards: int = 1) -> Target:
    """A `Target` whose parameters are `jax.ShapeDtypeStruct`s (of one device's part); takes no memory."""
    return nnx.eval_shape(lambda: Target(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0), shards=shards))


def abstract_drafter_module(config: DrafterConfig, dtype: DTypeLike, shards: int = 1) -> Drafter:
    """A `Drafter` whose parameters are `jax.ShapeDtypeStruct`s (of one device's part); takes no memory."""
    return nnx.eval_shape(lambda: Drafter(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0), shards=shards))


def abstract_mtp_module(config: TargetConfig, dtype: DTypeLike, shards: int = 1) -> MTP:
    """An `MTP` whose parameters are `jax.ShapeDtypeStruct`s; takes no memory."""
    return nnx.eval_shape(lambda: MTP(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0), shards=shards))


def abstract_target(config: TargetConfig, dtype: DTypeLike) -> Abstract:
    """The target's parameters by name (no prefix), [out, in] as checkpoints hold them.

    The gates `A_log`, `dt_bias` and `linear_attn.norm.weight` are float32 whatever `dtype` is.
    """
    return module_shapes(abstract_target_module(config, dtype))


def abstract_drafter(config: DrafterConfig, dtype: DTypeLike) -> Abstract:
    """The drafter's parameters by name; `fc.weight` is [hidden_size, taps · hidden_size]."""
    return module_shapes(abstract_drafter_module(config, dtype))


def abstract_mtp(config: TargetConfig, dtype: DTypeLike) -> Abstract:
    """Tensors of the multi-token-prediction head (`mtp.…`); empty where the config has no such head.

    One full-attention decoder layer of the target between a projection of [embedding | hidden] and a norm; embedding
    and head are the target's.
    """
    if not config.mtp_num_layers:
        return {}
    return {MTP_PREFIX + name: leaf for name, leaf in module_shapes(abstract_mtp_module(config, dtype)).items()}


def some(names: Iterable[str], shown: int = NAMES_SHOWN) -> str:
    """The first few of some names and how many more there are."""
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _report(source: str, problems: dict[str, list[str]]) -> None:
    """Raises one line with every kind of problem, or nothing where there is none."""
    parts = [f"{len(names)} {kind}: {some(names)}" for kind, names in problems.items() if names]
    if parts:
        raise UserError(f"{source}: weights do not fit config.json; " + "; ".join(parts))


def _index(tensors: Tensors) -> tuple[dict[str, Shape], list[str]]:
    """Shapes by tensor name, and the names that came more than once."""
    shapes: dict[str, Shape] = {}
    doubled: dict[str, None] = {}
    pairs = cast(Iterable[tuple[str, Shape]], tensors.items() if isinstance(tensors, Mapping) else tensors)
    for name, shape in pairs:
        if name in shapes:
            doubled.setdefault(name)
        shapes[name] = tuple(shape)
    return shapes, list(doubled)


def _misfit(name: str, found: Shape, expected: Shape) -> str:
    return f"{name} is {list(found)}, config.json gives {list(expected)}"


def match_target(config: TargetConfig, tensors: Tensors, source: str = "checkpoint") -> KeyMap:
    """Assigns a target checkpoint's tensors to parameters.

    Args:
      config: the target's config; fixes every name and shape.
      tensors: names and shapes in the checkpoint, either prefix, in any order.
      source: the folder's name, for errors.

    Raises:
      UserError: one line that lists the missing, unknown, doubled and mis-shaped tensors by name.
    """
    shapes, doubled = _index(tensors)
    # Names and shapes do not depend on the dtype.
    expected = {name: leaf.shape for name, leaf in abstract_target(config, jnp.float32).items()}
    expected_mtp = {name: leaf.shape for name, leaf in abstract_mtp(config, jnp.float32).items()}
    weights: dict[str, str] = {}
    mtp: dict[str, str] = {}
    skipped: list[str] = []
    unknown: list[str] = []
    misshaped: list[str] = []
    seen = dict.fromkeys(reversed(TEXT_PREFIXES), 0)

    def assign(into: dict[str, str], wanted: dict[str, Shape], name: str, tensor: str) -> None:
        if name in into:
            doubled.append(f"{tensor} (also as {into[name]})")
        into[name] = tensor
        if shapes[tensor] != wanted[name]:
            misshaped.append(_misfit(tensor, shapes[tensor], wanted[name]))

    for tensor, shape in shapes.items():
        if tensor.startswith(VISION_PREFIXES):
            skipped.append(tensor)
        elif tensor in expected_mtp:
            assign(mtp, expected_mtp, tensor, tensor)
        elif tensor == HEAD and config.tie_word_embeddings:
            # Some writers store the tied head a second time; it is the embedding and nothing else.
            table = (config.vocab_size, config.hidden_size)
            if shape != table:
                misshaped.append(_misfit(tensor, shape, table))
            skipped.append(tensor)
        elif tensor == HEAD:
            assign(weights, expected, HEAD, tensor)
        else:
            prefix = next((prefix for prefix in TEXT_PREFIXES if tensor.startswith(prefix)), None)
            name = tensor[len(prefix) :] if prefix else ""
            if prefix and name in expected and name != HEAD:
                assign(weights, expected, name, tensor)
                seen[prefix] += 1
            else:
                unknown.append(tensor)
    # Text-only copies drop the head of multi-token prediction, which is fine; half of one is not.
    # Missing ones are named as this checkpoint would name them.
    usual = max(seen, key=lambda prefix: seen[prefix])
    missing = [name if name == HEAD else f"{usual}{name}" for name in expected if name not in weights]
    missing += [name for name in expected_mtp if name not in mtp] if mtp else []
    _report(source, {"missing": missing, "unknown": unknown, "doubled": doubled, "mis-shaped": misshaped})
    return KeyMap(weights, mtp, tuple(skipped))


def match_drafter(config: DrafterConfig, tensors: Tensors, source: str = "checkpoint") -> KeyMap:
    """Assigns a drafter checkpoint's tensors (no prefix) to parameters; errors as in `match_target`."""
    shapes, doubled = _index(tensors)
    expected = {name: leaf.shape for name, leaf in abstract_drafter(config, jnp.float32).items()}
    _report(
        source,
        {
            "missing": [name for name in expected if name not in shapes],
            "unknown": [name for name in shapes if name not in expected],
            "doubled": doubled,
            "mis-shaped": [
                _misfit(name, shape, expected[name])
                for name, shape in shapes.items()
                if name in expected and shape != expected[name]
            ],
        },
    )
    return KeyMap({name: name for name in expected}, {}, ())
