"""Laws of tokenised rows, of their preview and of the draft vocabulary counted from them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DataConfig
from aerie.data import tokens
from aerie.data.conversations import Tally
from aerie.data.tokens import TokenisedData, draft_vocabulary, forced_ids, statistics, tokenize
from tests import tiny
from tests.data import chat_targets as targets
from tests.test_architecture import ROOT, imported


def tokenised(
    tmp_path: Path, rows: list[Any], template: str | None = targets.CHATML, **options: Any
) -> tuple[TokenisedData, Tally]:
    tokenizer, tally = targets.build_tokenizer(template, "<|im_end|>"), Tally()
    path = str(tiny.write_rows(tmp_path / "rows.jsonl", rows))
    config = DataConfig((path,), **{"held_out": 0.0, **options})
    return tokenize(config, tokenizer, {tokenizer.eos_token_id}, tally), tally


def questions(count: int) -> list[dict[str, str]]:
    return [
        {"question": f"hello {number}?", "answer": f"the answer is {number} fine"}
        for number in range(count)
    ]


def talk(count: int, *roles: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": role, "content": "hello there fine"} for _ in range(count) for role in roles
        ]
    }


def test_order_and_limit(
    tmp_path: Path,
) -> None:
    """Each side keeps the order of the file and the limit counts rows for training."""
    data, _ = tokenised(tmp_path, questions(300), held_out=0.2)
    numbers = [
        [int(row.source.rsplit(" ", 1)[1]) for row in side] for side in (data.train, data.held_out)
    ]
    assert numbers == [sorted(side) for side in numbers] and len(numbers[1]) > 30
    assert sorted(numbers[0] + numbers[1]) == list(range(1, 301))
    some, _ = tokenised(tmp_path, questions(300), held_out=0.2, limit=50)
    assert some.train == data.train[:50] and some.held_out == data.held_out[: len(some.held_out)]


def test_many_processes(tmp_path: Path, monkeypatch: Any) -> None:
    """Many processes make the rows and counts of one and their errors are told."""
    monkeypatch.setattr(tokens, "CONVERSATIONS_PER_CALL", 4)
    rows = [
        *questions(30),
        {"question": "?", "answer": ""},
        talk(2, "user", "assistant"),
        *questions(3),
    ]
    alone = tokenised(tmp_path, rows, held_out=0.3, max_length=60)
    made = list[int]()
    monkeypatch.setattr(
        tokens.RowMaker,
        "rows",
        lambda *batch, make=tokens.RowMaker.rows: made.append(0) or make(*batch),
    )
    monkeypatch.setattr(tokens, "num_cores", lambda: 3)
    monkeypatch.setattr(tokens, "SLOW_SECONDS", 0.0)
    assert tokenised(tmp_path, rows, held_out=0.3, max_length=60) == alone and alone[0].held_out
    assert len(made) == 1  # other processes made the rest
    with pytest.raises(UserError, match="token ids from 7 to 99,999, but the"):
        tokenised(tmp_path, [*questions(9), {"input_ids": [7, 99999], "loss_mask": [0, 1]}])


def test_kept_rows(tmp_path: Path, monkeypatch: Any) -> None:
    """Rows that took long are kept and made anew after any change."""
    cache, made, make = tmp_path / "cache", list[str](), tokens._make_rows
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(
        tokens, "_make_rows", lambda *arguments: made.append("made") or make(*arguments)
    )

    def times(rows: Any = None, **options: Any) -> int:
        before, rows = len(made), rows or [*questions(9), {"question": "?", "answer": ""}]
        got, again = (tokenised(tmp_path, rows, **options) for _ in range(2))
        assert got == again and got[0].train and got[1].rows == len(rows)
        return len(made) - before

    assert times() == 2 and not cache.exists()  # making them is faster than reading a cache
    monkeypatch.setattr(tokens, "SLOW_SECONDS", 0.0)
    assert times(held_out=0.3) == times() == 1 and times() == 0
    template = targets.CHATML.replace("<|im_start|>", "<|im_start|> ", 1)
    for change in (
        {"rows": questions(9)},
        {"template": template},
        {"max_length": 999},
        {"system_prompt": "Be short."},
    ):
        assert times(**change) == 1, change
    for damaged in cache.glob("aerie/*/rows.parquet"):
        tiny.flip(damaged)
    assert times() == 1 and times() == 0
    monkeypatch.setenv(
        "XDG_CACHE_HOME", str(tmp_path / "rows.jsonl")
    )  # a file: no folder can be made in it
    assert times() == 2


def test_kept_rows_depend_on_all_code_that_makes_them() -> None:
    """Each file of data/ that tokens.py imports makes rows, except the one of progress bars."""
    files = {"tokens.py"}
    for _ in range(9):  # imports of imports
        names = {name for file in files for name in imported(ROOT / "data" / file)}
        files |= {f"{name.split('.')[2]}.py" for name in names if name.startswith("aerie.data.")}
    assert files - {"progress.py"} == {*tokens.CODE} - {"shapes.yaml"}


def test_cutting(
    tmp_path: Path,
) -> None:
    """Cutting keeps the turns of what remains, and skips what cannot be learnt."""
    rows = [talk(6, "user", "assistant")]
    (whole,) = tokenised(tmp_path, rows)[0].train
    data, tally = tokenised(tmp_path, rows, max_length=100)
    (cut,) = data.train
    assert len(whole.input_ids) > 100 and (cut.input_ids, cut.turn_ids) == (
        whole.input_ids[:100],
        whole.turn_ids[:100],
    )
    assert tally.counts["left out", "tokens after max_length"] == 1
    masks = [[0, 0, 1, 1], [0, 1, 0, 1], [0] * 18 + [1] * 2]
    rows = [{"input_ids": [5] * len(mask), "loss_mask": mask} for mask in masks]
    data, tally = tokenised(tmp_path, rows, max_length=10)
    assert [list(row.turn_ids) for row in data.train] == [[0, 0, 1, 1]] and tally.kept == 1
    assert [reason for kind, reason in tally.counts if kind == "skipped"] == [
        "no answer of at least two tokens",
        "the answer begins after max_length (10 tokens)",
    ]


def test_token_rows(tmp_path: Path) -> None:
    """Token rows need no template and each run of ones is a turn."""
    rows = [
        {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 1, 0, 1]},
        {"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]},
    ]
    data, _ = tokenised(tmp_path, rows, template=None)
    assert list(data.train[0].input_ids) == [5, 6, 7, 8, 9]
    assert list(data.train[0].turn_ids) == [0, 1, 1, 0, 2]
    # (6, 7) of each row is a slot: a slot needs a token before it
    assert (
        statistics(data.train)
        == "2 rows | 8 tokens | 6 supervised (75.0%) | 2 slots | 3 turns | longest 5"
    )


def test_supervise_all(tmp_path: Path) -> None:
    """Supervising all learns every token but the first, in one row though the answers fan out."""
    row = talk(2, "user", "assistant")
    data, tally = tokenised(tmp_path, [row], targets.THINK_DROPPING)
    assert (len(data.train), tally.rows, tally.kept) == (2, 1, 1)
    (whole,) = tokenised(tmp_path, [row], targets.THINK_DROPPING, supervise="all")[0].train
    tokenizer = targets.build_tokenizer(targets.THINK_DROPPING, "<|im_end|>")
    assert list(whole.turn_ids) == [0] + [1] * (len(whole.input_ids) - 1)
    assert list(whole.input_ids) == tokenizer.apply_chat_template(
        row["messages"], return_dict=False
    )


def test_nothing_to_train_on(tmp_path: Path) -> None:
    """What cannot be trained on is refused with the reasons."""
    refusals: list[tuple[list[Any], dict[str, Any], str]] = [
        (questions(20), {"min_supervised_share": 0.95}, r"only \d+\.\d+% of .*aerie show"),
        (
            [{"input_ids": [65, 66], "loss_mask": [0, 0]}],
            {},
            r"no conversation is left to train on .*two tokens",
        ),
        (questions(3), {"held_out": 0.999999}, "3 rows are held out"),
        (
            [{"input_ids": [5, 99_999], "loss_mask": [0, 1]}],
            {},
            r"row 1: has token ids from 5 to 99,999, but the .* has \d+",
        ),
    ]
    for rows, options, said in refusals:
        with pytest.raises(UserError, match=said):
            tokenised(tmp_path, rows, **options)


ROWS = [([7, 3, 3, 4, 3], [0, 1, 1, 0, 2]), ([4, 9], [0, 1]), ([5], [0])]


def test_draft_vocabulary() -> None:
    """Supervised tokens are counted, and special ones are always drafted."""
    special = set(range(len(tiny.SPECIAL)))
    # the LM head has no row for 4000, and 8 tokens have no room for bytes
    forced = forced_ids(tiny.tokenizer(), {300, 4000}, 320, 8)
    assert forced == {*special, 300}
    with_forced, _, _ = draft_vocabulary(ROWS, 320, 8, forced)
    # 3 is frequent but special; 5 comes first among the rest
    assert set(with_forced.ids.tolist()) == {*forced, 9, 5}
    counted, facts, _ = draft_vocabulary(ROWS, 10, 1)
    assert counted.ids.tolist() == [3]
    expected: dict[str, Any] = {"size": 1, "coverage": 0.75, "counted_tokens": 4}
    assert facts == {**expected, "coverage_of": "training"}
    assert draft_vocabulary(ROWS, 10, warm_start=counted)[1] == facts
    held_out = [([3, 4, 4, 4], [0, 1, 1, 1])]
    _, facts, _ = draft_vocabulary(ROWS, 10, 1, held_out=held_out)
    assert facts["coverage"] == 0.0 and facts["coverage_of"] == "held-out"


def with_byte_fallback() -> PreTrainedTokenizerFast:
    vocabulary = {"<unk>": 0, "a": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    rules = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    return PreTrainedTokenizerFast(tokenizer_object=rules, unk_token="<unk>")


@pytest.mark.parametrize("make", [tiny.tokenizer, with_byte_fallback])
def test_a_draft_writes_every_script(make: Any) -> None:
    """The bytes of the alphabet are drafted, whatever the rows hold."""
    tokenizer = make()
    size = len(tokenizer)
    ids = tokenizer("a")["input_ids"]
    forced = forced_ids(tokenizer, set(), size, 270)
    vocabulary, _, line = draft_vocabulary(
        [(ids, [1] * len(ids))], size, min(size, 270), forced, tokenizer=tokenizer
    )
    drafted = {*vocabulary.ids.tolist()}
    for text in ("é", "你好", "🙂"):
        assert drafted.issuperset(tokenizer(text)["input_ids"])
    assert "other scripts" not in line


def test_what_no_draft_writes_is_named() -> None:
    tokenizer = tiny.tokenizer()
    ids = tokenizer("boats boats")["input_ids"]
    _, _, line = draft_vocabulary(
        [([0, 1], [0, 1])], 320, 8, held_out=[(ids, [1] * len(ids))], tokenizer=tokenizer
    )
    assert f"cover 0.00% of {len(ids)} supervised tokens of the held-out rows" in line
    assert "never drafted: " in line and "of the bytes that spell other scripts" in line


def test_mask_token() -> None:
    """A mask token is one that no text has."""
    tokenizer, embedding = tiny.tokenizer(320), torch.ones(324, 4)
    embedding[320] = 0.0  # a row of zeros would make all masks alike
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    assert tokens.mask_token(tokenizer, {end}, embedding) == 321
    assert tokens.mask_token(tokenizer, {end}, embedding[:320]) == pad
    with pytest.raises(
        UserError, match=r"head\.mask_token_id: each of the 320 rows .*; set the key to a token"
    ):
        tokens.mask_token(tokenizer, {end, pad}, embedding[:320])
