"""Checks the rules of the house in the source: the import ladder and declared dependencies."""

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests import mutants

ROOT = Path(__file__).resolve().parent.parent
LADDER = {
    "configs": {"configs"},
    "model": {"configs", "model"},
    "data": {"configs", "model", "data"},
    "train": {"configs", "model", "data", "train"},
    "infer": {"configs", "model", "data", "infer"},
}
ROOF = sorted((ROOT / "src/aerie").glob("*.py"))  # the command; its modules import from everywhere
SOURCES = ROOF + sorted(path for package in LADDER for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
# vLLM's Python runs these files
OF_VLLM = [ROOT / "data/connector/cpu_states.py", ROOT / "tests/served/engine.py"]
ENTRIES = ("main", "__main__", "__init__")
MAX_SINGLE_IMPORTERS = 15
distributions = cache(packages_distributions)  # top-level module -> distributions


@cache
def imported(path: Path) -> list[str]:
    """Dotted names of all imports in a file, also those in functions and by import_module("")."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                names += [alias.name for alias in node.names]
            case ast.ImportFrom(module=str(module), level=0):
                names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
            case ast.Call(func=ast.Name("import_module"), args=[ast.Constant(str(name))]):
                names.append(name)
    return names


def dotted(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix().removeprefix("src/aerie/")
    return "aerie." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def forbidden(path: Path) -> Iterator[str]:
    """The imports of a file that break the rules.

    A package imports what its ladder allows, configs no torch, and nobody the roof or the tests.
    """
    package = path.relative_to(ROOT).parts[0]
    composes = path.stem == "main" or path in ROOF
    for name in imported(path):
        first, _, rest = name.partition(".")
        is_off_ladder = first == "aerie" and rest.split(".")[0] not in LADDER.get(package, ())
        is_heavy = package == "configs" and first in ("torch", "transformers")
        if first == "tests" or (not composes and (is_off_ladder or is_heavy)):
            yield name


def declared(*extras: str) -> set[str]:
    """Normalised names of pyproject.toml's dependencies, with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return {normal(re.split(r"[^\w.-]", line)[0]) for line in lines}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("path", SOURCES, ids=dotted)
def test_imports_go_down_the_ladder(path: Path) -> None:
    assert [*forbidden(path)] == []


@pytest.mark.parametrize("path", OF_VLLM, ids=dotted)
def test_what_vllm_runs_imports_torch_and_vllm_alone(path: Path) -> None:
    names = {name.split(".")[0] for name in imported(path)}
    assert names - set(sys.stdlib_module_names) <= {"torch", "vllm"}


def test_modules_are_shared_and_import_in_no_circle() -> None:
    """A module with one importer belongs in that importer; the commands' modules may have none."""
    modules = {dotted(path): path for path in SOURCES}
    graph = {name: {*imported(path)} & {*modules} - {name} for name, path in modules.items()}
    importers = Counter(other for others in graph.values() for other in others)
    single = [
        name for name, path in modules.items() if importers[name] == 1 and path.stem not in ENTRIES
    ]
    assert len(single) <= MAX_SINGLE_IMPORTERS, sorted(single)
    TopologicalSorter(graph).prepare()  # CycleError names the modules of a circle


def test_a_file_has_a_name_of_its_own() -> None:
    stems = Counter(path.stem for path in SOURCES if path.stem not in ENTRIES)
    assert [stem for stem, count in stems.items() if count > 1] == []


@pytest.mark.parametrize(("paths", "extras"), [(SOURCES, ""), (TESTS, "dev")], ids=["src", "tests"])
def test_every_third_party_import_is_declared(paths: list[Path], extras: str) -> None:
    known = declared("report", "distill", *extras.split())
    ours = [path for path in paths if path not in OF_VLLM]
    names = {name.split(".")[0] for path in ours for name in imported(path)}
    undeclared = []
    for name in names - {"aerie", "tests"} - set(sys.stdlib_module_names):
        providers = distributions().get(name, [name])
        if not known & {normal(provider) for provider in providers}:
            undeclared.append(name)
    assert undeclared == []


def test_a_mutant_breaks_one_line() -> None:
    """Each text that `python tests/mutants.py` replaces stands exactly once in its file."""
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in mutants.TESTS}
    assert [old for file, old, _ in mutants.MUTANTS if texts[file].count(old) != 1] == []
