import json
from pathlib import Path
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DataConfig
from aerie.data.conversations import Tally
from aerie.data.tokens import TokenisedData, statistics, tokenize
from tests.data import chat_targets as targets


def written(tmp_path: Path, rows: list[Any]) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def tokenised(
    path: str, template: str | None = targets.CHATML, tally: Tally | None = None, **options: Any
) -> tuple[TokenisedData, Any]:
    tokenizer = targets.build_tokenizer(template, "<|im_end|>")
    config = DataConfig((path,), **{"held_out": 0.0, **options})
    return tokenize(config, tokenizer, {tokenizer.eos_token_id}, tally or Tally(), disable_bar=True), tokenizer


def questions(count: int) -> list[dict[str, str]]:
    return [{"question": f"hello {number}?", "answer": f"the answer is {number} fine"} for number in range(count)]


def test_rows_stand_in_file_order_and_each_side_keeps_its_own(tmp_path: Path) -> None:
    data, _ = tokenised(written(tmp_path, questions(300)), held_out=0.2)
    numbers = [[int(row.source.rsplit(" ", 1)[1]) for row in side] for side in (data.train, data.held_out)]
    assert numbers == [sorted(side) for side in numbers]
    assert sorted(numbers[0] + numbers[1]) == list(range(1, 301))
    assert len(numbers[1]) > 30


def test_the_limit_counts_conversations_for_training(tmp_path: Path) -> None:
    path = written(tmp_path, questions(300))
    every, _ = tokenised(path, held_out=0.2)
    some, _ = tokenised(path, held_out=0.2, limit=50)
    assert some.train == every.train[:50]
    assert some.held_out == every.held_out[: len(some.held_out)]


def test_cutting_keeps_the_turns_of_what_remains(tmp_path: Path) -> None:
    turns = [{"role": role, "content": "hello there fine"} for _ in range(6) for role in ("user", "assistant")]
    path = written(tmp_path, [{"messages": turns}])
    tally = Tally()
    (whole,) = tokenised(path)[0].train
    (cut,) = tokenised(path, max_length=30, tally=tally)[0].train
    assert len(cut.input_ids) == 30 < len(whole.input_ids)
    assert (cut.input_ids, cut.turns) == (whole.input_ids[:30], whole.turns[:30])
    assert tally.findings[("left out", "tokens behind max_length cut")].count == 1


def test_rows_without_a_supervised_slot_are_skipped_and_counted(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]},
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]},
        {"input_ids": [5] * 20, "loss_mask": [0] * 18 + [1] * 2},
    ]
    tally = Tally()
    data, _ = tokenised(written(tmp_path, rows), tally=tally, max_length=10)
    assert [list(row.turns) for row in data.train] == [[0, 0, 1, 1]]
    assert [reason for kind, reason in tally.findings if kind == "skipped"] == [
        "no answer of at least two tokens",
        "the answer begins after max_length (10 tokens)",
    ]
    assert tally.kept == 1


def test_token_rows_need_no_template(tmp_path: Path) -> None:
    data, _ = tokenised(written(tmp_path, [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}]), template=None)
    assert len(data.train) == 1


def test_a_refused_conversation_is_skipped_with_the_templates_words(tmp_path: Path) -> None:
    system = {"messages": [{"role": role, "content": "hello there"} for role in ("system", "user", "assistant")]}
    tally = Tally()
    data, _ = tokenised(written(tmp_path, [system, *questions(3)]), targets.NO_SYSTEM, tally)
    assert len(data.train) == tally.kept == 3
    assert "the chat template refuses it: System role not supported" in tally.table()


def test_an_answer_that_fans_out_is_one_conversation_with_several_rows(tmp_path: Path) -> None:
    turns = [{"role": role, "content": "hello there"} for _ in range(3) for role in ("user", "assistant")]
    tally = Tally()
    data, _ = tokenised(written(tmp_path, [{"messages": turns}]), targets.THINK_DROPPING, tally)
    assert len(data.train) == 3
    assert (tally.rows, tally.kept) == (1, 1)


def test_supervising_all_learns_every_token_but_the_first(tmp_path: Path) -> None:
    turns = [{"role": role, "content": "hello there"} for _ in range(2) for role in ("user", "assistant")]
    data, tokenizer = tokenised(written(tmp_path, [{"messages": turns}]), targets.THINK_DROPPING, supervise="all")
    (row,) = data.train
    assert list(row.turns) == [0] + [1] * (len(row.input_ids) - 1)
    assert list(row.input_ids) == tokenizer.apply_chat_template(turns, return_dict=False)


def test_too_little_supervision_is_refused_with_a_preview(tmp_path: Path) -> None:
    path = written(tmp_path, questions(20))
    with pytest.raises(
        UserError, match=r"\d+\.\d+% of .*min_supervised_share 95\.00%.*\[1:the answer is 0 fine"
    ) as caught:
        tokenised(path, min_supervised_share=0.95)
    assert "\n" not in str(caught.value)


def test_nothing_to_learn_is_refused_with_the_reasons_and_a_preview(tmp_path: Path) -> None:
    path = written(tmp_path, [{"input_ids": [65, 66, 67], "loss_mask": [0, 0, 0]}])
    with pytest.raises(UserError, match=r"no conversation to train on: .*no answer of at least two tokens.*reads: '"):
        tokenised(path)


def test_a_share_that_holds_everything_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"all 3 conversations are held out; lower data\.held_out"):
        tokenised(written(tmp_path, questions(3)), held_out=0.999999)


def test_statistics_count_what_the_rows_hold(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 1, 0, 1]},
        {"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]},
    ]
    found = statistics(tokenised(written(tmp_path, rows))[0].train)
    assert (found.num_rows, found.num_tokens, found.num_supervised, found.num_turns, found.longest) == (2, 8, 6, 3, 5)
    assert found.num_slots == 2  # (6, 7) of each row; a slot needs a token before it
    assert "75.0%" in found.line()
