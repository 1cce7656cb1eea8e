"""The files of a bench as types. records.jsonl has a Record a line and only grows."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from aerie.configs.errors import UserError
from aerie.configs.read import adapter, as_dict, validate
from aerie.configs.schema.decode import METHODS, MethodConfig, published_tree
from aerie.configs.schema.heads import TargetConfig
from aerie.configs.schema.recipe import RunPaths
from aerie.data.inputs import target_inputs
from aerie.data.progress import format_bytes
from aerie.model import storage
from aerie.model.hub import head_directory
from aerie.model.storage import (
    Manifest,
    Whole,
    differences,
    digest,
    digests,
    find_weights,
    read_json,
)

T = TypeVar("T")
FloatArray = NDArray[np.float64]
Sampling = tuple[float, int, float]  # temperature, top_k, top_p
PromptKey = tuple[str, str, int]  # task, prompt_id, turn
Key = tuple[int, Sampling, PromptKey]
RECORDS = "records.jsonl"
SUITE = "suite.json"
REFERENCE = "reference.json"


@dataclass(frozen=True)
class TreeShape:
    """The tree of a row, root counted; `settings`: what else the method was given."""

    shape: str  # dynamic, chain, static, lookup, lookahead
    levels: int
    k: int
    nodes: int
    settings: dict[str, Any] = field(default_factory=dict)
    text: str | None = None
    variant: str = ""

    @property
    def words(self) -> str:
        """'6 levels, k 8, 16 nodes', '5 levels, chain, stop entropy', '4 levels, static, 64 nodes'."""
        match self.shape:
            case "chain":
                size = "chain"
            case "static":
                size = f"static, {self.nodes} nodes"
            case _:
                size = f"k {self.k}, {self.nodes} nodes"
        sizes = f"{self.levels} levels, {size}"
        return ", ".join(filter(None, (self.text or sizes, self.variant)))

    def as_dict(self) -> dict[str, Any]:
        """As summary.json has it."""
        values = {
            **self.settings,
            "shape": self.shape,
            "levels": self.levels,
            "k": self.k,
            "nodes": self.nodes,
        }
        return values | {
            name: text for name, text in (("text", self.text), ("variant", self.variant)) if text
        }


@dataclass(frozen=True)
class Milliseconds:
    """Wall-clock of one answer; the parts sum to wall."""

    prefill: float
    draft: float
    verify: float
    commit: float
    other: float
    wall: float


@dataclass(frozen=True)
class AskedCell:
    """A row of the suite at one sampling."""

    row: int
    temperature: float
    top_k: int
    top_p: float

    @property
    def sampling(self) -> Sampling:
        return self.temperature, self.top_k, self.top_p


@dataclass(frozen=True)
class Origin(AskedCell):
    """Which row and sampling an answer is of, and which turn of which prompt."""

    method: str
    task: str
    prompt_id: str
    turn: int = 0

    @property
    def prompt(self) -> tuple[str, str]:
        return self.task, self.prompt_id

    @property
    def prompt_key(self) -> PromptKey:
        """What pairs a row's answer with vanilla's."""
        return self.task, self.prompt_id, self.turn

    @property
    def key(self) -> Key:
        return self.row, self.sampling, self.prompt_key


@dataclass(frozen=True, kw_only=True)
class Record(Origin):
    """One answer. `new_tokens` counts the prefill's token; `cycle_tokens` does not."""

    tree: TreeShape | None
    verify: str  # R0 to R3 (decode/verify.py) or none
    head: str | None = None
    head_path: str | None = None
    prompt_tokens: int = 0
    prompt_ids: tuple[int, ...] = ()
    prompt_text: str | None = None
    new_tokens: int = 0
    output_ids: tuple[int, ...] = ()
    text: str = ""
    cycle_texts: tuple[str, ...] = ()  # the prefill's first
    accepted: tuple[int, ...] = ()  # draft tokens kept per cycle, after the cut at an end
    cycle_tokens: tuple[int, ...] = ()  # per cycle, after the same cut
    cycle_ms: tuple[float, ...] = ()
    cycle_nodes: tuple[int, ...] = ()
    target_forwards: int = 0  # the prefill is not counted
    draft_forwards: int = 0
    draft_levels: int = 0
    draft_forwards_wasted: int = 0
    draft_nodes: int = 0
    ms: Milliseconds | None = None
    identical: bool | None = None  # to the vanilla row's tokens; None where sampled
    identical_to_generate: bool | None = None
    margin: float | None = (
        None  # gap of the first difference over what 16-bit rounding makes; at most 1: rounding
    )
    peak_memory_gib: float | None = None
    graph_bytes: int = 0  # of CUDA graphs captured so far for the row
    status: Literal["ok", "error"] = "ok"
    message: str | None = None


