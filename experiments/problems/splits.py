"""Training, validation and test splits as ranges of sample indices."""

from collections.abc import Mapping
from numbers import Integral

SPLIT_ORDER = ("train", "validation", "test")


def split_slices(splits: Mapping[str, int]) -> dict[str, slice]:
    """Consecutive, disjoint ranges of sample indices, in the order train, validation, test.

    Args:
        splits: samples in each of "train", "validation" and "test" (any of them may be absent),
            each `>= 1`.

    Returns:
        The range of each split that `splits` names; the first starts at 0.

    Raises:
        ValueError: no split, an unknown split, or a count that is not an integer of at least 1.
    """
    if not splits or not set(splits) <= set(SPLIT_ORDER):
        raise ValueError(f"splits: expected some of {list(SPLIT_ORDER)}, got {list(splits)}")
    slices, start = {}, 0
    for name in SPLIT_ORDER:
        if name in splits:
            require_integer(f"splits[{name!r}]", splits[name], 1)
            slices[name] = slice(start, start + int(splits[name]))
            start = slices[name].stop
    return slices


def require_integer(name: str, value: object, minimum: int) -> None:
    """Refuse an argument that is not an integer of at least `minimum`.

    Raises:
        ValueError: says the name of the argument, what was expected and what came.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name}: expected an integer of at least {minimum}, got {value!r}")
