"""README and docs: code runs, arguments of commands parse, or the page says why not.

A comment above a block says what it is:

    <!-- not run: REASON -->   neither run nor checked
    <!-- file: PATH -->        a file of a worked example, see `test_extending_by_the_page_alone`
    <!-- edit: PATH -->        a change of a file, likewise

Other blocks of Python are run, one page after another in this process, each page in a folder of its
own; YAML is parsed; of shell commands the arguments are parsed, the configuration is composed, and
targets, extras and files are looked up.
"""

import importlib
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from commands import ROOT, compose
from hydra.errors import HydraException

pytest.importorskip("pyvista")
pytest.importorskip("zarr")

DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(ROOT)): path for path in [ROOT / "README.md", *DOCS.rglob("*.md")]}
COMMENT = re.compile(r"<!-- (?P<kind>not run|file|edit): (?P<what>.+?) -->")
SHELL = ("sh", "bash", "console")

# Scripts of the docs, which import each other; behind all else, for their names are plain.
sys.path += [str(DOCS), str(DOCS / "figures")]
draw, reference, reference_commands = map(
    importlib.import_module, ("draw", "reference", "reference_commands")
)


class Block(NamedTuple):
    """A block of code: where it is, what language it is in, and what the comment above says."""

    place: str
    language: str
    text: str
    kind: str | None
    what: str | None


def blocks_of(name: str) -> list[Block]:
    """The blocks of a page; an indented one counts as shell."""
    lines = PAGES[name].read_text().splitlines()
    found, mark, number = [], None, 0
    while number < len(lines):
        line, before = lines[number], lines[number - 1] if number else ""
        first, body = number, []
        number += 1
        if line.startswith("```"):
            while lines[number] != "```":
                body.append(lines[number])
                number += 1
            number += 1
            language = line[3:]
        elif line.startswith("    ") and not before.strip():
            number -= 1
            while number < len(lines) and (lines[number].startswith("    ") or not lines[number]):
                body.append(lines[number][4:])
                number += 1
            language = "sh"
        else:
            comment = COMMENT.fullmatch(line)
            mark = comment or (mark if not line.strip() else None)
            continue
        kind, what = (mark["kind"], mark["what"]) if mark else (None, None)
        text = "\n".join(body) + "\n"
        found.append(Block(f"{name}:{first + 1}", language, text, kind, what))
        mark = None
    return found


BLOCKS = {name: blocks_of(name) for name in sorted(PAGES)}


def pages_with(*languages: str) -> list[str]:
    """Pages that have blocks of these languages without a comment above."""
    return [
        name
        for name, blocks in BLOCKS.items()
        if any(block.language in languages and block.kind is None for block in blocks)
    ]


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_is_run_or_checked_or_says_why_not(name):
    for block in BLOCKS[name]:
        if block.kind == "not run":
            assert len(block.what.split()) > 2, f"{block.place}: expected a reason"
        elif block.kind is not None:
            assert name == "docs/extending.md", f"{block.place}: no test makes this file"
            assert (block.language == "diff") == (block.kind == "edit"), block.place
        else:
            known = ("python", "yaml", "text", *SHELL)
            assert block.language in known, f"{block.place}: {block.language!r} is not checked"


@pytest.mark.parametrize("name", pages_with("python"))
def test_python_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "documentation"}
    for block in BLOCKS[name]:
        if block.language == "python" and block.kind is None:
            exec(compile(block.text, block.place, "exec"), namespace)


@pytest.mark.parametrize("name", pages_with("yaml"))
def test_yaml_parses(name):
    for block in BLOCKS[name]:
        if block.language == "yaml":
            assert list(yaml.safe_load_all(block.text)), block.place


# Commands ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", pages_with(*SHELL))
def test_arguments_of_commands_parse(name):
    for block in BLOCKS[name]:
        if block.language not in SHELL or block.kind is not None:
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                check_command(words, block.place)


def check_command(words: list[str], place: str) -> None:
    """One command of a shell, by what it starts."""
    while re.fullmatch(r"[A-Z_]+=.*", words[0]) or words[0] == "srun":
        words = words[1:]
    program, *arguments = words
    if Path(program).name == "python":
        assert arguments[0] == "-m", f"{place}: expected python -m"
        check_module(arguments[1], arguments[2:], place)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert [word for word in arguments if "=" not in word and word not in targets] == [], place
    elif program == "pip":
        check_install(arguments, place)
    else:
        pytest.fail(f"{place}: {program!r} is not checked, and nothing says why")


