"""Interviews, journals, gate and command: every row ends once, whatever stops the job.

Input rows: each is asked or skipped with a reason; none is close to an evaluation question.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DistillConfig, GateConfig, ServerConfig, SourceConfig
from aerie.data.distill.answer import Answer, Ask, Outcome, Unanswered
from aerie.data.distill.distillation import Distillation, flaws
from aerie.data.distill.prompts import InputRow, make_prompts, plan_line
from aerie.data.progress import JobShare
from aerie.data.shapes import Message
from aerie.model.target import Target
from tests import tiny
from tests.data.chat_targets import NO_SYSTEM
from tests.data.distill import answering
from tests.data.distill.answering import KEEP, distill, echo, outcomes, thinking
from tests.tiny import read_rows, refused, write_rows

ROWS = [
    InputRow(f"0:{n}", f"rows: row {n}", tuple(f"Question {n}, {t}?" for t in range(2)))
    for n in range(12)
]
JOURNAL = "journal/shard-00001-of-00001.jsonl"


def job(directory: Path, *questions: str, **keys: Any) -> Distillation:
    server, sources = (
        ServerConfig(("http://unused/v1",), concurrency=4),
        (SourceConfig("unused.jsonl"),),
    )
    config = DistillConfig(sources=sources, server=server, ngram=8, **keys)
    return Distillation(directory, config, {"target": {"path": "a <target>"}}, questions)


def sit(directory: Path, ask: Ask, share: JobShare = JobShare(), retry: bool = False) -> None:  # noqa: B008
    """One sitting: asks all rows that no journal has ended yet."""
    job(directory).ask(ROWS, share, retry, nullcontext(ask), thinking())


def merged(directory: Path) -> bytes:
    """The bytes of the result."""
    job(directory).merge(ROWS, thinking())
    names = ("outcomes.jsonl", "conversations.jsonl", "summary.json")
    return b"".join((directory / name).read_bytes() for name in names)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("whole")
    sit(directory, echo)
    return merged(directory)


def test_killed_run(tmp_path: Path, whole: bytes) -> None:
    """A run killed at random moments, in any shares, ends as an undisturbed one."""

    class Killed(BaseException):
        pass

    chance, alive = random.Random(7), [0]

    async def dying(messages: Sequence[Message], seed: int) -> Answer:
        alive[0] -= 1
        if alive[0] < 0:
            raise Killed
        for _ in range(chance.randint(0, 5)):
            await asyncio.sleep(0)
        return await echo(messages, seed)

    path = tmp_path / JOURNAL
    for share in (JobShare(), JobShare(2, 3), JobShare(), JobShare(1, 2)):
        alive[0] = chance.randint(2, 5)
        with pytest.raises(Killed):
            sit(tmp_path, dying, share)
        refused(r"of 12 rows have not ended \(first: 0:", merged, tmp_path)
        torn = b'{"id": "0:11", "status": "done", "place": "rows: row 11", "tu'[
            : chance.randint(0, 60)
        ]
        path.write_bytes(path.read_bytes() + torn)
    sit(tmp_path, echo, JobShare(3, 3))
    path.write_text("{damaged}\n" + path.read_text()[40:])
    sit(tmp_path, echo)
    assert merged(tmp_path) == whole


def test_retry(tmp_path: Path, whole: bytes) -> None:
    """Failed and skipped rows are asked again if that is wished, by one writer at a time."""

    async def failing(messages: Sequence[Message], seed: int) -> Answer:
        with pytest.raises(UserError, match="another process is writing it"):
            await asyncio.to_thread(sit, tmp_path, echo)
        if (number := str(messages[0]["content"])[9]) in "2456":
            raise Unanswered("failed" if number in "24" else "skipped", "why")
        return await echo(messages, seed)

    sit(tmp_path, failing)
    sit(tmp_path, echo)
    assert [
        merged(tmp_path).count(b'"status": "%s"' % status) for status in (b"failed", b"skipped")
    ] == [2, 2]
    for share in (JobShare(1, 2), JobShare(2, 2)):  # each asks the rows of its share
        sit(tmp_path, echo, share, retry=True)
    assert merged(tmp_path) == whole


def end_of(
    prompt: InputRow,
    answer: Callable[[list[str]], Answer],
    *questions: str,
    template: str = tiny.TEMPLATE,
) -> Outcome:
    """How a row ends; `answer` gets the contents of the request's messages."""

    async def ask(messages: Sequence[Message], seed: int) -> Answer:
        return answer([message["content"] for message in messages])

    return asyncio.run(job(Path(), *questions).interview(prompt, ask, thinking(template)))


