"""Edits of small tables and lists; the answer tells the outcome in another layout instead of copying the table."""

from random import Random

from data.families.lexicon import MEN, TOWNS, WOMEN, in_words, listing
from data.families.turn import Turn

Row = tuple[str, int]

SUBJECTS = {  # heading of the table: (what a row is, its number, possible names, range of the number)
    "stock": (
        "item",
        "price",
        "lamp chair desk shelf rug clock vase mirror stool bench basket kettle".split(),
        (5, 95),
    ),
    "team": ("player", "points", WOMEN + MEN, (3, 60)),
    "fruit": ("fruit", "kilos", "apples pears plums grapes figs melons limes peaches cherries dates".split(), (2, 40)),
    "cities": ("city", "visitors", TOWNS, (10, 90)),
    "books": (
        "title",
        "pages",
        "Winter Harbor Embers Maps Silence Bridges Salt Horizon Lanterns Echo".split(),
        (80, 400),
    ),
    "classes": ("class", "students", "music art chess drama biology history dance poetry robotics".split(), (8, 35)),
}
ADJECTIVES = {"price": ("cheapest", "most expensive"), "points": ("weakest", "strongest"), "kilos": ("lightest", "heaviest"),
              "visitors": ("quietest", "busiest"), "pages": ("shortest", "longest"), "students": ("smallest", "largest")}  # fmt: skip


def draw(generator: Random) -> list[Turn]:
    """One table or list, an edit of it, and a second look at the outcome."""
    heading = generator.choice(list(SUBJECTS))
    kind, column, names, (low, high) = SUBJECTS[heading]
    count = generator.choice((3, 4, 4, 5))
    rows = list(zip(generator.sample(names, count), generator.sample(range(low, high), count), strict=True))
    edit = generator.choice((_sort, _sort_down, _filter, _append, _rename, _remove, _raise, _total, _swap, _extremes))
    question, answer = edit(generator, kind, column, rows)
    return [
        Turn(f"{question}\n\n{_layout(generator, kind, column, rows)}", answer),
        _second(generator, kind, column, rows),
    ]


def _layout(generator: Random, kind: str, column: str, rows: list[Row]) -> str:
    style = generator.randrange(3)
    if style == 0:
        return "\n".join([f"{kind} | {column}", *(f"{name} | {number}" for name, number in rows)])
    if style == 1:
        return "\n".join([f"{kind},{column}", *(f"{name},{number}" for name, number in rows)])
    return "\n".join([f"{kind}: {column}", *(f"{name}: {number}" for name, number in rows)])


def _sort(generator: Random, kind: str, column: str, rows: list[Row]) -> tuple[str, str]:
    ordered = sorted(rows, key=lambda row: row[1])
    least, _ = ADJECTIVES[column]
    text = " < ".join(f"{name} ({number})" for name, number in ordered)
    return (f"Sort this by {column}, lowest first.",
            f"I compared the numbers one by one and started with the {least} {kind}. The new order is:\n\n{text}\n\n"
            f"Each entry is followed by its {column}, so the numbers climb from left to right.")  # fmt: skip


def _sort_down(generator: Random, kind: str, column: str, rows: list[Row]) -> tuple[str, str]:
    ordered = sorted(rows, key=lambda row: -row[1])
    _, most = ADJECTIVES[column]
    text = "\n".join(f"{place}. {name} with {number}" for place, (name, number) in enumerate(ordered, 1))
    return (f"Rank the rows by {column}, highest first.",
            f"Here is the ranking:\n\n{text}\n\nAt the top stands the {most} {kind}, and nothing else was changed.")  # fmt: skip


def _filter(generator: Random, kind: str, column: str, rows: list[Row]) -> tuple[str, str]:
    numbers = sorted(number for _, number in rows)
    cut = generator.choice(numbers[:-1])
    kept, gone = [name for name, number in rows if number > cut], [name for name, number in rows if number <= cut]
    verb = "stays" if len(kept) == 1 else "stay"
    return (f"Keep only the rows where {column} is more than {cut}.",
            f"After the filter {in_words(len(kept))} of {in_words(len(rows))} rows {verb}: {listing(kept)}. "
            f"The rest did not pass, because a value up to {cut} is too small. That removes {listing(gone)} from the table.")  # fmt: skip


