"""Neighbours that a k-d tree finds on the host are those that the model would search for."""

import numpy as np
import pytest

import parallel
from experiments.data.neighborhoods import find_neighborhoods, nearest_within
from parallel.neighbors import Neighbors


def uniform(draw, points):
    return draw.random((points, 3))


def grid(draw, points):
    """Many points at equal distances, some of them in one place."""
    return draw.integers(0, 3, (points, 3)) / 2


@pytest.mark.parametrize("kind", [uniform, grid])
@pytest.mark.parametrize("count", [1, 5, 70])
def test_a_tree_finds_what_the_search_finds(kind, count):
    draw = np.random.default_rng(count)
    queries, points = (kind(draw, n).astype(np.float32) for n in (40, 60))
    queries[:3] += 10
    found = nearest_within(queries, points, 0.6, count)
    expected = parallel.radius_search(queries[None], points[None], 0.6, count)
    np.testing.assert_array_equal(found.indices, expected.indices[0])
    np.testing.assert_array_equal(found.distances, expected.distances[0])


def test_both_directions_of_every_sample():
    draw = np.random.default_rng(0)
    positions = [uniform(draw, n).astype(np.float32) for n in (30, 20)]
    geometry = [uniform(draw, n).astype(np.float32) for n in (10, 12)]
    found = find_neighborhoods(positions, geometry, 0.5, 4)
    for sample, (points, surface) in enumerate(zip(positions, geometry, strict=True)):
        pairs = [(found[sample].of_points, points, surface)]
        pairs += [(found[sample].of_geometry, surface, points)]
        for neighbors, queries, searched in pairs:
            expected = parallel.radius_search(queries[None], searched[None], 0.5, 4)
            assert isinstance(neighbors, Neighbors)
            np.testing.assert_array_equal(neighbors.indices, expected.indices[0])


@pytest.mark.parametrize(
    ("queries", "points", "message"),
    [
        (np.ones((2, 3)), np.ones((0, 3)), r"points: expected coordinates .* got shape \(0, 3\)"),
        (np.ones(3), np.ones((1, 3)), r"queries: expected coordinates \(N, D\); got shape \(3,\)"),
        (np.ones((2, 2)), np.ones((4, 3)), r"queries: expected the width 3 of points; got"),
        (np.array([[0.0, np.nan]]), np.ones((4, 2)), r"queries: expected finite .* at point 0"),
    ],
)
def test_bad_clouds_are_named(queries, points, message):
    with pytest.raises(ValueError, match=message):
        nearest_within(queries, points, 1.0, 2)