@dataclass(frozen=True)
class SummaryRow:
    """A row of summary.json or a point of a sweep; one that failed has a message and no figure."""

    method: str
    head: str | None
    head_path: str | None
    task: str
    temperature: float
    top_k: int
    top_p: float
    prompts: int
    verify: str
    tree: TreeShape | None
    status: Literal["ok", "error"] = "ok"
    message: str | None = None
    new_tokens: int | None = None
    tau: float | None = None  # pooled over the cycles of all prompts
    tau_macro: float | None = None
    accepted_histogram: list[int] | None = None  # entry a: cycles in which a draft tokens were kept
    tokens_per_s: float | None = None
    speedup: float | None = None
    speedup_ci95: list[float] | None = None
    speedup_mean_per_prompt: float | None = None
    speedup_with_prefill: float | None = None
    target_forwards: float | None = None
    draft_forwards: int | None = None
    draft_forwards_wasted: int | None = None
    draft_nodes: float | None = None
    accept_rate: float | None = None
    identical: int | None = None
    mismatch: int | None = None
    peak_memory_gib: float | None = None
    ms: Milliseconds | None = None
    sweep: str | None = None  # None: a row of the bench
    key: str | None = None
    value: Any = None
    span: str | None = None  # cumulative or bucket, of context lengths
    repeated: float | None = None  # share of 4-grams that came before
    NOT_BY_CONTEXT: ClassVar = [
        "tau_macro", "accepted_histogram", "speedup_with_prefill", "draft_forwards", "draft_forwards_wasted",
        "identical", "mismatch", "peak_memory_gib", "ms",
    ]  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """As summary.json has it, without the fields that rows of its sort lack."""
        values = {**asdict(self), "tree": None if self.tree is None else self.tree.as_dict()}
        names = list(values)
        figures = names[names.index("new_tokens") : names.index("sweep")]
        left_out = figures if self.status == "error" else ["message"]
        left_out += ["sweep", "key", "value"] if self.sweep is None else []
        left_out += ["span", "repeated"] if self.span is None else self.NOT_BY_CONTEXT
        return {name: value for name, value in values.items() if name not in left_out}


@dataclass(frozen=True)
class Reference:
    """reference.json: vanilla against transformers' generate and bare forwards."""

    vanilla_ms_per_token: float
    bare_forward_ms_per_token: float
    prompts: int
    identical_to_generate: int
    generate_static_ms_per_token: float | None = None  # with a static cache, not compiled


@dataclass(frozen=True)
class AskedPoint(AskedCell):
    """One value of a sweep, on these prompts alone."""

    sweep: str
    key: str
    value: Any
    prompts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Asked:
    main: tuple[AskedCell, ...]
    points: tuple[AskedPoint, ...] = ()
    by_task: bool = False
    contexts: tuple[int, ...] = ()
    max_context: int | None = None


def line_of(record: Record) -> str:
    return adapter(Record).dump_json(record).decode() + "\n"


