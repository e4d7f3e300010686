"""The configurations of the shapes that benchmarks and compile checks run."""

import json

from benchmarks.published import SHAPES, cut
from dflash_jax.config import DrafterConfig, TargetConfig, parse_drafter_config, parse_target_config
from dflash_jax.errors import UserError
from dflash_jax.loading import BUNDLED_DRAFTER, BUNDLED_TARGET

NAMES = (*SHAPES, "bundled")


def configs(name: str, layers: int | None = None) -> tuple[TargetConfig, DrafterConfig]:
    """Target and drafter of a shape.

    Args:
      name: one of `NAMES`.
      layers: cut the target to its first layers (the taps move to what is left).

    Raises:
      UserError: no such shape.
    """
    if name == "bundled":
        target, drafter = (
            json.loads((folder / "config.json").read_text()) for folder in (BUNDLED_TARGET, BUNDLED_DRAFTER)
        )
    elif name in SHAPES:
        target, drafter = (json.loads(json.dumps(raw)) for raw in SHAPES[name])
    else:
        raise UserError(f"--shape {name}: must be one of {', '.join(NAMES)}")
    if layers is not None:
        cut(target, drafter, layers)
    return parse_target_config(target), parse_drafter_config(drafter)[0]
