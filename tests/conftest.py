"""What the tests share. JAX is told of its virtual devices here, before anything imports it."""

import os

os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
).strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import contextlib
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import parallel

GOLDEN = Path(__file__).parent / "golden"

MESHES = {
    "points8": dict(points=8),
    "data2_points4": dict(data=2, points=4),
    "points4_heads2": dict(points=4, heads=2),
    "data2_points2_heads2": dict(data=2, points=2, heads=2),
}

on_meshes = pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
on_any_mesh = pytest.mark.parametrize("mesh", [None, *MESHES.values()], ids=["single", *MESHES])


def on_mesh(axes: dict[str, int] | None):
    """Context of a device mesh, or of none."""
    if axes is None:
        return contextlib.nullcontext()
    return jax.set_mesh(parallel.make_mesh(**axes))


@pytest.fixture
def float64():
    """float64 within one test."""
    with jax.enable_x64(True):
        yield np.float64


def relative_difference(actual, expected) -> float:
    """Largest difference relative to the largest value, as the laws of the design state it."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30))


def assert_trees_close(actual, expected, tolerance: float) -> None:
    """Every leaf of two trees agrees to `tolerance` of its largest value."""
    difference = jax.tree.map(relative_difference, actual, expected)
    wrong = {
        jax.tree_util.keystr(path): value
        for path, value in jax.tree_util.tree_leaves_with_path(difference)
        if not value <= tolerance
    }
    assert not wrong, f"differ by more than {tolerance}: {wrong}"


def load_golden(name: str) -> dict:
    """One reference case as a tree: `meta`, and the arrays under `param`, `in`, `out`, `grad`..."""
    case = {}
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as archive:
        for key in archive.files:
            group, _, leaf = key.partition("/")
            if leaf:
                case.setdefault(group, {})[leaf] = archive[key]
            else:
                case[group] = archive[key]
    case["meta"] = json.loads(str(case["meta"]))
    return case
