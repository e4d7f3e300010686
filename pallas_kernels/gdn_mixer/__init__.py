"""What surrounds the delta rule in a Gated DeltaNet layer: its front (convolution, gates) and its gated norm."""

from pallas_kernels.gdn_mixer.api import gated_norm, gdn_front

__all__ = ["gated_norm", "gdn_front"]