def _append(generator: Random, kind: str, column: str, rows: list[Row]) -> tuple[str, str]:
    names, (low, high) = next(v[2:] for v in SUBJECTS.values() if v[:2] == (kind, column))
    name = generator.choice([n for n in names if n not in dict(rows)])
    number = generator.randrange(low, high)
    above = sum(value > number for _, value in rows)
    place = (
        f"{in_words(above)} existing {'row has' if above == 1 else 'rows have'} a higher value"
        if above
        else "no row has a higher value"
    )
    return (f"Append a row for {name} with {column} {number}.",
            f"Done. The last line now reads:\n\n{name} | {number}\n\nWith this addition there are {in_words(len(rows) + 1)} rows below the "
            f"header. Looking at {column}, {place}.")  # fmt: skip


def _rename(generator: Random, kind: str, column: str, rows: list[Row]) -> tuple[str, str]:
    new = generator.choice(("amount", "value", "number", "figure", "total"))
    return (f"Rename the column {column} to {new} and show me the first row.",
            f"The header becomes `{kind} | {new}`. Renaming does not touch the data, and so the first entry keeps its content: "
            f"{rows[0][0]} has a {new} of {rows[0][1]}. The other {in_words(len(rows) - 1)} rows follow as before.")  # fmt: skip


def _remove(generator: Random, kind: str, column: str, rows: list[Row]) -> tuple[str, str]:
    name, number = generator.choice(rows)
    rest = [other for other, _ in rows if other != name]
    return (f"Delete the row of {name}.",
            f"I took out that line, which had {number} in the second column. What remains are the entries {listing(rest)}, in the same "
            f"order as in your version. The table is now one row shorter, with {in_words(len(rest))} left.")  # fmt: skip


def _raise(generator: Random, kind: str, column: str, rows: list[Row]) -> tuple[str, str]:
    (name, number), step = generator.choice(rows), generator.choice((2, 3, 5, 10))
    return (f"Increase the {column} of {name} by {step}.",
            f"Only a single cell changes. Its old content was {number}, and {number} + {step} = {number + step}. So the row of {name} now "
            f"shows {number + step} under {column}; the others are as you sent them.")  # fmt: skip


def _total(generator: Random, kind: str, column: str, rows: list[Row]) -> tuple[str, str]:
    running, steps = rows[0][1], []
    for _, number in rows[1:]:
        steps.append(f"{running} + {number} = {running + number}")
        running += number
    return (f"Add a final row with the total of {column}.",
            f"Let me add them up from top to bottom: {', then '.join(steps)}. The final row is therefore\n\ntotal | {running}\n\n"
            f"and it goes under the last {kind}.")  # fmt: skip


def _swap(generator: Random, kind: str, column: str, rows: list[Row]) -> tuple[str, str]:
    reverse = [name for name, _ in reversed(rows)]
    return (f"Reverse the order of the rows and list only the {kind} names.",
            f"Reading the table from the bottom up gives this list: {listing(reverse)}. I left out the {column} on purpose, "
            f"since you asked for one column. The row that used to be last comes first.")  # fmt: skip


def _extremes(generator: Random, kind: str, column: str, rows: list[Row]) -> tuple[str, str]:
    ordered = sorted(rows, key=lambda row: row[1])
    (small, low), (large, high) = ordered[0], ordered[-1]
    least, most = ADJECTIVES[column]
    return (f"Which rows hold the lowest and the highest {column}, and how far apart are they?",
            f"The {least} {kind} is {small}, while {large} is the {most} one. Between the two there is a gap of {high} - {low} = "
            f"{high - low}. Every other row lies somewhere in the middle.")  # fmt: skip


def _second(generator: Random, kind: str, column: str, rows: list[Row]) -> Turn:
    ordered = sorted(rows, key=lambda row: row[1])
    name, number = ordered[-1]
    if generator.random() < 0.5:
        return Turn(f"In my original data, which {kind} came first by {column}?",
                    f"That was {name}. In the data you sent, no other value is above {number}.")  # fmt: skip
    return Turn("How many rows did I give you?",
                f"You gave me {in_words(len(rows))} rows, not counting a header line; the first one was {rows[0][0]}.")  # fmt: skip
