"""Interviews and journals: every row ends once, whatever stops the job, and the same rows give the same bytes."""

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DistillConfig, GateConfig, ServerConfig, SourceConfig
from aerie.data.distill.answer import TOO_LONG_FOR_SERVER, Answer, Request, Unanswered
from aerie.data.distill.journal import Journal, Outcome, ended_rows, forget_others, journals
from aerie.data.distill.prompts import Overlap, Prompt
from aerie.data.distill.run import LOCK, Interview, Job, merge
from aerie.data.progress import Share
from aerie.model.storage import Lock
from tests.data.chat_targets import NO_SYSTEM
from tests.data.distill.answering import asking, config, echo, prompts, thinking

INPUTS = {"target": "tiny"}
ONE = Share()


def interview(ask: Any, settings: DistillConfig | None = None, questions: tuple[str, ...] = ()) -> Interview:
    return Interview(ask, thinking(), settings or config(), Overlap(questions, 8))


def sit(
    directory: Path, rows: list[Prompt], ask: Any, shard: Share = ONE, width: int = 4, retry_failed: bool = False
) -> None:
    """One sitting: what no journal has ended yet is asked."""
    job = Job(directory, config(), {}, INPUTS)
    with job.journal(shard) as journal:
        waiting, begun = job.left(rows, journal, retry_failed)
        asyncio.run(job.answer(waiting, begun, interview(ask), journal, width))


def merged(directory: Path, rows: list[Prompt]) -> bytes:
    merge(directory, rows, INPUTS, GateConfig(), thinking())
    return (directory / "outcomes.jsonl").read_bytes() + (directory / "conversations.jsonl").read_bytes()


class Killed(BaseException):
    """Ends a sitting as a signal does."""


def dying(after: int) -> Any:
    """Answers out of order, and dies at a request."""
    chance, asked = random.Random(after), [0]

    async def ask(request: Request) -> Answer:
        asked[0] += 1
        if asked[0] == after:
            raise Killed
        for _ in range(chance.randint(0, 5)):
            await asyncio.sleep(0)
        return echo(request)

    return ask


def test_a_run_killed_at_five_random_moments_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    rows = prompts(40, turns=2)
    sit(tmp_path / "whole", rows, asking())
    expected = merged(tmp_path / "whole", rows)
    chance = random.Random(7)
    for _ in range(5):
        with pytest.raises(Killed):
            sit(tmp_path / "killed", rows, dying(chance.randint(1, 14)))
        with pytest.raises(UserError, match="rows have not ended"):
            merged(tmp_path / "killed", rows)
        journal = journals(tmp_path / "killed")[0]
        torn = chance.randint(0, 60)
        journal.write_bytes(
            journal.read_bytes() + b'{"id": "0:39", "status": "done", "place": "rows: row 39", "tu'[:torn]
        )
    sit(tmp_path / "killed", rows, dying(0))
    lines = [json.loads(line)["id"] for line in journals(tmp_path / "killed")[0].read_text().splitlines()[1:]]
    assert len(lines) == len(set(lines)) == 40
    assert merged(tmp_path / "killed", rows) == expected


def test_shards_together_are_the_whole_and_a_missing_one_is_told(tmp_path: Path) -> None:
    rows = prompts(11)
    sit(tmp_path / "whole", rows, asking())
    for index in (1, 3):
        sit(tmp_path / "parts", rows, asking(), Share(index, 3))
    with pytest.raises(UserError, match=r"4 of 11 rows have not ended \(the first: 0:1\)"):
        merged(tmp_path / "parts", rows)
    sit(tmp_path / "parts", rows, asking(), Share(2, 3))
    assert merged(tmp_path / "parts", rows) == merged(tmp_path / "whole", rows)
    assert Share.of("2/3") == Share(2, 3)
    for wrong in ("0/3", "4/3", "2", "a/b", "-1/3"):
        with pytest.raises(UserError, match="write i/n with i from 1 to n"):
            Share.of(wrong)


