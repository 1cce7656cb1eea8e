"""The files of a bench as types. records.jsonl has a Record a line and only grows."""

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
    """Wall-clock of one answer; the parts sum to wall."""

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
    verify: str  # R0 to R3 (decode/verify.py), server or none
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
    # Gap of the first difference over what 16-bit rounding makes; at most 1: rounding explains it.
    margin: float | None = None
    peak_memory_gib: float | None = None
    graph_bytes: int = 0  # of CUDA graphs captured so far for the row
    processes: int = 1  # that shared out the prompts
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
    served: dict[str, Any] | None = None  # what is known of a server's row alone
    trained_length: int | None = None  # tokens of the longest text of the head's training
    beyond_trained: float | None = None  # share of texts that are longer
    sweep: str | None = None  # None: a row of the bench
    key: str | None = None
    value: Any = None
    span: str | None = None  # cumulative or bucket, of context lengths
    repeated: float | None = None  # share of 4-grams that came before
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
        """The row as summary.json has it, without the fields that rows of its sort lack."""
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
    """reference.json: vanilla against transformers' generate; medians over prompts."""

    vanilla_ms_per_token: float
    prompts: int
    identical_to_generate: int
    generate_static_ms_per_token: float  # with a static cache, not compiled


@dataclass(frozen=True)
class SweepPoint(Cell):
    """One value of a sweep, on these prompts alone."""

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
    """What a served row is asked of."""

    name: str  # of the row
    url: str
    model: str
    root: str | None  # the model's directory or Hub id, as the server was given it
    server: str  # such as 'vllm 0.32.0'
    draft_tokens: int  # of a cycle; 0: none, or unknown
    max_positions: int | None  # of prompt and answer


@dataclass(frozen=True)
class ServedLoad(Cell):
    """The answers of a served row, asked so many at once."""

    at_once: int
    answers: int
    failed: int
    new_tokens: int
    seconds: float
    compared: int  # greedy answers with token ids
    identical: int  # of them, to vanilla's

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
    try:
        return validate(read_json(path), schema, str(path), {})
    except UserError as error:
        command = path.parent.name.replace("calibration", "calibrate")
        raise UserError(f"{error}; delete it and run: aerie {command} --overwrite") from error
