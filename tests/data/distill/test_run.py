"""Interviews, journals and the command: every row ends once, whatever stops the job, and is what the target says."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from aerie.configs.errors import UserError
from aerie.configs.schema.data import ServerConfig
from aerie.data.conversations import Message
from aerie.data.distill.answer import Answer, Ask, Outcome, Unanswered
from aerie.data.distill.prompts import Overlap, Prompt
from aerie.data.distill.run import Job
from aerie.data.stage import Share
from tests import tiny
from tests.data.chat_targets import NO_SYSTEM
from tests.data.distill.answering import KEEP, config, distill, echo, outcomes, read_rows, thinking, write_rows

ROWS = [Prompt(f"0:{n}", f"rows: row {n}", tuple(f"Question {n}, {t}?" for t in range(2))) for n in range(12)]


def sit(directory: Path, ask: Ask, share: Share = Share(), retry: bool = False) -> None:  # noqa: B008
    """One sitting: what no journal has ended yet is asked."""
    server = ServerConfig(("http://unused/v1",), concurrency=4)
    job = Job(directory, config(server=server), {})
    job.ask(ROWS, share, retry, nullcontext(ask), thinking(), Overlap((), 8))


def merged(directory: Path) -> tuple[bytes, Counter[str]]:
    """The bytes of the result and how many rows ended as what."""
    summary = Job(directory, config(), {}).merge(ROWS, thinking(), "target")
    names = ("outcomes.jsonl", "conversations.jsonl", "summary.json")
    return b"".join((directory / name).read_bytes() for name in names), summary.status


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("whole")
    sit(directory, echo)
    return merged(directory)[0]


def failing(*numbers: int) -> Ask:
    async def ask(messages: Sequence[Message], seed: int) -> Answer:
        if any(str(messages[0]["content"]).startswith(f"Question {n},") for n in numbers):
            raise Unanswered("failed" if len(messages) > 1 else "skipped", "why")
        return await echo(messages, seed)

    return ask


def test_a_run_killed_at_random_moments_ends_as_an_undisturbed_one(tmp_path: Path, whole: bytes) -> None:
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

    path = tmp_path / "journal/shard-00001-of-00001.jsonl"
    for _ in range(4):
        alive[0] = chance.randint(2, 9)
        with pytest.raises(Killed):
            sit(tmp_path, dying)
        with pytest.raises(UserError, match="of 12 rows have not ended"):
            merged(tmp_path)
        torn = b'{"id": "0:11", "status": "done", "place": "rows: row 11", "tu'[: chance.randint(0, 60)]
        path.write_bytes(path.read_bytes() + torn)
    sit(tmp_path, echo)
    assert sorted(row["id"] for row in read_rows(path)) == sorted(prompt.id for prompt in ROWS)
    assert merged(tmp_path)[0] == whole


def test_shards_in_any_number_are_merged_to_what_one_job_writes(tmp_path: Path, whole: bytes) -> None:
    for index in (1, 3):
        sit(tmp_path, echo, share=Share(index, 3))
    with pytest.raises(UserError, match=r"4 of 12 rows have not ended \(first: 0:1\)"):
        merged(tmp_path)
    sit(tmp_path, echo, share=Share(2, 2))
    sit(tmp_path, echo)
    assert merged(tmp_path)[0] == whole


def test_rows_that_failed_or_that_a_server_skipped_are_asked_again_when_that_is_wished(
    tmp_path: Path, whole: bytes
) -> None:
    sit(tmp_path, failing(1, 2, 4, 5))
    assert merged(tmp_path)[1] == {"done": 8, "skipped": 4}
    sit(tmp_path, echo)
    for share in (Share(1, 2), Share(2, 2)):  # each asks those of its share
        sit(tmp_path, echo, share=share, retry=True)
    lines = [line for path in (tmp_path / "journal").iterdir() for line in read_rows(path)]
    assert len(lines) == 16 and merged(tmp_path)[0] == whole


def test_a_journal_has_one_writer_and_damaged_lines_in_it_are_asked_again(tmp_path: Path, whole: bytes) -> None:
    async def nested(messages: Sequence[Message], seed: int) -> Answer:
        with pytest.raises(UserError, match="another process writes it"):
            await asyncio.to_thread(sit, tmp_path, echo)
        return await echo(messages, seed)

    sit(tmp_path, nested)
    path = tmp_path / "journal/shard-00001-of-00001.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(["{damaged}\n", lines[0][:40] + "\n", *lines[1:]]))
    sit(tmp_path, echo)
    assert len(path.read_text().splitlines()) == 14 and merged(tmp_path)[0] == whole


def end_of(
    prompt: Prompt, answer: Callable[[list[str]], Answer], *questions: str, template: str = tiny.TEMPLATE
) -> Outcome:
    """How a row ends; answer is given the contents of the request's messages."""

    async def ask(messages: Sequence[Message], seed: int) -> Answer:
        return answer([message["content"] for message in messages])

    job = Job(Path(), config(), {})
    return asyncio.run(job.interview(prompt, ask, thinking(template), Overlap(questions, 8)))


