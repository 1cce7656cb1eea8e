"""Laws of the progress bar."""

import io
import re
import time

from aerie.data.progress import bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_file_gets_whole_lines_and_a_terminal_one_that_is_redrawn() -> None:
    log, terminal, silent = io.StringIO(), Terminal(), io.StringIO()
    for stream, rank in ((log, 0), (terminal, 0), (silent, 1)):
        with bar(1000, "tok", "features", rank, stream) as progress:
            for _ in range(10):
                progress.update(100)
                progress.refresh()
    last = log.getvalue().split("\n")[-2]
    assert "\r" not in log.getvalue() and last.startswith("features: 100% of 1.00k tok, ") and "tok/s" in last
    assert terminal.getvalue().count("\n") == 1 and "\r" in terminal.getvalue() and silent.getvalue() == ""


def test_what_was_done_before_is_no_part_of_the_rate_and_an_unknown_total_still_counts() -> None:
    log, open_end = io.StringIO(), io.StringIO()
    with (
        bar(1000, "row", "distill", stream=log, done=900) as progress,
        bar(None, "row", "read", stream=open_end) as other,
    ):
        time.sleep(0.02)
        for shown in (progress, other):
            shown.update(1)
            shown.refresh()
    rates = re.findall(r"distill:  90% of 1\.00k row, +([\d.]+) row/s", log.getvalue())
    assert rates and all(float(rate) <= 50 for rate in rates) and "read: 1.00 row" in open_end.getvalue()
