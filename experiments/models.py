"""The models that experiments are made with."""

from flare_jax.transformer import PointTransformer
from geotransolver_jax import GeoTransolver

# FLARE, Transolver and others of that shell need no entry of their own.
Model = PointTransformer | GeoTransolver
