import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
PACKAGING_FILES = ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run")
UNPACKAGED_FOLDERS = {"benchmarks", "docs", "tests"}


def constraint_lines():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pinned_versions():
    pins = map(Requirement, constraint_lines())
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}


def declared_requirements():
    extras = PROJECT["optional-dependencies"].values()
    groups = [PROJECT["dependencies"], *extras, PYPROJECT["build-system"]["requires"]]
    # An extra may name another of the project's own.
    own = f"{PROJECT['name']}["
    return [each for group in groups for each in group if not each.startswith(own)]


def packaged_folders():
    include = PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    return {pattern for pattern in include if "." not in pattern}


@pytest.mark.parametrize("declared", declared_requirements())
def test_pinned_version_satisfies_declared_requirement(declared):
    requirement = Requirement(declared)
    pins = pinned_versions()
    name = canonicalize_name(requirement.name)
    assert name in pins, f"constraints.txt pins no {name}"
    assert requirement.specifier.contains(pins[name])


def test_each_constraint_is_one_exact_pin():
    pin = re.compile(r"[\w.-]+==[0-9][0-9a-z.]*(?: *;.+)?")
    assert [line for line in constraint_lines() if not pin.fullmatch(line)] == []


def test_constraints_pin_each_package_once():
    assert len(pinned_versions()) == len(constraint_lines())


@pytest.mark.parametrize("file", PACKAGING_FILES)
def test_packaging_names_no_package_index(file):
    text = (ROOT / file).read_text(encoding="utf-8")
    assert not re.search(r"index-url|find-links|trusted-host|://|--(?:extra-)?index\b", text)


def test_every_packaged_folder_exists():
    assert {folder for folder in packaged_folders() if not (ROOT / folder).is_dir()} == set()


def test_every_package_is_packaged():
    packages = {init.parent.name for init in ROOT.glob("[!.]*/__init__.py")}
    assert packages - UNPACKAGED_FOLDERS <= packaged_folders()


def test_every_packaged_folder_includes_its_subpackages():
    include = PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {f"{folder}.*" for folder in packaged_folders()} <= set(include)


def test_version_is_the_newest_in_the_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(.+?)\]", changelog, flags=re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == PROJECT["version"]