def test_a_row_that_two_jobs_ended_counts_once(tmp_path: Path) -> None:
    rows = prompts(6)
    sit(tmp_path, rows, asking())
    before = merged(tmp_path, rows)
    with Journal(tmp_path, Share(1, 2), INPUTS) as journal:
        journal.append(Outcome("0:3", "failed", "rows: row 3", "a late job"))
    summary = merge(tmp_path, rows, INPUTS, GateConfig(), thinking())
    assert summary.repeats == 1 and summary.status == {"done": 6}  # the journal of a job that had all comes first
    assert merged(tmp_path, rows) == before


def test_a_journal_has_one_writer_and_one_identity(tmp_path: Path) -> None:
    with Journal(tmp_path, ONE, INPUTS) as journal, pytest.raises(UserError, match="another process writes it"):
        journal.append(Outcome("0:0", "skipped", "rows: row 0", "x"))
        Journal(tmp_path, ONE, INPUTS).__enter__()
    with pytest.raises(UserError, match="made with another target; choose another --run"):
        list(ended_rows(journals(tmp_path)[0], {"target": "other"}))


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    sit(tmp_path, prompts(3), asking())
    path = journals(tmp_path)[0]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], "{damaged}\n", *lines[3:]]))
    with pytest.raises(UserError, match=r"jsonl: byte \d+: no whole row; delete the line"):
        list(ended_rows(path, INPUTS))


@pytest.mark.parametrize("header", [b"{damaged}\n", b"\xff\n", b"5\n", b'{"inputs_digest": "a"}\n', b""])
def test_a_journal_that_does_not_say_what_it_was_made_from_is_named_and_may_be_replaced(
    tmp_path: Path, header: bytes
) -> None:
    sit(tmp_path, prompts(3), asking(), Share(1, 2))
    sit(tmp_path, prompts(3), asking(), Share(2, 2))
    path, sound = journals(tmp_path)
    path.write_bytes(b"".join([header, *path.read_bytes().splitlines(keepends=True)[1:]]))
    with pytest.raises(UserError, match=r"shard-00001-of-00002\.jsonl: byte 0: .* with --overwrite$"):
        list(ended_rows(path, INPUTS))
    forget_others(tmp_path, INPUTS)
    assert journals(tmp_path) == [sound] and len(statuses(tmp_path)) == 1


def failing(*numbers: int) -> Any:
    """Answers all but the questions with these numbers."""

    def answer(request: Request) -> Answer:
        if any(f"Question {number}," in request.messages[-1]["content"] for number in numbers):
            raise Unanswered("failed", "HTTP 500")
        return echo(request)

    return asking(answer)


def statuses(directory: Path) -> list[tuple[str, str]]:
    """(id, status) of every line of all journals."""
    return [(place.id, place.status) for path in journals(directory) for place in ended_rows(path, INPUTS)]


def test_failed_rows_are_asked_again_only_when_that_is_wished(tmp_path: Path) -> None:
    rows = prompts(5)
    sit(tmp_path, rows, failing(2, 3))
    before = journals(tmp_path)[0].read_bytes()
    sit(tmp_path, rows, asking())
    assert journals(tmp_path)[0].read_bytes() == before
    sit(tmp_path, rows, failing(3), retry_failed=True)
    assert [status for row, status in statuses(tmp_path) if row == "0:2"] == ["failed", "done"]
    summary = merge(tmp_path, rows, INPUTS, GateConfig(), thinking())
    assert (summary.status, summary.repeats) == ({"done": 4, "failed": 1}, 0)
    sit(tmp_path, rows, asking(), retry_failed=True)
    assert journals(tmp_path)[0].read_bytes().startswith(before)
    sit(tmp_path / "whole", rows, asking())
    assert merged(tmp_path, rows) == merged(tmp_path / "whole", rows)


def test_jobs_that_retry_together_ask_their_own_shares_failed_rows_again(tmp_path: Path) -> None:
    """Each while the other is at work, and although another job, of all rows, had met the failures."""
    rows = prompts(8)
    sit(tmp_path, rows, failing(1, 2, 4, 5))
    with Journal(tmp_path, Share(1, 2), INPUTS):
        sit(tmp_path, rows, asking(), Share(2, 2), retry_failed=True)
        assert sorted(row for row, status in statuses(tmp_path)[8:]) == ["0:1", "0:5"]
    sit(tmp_path, rows, asking(), Share(1, 2), retry_failed=True)
    assert len(statuses(tmp_path)) == 12
    sit(tmp_path / "whole", rows, asking())
    assert merged(tmp_path, rows) == merged(tmp_path / "whole", rows)