def check_install(arguments: list[str], place: str) -> None:
    """Files and extras of `pip install -c constraints.txt -e '.[extra]'`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert arguments[:3] == ["install", "-c", "constraints.txt"], place
    extras = re.fullmatch(r"\.(?:\[([\w,]+)\])?", arguments[-1])[1]
    assert set((extras or "dev").split(",")) <= project["optional-dependencies"].keys(), place


def check_module(name: str, arguments: list[str], place: str) -> None:
    """A command of Python."""
    if name == "pip":
        check_install(arguments, place)
    elif name == "pytest":
        paths = [word.partition("::")[0] for word in arguments if word[0] != "-"]
        assert [path for path in paths if not (ROOT / path).exists()] == [], place
    elif name == "experiments.train":
        for overrides in jobs([word for word in arguments if word[0] != "-"]):
            compose(*overrides)
    else:
        main = importlib.import_module(name).main
        if not reference_commands.takes_arguments(main):
            assert arguments == [], place
            return
        given = reference_commands.parser_of(main, arguments)
        if name == "experiments.launch":
            _, command, *rest = given.command
            check_module(f"experiments.{command}", rest, place)
        else:
            inputs = [*getattr(given, "overrides", []), *map(str, getattr(given, "files", []))]
            compose(*[word for word in inputs if "=" in word])


def jobs(overrides: list[str]) -> list[list[str]]:
    """The overrides of each job, of one list where nothing is swept over."""
    for place, override in enumerate(overrides):
        key, _, values = override.partition("=")
        if re.fullmatch(r"[\w.-]+(,[\w.-]+)+", values):
            rest = overrides[place + 1 :]
            return [[*overrides[:place], f"{key}={one}", *rest] for one in values.split(",")]
    return [overrides]


@pytest.mark.parametrize("name", BLOCKS)
def test_commands_in_the_text_are_there(name):
    modules = set(re.findall(r"python -m ([\w.]+)", PAGES[name].read_text()))
    assert {module for module in modules if importlib.util.find_spec(module) is None} == set()


# The worked examples of docs/extending.md --------------------------------------------------------

COPIED = ("parallel", "flare_jax", "geotransolver_jax", "experiments", "configs", "benchmarks")


def edited(text: str, change: str, place: str) -> str:
    """A file's text with lines changed as a diff says; its place is found by the lines around."""
    lines = change.splitlines()
    before, after = (
        "\n".join(line[1:] for line in lines if line[:1] != other) + "\n" for other in "+-"
    )
    found = text.count(before)
    assert found == 1, (
        f"{place}: expected the file to have these lines once; found {found} times:\n{before}"
        "Give the edit on the page lines that are there once."
    )
    return text.replace(before, after)