def read_records(path: Path) -> list[Record]:
    records = []
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; run aerie bench first") from error
    for number, line in enumerate(lines, start=1):
        try:
            records.append(adapter(Record).validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            problem = ": ".join(map(str, (*first["loc"], first["msg"])))
            raise UserError(
                f"{path}:{number}: {problem}; delete the line to measure it again"
            ) from error
    return records


def graphs_in(bench: Path, method: str | None = None) -> str:
    """For a plan: the most memory that a row's CUDA graphs took in a bench; method None: of any."""
    try:
        records = read_records(bench / RECORDS)
    except UserError:  # none there, or a broken one, which the command that needs it reports
        return ""
    taken = max(
        (record.graph_bytes for record in records if method in (None, record.method)), default=0
    )
    return f"; CUDA graphs of a row took up to {format_bytes(taken)} in {bench}" if taken else ""


def calibrations_of(run: Path) -> list[Path]:
    """The finished calibrations of a run, in RUN/calibration and RUN/*/calibration."""
    return sorted(
        path.parent
        for place in ("", "*/")
        for path in run.glob(f"{place}calibration/{storage.FILE}")
    )


def run_facts(
    run: RunPaths, recipe_words: str, target: TargetConfig | None = None
) -> dict[Path, dict[str, Any]]:
    """`measured_facts` of a run's calibrations, bench and tuning: all of one target (default: the bench's)."""
    here = storage.sound_record(run.bench).get("inputs", {}).get("target")
    if target and Path(target.path).is_dir():
        here = target_inputs(target)
    elif here and Path(here["path"]).is_dir():
        here["files"] = target_inputs(TargetConfig(here["path"]))["files"]
    parts = [
        *calibrations_of(run.root),
        run.bench,
        *([run.tune] if (run.tune / storage.FILE).is_file() else ()),
    ]
    return {path: measured_facts(path, recipe_words, here) for path in parts}


def measured_facts(
    directory: Path, recipe_words: str, target: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The facts that a stage recorded at its end; UserError if its files, heads or target (an input) changed since."""
    made = [
        word
        for word in storage.sound_record(directory).get("argv", ())[1:]
        if word != "--overwrite"
    ]
    again = "run: aerie " + (
        shlex.join(made) or f"{directory.name.replace('calibration', 'calibrate')} {recipe_words}"
    )
    if not (directory / storage.FILE).is_file():
        raise UserError(f"{directory}: no {directory.name}, or one that was stopped; {again}")
    checked = Manifest.check(directory)
    if not isinstance(checked, Whole):
        raise UserError(f"{checked}; {again} --overwrite")
    facts, of_target = checked.manifest.facts, checked.manifest.inputs.get("target", target)
    if target and (changed := differences({"target": of_target}, {"target": target})):
        raise UserError(f"{directory}: measured another target ({changed}); {again} --overwrite")
    for head, files in facts.get("heads", {}).items():
        is_here = Path(head).is_dir() and find_weights(head_directory(head))
        if is_here and digests(head_directory(head)) != files:
            raise UserError(
                f"{directory}: measured {head} before it was trained anew; {again} --overwrite"
            )
    return facts


def read_as(path: Path, schema: type[T]) -> T:
    try:
        return validate(read_json(path), schema, str(path), {})
    except UserError as error:
        command = path.parent.name.replace("calibration", "calibrate")
        raise UserError(f"{error}; delete it and run: aerie {command} --overwrite") from error


def tree_shape(row: MethodConfig) -> TreeShape | None:
    """A row's tree, None for vanilla; its variant names what differs from the method's own."""
    if row.options is not None:
        return TreeShape(
            METHODS[row.method].options or "",
            *row.options.sizes,
            settings=as_dict(row.options),
            text=row.options.text,
        )
    tree = row.tree
    if tree is None:
        return None
    published, stop = published_tree(row.method), as_dict(tree.stop)
    changes: dict[str, Any] = (
        {} if tree.stop.rule == published.stop.rule else {"stop": tree.stop.rule}
    )
    changes |= {
        key: value for key, value in stop.items() if value != as_dict(type(tree.stop)())[key]
    }
    usual = published if tree.shape == published.shape else type(tree)
    for key in ("rank", "rerank", "children", "choices", "calibrated", "stop_read"):
        value = getattr(tree, key, None)
        if value != getattr(usual, key, None):
            changes[key] = digest(value)[:6] if isinstance(value, tuple) else value
    sizes: dict[str, Any] = {key: getattr(tree, key) for key in ("shape", "levels", "k", "nodes")}
    settings = {"children": "best"}
    settings |= {key: value for key, value in as_dict(tree).items() if key not in sizes}
    return TreeShape(**sizes, settings=settings, variant=_words(changes))


def _words(value: Any) -> str:
    """'stop entropy, h 0.5'."""
    match value:
        case dict():
            return ", ".join(
                f"{key.replace('_', ' ')} {_words(item)}" for key, item in value.items()
            )
        case list():
            return "/".join(map(str, value))
        case bool():
            return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