def test_later_questions_follow_the_new_answers_until_one_is_cut_or_the_context_is_full() -> None:
    two = Prompt("0:1", "x", ("a", "b"), system="s")
    ended = end_of(two, lambda texts: Answer(" ".join(texts), "stop", 2))
    assert [answer.content for answer in ended.answers] == ["s a", "s a s a b"]
    assert end_of(two, lambda _: Answer("half", "length", 2)).turns == ("a",)
    for status, end in (("skipped", ("done", ("a",), None)), ("failed", ("failed", (), "why"))):

        def answer(texts: list[str], status: Any = status) -> Answer:
            if len(texts) > 2:
                raise Unanswered(status, "why")
            return Answer("c", "stop", 1)

        ended = end_of(two, answer)
        assert (ended.status, ended.turns, ended.why) == end
    refused = end_of(two, lambda _: Answer("c", "stop", 1), template=NO_SYSTEM)
    assert (refused.status, refused.why) == ("skipped", "the chat template refuses it: System role not supported")


def test_an_invented_problem_is_solved_in_a_conversation_of_its_own() -> None:
    prompt = Prompt("0:1", "x", invent="Invent.")

    def answer(texts: list[str]) -> Answer:
        return Answer("Problem: 2 + 2?" if texts == ["Invent."] else f"4 {len(texts)}", "stop", 3)

    ended = end_of(prompt, answer)
    assert ended.turns[0].startswith("2 + 2?\n\n") and ended.answers[0].content == "4 1" and ended.invented
    assert end_of(prompt, answer, "2 2").why == "the invented problem overlaps an evaluation question"
    assert end_of(prompt, lambda _: Answer("Problem: 2 +", "length", 3)).why == "the invented problem is cut or empty"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def recipe(tmp_path: Path, target: Path) -> Path:
    """A recipe whose target answers six questions in process."""
    rows = write_rows(tmp_path / "questions.jsonl", [{"prompt": f"Please count {n} boats."} for n in range(6)])
    section = {
        "sources": [{"path": str(rows), "kind": "prompts"}],
        "sampling": {"temperature": 0.0, "max_tokens": 12},
        "gate": KEEP,
    }
    data = {"conversations": [str(tmp_path / "run/distilled/conversations.jsonl")], "held_out": 0.0}
    values = {"run": str(tmp_path / "run"), "threads": 1, "target": {"path": str(target)}, "data": data}
    return tiny.recipe(tmp_path / "recipe.yaml", {**values, "distill": section})


def test_a_distillation_is_made_reused_judged_anew_and_replaced_when_that_is_asked(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run/distilled"
    assert distill(recipe, "--is-whole") == 1 and distill(recipe) == 0 and distill(recipe, "--is-whole") == 0
    assert "6 of 6 rows kept" in capsys.readouterr().out
    before, answers = (run / "outcomes.jsonl").read_bytes(), (run / "journal/shard-00001-of-00001.jsonl").read_bytes()
    assert distill(recipe) == 0 and capsys.readouterr().out == f"distill: whole, reused ({run})\n"
    assert distill(recipe, "--distill.gate.cut", "drop") == 2
    kept = (run / "conversations.jsonl").read_bytes()
    assert distill(recipe, "--distill.gate.cut", "drop", "--overwrite") == 2  # all are cut: nothing is left
    assert "no row is left to train on: 6 cut" in capsys.readouterr().err
    assert (run / "conversations.jsonl").read_bytes() == kept
    assert (run / "journal/shard-00001-of-00001.jsonl").read_bytes() == answers  # asked nothing again
    assert distill(recipe, "--distill.sampling.max_tokens", "5") == 2
    assert "sampling.max_tokens: 12 there, 5 asked" in capsys.readouterr().err
    assert distill(recipe, "--distill.sampling.max_tokens", "5", "--overwrite") == 0
    assert max(row.answers[0].num_tokens for row in outcomes(tmp_path / "run")) == 5
    assert distill(recipe, "--overwrite") == 0 and (run / "outcomes.jsonl").read_bytes() == before


def test_the_recipes_own_measuring_prompts_and_those_to_exclude_are_never_asked(recipe: Path, tmp_path: Path) -> None:
    def question(number: int) -> str:
        row = {"question_id": number, "category": "a", "turns": [f"Please count {number} boats."]}
        return str(write_rows(tmp_path / f"{number}.jsonl", [row]))

    values = yaml.safe_load(recipe.read_text())
    values["bench"] = {"prompts": {"path": question(3), "num_prompts": 1}, "rows": [{"method": "vanilla"}]}
    values["tune"] = {name: {"path": question(n), "num_prompts": 1} for n, name in ((1, "prompts"), (2, "measure"))}
    values["distill"]["exclude"] = [{"name": "ours", "path": question(4)}]
    path = tiny.recipe(tmp_path / "measured.yaml", values)
    assert distill(path, "--plan") == 0 and not (tmp_path / "run").exists()
    assert distill(path) == 0
    assert [row.status for row in outcomes(tmp_path / "run")] == ["done", *["skipped"] * 4, "done"]
    write_rows(tmp_path / "3.jsonl", [{"question_id": 3, "category": "a", "turns": ["Please count 5 boats."]}])
    assert distill(path, "--is-whole") == 1 and distill(path) == 2  # other questions are held out now


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--shard", "3/2"], "--shard: 3/2 is no share; write i/n"),
        (["--merge", "--retry-failed"], "leave --retry-failed and --shard out"),
        (["--distill.gate.cut", "maybe"], "distill.gate.cut: input should be 'keep' or 'drop'"),
        (["--distill.server.urls", "[host]"], "urls.0: string should match pattern '^https?://', not 'host'"),
        (["--distill.sources", json.dumps([{"path": "x", "samples": 0}])], "samples: input should be greater than 0"),
        (["--distill.sources", json.dumps([{"path": "x", "ask": "problem"}])], "ask to personas"),
    ],
)
def test_mistakes_are_refused_in_a_line(
    recipe: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    assert distill(recipe, *words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and line in lines[0]
