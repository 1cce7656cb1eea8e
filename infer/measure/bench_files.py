"""The files of a bench as types. records.jsonl only grows, and has one Record a line."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import ValidationError

from aerie.configs.errors import UserError
from aerie.configs.read import adapter, validate
from aerie.infer.measure.tree_shape import TreeShape
from aerie.model.storage import read_json

Schema = TypeVar("Schema")
Sampling = tuple[float, int, float]  # temperature, top_k, top_p
PromptKey = tuple[str, str, int]  # task, prompt_id, turn
Key = tuple[int, Sampling, PromptKey]
RECORDS = "records.jsonl"
SUITE = "suite.json"
REFERENCE = "reference.json"
SERVED_FILE = "served.json"


@dataclass(frozen=True)
class Milliseconds:
    """The wall-clock times of an answer; all others sum to `wall`."""

    prefill: float
    draft: float
    verify: float
    commit: float
    other: float
    wall: float


@dataclass(frozen=True)
class Cell:
    """A row of the suite at one sampling."""

    row: int
    temperature: float
    top_k: int
    top_p: float

    @property
    def sampling(self) -> Sampling:
        return self.temperature, self.top_k, self.top_p


@dataclass(frozen=True)
class Origin(Cell):
    """The row, the sampling, and the turn of a prompt that an answer belongs to."""

    method: str
    task: str
    prompt_id: str
    turn: int = 0

    @property
    def prompt(self) -> tuple[str, str]:
        return self.task, self.prompt_id

    @property
    def prompt_key(self) -> PromptKey:
        """The key that pairs a row's answer with vanilla's."""
        return self.task, self.prompt_id, self.turn

    @property
    def key(self) -> Key:
        return self.row, self.sampling, self.prompt_key


@dataclass(frozen=True, kw_only=True)
class Record(Origin):
    """An answer. `new_tokens` counts the prefill's token; `cycle_tokens` does not."""

    tree: TreeShape | None
    verify: str  # R0 to R3 (decode/verify.py), server or none
    head: str | None = None
    head_path: str | None = None
    prompt_tokens: int = 0
    prompt_ids: tuple[int, ...] = ()
    prompt_text: str | None = None
    new_tokens: int = 0
    output_ids: tuple[int, ...] = ()
    text: str = ""
    cycle_texts: tuple[str, ...] = ()  # the prefill's text, then each cycle's
    accepted: tuple[int, ...] = ()  # accepted draft tokens per cycle, cut at the answer's end
    cycle_tokens: tuple[int, ...] = ()  # new tokens per cycle, cut at the answer's end
    cycle_ms: tuple[float, ...] = ()
    cycle_nodes: tuple[int, ...] = ()
    target_forwards: int = 0  # without the prefill
    draft_forwards: int = 0
    draft_levels: int = 0
    draft_forwards_wasted: int = 0
    draft_nodes: int = 0
    ms: Milliseconds | None = None
    identical: bool | None = None  # to vanilla's tokens; None if tokens are sampled
    identical_to_generate: bool | None = None
    margin: float | None = None  # as in agreement.Difference; None: none was measured
    peak_memory_gib: float | None = None
    graph_bytes: int = 0  # of the CUDA graphs that the row has captured so far
    processes: int = 1  # how many shared the prompts
    status: Literal["ok", "error"] = "ok"
    message: str | None = None


@dataclass(frozen=True)
class SummaryRow:
    """A row of summary.json, or a point of a sweep. A failed row has a message and no figures."""

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
    accepted_histogram: list[int] | None = None  # entry a: cycles that accepted a draft tokens
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
    served: dict[str, Any] | None = None  # served_figures; None: no server answered this row
    trained_length: int | None = None  # tokens of the longest text in the head's training
    beyond_trained: float | None = None  # the share of texts that are longer
    sweep: str | None = None  # the sweep's name; None: a row of the bench
    key: str | None = None
    value: Any = None
    span: str | None = None  # cumulative or bucket, for a point by context length
    repeated: float | None = None  # the share of 4-grams that came before
    NOT_BY_CONTEXT: ClassVar = [
        "tau_macro",
        "accepted_histogram",
        "speedup_with_prefill",
        "draft_forwards",
        "draft_forwards_wasted",
        "identical",
        "mismatch",
        "peak_memory_gib",
        "ms",
    ]

    def as_dict(self) -> dict[str, Any]:
        """The row for summary.json, without the fields that do not apply to it."""
        values = asdict(self)
        if self.tree is not None:
            values["tree"] = self.tree.as_dict()
        names = list(values)
        figures = names[names.index("new_tokens") : names.index("sweep")]
        left_out = figures if self.status == "error" else ["message"]
        if self.sweep is None:
            left_out += ["sweep", "key", "value"]
        if self.served is None:
            left_out.append("served")
        if not self.beyond_trained:
            left_out += ["trained_length", "beyond_trained"]
        left_out += ["span", "repeated"] if self.span is None else self.NOT_BY_CONTEXT
        return {name: value for name, value in values.items() if name not in left_out}


@dataclass(frozen=True)
class Reference:
    """reference.json compares vanilla with transformers' generate; times are medians of prompts."""

    vanilla_ms_per_token: float
    prompts: int
    identical_to_generate: int
    generate_static_ms_per_token: float  # with a static cache, not compiled


@dataclass(frozen=True)
class SweepPoint(Cell):
    """One value of a sweep, with the prompts that the sweep uses."""

    sweep: str
    key: str
    value: Any
    prompts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class SuiteFile:
    main: tuple[Cell, ...]
    points: tuple[SweepPoint, ...] = ()
    by_task: bool = False
    contexts: tuple[int, ...] = ()
    max_context: int | None = None


@dataclass(frozen=True)
class ServerFacts:
    """The server of a served row."""

    name: str  # the row's
    url: str
    model: str
    root: str | None  # the model's directory or Hub id, says the server
    server: str  # such as 'vllm 0.32.0'
    draft_tokens: int  # per cycle; 0: none, or unknown
    max_positions: int | None  # for prompt and answer together


@dataclass(frozen=True)
class ServedLoad(Cell):
    """A served row's answers to `at_once` requests at the same time."""

    at_once: int
    answers: int
    failed: int
    new_tokens: int
    seconds: float
    compared: int  # greedy answers with token ids
    identical: int  # those that equal vanilla's

    @property
    def tokens_per_s(self) -> float:
        return self.new_tokens / self.seconds


@dataclass(frozen=True)
class ServedFile:
    servers: dict[int, ServerFacts]  # by row
    loads: tuple[ServedLoad, ...] = ()


def line_of(record: Record) -> str:
    return adapter(Record).dump_json(record).decode() + "\n"


def read_records(path: Path) -> list[Record]:
    """The records, without a cut last line; UserError for a bad line."""
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


def read_as(path: Path, schema: type[Schema]) -> Schema:
    """A stage's JSON file; UserError if it is damaged."""
    try:
        return validate(read_json(path), schema, str(path), {})
    except UserError as error:
        command = path.parent.name.replace("calibration", "calibrate")
        raise UserError(f"{error}; delete it and run: aerie {command} --overwrite") from error