def test_later_questions() -> None:
    """Later questions follow the new answers, until one is cut or the context is full."""
    two = InputRow("0:1", "x", ("a", "b"), system="s")

    def full(texts: list[str]) -> Answer:
        if len(texts) > 2:
            raise Unanswered("skipped", "why")
        return Answer("c", "stop")

    ended = end_of(two, lambda texts: Answer(" ".join(texts), "stop"))
    assert [answer.content for answer in ended.answers] == ["s a", "s a s a b"]
    assert end_of(two, lambda _: Answer("half", "length")).turns == ("a",)
    short = end_of(two, full)
    assert (short.turns, short.status) == (("a",), "done")
    refused = end_of(two, lambda _: Answer("c", "stop"), template=NO_SYSTEM)
    assert (refused.status, refused.why) == (
        "skipped",
        "the chat template refuses the messages: No system role",
    )


def test_tools_are_asked_with() -> None:
    """Tools reach the server and the rows, and a call ends its conversation."""
    call = {"type": "function", "function": {"name": "weather", "arguments": {"in": "Paris"}}}
    template = "{{ tools | tojson if tools }}{% for m in messages %}{{ m['content'] }}"
    template += "{{ m['tool_calls'] | tojson if m['tool_calls'] }}"
    template += "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    asked = list[Any]()

    async def ask(messages: Sequence[Message], seed: int, tools: list[Any]) -> Answer:
        asked.append((tools, messages[0]))
        return Answer("", "stop", tool_calls=(call,))

    tools = [{"type": "function", "function": {"name": "weather"}}]
    prompt = InputRow("0:1", "x", ("a", "b"), system="", tools=tools)
    ended = asyncio.run(job(Path()).interview(prompt, ask, thinking(template)))
    silent = {"role": "system", "content": ""}  # it switches off a template's own
    assert asked == [(tools, silent)] and ended.turns == ("a",) and flaws(ended) == []
    [row] = thinking(template).learnt(ended).rows
    assert row["tools"] == tools and row["messages"][-1]["tool_calls"] == [call]


def test_invented_problem() -> None:
    """An invented problem is solved in a conversation of its own."""
    prompt = InputRow("0:1", "x", invent="Invent.")

    def answer(texts: list[str]) -> Answer:
        return Answer("Problem: 2 + 2?" if texts == ["Invent."] else f"4 {len(texts)}", "stop")

    ended = end_of(prompt, answer)
    assert (
        ended.turns[0].startswith("2 + 2?\n\n")
        and ended.answers[0].content == "4 1"
        and ended.invented
    )
    assert (
        end_of(prompt, answer, "2 2").why == "the invented problem overlaps an evaluation question"
    )
    assert (
        end_of(prompt, lambda _: Answer("Problem: 2 +", "length")).why
        == "the invented problem is cut or empty"
    )


PROSE = (
    "A lighthouse keeper counts the ships that pass each night and writes their number into a "
    "book. He adds the columns in the morning, checks them twice, and sends a copy to the harbour "
    "by the mail boat."
)
CHINESE = "灯塔看守人每晚数经过的船只并把数字写进一本书里，冬天很少，春天很多。"
SOUND = Answer(PROSE, "stop")
FLAWS: dict[str, list[str]] = {
    "": [
        *(
            "Four.",
            PROSE + " ha" * 4,
            PROSE + " again" * 39,
            f"{PROSE} {'!' * 20}",
        ),  # repeating forty words is a loop
        *(f"{PROSE} In Chinese: 灯塔。", "Ω and Σ are Greek letters, like α and β."),
        *("I can help with that.", PROSE + " I cannot help with that."),
    ],
    "empty": [" \n"],
    "loop": [PROSE + " again" * 40, (PROSE + " ") * 5, f"{PROSE} {'?!' * 500}"],
    "language": [
        CHINESE,
        "Смотритель маяка каждую ночь считает корабли и записывает их число в книгу.",
    ],
    "refusal": ["I am sorry, I cannot share this.", "As an AI language model, I wait."],
}


def row(*answers: Answer, question: str = "What does he count?") -> Outcome:
    return Outcome("0:1", "done", "x", None, None, (question,) * len(answers), answers)


def test_flaws() -> None:
    """Flaws are found in thinking and in every turn, and only where they are."""
    for name, texts in FLAWS.items():
        for text in texts:
            assert flaws(row(Answer(text, "stop"))) == ([name] if name else []), text
    assert flaws(row(SOUND, Answer("Th", "length"))) == ["cut"]
    assert flaws(row(Answer("", "stop", reasoning=PROSE))) == ["empty"]
    assert flaws(row(replace(SOUND, reasoning="wait " * 60))) == ["loop"]
    assert flaws(row(Answer(CHINESE, "stop"), question="他数什么？")) == []


