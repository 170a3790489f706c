"""Statistics by a streaming pass are those of all rows at once."""

import numpy as np
import pytest

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
