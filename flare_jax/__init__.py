"""FLARE: attention of points through a few learned latent queries."""

from flare_jax.attention import FLAREAttention
from flare_jax.model import FLARE

__all__ = ["FLARE", "FLAREAttention"]
