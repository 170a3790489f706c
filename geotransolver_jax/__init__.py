"""Physics attention over learned slices: Transolver."""

from geotransolver_jax.attention import PhysicsAttention
from geotransolver_jax.transolver import Transolver

__all__ = ["PhysicsAttention", "Transolver"]
