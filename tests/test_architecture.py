"""The rules of the house, checked in the source: the import ladder, declared dependencies."""

import ast
import functools
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

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
MAX_SINGLE_IMPORTERS = 14
distributions = functools.cache(packages_distributions)  # by top-level module


def imported(source: str) -> Iterator[str]:
    """Dotted names of every import in source, also in functions, under TYPE_CHECKING and by import_module("...")."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            names = (
                argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)
            )
            yield from (name for name in names if isinstance(name, str))


def off_the_ladder(file: str, source: str) -> list[str]:
    """The imports that a file may not make. configs never imports torch, and nothing imports the roof."""
    found = [name.split(".") for name in imported(source)]
    if file.endswith("/main.py") or file.startswith("src/"):
        return [".".join(name) for name in found if name[0] == "tests"]
    package = file.split("/")[0]
    heavy = {"torch", "transformers"} if package == "configs" else set()
    return [
        ".".join(name)
        for name in found
        if name[0] in {"tests", *heavy} or (name[0] == "aerie" and name[1] not in LADDER[package])
    ]


def undeclared(source: str, declared: set[str]) -> list[str]:
    """Third-party imports whose distribution (normalised name) is not among the declared ones."""
    installed = distributions()
    outside = (
        {name.split(".")[0] for name in imported(source)}
        - {"aerie", "tests"}
        - set(sys.stdlib_module_names)
    )
    return sorted(
        name for name in outside if not {normal(d) for d in installed.get(name, [name])} & declared
    )


def declared(*extras: str) -> set[str]:
    """Normalised names of the dependencies in pyproject.toml, with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ]
    return {normal(re.split(r"[^\w.-]", line)[0]) for line in wanted}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def dotted(path: Path) -> str:
    return "aerie." + relative(path).removeprefix("src/aerie/").removesuffix(".py").removesuffix(
        "/__init__"
    ).replace("/", ".")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_imports_go_down_the_ladder_and_train_and_infer_never_meet() -> None:
    found = {relative(path): off_the_ladder(relative(path), path.read_text()) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == {}


def test_modules_are_shared_and_import_in_no_circle() -> None:
    """A module with one importer belongs in that importer; main.py and __init__.py may have none."""
    modules = {dotted(path): path for path in SOURCES}
    graph = {
        name: {other for other in imported(path.read_text()) if other in modules and other != name}
        for name, path in modules.items()
    }
    importers = Counter(other for others in graph.values() for other in others)
    single = [
        name
        for name, path in modules.items()
        if path.stem not in ("main", "__init__", "__main__") and importers[name] == 1
    ]
    assert len(single) <= MAX_SINGLE_IMPORTERS, sorted(single)
    TopologicalSorter(graph).prepare()  # CycleError names the modules of a circle


def test_every_third_party_import_is_declared() -> None:
    at_run_time, in_tests = declared("report", "distill"), declared("report", "distill", "dev")
    found = {path: undeclared(path.read_text(), at_run_time) for path in SOURCES}
    found |= {path: undeclared(path.read_text(), in_tests) for path in TESTS}
    assert {relative(path): names for path, names in found.items() if names} == {}
    assert undeclared("import yaml, never_installed, pytest", at_run_time) == [
        "never_installed",
        "pytest",
    ]