def test_a_retry_that_is_killed_loses_no_row(tmp_path: Path) -> None:
    rows = prompts(6)
    sit(tmp_path, rows, failing(1, 2, 4))
    with pytest.raises(Killed):
        sit(tmp_path, rows, dying(2), retry_failed=True, width=1)
    assert merge(tmp_path, rows, INPUTS, GateConfig(), thinking()).status == {"done": 4, "failed": 2}
    sit(tmp_path, rows, asking(), retry_failed=True)
    assert merge(tmp_path, rows, INPUTS, GateConfig(), thinking()).status == {"done": 6}


def test_rows_that_a_server_skipped_are_asked_again_and_the_recipes_own_are_not(tmp_path: Path) -> None:
    rows = prompts(2)
    with Journal(tmp_path, ONE, INPUTS) as journal:
        journal.append(Outcome("0:0", "skipped", "rows: row 0", TOO_LONG_FOR_SERVER))
        journal.append(Outcome("0:1", "skipped", "rows: row 1", "no problem was invented"))
    job = Job(tmp_path, config(), {}, INPUTS)
    assert not job.has_answers()
    sit(tmp_path, rows, asking(), retry_failed=True)
    assert statuses(tmp_path) == [("0:0", "skipped"), ("0:1", "skipped"), ("0:0", "done")]
    assert job.has_answers()


def test_what_is_left_is_found_while_no_other_process_ends_rows(tmp_path: Path) -> None:
    """A second process of the same share sees what the first has ended, or is refused."""
    rows, job = prompts(3), Job(tmp_path, config(), {}, INPUTS)
    with job.journal(ONE) as journal:
        assert job.left(rows, journal, False) == (rows, 0)
        with pytest.raises(UserError, match="another process writes it"), job.journal(ONE) as other:
            job.left(rows, other, False)
    sit(tmp_path, rows, asking())
    with job.journal(ONE) as journal:
        assert job.left(rows, journal, False) == ([], 3)


def test_asking_for_token_ids_is_part_of_what_answers_are_made_from_and_how_they_are_carried_is_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "rows.jsonl").touch()

    def inputs(**server: Any) -> dict[str, Any]:
        section = config(sources=(SourceConfig(str(tmp_path / "rows.jsonl")),), server=ServerConfig(**server))
        return Job.of(tmp_path, section, INPUTS, ("b", "a")).stage.inputs

    one, two = ("http://one/v1",), ("http://one/v1", "http://two/v1")
    assert inputs(urls=one) == inputs(urls=two, concurrency=3, timeout_s=5.0) != inputs(urls=one, token_ids=True)


def test_a_job_that_is_refused_leaves_no_mark_on_the_journals(tmp_path: Path) -> None:
    rows = prompts(3)
    sit(tmp_path, rows, asking())
    other = Job(tmp_path, config(), {}, {"target": "other"})
    with pytest.raises(UserError, match="made with another target"), other.journal(Share(1, 2)) as journal:
        other.left(rows, journal, False)
    sit(tmp_path, rows, asking(), Share(1, 2))
    assert len(merged(tmp_path, rows)) > 0


def outcome(prompt: Prompt, answer: Any, **keys: Any) -> Outcome:
    return asyncio.run(interview(asking(answer), **keys).outcome(prompt))


