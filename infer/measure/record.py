"""What a bench leaves behind, as types: an answer, a row of summary.json, the reference times, what was asked.

records.jsonl has one Record a line and only grows: a line that a kill cut short is measured again.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from aerie.configs.errors import UserError
from aerie.configs.read import adapter, as_dict, validate
from aerie.configs.schema.decode import METHODS, MethodConfig, published_tree
from aerie.model.storage import digest, read_json

T = TypeVar("T")
FloatArray = NDArray[np.float64]
Sampling = tuple[float, int, float]  # temperature, top_k, top_p
PromptKey = tuple[str, str, int]  # task, prompt_id, turn
Key = tuple[int, Sampling, PromptKey]  # row of the suite, sampling, prompt and turn: what no two answers share
RECORDS, SUITE, OVERHEAD, REFERENCE = "records.jsonl", "suite.json", "overhead.json", "reference.json"


@dataclass(frozen=True)
class TreeShape:
    """The tree of a row; nodes count the root. `settings` is what else the method was given, published values too."""

    shape: str  # dynamic, chain, static; lookup or lookahead for methods that grow no tree
    levels: int
    k: int
    nodes: int
    settings: dict[str, Any] = field(default_factory=dict)
    text: str | None = None  # shown in place of the sizes, for methods that grow no tree
    variant: str = ""  # in a few words, how the method differs from its published form

    def as_dict(self) -> dict[str, Any]:
        """As summary.json has it: the settings beside the sizes, empty words left out."""
        values = {**self.settings, "shape": self.shape, "levels": self.levels, "k": self.k, "nodes": self.nodes}
        return values | {name: text for name, text in (("text", self.text), ("variant", self.variant)) if text}


@dataclass(frozen=True)
class Milliseconds:
    """Wall-clock of one answer. wall - prefill is what decoding took; the parts sum to wall."""

    prefill: float
    draft: float
    verify: float
    commit: float
    other: float
    wall: float


@dataclass(frozen=True)
class Origin:
    """Whose answer: the row of the recipe, its sampling, and the turn of a prompt."""

    row: int  # position in the recipe's bench.rows, behind them those of its sweeps
    method: str
    temperature: float
    top_k: int
    top_p: float
    task: str
    prompt_id: str
    turn: int = 0  # 0 is a conversation's first; a later one's history holds the vanilla row's answers

    @property
    def sampling(self) -> Sampling:
        return self.temperature, self.top_k, self.top_p

    @property
    def prompt(self) -> tuple[str, str]:
        """(task, prompt_id): the conversation that the answer is a turn of."""
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
    """One answer of one row. `new_tokens` counts the prefill's token too; `cycle_tokens` does not."""

    tree: TreeShape | None  # null: vanilla
    verify: str  # R0 to R4, or that it was not lossless (infer/decode/verify.py)
    head: str | None = None  # the kind of head that drafted
    head_path: str | None = None  # as its row names it; null: the run's own
    prompt_tokens: int = 0
    prompt_ids: tuple[int, ...] = ()
    prompt_text: str | None = None
    new_tokens: int = 0
    output_ids: tuple[int, ...] = ()
    text: str = ""
    cycle_texts: tuple[str, ...] = ()  # the prefill's token first, then each cycle's new text
    accepted: tuple[int, ...] = ()  # draft tokens kept per cycle, after the cut at end-of-text or max_new_tokens
    cycle_tokens: tuple[int, ...] = ()  # new tokens per cycle, after the same cut
    cycle_ms: tuple[float, ...] = ()  # wall time per cycle
    cycle_nodes: tuple[int, ...] = ()  # drafted nodes per cycle
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
            return
        cycles = {len(self.accepted), len(self.cycle_tokens), self.target_forwards}
        if self.ms is None or len(cycles) > 1 or sum(self.cycle_tokens) + 1 != self.new_tokens:
            raise ValueError("an answer needs its ms, one entry per cycle, and new_tokens one more than its cycles'")