def test_gate(
    tmp_path: Path,
) -> None:
    """Flaws are counted, the recipe says which are dropped, and the page says it all."""
    good, problem = row(SOUND), Answer("Problem: 2 + 2?", "stop")
    cut = Answer("", "length", None, (9,), (8,))
    made = [
        *(good, row(cut), row(Answer("I cannot help with that.", "stop"))),
        *(
            replace(good, invented=problem, turns=(turn,))
            for turn in ("2 + 2?", "2  + 2?", "2 - 2?")
        ),
        *(Outcome("", "skipped", "x", "an empty question"), Outcome("", "failed", "x", "HTTP 500")),
    ]
    rows = [replace(outcome, id=f"0:{place}") for place, outcome in enumerate(made)]
    write_rows(
        tmp_path / JOURNAL,
        [answering.OUTCOME.dump_python(end, exclude_defaults=True) for end in rows],
    )

    def kept(**gate: Any) -> tuple[dict[str, Any], str]:
        asked = [InputRow(end.id, end.place) for end in rows]
        return job(tmp_path, gate=GateConfig(**gate)).merge(asked, thinking()), "".join(
            row["id"][-1] for row in read_rows(tmp_path / "conversations.jsonl")
        )

    assert kept(cut="keep", empty="keep", refusal="drop", repeated="keep")[1] == "01345"
    summary, ids = kept()
    assert ids == "0235" and len(read_rows(tmp_path / "outcomes.jsonl")) == 8
    assert summary["flaws"] == {"cut": 1, "empty": 1, "refusal": 1, "repeated": 1}
    assert [summary[name] for name in ("rows", "kept", "dropped", "training_rows", "answers")] == [
        8,
        4,
        2,
        4,
        4,
    ]
    assert summary["why"] == {"skipped: an empty question": 1, "failed: HTTP 500": 1}
    page = (tmp_path / "summary.html").read_text()
    assert all(
        text in page
        for text in ("4 of 8 input rows are kept.", "failed: HTTP 500", "a &lt;target&gt;")
    )


@pytest.fixture
def recipe(tmp_path: Path, target: Target) -> Path:
    """A recipe whose target answers six questions in process."""
    rows = write_rows(
        tmp_path / "questions.jsonl", [{"prompt": f"Please count {n} boats."} for n in range(6)]
    )
    section = {
        "sources": [{"path": str(rows), "kind": "prompts"}],
        "sampling": {"temperature": 0.0, "max_tokens": 12},
        "gate": KEEP,
    }
    return answering.local_recipe(tmp_path, Path(target.recipe.path), section)


