"""Laws of the files that measuring leaves behind."""

from dataclasses import replace
from pathlib import Path

import pytest

from aerie.configs.errors import UserError
from aerie.infer.measure.record import Reference, line_of, read_as, read_records
from tests.infer.made_up import drafted, record


def test_records_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    written = [record(), drafted((3, 1), text="two\nlines é", output_ids=(1, 2, 3, 4, 5))]
    path.write_text("".join(line_of(item) for item in written), encoding="utf-8")
    assert read_records(path) == written


def test_a_cut_last_line_is_left_out_and_a_damaged_whole_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(line_of(record()) + line_of(drafted((3, 1)))[:80])
    assert read_records(path) == [record()]
    path.write_text(line_of(record()) + line_of(drafted((3, 1)))[:80] + "\n")
    with pytest.raises(UserError, match=r"records\.jsonl:2: .*delete the line"):
        read_records(path)


def test_one_answer_measured_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(line_of(record()) + line_of(drafted((3, 1))) + line_of(record()))
    with pytest.raises(UserError, match=r":3: row 0, prompt '0' of 'sums' was measured already"):
        read_records(path)


def test_a_missing_file_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"records\.jsonl: No such file.*infer/main\.py bench"):
        read_records(tmp_path / "records.jsonl")


def test_a_record_that_contradicts_itself_is_refused() -> None:
    for changes in ({"new_tokens": 4}, {"accepted": (2,)}, {"ms": None}):
        with pytest.raises(ValueError, match="one entry per cycle"):
            replace(drafted((3, 1)), **changes)  # type: ignore[arg-type]


def test_an_answer_may_end_inside_a_cycle_without_its_bonus_token() -> None:
    assert replace(drafted((3, 2)), accepted=(2, 2)).new_tokens == 6


def test_an_unknown_key_of_the_reference_times_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    path.write_text('{"vanilla_ms_per_token": 1, "bare_forward_ms_per_token": 1, "prompts": 1, "identical": 1}')
    with pytest.raises(UserError, match=r"reference\.json: identical"):
        read_as(path, Reference)
