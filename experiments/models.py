"""The models that experiments are made with."""

from flare_jax import FLARE
from geotransolver_jax import GeoTransolver, Transolver

Model = FLARE | Transolver | GeoTransolver
