"""Scales of local features: the radii within which points and geometry see each other."""

from collections.abc import Iterable, Sequence
from numbers import Integral, Real

from flare_jax.checks import check_positive
from parallel.annotations import Integer

_COORDINATES = 3


def check_scales(
    include: bool,
    geometry_dim: int | None,
    structured_shape: tuple[int, ...] | None,
    radii: Sequence[float] | None,
    counts: Sequence[Integer] | None,
    features: int,
) -> list[tuple[float, int]]:
    """Radius of each scale and how many neighbours are taken within it.

    Args:
        include: whether there are local features; without them there are no scales.
        geometry_dim: width of the geometry's features.
        structured_shape: shape of a grid, or `None`.
        radii: in units of the coordinates; by default 0.05 and 0.25.
        counts: one a radius; by default 8 and 32.
        features: width of the features of one radius.

    Raises:
        ValueError: they do not fit together.
    """
    if not include:
        return []
    radii = _numbers("radii", [0.05, 0.25] if radii is None else radii)
    counts = _numbers("neighbors_in_radius", [8, 32] if counts is None else counts)
    if structured_shape is not None:
        raise ValueError(
            "include_local_features: expected False with a structured_shape, whose points have "
            "their neighbours in the grid; got True"
        )
    if geometry_dim != _COORDINATES:
        raise ValueError(
            f"geometry_dim: expected {_COORDINATES}, the coordinates, since "
            f"include_local_features=True; got {geometry_dim}"
        )
    if not radii or len(radii) != len(counts):
        raise ValueError(
            f"neighbors_in_radius: expected one count for each of the {len(radii)} radii, of which "
            f"there must be one; got {len(counts)}"
        )
    if not all(radius > 0 for radius in radii):
        raise ValueError(f"radii: expected positive numbers; got {radii}")
    if not all(isinstance(count, Integral) and int(count) >= 1 for count in counts):
        raise ValueError(f"neighbors_in_radius: expected positive integers; got {counts}")
    check_positive(n_hidden_local=features)
    if features < 2:
        raise ValueError(f"n_hidden_local: expected at least 2; got {features}")
    return list(zip(radii, counts, strict=True))


def _numbers(name: str, values: object) -> list:
    numbers = list(values) if isinstance(values, Iterable) else [None]
    if isinstance(values, str) or not all(
        isinstance(x, Real) and not isinstance(x, bool) for x in numbers
    ):
        raise ValueError(f"{name}: expected a list of numbers; got {values!r}")
    return numbers
