"""Laws of tokenised rows, of their preview and of the draft vocabulary that is counted on them."""

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DataConfig
from aerie.data.chat import Row
from aerie.data.conversations import Tally
from aerie.data.tokens import TokenisedData, draft_vocabulary, forced_ids, show, statistics, tokenize
from tests import tiny
from tests.data import chat_targets as targets


def tokenised(
    tmp_path: Path, rows: list[Any], template: str | None = targets.CHATML, **options: Any
) -> tuple[TokenisedData, Tally]:
    tokenizer, tally = targets.build_tokenizer(template, "<|im_end|>"), Tally()
    path = str(tiny.write_rows(tmp_path / "rows.jsonl", rows))
    config = DataConfig((path,), **{"held_out": 0.0, **options})
    return tokenize(config, tokenizer, {tokenizer.eos_token_id}, tally, speaks=False), tally


def questions(count: int) -> list[dict[str, str]]:
    return [{"question": f"hello {number}?", "answer": f"the answer is {number} fine"} for number in range(count)]


def talk(count: int, *roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "hello there fine"} for _ in range(count) for role in roles]}


def test_each_side_keeps_the_order_of_the_file_and_the_limit_counts_rows_for_training(tmp_path: Path) -> None:
    data, _ = tokenised(tmp_path, questions(300), held_out=0.2)
    numbers = [[int(row.source.rsplit(" ", 1)[1]) for row in side] for side in (data.train, data.held_out)]
    assert numbers == [sorted(side) for side in numbers] and len(numbers[1]) > 30
    assert sorted(numbers[0] + numbers[1]) == list(range(1, 301))
    some, _ = tokenised(tmp_path, questions(300), held_out=0.2, limit=50)
    assert some.train == data.train[:50] and some.held_out == data.held_out[: len(some.held_out)]


def test_cutting_keeps_the_turns_of_what_remains_and_skips_what_cannot_be_learnt(tmp_path: Path) -> None:
    rows = [talk(6, "user", "assistant")]
    (whole,) = tokenised(tmp_path, rows)[0].train
    data, tally = tokenised(tmp_path, rows, max_length=100)
    (cut,) = data.train
    assert len(whole.input_ids) > 100 and (cut.input_ids, cut.turns) == (whole.input_ids[:100], whole.turns[:100])
    assert tally.counts["left out", "tokens behind max_length cut"] == 1
    masks = [[0, 0, 1, 1], [0, 1, 0, 1], [0] * 18 + [1] * 2]
    rows = [{"input_ids": [5] * len(mask), "loss_mask": mask} for mask in masks]
    data, tally = tokenised(tmp_path, rows, max_length=10)
    assert [list(row.turns) for row in data.train] == [[0, 0, 1, 1]] and tally.kept == 1
    assert [reason for kind, reason in tally.counts if kind == "skipped"] == [
        "no answer of at least two tokens",
        "the answer begins after max_length (10 tokens)",
    ]


def test_token_rows_need_no_template_and_each_run_of_ones_is_a_turn(tmp_path: Path) -> None:
    masks = ([0, 1, 1, 0, 1], [1, 1, 1])
    rows = [{"input_ids": [5, 6, 7, 8, 9][: len(mask)], "loss_mask": mask} for mask in masks]
    data, _ = tokenised(tmp_path, rows, template=None)
    assert (list(data.train[0].input_ids), list(data.train[0].turns)) == ([5, 6, 7, 8, 9], [0, 1, 1, 0, 2])
    # (6, 7) of each row is a slot: one needs a token before
    assert statistics(data.train) == "2 rows | 8 tokens | 6 supervised (75.0%) | 2 slots | 3 turns | longest 5"