@dataclass(frozen=True)
class SummaryRow:
    """A row of summary.json, or a point of its sweeps. A row that failed has a message and no figure."""

    method: str
    head: str | None
    head_path: str | None
    task: str  # "all" where there are several
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
    tau_macro: float | None = None  # mean of the prompts' own
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
    identical: int | None = None  # answers; null where sampled
    mismatch: int | None = None
    peak_memory_gib: float | None = None
    ms: Milliseconds | None = None  # sums over the prompts and their turns
    sweep: str | None = None  # the sweep that the row is a point of; null: a row of the bench
    key: str | None = None  # what varies in it
    value: Any = None
    span: str | None = None  # of the context lengths: cumulative or bucket
    repeated: float | None = None  # of the same: the share of 4-grams that the answer has had before
    NOT_BY_CONTEXT: ClassVar = [  # what is counted of whole answers alone
        "tau_macro", "accepted_histogram", "speedup_with_prefill", "draft_forwards", "draft_forwards_wasted",
        "identical", "mismatch", "peak_memory_gib", "ms",
    ]  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """As summary.json has it, without what a row of its sort has not."""
        values = {**asdict(self), "tree": None if self.tree is None else self.tree.as_dict()}
        names = list(values)
        figures = names[names.index("new_tokens") : names.index("sweep")]
        left_out = figures if self.status == "error" else ["message"]
        left_out += ["sweep", "key", "value"] if self.sweep is None else []
        left_out += ["span", "repeated"] if self.span is None else self.NOT_BY_CONTEXT
        return {name: value for name, value in values.items() if name not in left_out}


@dataclass(frozen=True)
class Reference:
    """What the vanilla row is held against: transformers' generate and the bare forwards replayed (reference.json)."""

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
    same forwards, LM heads included, without laws, trees, masks, choices, cache rows and statistics.
    """

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
class AskedCell:
    """A row at a sampling that stands among the rows of summary.json."""

    row: int
    temperature: float
    top_k: int
    top_p: float

    @property
    def sampling(self) -> Sampling:
        return self.temperature, self.top_k, self.top_p


@dataclass(frozen=True)
class AskedPoint(AskedCell):
    """One value of a sweep, on these prompts alone."""

    sweep: str
    key: str
    value: Any
    prompts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Asked:
    """What a bench asked, for those who read its records (suite.json)."""

    main: tuple[AskedCell, ...]
    points: tuple[AskedPoint, ...] = ()
    by_task: bool = False
    contexts: tuple[int, ...] = ()
    max_context: int | None = None  # what the target was trained for


def line_of(record: Record) -> str:
    """The record as one line of JSON, newline included."""
    return adapter(Record).dump_json(record).decode() + "\n"


def read_records(path: Path) -> list[Record]:
    """Every record of the file; UserError (file:line) for a damaged line or an answer that was measured twice."""
    records: dict[Key, Record] = {}
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # behind the last newline is a write that was cut
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; measure first with: python infer/main.py bench") from error
    for number, line in enumerate(lines, start=1):
        try:
            record: Record = adapter(Record).validate_json(line)
        except ValidationError as error:
            problem = f"{error.errors()[0]['loc']}: {error.errors()[0]['msg']}"
            raise UserError(f"{path}:{number}: {problem}; delete the line to measure it again") from error
        if record.key in records:
            raise UserError(f"{path}:{number}: an answer that was measured already {record.key}; delete the line")
        records[record.key] = record
    return list(records.values())


def read_as(path: Path, schema: type[T]) -> T:
    """reference.json, overhead.json or suite.json as its type; UserError where it holds something else."""
    return validate(read_json(path), schema, str(path), {})


def tree_shape(row: MethodConfig) -> TreeShape | None:
    """What a record says of a row's tree; null for vanilla. Its variant names what is not the method's own."""
    typical = {} if row.typical is None else {"typical": as_dict(row.typical)}
    if row.options is not None:
        given = {**as_dict(row.options), **typical}
        section = METHODS[row.method].options or ""
        return TreeShape(section, *row.options.sizes, settings=given, text=row.options.text, variant=_words(typical))
    tree = row.tree
    if tree is None:
        return None
    published, stop = published_tree(row.method), as_dict(tree.stop)
    changes: dict[str, Any] = {} if tree.stop.rule == published.stop.rule else {"stop": tree.stop.rule}
    changes |= {key: value for key, value in stop.items() if value != as_dict(type(tree.stop)())[key]}
    usual = published if tree.shape == published.shape else type(tree)  # of another shape: its defaults
    for key in ("rank", "rerank", "children", "choices", "calibrated"):
        value = getattr(tree, key, None)
        if value != getattr(usual, key, None):
            changes[key] = digest(value)[:6] if isinstance(value, tuple) else value
    sizes: dict[str, Any] = {"shape": tree.shape, "levels": tree.levels, "k": tree.k, "nodes": tree.nodes}
    # a dynamic tree has no other children
    settings = {"children": "best"} | {key: value for key, value in as_dict(tree).items() if key not in sizes} | typical
    return TreeShape(**sizes, settings=settings, variant=_words(changes | typical))


def _words(value: Any) -> str:
    """A value of a recipe in words: 'stop entropy, h 0.5'."""
    match value:
        case dict():
            return ", ".join(f"{key.replace('_', ' ')} {_words(item)}" for key, item in value.items())
        case list():
            return "/".join(map(str, value))
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
    return str(value)
