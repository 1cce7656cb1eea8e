"""What a head's records say to the world: the target, the conversations and the run by name, and no path of a machine.

Records are JSON-ready values. A path that is only known to be one by its form (it starts at the root, at a home or
above) gives way to its last part; a home itself, whose last part is somebody's name, to "home".
"""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from model.hub import is_on_hub

PART = r"""[^\s'"\[\](){}<>,;=|]"""
ROOTED = re.compile(
    rf"(?<![\w./~\\-])(?!//)(?:~|[A-Za-z]:(?=[/\\]))?(?:/|\\\\|(?<=:)\\|(?:\.\./)+){PART}+"
    r"|(?<![\w./~-])~/?(?=\s|$)"
)
WHOLE = re.compile(r"~?/|~$|[A-Za-z]:[/\\]|\\\\|\.\./")
HOME = re.compile(r"(~|(/.*)?/(home|Users)/[^/]+|/root|[A-Za-z]:[/\\]Users[/\\][^/\\]+)[/\\]?")
OPTION = re.compile(r"(--?[\w.-]+=)(.+)", re.DOTALL)  # of a command line
SOURCE = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+){0,2}")  # a data set of the Hub, its configuration and split
FILES = (".json", ".jsonl", ".parquet", ".csv", ".txt", ".gz", ".zst", ".arrow", ".yaml")


def public(value: Any, names: Mapping[str, str]) -> Any:
    """The value with every text, keys included, made public; names are local spellings and what the world is told."""
    if isinstance(value, dict):
        return {public(key, names): public(entry, names) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [public(entry, names) for entry in value]
    return _text(value, names) if isinstance(value, str) else value


def public_names(target: str, records: Mapping[str, Any]) -> dict[str, str]:
    """Local spelling -> public name of the target, the conversations and the run that a head's records name.

    records are the tables of the files by their names.
    """
    config, recipe, summary = (records.get(name) for name in ("config.json", "recipe.yaml", "summary.json"))
    spelt = [
        _at(config, "aerie", "target_path"),
        _at(config, "speculators_config", "verifier", "name_or_path"),
        _at(recipe, "target", "path"),
        _at(summary, "target", "name"),
        _at(records.get("provenance.json"), "inputs", "target", "path"),
    ]
    names = {name: target for name in spelt if isinstance(name, str) and not is_on_hub(name)}
    for name in sources(recipe):
        if is_local_source(name):
            names[name] = last_part(name)
    for run in (_at(recipe, "run"), _at(summary, "run")):
        if isinstance(run, str) and run:
            names.setdefault(run, last_part(run))
    return names


def sources(recipe: Any) -> list[str]:
    """The conversations that a recipe names."""
    found = _at(recipe, "data", "conversations")
    return [str(name) for name in found] if isinstance(found, list | tuple) else []


def is_local_source(name: str) -> bool:
    """Whether conversations are a file or folder of the trainer's machine and no data set of the Hub."""
    return name.endswith(FILES) or name.count("/") == 0 or SOURCE.fullmatch(name) is None or not is_on_hub(_bare(name))


def last_part(path: str) -> str:
    """The last part of a path; "home" for somebody's home."""
    if HOME.fullmatch(path):
        return "home"
    kind = PureWindowsPath if "\\" in path else PurePosixPath
    return kind(path).name.strip("~.") or "home"


def _bare(name: str) -> str:
    """A data set's repository, without its configuration and split."""
    return name.split(":", maxsplit=1)[0]


def _text(text: str, names: Mapping[str, str]) -> str:
    if option := OPTION.fullmatch(text):
        return option[1] + _text(option[2], names)
    text = re.sub(r"\bfile://", "", text)
    for local in sorted(names, key=len, reverse=True):
        if text == local or text.startswith(f"{local}/"):
            return names[local] + text[len(local) :]
        if "/" in local:
            told = names[local].replace("\\", r"\\")
            text = re.sub(rf"(?<![\w./~-]){re.escape(local)}(?![\w.-])", told, text)
    if WHOLE.match(text) and "\n" not in text:
        return last_part(text.rstrip())
    return ROOTED.sub(lambda found: last_part(found[0]), text)


def _at(table: Any, *keys: str) -> Any:
    """The entry under nested keys, None where a table is missing."""
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table
