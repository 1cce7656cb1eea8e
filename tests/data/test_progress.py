"""Laws of the progress bar."""

import io
import re
import time

from aerie.data.progress import bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_file_gets_whole_lines_with_rate_and_unit_and_no_carriage_returns() -> None:
    log = io.StringIO()
    with bar(1000, "tok", "features", stream=log) as progress:
        for _ in range(10):
            progress.update(100)
            progress.refresh()
    lines = log.getvalue().split("\n")
    assert "\r" not in log.getvalue()
    assert lines[-1] == "" and lines[-2].startswith("features: 100% of 1.00k tok, ") and "tok/s" in lines[-2]


def test_a_terminal_gets_one_line_that_is_redrawn() -> None:
    terminal = Terminal()
    with bar(10, "row", "tokenise", stream=terminal) as progress:
        progress.update(10)
        progress.refresh()
    assert terminal.getvalue().count("\n") == 1 and "\r" in terminal.getvalue()


def test_other_ranks_are_silent() -> None:
    log = io.StringIO()
    with bar(10, "tok", "features", rank=1, stream=log) as progress:
        progress.update(10)
    assert log.getvalue() == ""


def test_an_unknown_total_still_counts() -> None:
    log = io.StringIO()
    with bar(None, "row", "read", stream=log) as progress:
        progress.update(3)
        progress.refresh()
    assert "read: 3.00 row" in log.getvalue()


def test_what_was_done_before_is_no_part_of_the_rate() -> None:
    log = io.StringIO()
    with bar(1000, "row", "distill", stream=log, done=900) as progress:
        time.sleep(0.02)
        progress.update(1)
        assert progress.n == 901 and progress.format_dict["initial"] == 900
        progress.refresh()
    rates = re.findall(r"distill:  90% of 1\.00k row, +([\d.]+) row/s", log.getvalue())
    assert rates and all(float(rate) <= 50 for rate in rates)
