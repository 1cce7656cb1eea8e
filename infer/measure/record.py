"""What measuring leaves behind: a record per (row, sampling, prompt), the reference times, the calibration's nodes."""

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from aerie.configs.errors import UserError
from aerie.configs.read import STRICT, as_dict
from aerie.configs.schema.decode import METHODS, MethodConfig, StopConfig, TreeConfig, sized, tree_of
from aerie.model.storage import digest, read_json, write_atomically

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
OVERHEAD = "overhead.json"
NODE_ARRAYS = ("prompt", "depth", "confidence", "survival", "acceptance")
CYCLE_ARRAYS = ("accepted_length", "cycle_prompt")


@dataclass(frozen=True)
class TreeShape:
    """The tree of one row; nodes count the root. `settings` is what else its method was given, published values too.

    text: what a method that grows no tree says in its place. variant: what its method has otherwise, in a few words.
    """

    __pydantic_config__ = STRICT
    shape: str  # dynamic, chain, static; or the section of a method's settings that grows no tree: lookup, lookahead
    levels: int
    k: int
    nodes: int
    settings: dict[str, Any] = field(default_factory=dict)
    text: str | None = None
    variant: str = ""


@dataclass(frozen=True)
class Milliseconds:
    """Wall-clock of one answer. wall - prefill is what decoding took; the parts sum to wall."""

    __pydantic_config__ = STRICT
    prefill: float
    draft: float
    verify: float
    commit: float
    other: float
    wall: float


@dataclass(frozen=True)
class Record:
    """One answer of one row. `new_tokens` counts the prefill's token too; `cycle_tokens` does not."""

    __pydantic_config__ = STRICT
    row: int  # position in the recipe's bench.rows, behind them those of its sweeps
    method: str
    tree: TreeShape | None  # null: vanilla
    verify: str  # R0 to R4, or that it was not lossless (infer/verify.py)
    temperature: float
    top_k: int
    top_p: float
    task: str
    prompt_id: str
    turn: int = 0  # 0 is a conversation's first; a later one's history holds the vanilla row's answers
    head: str | None = None  # the kind of head that drafted
    head_path: str | None = None  # as its row names it; null: the run's own
    prompt_tokens: int = 0
    prompt_ids: tuple[int, ...] = ()
    prompt_text: str | None = None  # shown above the sample outputs when given
    new_tokens: int = 0
    output_ids: tuple[int, ...] = ()
    text: str = ""
    cycle_texts: tuple[str, ...] = ()  # the prefill's token first, then each cycle's new text
    accepted: tuple[int, ...] = ()  # draft tokens kept per cycle, after the cut at end-of-text or max_new_tokens
    cycle_tokens: tuple[int, ...] = ()  # new tokens per cycle, after the same cut
    cycle_ms: tuple[float, ...] = ()  # wall time per cycle; empty in records of an older version
    cycle_nodes: tuple[int, ...] = ()  # drafted nodes per cycle; likewise
    target_forwards: int = 0  # the prefill is not counted
    draft_forwards: int = 0
    draft_forwards_wasted: int = 0
    draft_nodes: int = 0
    ms: Milliseconds | None = None
    identical: bool | None = None  # to the vanilla row's tokens; null where sampled
    identical_to_generate: bool | None = None  # to transformers' generate(do_sample=False)
    peak_memory_gib: float | None = None
    status: Literal["ok", "error"] = "ok"
    message: str | None = None

    def __post_init__(self) -> None:
        if self.status == "error":
            if not self.message:
                raise ValueError("a failed record needs a message")
            return
        if self.ms is None:
            raise ValueError("a record that is ok needs its ms")
        if not len(self.accepted) == len(self.cycle_tokens) == self.target_forwards:
            raise ValueError(
                f"{len(self.accepted)} accepted and {len(self.cycle_tokens)} cycle_tokens "
                f"for {self.target_forwards} target_forwards; one entry per cycle"
            )
        for name in ("cycle_ms", "cycle_nodes"):
            if len(getattr(self, name)) not in (0, self.target_forwards):
                raise ValueError(f"{len(getattr(self, name))} {name} for {self.target_forwards} target_forwards")
        if sum(self.cycle_tokens) + 1 != self.new_tokens:
            raise ValueError(
                f"cycle_tokens sum to {sum(self.cycle_tokens)}, new_tokens is {self.new_tokens}; "
                "it must be one more (the prefill's token)"
            )
        for kept, new in zip(self.accepted, self.cycle_tokens, strict=True):
            if not kept <= new <= kept + 1:
                raise ValueError(
                    f"a cycle of {new} tokens cannot hold {kept} accepted ones and at most one bonus token"
                )

    @property
    def sampling(self) -> tuple[float, int, float]:
        """(temperature, top_k, top_p)."""
        return self.temperature, self.top_k, self.top_p

    @property
    def prompt(self) -> tuple[str, str]:
        """(task, prompt_id): the conversation that the answer is a turn of."""
        return self.task, self.prompt_id

    @property
    def prompt_key(self) -> tuple[str, str, int]:
        """(task, prompt_id, turn): what pairs a row's answer with vanilla's."""
        return self.task, self.prompt_id, self.turn


