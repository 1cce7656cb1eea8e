from aerie.data.conversations import MAX_REASONS, Tally


def test_the_table_counts_each_reason_and_shows_its_first_place() -> None:
    tally = Tally(rows=5)
    tally.skip("unknown role", "a.json: row 2", "turn 1 is from 'gtp'")
    tally.skip("unknown role", "a.json: row 4", "turn 3 is from 'gtp'")
    tally.mend("joined", "a.json: row 1")
    assert tally.kept == 3
    assert tally.table().splitlines() == [
        "conversations: 5 read, 3 kept, 2 skipped",
        "  skipped          2  unknown role (a.json: row 2: turn 1 is from 'gtp')",
        "  mended           1  joined (a.json: row 1)",
    ]


def test_endless_reasons_are_counted_together() -> None:
    tally = Tally(rows=1000)
    for number in range(1000):
        tally.skip(f"reason {number}", "a.json: row 1")
    assert len(tally.findings) == MAX_REASONS + 1
    assert tally.total("skipped") == 1000