def test_later_questions_follow_the_new_answers(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def record(request: Request) -> Answer:
        seen.append([message["content"] for message in request.messages])
        return Answer(f"answer {len(seen)}", "stop", 2)

    ended = outcome(Prompt("0:1", "x", ("a", "b"), system="s"), record)
    assert seen == [["s", "a"], ["s", "a", "answer 1", "b"]]
    assert [answer.content for answer in ended.answers] == ["answer 1", "answer 2"] and ended.num_tokens == 4


def test_a_conversation_stops_behind_a_cut_answer_and_where_the_context_is_full() -> None:
    cut = outcome(Prompt("0:1", "x", ("a", "b")), lambda _: Answer("half", "length", 2))
    assert (cut.status, cut.turns) == ("done", ("a",))

    def full(request: Request) -> Answer:
        if len(request.messages) > 1:
            raise Unanswered("skipped", "too long")
        return echo(request)

    assert outcome(Prompt("0:1", "x", ("a", "b")), full).turns == ("a",)

    def broken(request: Request) -> Answer:
        if len(request.messages) > 1:
            raise Unanswered("failed", "HTTP 500")
        return echo(request)

    failed = outcome(Prompt("0:1", "x", ("a", "b")), broken)
    assert (failed.status, failed.why, failed.answers) == ("failed", "HTTP 500", ())


def test_an_invented_problem_is_solved_in_a_conversation_of_its_own() -> None:
    def answer(request: Request) -> Answer:
        assert len(request.messages) == 1
        return Answer("Problem: 2 + 2?" if "Invent" in request.messages[0]["content"] else "4", "stop", 3)

    ended = outcome(Prompt("0:1", "x", invent="Invent a problem."), answer)
    assert ended.turns[0].startswith("2 + 2?\n\n") and ended.answers[0].content == "4"
    assert ended.invented is not None and ended.num_tokens == 6
    near = outcome(Prompt("0:1", "x", invent="Invent a problem."), answer, questions=("2 2",))
    assert (near.status, near.why) == ("skipped", "the invented problem overlaps an evaluation question")
    cut = outcome(Prompt("0:1", "x", invent="Invent."), lambda _: Answer("Problem: 2 +", "length", 3))
    assert (cut.status, cut.why) == ("skipped", "the invented problem is cut")


def test_a_conversation_that_the_template_refuses_is_skipped_unasked() -> None:
    def never(_: Request) -> Answer:
        raise AssertionError("asked")

    refusing = Interview(asking(never), thinking(NO_SYSTEM), config(), Overlap((), 8))
    ended = asyncio.run(refusing.outcome(Prompt("0:1", "x", ("a",), system="s")))
    assert (ended.status, ended.why) == ("skipped", "the chat template refuses it: System role not supported")


def test_a_request_has_the_same_seed_whichever_job_draws_it() -> None:
    def seeds(settings: DistillConfig) -> list[int]:
        found: list[int] = []

        def record(request: Request) -> Answer:
            found.append(request.seed)
            return echo(request)

        for prompt in prompts(2, turns=2):
            asyncio.run(interview(asking(record), settings).outcome(prompt))
        return found

    assert seeds(config()) == seeds(config()) != seeds(config(seed=1))
    assert len(set(seeds(config()))) == 4 and all(0 <= seed < 2**31 for seed in seeds(config()))


def test_a_row_of_the_journal_comes_back_as_it_was() -> None:
    answer = Answer("b", "stop", 3, reasoning="r", token_ids=(1, 2), prompt_token_ids=(0,))
    row = Outcome("0:1", "done", "x: row 1", None, "s", ("a",), (answer,), Answer("p", "length", 1))
    assert Outcome.of(json.loads(row.line())) == row


def test_jobs_that_start_together_make_their_prompts_one_after_the_other(tmp_path: Path) -> None:
    source = tmp_path / "questions.jsonl"
    source.write_text('{"prompt": "a?"}\n')
    section = DistillConfig((SourceConfig(path=str(source), kind="prompts"),))
    job = Job.of(tmp_path / "distilled", section, {"target": "tiny"}, ())
    with ThreadPoolExecutor(1) as pool, Lock(job.directory / LOCK) as first:
        first.acquire()
        second = pool.submit(job.prompts, (), True)
        with pytest.raises(TimeoutError):
            second.result(0.2)
        assert not (job.directory / "prompts.jsonl").exists()
        first.release()
        assert [row.turns for row in second.result(30.0)] == [("a?",)]
    assert not (job.directory / LOCK).exists()
