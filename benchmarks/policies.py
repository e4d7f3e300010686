"""Tree policies by name, as `benchmarks.acceptance --policies` takes them: the library's, and variations to compare.

Each variation states a belief about a drafter whose distributions do not depend on the branch; docs/performance.md says
what each was worth on the bundled pair.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.tree import BestFirst, SpineFirst, TreePolicy


@dataclasses.dataclass(frozen=True)
class CloseSiblings(SpineFirst):
    """Siblings only where the drafter is undecided: within `margin` nats of its best token of that depth."""

    margin: float = 2.0

    def edge_scores(self, log_probs: Float[Array, "B L K"]) -> Float[Array, "B L K"]:
        """-inf beyond the margin."""
        return jnp.where(log_probs[..., :1] - log_probs <= self.margin, log_probs, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class WaryOfSiblings(SpineFirst):
    """What follows a sibling was drafted for the spine: leaving it costs `discount` nats, once for every sibling."""

    discount: float = 0.5

    def edge_scores(self, log_probs: Float[Array, "B L K"]) -> Float[Array, "B L K"]:
        """Less for every rank but the first."""
        return log_probs - self.discount * (jnp.arange(log_probs.shape[2]) > 0)


@dataclasses.dataclass(frozen=True)
class DoubtDepth(SpineFirst):
    """A drafter is too sure of what is far away: `doubt` nats less for every depth."""

    doubt: float = 0.1

    def edge_scores(self, log_probs: Float[Array, "B L K"]) -> Float[Array, "B L K"]:
        """Less the deeper."""
        return log_probs - self.doubt * jnp.arange(log_probs.shape[1])[None, :, None]


POLICIES: dict[str, TreePolicy] = {
    "spine": SpineFirst(),
    "best": BestFirst(),
    "close": CloseSiblings(),
    "wary": WaryOfSiblings(),
    "doubt": DoubtDepth(),
}
