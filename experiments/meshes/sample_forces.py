"""Force and moment coefficients of a sample, from fields on its surface as a model gives them."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from experiments.configuration.schema import ForcesConfig
from experiments.meshes.forces import force_coefficients, moment_coefficients, tractions
from experiments.meshes.wiring import Wired


def force_columns(forces: ForcesConfig) -> tuple[str | None, ...]:
    """The fields that forces are integrated from: the pressure, and three of a shear."""
    shear = () if forces.shear is None else tuple(f"{forces.shear}_{axis}" for axis in "xyz")
    return (forces.pressure, *shear)


def forces_of(
    sample: Wired, columns: Sequence[str], fields: Float[np.ndarray, "N C_out"]
) -> dict[str, float]:
    """Force and moment coefficients of a surface.

    Args:
        sample: whose surface it is.
        columns: names of the fields.
        fields: targets of the surface's stream, as a model gives them.

    Raises:
        ValueError: the pressure or the shear is no target, or a number is missing.
    """
    forces = sample.config.forces
    pressure = _coefficient(sample, fields, columns, forces.pressure, "pressure")
    shear = None
    if forces.shear is not None:
        parts = force_columns(forces)[1:]
        shear = np.stack([_coefficient(sample, fields, columns, p, "stress") for p in parts], 1)
    arrays = sample.arrays
    force = tractions(arrays.read("surface_normals"), pressure, shear, inward=forces.inward)
    areas, area = np.ravel(arrays.read("surface_areas")), sample.number(forces.area)
    coefficients = force_coefficients(
        force, areas, {name: sample.vector(v) for name, v in forces.directions.items()}, area
    )
    if not forces.moments:
        return coefficients
    return coefficients | moment_coefficients(
        force,
        areas,
        arrays.read("surface_mesh_centers"),
        {name: sample.vector(axis) for name, axis in forces.moments.items()},
        sample.vector(forces.centre),
        area * sample.number(forces.length),
    )


def _coefficient(
    sample: Wired, fields: np.ndarray, columns: Sequence[str], column: str | None, kind: str
) -> np.ndarray:
    if column is None or column not in columns:
        raise ValueError(
            f"data.forces: expected {column!r} among the targets; got {', '.join(columns)}"
        )
    values = fields[:, columns.index(column)]
    if sample.kind(column) is not None:
        return values
    return sample.free_stream.coefficient(values, kind)