def test_a_conversation_counts_once_whether_it_fans_out_or_is_refused(tmp_path: Path) -> None:
    data, tally = tokenised(tmp_path, [talk(3, "user", "assistant")], targets.THINK_DROPPING)
    assert (len(data.train), tally.rows, tally.kept) == (3, 1, 1)
    rows = [talk(1, "system", "user", "assistant"), *questions(3)]
    data, tally = tokenised(tmp_path, rows, targets.NO_SYSTEM)
    assert len(data.train) == tally.kept == 3
    assert "the chat template refuses it: No system role" in tally.table()


def test_supervising_all_learns_every_token_but_the_first(tmp_path: Path) -> None:
    row, tokenizer = talk(2, "user", "assistant"), targets.build_tokenizer(targets.THINK_DROPPING, "<|im_end|>")
    (whole,) = tokenised(tmp_path, [row], targets.THINK_DROPPING, supervise="all")[0].train
    assert list(whole.turns) == [0] + [1] * (len(whole.input_ids) - 1)
    assert list(whole.input_ids) == tokenizer.apply_chat_template(row["messages"], return_dict=False)


def test_what_cannot_be_trained_on_is_refused_with_the_reasons(tmp_path: Path) -> None:
    refusals: list[tuple[list[Any], dict[str, Any], str]] = [
        (questions(20), {"min_supervised_share": 0.95}, r"only \d+\.\d+% of .*show command"),
        ([{"input_ids": [65, 66], "loss_mask": [0, 0]}], {}, r"no conversation to train on; .*two tokens"),
        (questions(3), {"held_out": 0.999999}, "3 rows are held out"),
        ([{"input_ids": [5, 99_999], "loss_mask": [0, 1]}], {}, r"row 1: token ids 5 to 99,999 are outside the \d+"),
    ]
    for rows, options, said in refusals:
        with pytest.raises(UserError, match=said):
            tokenised(tmp_path, rows, **options)


def test_the_preview_cannot_steer_the_terminal() -> None:
    tokenizer = targets.build_tokenizer(None, "<|end|>")
    ids = tokenizer.encode("hello \x1b[2J", add_special_tokens=False)
    assert show([Row(ids, [0] * len(ids), "")], tokenizer).endswith("\nhello \\x1b[2J")


ROWS = [([7, 3, 3, 4, 3], [0, 1, 1, 0, 2]), ([4, 9], [0, 1]), ([5], [0])]
ORIGIN = {"rows": "a", "tokenizer": "b"}


def test_special_and_end_of_turn_tokens_are_always_drafted() -> None:
    tokenizer = tiny.tokenizer()
    special = set(range(len(tiny.SPECIAL)))
    forced = forced_ids(tokenizer, {300}, 320)
    assert forced == {*special, 300}
    assert forced_ids(tokenizer, {4000}, 320) == special  # the LM head has no row for it
    counted = draft_vocabulary(ROWS, 320, ORIGIN, 8, forced)
    # 3 is special and frequent; 5 is the first of the rest
    assert set(counted.vocabulary.ids.tolist()) == {*forced, 9, 5}


@pytest.mark.parametrize("kind", [list, lambda values: array("i", values), torch.tensor])
def test_supervised_tokens_are_counted_and_the_key_follows_what_was_counted(kind: Any) -> None:
    rows = [(kind(ids), kind(turns)) for ids, turns in ROWS]
    counted = draft_vocabulary(rows, 10, ORIGIN, 1)
    assert counted.vocabulary.ids.tolist() == [3]
    assert counted.facts == {"key": counted.facts["key"], "size": 1, "coverage": 0.75, "counted_tokens": 4}
    given = draft_vocabulary(rows, 10, ORIGIN, given=counted.vocabulary).facts
    assert given == {**counted.facts, "key": given["key"]}
    others = [(4, [1], ORIGIN), (5, [1], ORIGIN), (4, [2], ORIGIN), (4, [1], {**ORIGIN, "rows": "c"})]
    assert len({draft_vocabulary(rows, 10, origin, size, forced).facts["key"] for size, forced, origin in others}) == 4
    assert [draft_vocabulary(rows, size, ORIGIN).vocabulary.size for size in (10, 40_000)] == [10, 32_000]
