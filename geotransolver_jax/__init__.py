"""GeoTransolver and Transolver: physics attention over learned slices, with a context."""

from geotransolver_jax.attention import PhysicsAttention
from geotransolver_jax.gale import GALE
from geotransolver_jax.gale_fa import GALEFA
from geotransolver_jax.geotransolver import GeoTransolver
from geotransolver_jax.neighborhoods import Neighborhoods
from geotransolver_jax.transolver import Transolver

__all__ = ["GALE", "GALEFA", "GeoTransolver", "Neighborhoods", "PhysicsAttention", "Transolver"]