def test_reuse(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A distillation is made once, reused, judged anew, and replaced if that is asked."""
    run = tmp_path / "run/distilled"
    assert (
        distill(recipe, "--is-whole") == 1
        and distill(recipe) == 0
        and distill(recipe, "--is-whole") == 0
    )
    assert "6 of 6 rows kept" in capsys.readouterr().out
    answers = (run / JOURNAL).read_bytes()
    assert distill(recipe) == 0 and capsys.readouterr().out == f"distill: whole, reused ({run})\n"
    dropping = ("--distill.gate.cut", "drop")
    assert distill(recipe, *dropping) == 2 and distill(recipe, *dropping, "--overwrite") == 2
    assert "no row is left to train on: 6 cut" in capsys.readouterr().err
    assert (run / JOURNAL).read_bytes() == answers  # nothing was asked again
    shorter = ("--distill.sampling.max_tokens", "5")
    assert (
        distill(recipe, *shorter) == 2 and "max_tokens: 12 before, 5 now" in capsys.readouterr().err
    )
    assert distill(recipe, *shorter, "--overwrite") == 0
    assert max(len(row.answers[0].token_ids or ()) for row in outcomes(tmp_path / "run")) == 5


def test_measuring_prompts_are_excluded(recipe: Path, tmp_path: Path) -> None:
    """The recipes own measuring prompts and those to exclude are never asked."""

    def measured(number: int) -> dict[str, Any]:
        rows = [
            {"question_id": number, "category": "a", "turns": [f"Please count {number} boats."]}
        ]
        return {"path": str(write_rows(tmp_path / f"{number}.jsonl", rows)), "num_prompts": 1}

    values = yaml.safe_load(recipe.read_text())
    exclude = [{"name": "ours", "path": measured(4)["path"]}]
    measuring = {
        "bench": {"prompts": measured(1), "rows": [{"method": "vanilla"}]},
        "tune": {"prompts": measured(2), "measure": measured(3)},
        "distill": {**values["distill"], "exclude": exclude},
    }
    path = tiny.recipe(tmp_path / "measured.yaml", {**values, **measuring})
    assert distill(path, "--plan") == 0 and not (tmp_path / "run").exists()
    assert distill(path) == 0
    assert [row.status for row in outcomes(tmp_path / "run")] == ["done", *["skipped"] * 4, "done"]


LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
SHARED = tuple(f"{LONG} question {n} about {n * n}" for n in range(20))
NEAR = "overlaps an evaluation question"


def made(
    path: Path, rows: list[Any], questions: tuple[str, ...] = (), seed: int = 0, **keys: Any
) -> list[InputRow]:
    source = SourceConfig(str(write_rows(path / "rows.jsonl", rows)), **keys)
    return make_prompts(DistillConfig(sources=(source,), ngram=8, seed=seed), questions)


def skips(path: Path, texts: list[Any], questions: tuple[str, ...] = ()) -> list[str | None]:
    rows = [{"prompt": text} if isinstance(text, str) else text for text in texts]
    return [prompt.skip for prompt in made(path, rows, questions, kind="prompts")]


def said(*turns: tuple[str, str | None]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_human_turns_are_asked(
    tmp_path: Path,
) -> None:
    """Human turns are asked; rows that cannot be are skipped with their reason."""
    row = said(
        ("system", "Be brief."),
        ("human", "First?"),
        ("gpt", "An old answer."),
        ("human", "Second?"),
    )
    joined, place = said(("user", "a"), ("user", "b")), f"{tmp_path}/rows.jsonl: row"
    assert made(tmp_path, [row, joined]) == [
        InputRow("0:1", f"{place} 1", ("First?", "Second?"), system="Be brief."),
        InputRow("0:2", f"{place} 2", ("a\n\nb",)),
    ]
    rows = {
        None: said(("user", "Why?")),
        "no user turn": said(("assistant", "Because.")),
        "the same prompt as an earlier row": said(("user", " WHY? ")),
        "the conversation calls tools": said(("user", "x"), ("tool", None)),
        "the row is not an object": "text",
    }
    prompts = made(tmp_path, list(rows.values()))
    assert [prompt.skip for prompt in prompts] == list(rows)
    assert plan_line(prompts).startswith("5 rows, 1 to ask; 1 skipped: ")
    empty = [
        {"prompt": None},
        {"turns": []},
        {"prompt": 5},
        {"turns": ["a", None]},
        {"prompt": "Why?", "system": 5},
    ]
    usable = ["Why?", {"turns": None, "question": "a?"}]
    reasons = ["the question is empty or is not text"] * 4 + ["a system column is not text"]
    assert skips(tmp_path, usable + empty) == [None] * 2 + reasons


@pytest.mark.parametrize(
    ("questions", "texts", "expected"),
    [
        (
            (f"Say: {LONG}", "why so"),
            [f"Well, {LONG.upper()}!", LONG[:30], "Why so?"],
            [NEAR, None, NEAR],
        ),
        ((LONG,), [{"prompt": "a", "system": LONG}, "b"], [NEAR, None]),
        # instructions that many questions share do not count
        (SHARED, [f"Prove it. {LONG}"], [None]),
        # a short question must match whole
        ((*SHARED, LONG), [f"Prove it. {LONG}!", LONG[4:]], [NEAR, None]),
        (
            # each character is a word
            ("一列火车以每小时六十公里的速度行驶，多久到达？", "为什么？"),
            ["请回答：一列火车以每小时六十公里的速度行驶，", "一列火车每天行驶", "为什么"],
            [NEAR, None, NEAR],
        ),
    ],
)  # fmt: skip
def test_overlap(
    tmp_path: Path, questions: tuple[str, ...], texts: list[Any], expected: list[str | None]
) -> None:
    """No prompt shares a run of words with an evaluation question."""
    assert skips(tmp_path, texts, questions) == expected
    refused("no row can be asked", skips, tmp_path, [questions[-1]], (questions[-1],))


def test_seed_draws_rows(tmp_path: Path) -> None:
    """The seed draws the rows and samples have ids of their own."""
    rows = [{"prompt": f"Question {n}?"} for n in range(50)]
    keys: dict[str, Any] = {"kind": "prompts", "num_rows": 10, "samples": 2}
    first, again, other = (made(tmp_path, rows, seed=seed, **keys) for seed in (0, 0, 1))
    questions = {prompt.turns for prompt in first}
    assert first == again and questions != {prompt.turns for prompt in other}
    assert len(first) == len({prompt.id for prompt in first}) == 20 == 2 * len(questions)


def test_personas(tmp_path: Path) -> None:
    """Personas are asked for a problem or for the solution of theirs."""
    row = {
        "input persona": f"One who says {LONG}",
        "synthesized text": "**Math problem:** 3 hives hold 9 frames each.",
    }
    solved, unsolved = made(tmp_path, [row, {"input persona": "A baker"}], kind="personas")
    assert (
        solved.turns[0].startswith("3 hives hold 9 frames each.\n\n")
        and unsolved.skip == "the row has no problem"
    )
    near, invented = made(
        tmp_path, [row, {"persona": "A baker"}], (LONG,), kind="personas", ask="problem"
    )
    assert "A baker" in (invented.invent or "") and invented.turns == () and near.skip == NEAR
