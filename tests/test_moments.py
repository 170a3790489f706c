"""Statistics by a streaming pass are those of all rows at once."""

from dataclasses import dataclass

import numpy as np
import pytest

from experiments.data.dataset import Dataset
from experiments.data.description import Description, StreamDescription
from experiments.data.moments import Moments


@pytest.mark.parametrize("block", [1, 7, 1000, 5000])
def test_blocks_change_nothing(block):
    # Absolute pressures: their spread is in the last digits of float32.
    rows = (1e5 + np.random.default_rng(0).standard_normal((1000, 2))).astype(np.float32)
    moments = Moments.of_blocks(rows.__getitem__, len(rows), block)
    exact = rows.astype(np.float64)
    assert moments.count == 1000
    np.testing.assert_allclose(moments.mean, exact.mean(0), rtol=1e-15)
    # A mean of 1e5 is itself rounded by 1.5e-11 each time that two sets merge.
    np.testing.assert_allclose(moments.deviation, exact.std(0), rtol=1e-11)
    np.testing.assert_array_equal(moments.least, exact.min(0))
    np.testing.assert_array_equal(moments.greatest, exact.max(0))


def test_sets_of_different_size_merge_in_any_order():
    draw = np.random.default_rng(0).standard_normal
    parts = [draw((n, 3)) * n for n in (1, 50, 7)]
    expected = Moments.of(np.concatenate(parts))
    for order in ((0, 1, 2), (2, 1, 0)):
        first, *rest = (Moments.of(parts[i]) for i in order)
        for other in rest:
            first = first.merge(other)
        for name in ("count", "mean", "squares", "least", "greatest"):
            np.testing.assert_allclose(getattr(first, name), getattr(expected, name), rtol=1e-12)


def test_a_vector_is_one_column():
    assert Moments.of(np.arange(5)).mean.shape == (1,)


def test_no_rows_change_nothing():
    rows = np.random.default_rng(0).standard_normal((5, 3))
    expected, none = Moments.of(rows), Moments.of(rows[:0])
    assert none.count == 0
    assert Moments.of_blocks(rows[:0].__getitem__, 0).count == none.merge(none).count == 0
    for moments in (expected.merge(none), none.merge(expected)):
        for name in ("count", "mean", "squares", "least", "greatest"):
            np.testing.assert_array_equal(getattr(moments, name), getattr(expected, name))


@dataclass
class GivenMoments:
    """Of a split, the moments alone."""

    given: dict[str, Moments]

    def moments(self):
        return self.given


FULL = {"0.embedding": np.zeros((4, 3)), "0.targets": np.zeros((4, 1))}


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        # All samples are empty: no points of any.
        ({name: rows[:0] for name, rows in FULL.items()}, "0.embedding: {} 3 columns; got 0 of 3"),
        (FULL | {"0.targets": np.zeros((0, 1))}, "0.targets: {} 1 columns; got 0 of 1"),
        (FULL | {"0.targets": np.zeros((4, 2))}, "0.targets: {} 1 columns; got 4 of 2"),
        ({"0.embedding": FULL["0.embedding"]}, "0.targets: {} 1 columns; got none"),
    ],
    ids=["empty", "no_targets", "width", "name"],
)
def test_moments_that_are_not_of_the_description_are_named(arrays, problem):
    split = GivenMoments({name: Moments.of(rows) for name, rows in arrays.items()})
    stream = StreamDescription("points", embedding=3, fx=0, fields=("u",))
    with pytest.raises(ValueError, match="expected") as error:
        Dataset({"train": split}, Description((stream,))).statistics()
    expected = problem.format("expected at least one row of")
    assert str(error.value) == f"training split: {expected}"