@dataclass(frozen=True)
class Reference:
    """What the vanilla row is held against: transformers' generate and the bare forwards replayed."""

    __pydantic_config__ = STRICT
    vanilla_ms_per_token: float
    bare_forward_ms_per_token: float
    prompts: int
    identical_to_generate: int
    generate_static_ms_per_token: float | None = None
    generate_dynamic_ms_per_token: float | None = None


@dataclass(frozen=True)
class Overhead:
    """What one row's cycles cost at temperature 0: medians over prompts and repetitions, milliseconds per cycle.

    cycle is what decoding takes after the prefill: draft, verify, commit and other. bare_target and bare_draft are the
    very same forwards, LM heads included, without laws, trees, masks, choices, cache rows and statistics.
    """

    __pydantic_config__ = STRICT
    row: int
    method: str
    prompts: int
    repetitions: int
    overhead: float  # (cycle - bare) / bare of each repetition, which takes both one right after the other
    cycle: float
    draft: float
    verify: float
    commit: float
    other: float
    bare_target: float
    bare_draft: float


@dataclass(frozen=True)
class CycleArrays:
    """Drafted nodes whose parent was accepted (n of them), and the cycles (c) that they came from."""

    prompt: IntArray  # [n]
    depth: IntArray  # [n], 1 = child of the root
    confidence: FloatArray  # [n], q of the node
    survival: FloatArray  # [n], product of q along the path
    acceptance: FloatArray  # [n], 0 or 1 at T = 0; at T > 0 the chance of the tree's rule to take the node
    accepted_length: IntArray  # [c]
    cycle_prompt: IntArray  # [c]
    temperature: float

    def __post_init__(self) -> None:
        for names in (NODE_ARRAYS, CYCLE_ARRAYS):
            shapes = {name: getattr(self, name).shape for name in names}
            if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
                raise ValueError(f"arrays of different shapes: {shapes}")
        for name in ("confidence", "survival", "acceptance"):
            values = getattr(self, name)
            if values.size and not (values.min() >= 0.0 and values.max() <= 1.0 + 1e-5):
                raise ValueError(f"{name} spans [{values.min():g}, {values.max():g}]; a probability lies in [0, 1]")


def line_of(record: Record) -> str:
    """The record as one line of JSON, newline included."""
    return TypeAdapter(Record).dump_json(record).decode() + "\n"


def read_records(path: Path) -> list[Record]:
    """Every record of the file; UserError (file:line) for what is no record, or measured twice.

    Text after the last newline is a write that was cut: it is left out, so that the bench measures that prompt again.
    """
    adapter = TypeAdapter(Record)
    records: list[Record] = []
    seen: dict[tuple[Any, ...], int] = {}
    for number, line in enumerate(_read_text(path).split("\n")[:-1], start=1):
        if not line.strip():
            continue
        try:
            record = adapter.validate_json(line)
        except ValidationError as error:
            raise UserError(f"{path}:{number}: {_problem(error)}; delete the line to measure it again") from error
        key = (record.row, record.sampling, record.prompt_key)
        if key in seen:
            raise UserError(
                f"{path}:{number}: row {record.row}, prompt {record.prompt_id!r} of {record.task!r} was measured "
                f"already at line {seen[key]}; delete one of the two lines"
            )
        seen[key] = number
        records.append(record)
    return records


def read_reference(path: Path) -> Reference:
    """The reference times; UserError when the file is missing or holds something else."""
    try:
        return TypeAdapter(Reference).validate_python(read_json(path))
    except ValidationError as error:
        raise UserError(f"{path}: {_problem(error)}; measure again with: python infer/main.py bench") from error


def read_overhead(path: Path) -> list[Overhead]:
    """The rows of overhead.json; UserError when it holds something else."""
    try:
        return TypeAdapter(list[Overhead]).validate_python(read_json(path))
    except ValidationError as error:
        raise UserError(f"{path}: {_problem(error)}; delete it and run: python infer/main.py bench") from error