def edit(file: Path, block: Block) -> str:
    """The text of a file after an edit of the page."""
    return edited(file.read_text(), block.text, f"{block.place}: edit of {block.what}")


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A copy of the project with the files and edits of the page."""
    copy = tmp_path_factory.mktemp("extended")
    for folder in COPIED:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tests").mkdir()
    for path in [ROOT / "pyproject.toml", *ROOT.glob("tests/*.py")]:
        if not path.name.startswith("test_") or path.name == "test_config.py":
            shutil.copy(path, copy / path.relative_to(ROOT))
    for block in BLOCKS["docs/extending.md"]:
        if block.kind not in ("file", "edit"):
            continue
        path = copy / block.what
        path.parent.mkdir(exist_ok=True)
        path.write_text(edit(path, block) if block.kind == "edit" else block.text)
    # As `make format` does; all else is to be in its form on the page.
    run_in(copy, "ruff", "check", "--no-cache", "--select=I", "--fix", ".")
    return copy


def run_in(folder: Path, module: str, *arguments) -> None:
    """Runs a module of Python on a copy of the project; it must end well."""
    result = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        check=False,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def run_tests(folder: Path, *names: str) -> None:
    """Runs files of tests of a copy of the project."""
    run_in(folder, "pytest", "-q", "-p", "no:cacheprovider", *[f"tests/{name}" for name in names])


def test_extending_by_the_page_alone(extended):
    tests = {path.name for path in (extended / "tests").glob("test_*.py")} - {"test_config.py"}
    assert len(tests) == 2
    run_tests(extended, *tests)


def test_one_more_data_set_and_model_are_no_fault_of_a_configuration(extended):
    run_tests(extended, "test_config.py")


def is_pinned(package):
    return f"{package}=={version(package)}" in (ROOT / "constraints.txt").read_text().split()


# Newer stubs and rules find errors in the rest of the project too, as `make lint types` would.
@pytest.mark.skipif(
    not all(map(is_pinned, ("mypy", "numpy", "ruff"))), reason="other packages than those pinned"
)
def test_what_the_page_makes_is_in_form_and_typed(extended):
    run_in(extended, "ruff", "check", "--no-cache", ".")
    run_in(extended, "ruff", "format", "--no-cache", "--check", ".")
    run_in(extended, "mypy", "--cache-dir", extended / ".mypy_cache")


def test_edits_of_the_page_leave_their_places_to_others():
    edits = [block for block in BLOCKS["docs/extending.md"] if block.kind == "edit"]
    assert edits
    for block in edits:
        once = edit(ROOT / block.what, block)
        edited(once, block.text, f"{block.place}: the same edit of {block.what} again")


# Pages -------------------------------------------------------------------------------------------


def test_pages_made_of_the_code_are_up_to_date():
    for name, text in reference.pages().items():
        assert (DOCS / name).read_text() == text, f"docs/{name}: run python docs/reference.py"


def test_figures_are_what_the_script_draws():
    for name, text in draw.figures().items():
        assert (DOCS / "images" / name).read_text() == text, f"{name}: run docs/figures/draw.py"


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {re.sub(r"[ ]", "-", heading.strip()) for heading in plain}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    text = re.sub(r"^```.*?^```", "", PAGES[name].read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        if "://" in file:
            continue
        path = (PAGES[name].parent / file).resolve() if file else PAGES[name]
        assert path.is_file(), f"{name}: {target}"
        if name != "README.md":
            assert path.is_relative_to(DOCS), f"{name}: {target}: the site does not have it"
        assert not anchor or anchor in anchors(path), f"{name}: {target}"


def navigation(entries: list) -> list[str]:
    """The pages of the site."""
    found = []
    for entry in entries:
        (inner,) = entry.values()
        found += navigation(inner) if isinstance(inner, list) else [inner]
    return found


def test_every_page_is_in_the_navigation_once():
    pages = navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(pages) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_every_law_names_tests_that_there_are():
    text = (DOCS / "laws.md").read_text()
    assert len(re.findall(r"^## \d", text, flags=re.MULTILINE)) == 7
    for section in text.split("\n## ")[1:]:
        names = re.findall(r"`(\w+)::(\w+)`", section)
        assert names, section.splitlines()[0]
        for file, test in names:
            path = ROOT / "tests" / f"{file}.py"
            assert re.search(rf"^def {test}\(", path.read_text(), re.MULTILINE), f"{file}::{test}"


def test_every_planted_fault_has_its_place_and_its_tests():
    faults = runpy.run_path(str(ROOT / "tests" / "faults" / "break_the_laws.py"))["FAULTS"]
    assert {fault.law for fault in faults.values()} == set(range(1, 8))
    for name, fault in faults.items():
        assert (ROOT / fault.file).read_text().count(fault.there) == 1, name
        assert (ROOT / "tests" / fault.tests.split()[0]).is_file(), name


@pytest.mark.parametrize("name", PAGES)
def test_files_of_the_suite_that_a_page_names_are_there(name):
    text = re.sub(r"^```.*?^```", "", PAGES[name].read_text(), flags=re.MULTILINE | re.DOTALL)
    named = {f"tests/{file}.py" for file in re.findall(r"`(test_\w+)(?:::\w+)?`", text)}
    named |= set(re.findall(r"`(tests/[\w/]+\.\w+)", text))
    assert {path for path in named if not (ROOT / path).is_file()} == set()


def test_readme_fits_on_two_screens_before_its_reference():
    start_of_it = (ROOT / "README.md").read_text().partition("\n## Reference\n")[0]
    assert len(start_of_it.splitlines()) <= 110


def test_every_edit_and_command_is_refused_if_wrong():
    with pytest.raises(AssertionError, match="found 0 times"):
        edited("one\ntwo\n", " three\n+four\n", "here")
    assert edited("one\ntwo\n", " one\n-two\n+three\n", "here") == "one\nthree\n"
    for command in (
        "python -m experiments.train model.n_layer=1",
        "python -m experiments.train -m model.slice_num=16,x",
        "python -m experiments.evaluate",
        "python -m experiments.launch -- train mesh.point=2",
        "python -m pytest tests/test_nothing.py",
        "make nothing",
        "pip install -c constraints.txt -e '.[nothing]'",
        "curl something",
    ):
        wrong = (AssertionError, SystemExit, ValueError, HydraException, pytest.fail.Exception)
        with pytest.raises(wrong):
            check_command(shlex.split(command), "here")
