"""Packages that a part of the project needs alone, and that are installed with an extra."""

from importlib.util import find_spec

_MODULES = {"meshes": ("pyvista", "zarr"), "airfoils": ("aerosandbox",)}


def installing(extra: str) -> str:
    """The command that installs an extra."""
    return f"python -m pip install -c constraints.txt -e '.[{extra}]'"


def require_extra(extra: str, asked_by: str) -> None:
    """Refuses to go on without the packages of an extra.

    Args:
        extra: its name in `pyproject.toml`.
        asked_by: command or key of the configuration that needs it.

    Raises:
        ValueError: one of them is not installed.
    """
    for module in _MODULES[extra]:
        if find_spec(module) is None:
            raise ValueError(
                f"{asked_by}: expected the extra `{extra}` ({installing(extra)}); "
                f"got no package {module}"
            )