def write_cycles(path: Path, arrays: CycleArrays) -> None:
    """Writes cycles.npz atomically."""
    values = {name: getattr(arrays, name) for name in (*NODE_ARRAYS, *CYCLE_ARRAYS)}

    def write(temporary: Path) -> None:
        with temporary.open("wb") as handle:  # a path without .npz would get the suffix appended
            np.savez_compressed(handle, temperature=np.float64(arrays.temperature), **values)

    write_atomically(path, write)


def read_cycles(path: Path) -> CycleArrays:
    """The arrays of cycles.npz; UserError when the file is missing, damaged or lacks an array."""
    fix = "collect them again with: python infer/main.py calibrate"
    try:
        with np.load(path, allow_pickle=False) as file:
            values = {name: file[name] for name in file.files}
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; {fix}") from error
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: not an npz file of arrays ({error}); {fix}") from error
    missing = sorted({*NODE_ARRAYS, *CYCLE_ARRAYS, "temperature"} - values.keys())
    if missing:
        raise UserError(f"{path}: missing {', '.join(missing)}; {fix}")
    integers = {name: values[name].astype(np.int64) for name in ("prompt", "depth", *CYCLE_ARRAYS)}
    floats = {name: values[name].astype(np.float64) for name in ("confidence", "survival", "acceptance")}
    try:
        return CycleArrays(**integers, **floats, temperature=float(values["temperature"]))
    except ValueError as error:
        raise UserError(f"{path}: {error}; {fix}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; measure first with: python infer/main.py bench") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def _problem(error: ValidationError) -> str:
    """The first problem as 'key: what was wrong'."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message


KEPT = ("stop", "rank", "rerank", "choices", "calibrated")  # of a tree, beside its sizes


def tree_shape(row: MethodConfig) -> TreeShape | None:
    """What a record says of a row's tree; null for vanilla."""
    options, typical = row.options, _typical(row)
    if options is not None:
        shape = METHODS[row.method].options
        assert shape is not None
        given = {**as_dict(options), **typical}
        return TreeShape(shape, *options.sizes, settings=given, text=options.text, variant=_words(typical))
    tree = tree_of(row, "bench.rows")
    if tree is None:
        return None
    size, published = sized(tree), METHODS[row.method].tree
    assert published is not None
    kept = {key: value for key, value in as_dict(tree).items() if key in KEPT}
    settings = {**kept, "children": _children(tree), **typical}
    words = _words({**_changes(tree, published), **typical})
    return TreeShape(size.shape, size.levels, size.k, size.nodes, settings, variant=words)


def told_apart(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A summary's rows; those that differ in nothing but their head have it in their tree's variant."""
    alike: dict[str, set[tuple[str | None, str | None]]] = {}
    for row in rows:
        alike.setdefault(digest([row["method"], row["tree"]]), set()).add((row["head"], row.get("head_path")))
    made = []
    for row in rows:
        heads = alike[digest([row["method"], row["tree"]])]
        if row["tree"] is None or len(heads) == 1:
            made.append(row)
            continue
        kinds = len({kind for kind, _ in heads})
        words = f"{row['head']} head" if kinds == len(heads) else f"head {row.get('head_path') or 'of the run'}"
        variant = ", ".join(part for part in (row["tree"].get("variant"), words) if part)
        made.append({**row, "tree": {**row["tree"], "variant": variant}})
    return made


def _changes(tree: TreeConfig, published: TreeConfig) -> dict[str, Any]:
    """The settings that are not the method's own, but for a tree's sizes."""
    found = _rule_changes(tree.stop, published.stop)
    if tree.rank != published.rank:
        found["rank"] = tree.rank
    if tree.rerank != published.rerank:
        found["rerank"] = tree.rerank
    usual = _children(published) if tree.shape == published.shape else _children(replace(tree, children=None))
    if _children(tree) != usual:
        found["children"] = tree.children
    if tree.choices != published.choices:
        named = isinstance(tree.choices, str)
        found["choices"] = tree.choices if named else digest(tree.choices)[:6]
    if tree.calibrated is not None:
        found["calibrated"] = tree.calibrated
    return found


def _rule_changes(stop: StopConfig, published: StopConfig) -> dict[str, Any]:
    found: dict[str, Any] = {} if stop.rule == published.rule else {"stop": stop.rule}
    plain = type(stop)()
    for key in fields(stop):
        value = getattr(stop, key.name)
        if value != getattr(plain, key.name):
            found[key.name] = value
    return found


def _children(tree: TreeConfig) -> str:
    return tree.children or ("best" if tree.shape == "dynamic" else "sampled")


def _typical(row: MethodConfig) -> dict[str, Any]:
    return {} if row.typical is None else {"typical": as_dict(row.typical)}


def _words(changes: dict[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {_word(value)}" for key, value in changes.items())


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_word(item)}" for key, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return "/".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
