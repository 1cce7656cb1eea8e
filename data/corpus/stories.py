"""Worked arithmetic word problems: several steps in words, the answer at the end.

Every story states its numbers once and its steps as `a + b = c`, so that a reader (and a test) can check each of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from aerie.data.corpus.families import TOWNS, Turn, multiple, people

GOODS = "pencils apples marbles candles cookies stickers oranges buttons tulips postcards shells stamps badges lemons".split()
TREATS = "rolls muffins bagels pretzels tarts scones".split()
CROPS = "tomatoes carrots onions beans peppers cabbages".split()
PRIZES = "bicycle guitar camera tent telescope scooter".split()
DISHES = "pizzas salads soups burgers pancakes".split()

Values = dict[str, object]


@dataclass(frozen=True)
class Story:
    """Numbers and, for each phrasing of the question, the worked answer that goes with it."""

    draw: Callable[[Random], Values]
    phrasings: tuple[tuple[str, str], ...]
    follow_up: tuple[str, str]


def draw(generator: Random) -> list[Turn]:
    """One story and its follow-up."""
    story = generator.choice(STORIES)
    first, second = people(generator, 2)
    values: Values = {
        "name": first.name,
        "he": first.subject,
        "his": first.possessive,
        "him": first.object,
        "friend": second.name,
    }
    values |= {"good": generator.choice(GOODS), "town": generator.choice(TOWNS), **story.draw(generator)}
    values |= {"He": str(values["he"]).title(), "His": str(values["his"]).title()}
    question, answer = generator.choice(story.phrasings)
    return [
        Turn(text.format(**values), reply.format(**values)) for text, reply in ((question, answer), story.follow_up)
    ]


def _boxes(generator: Random) -> Values:
    a, b, d = generator.randint(3, 9), generator.randint(3, 9), generator.randint(2, 9)
    c = generator.randint(2, a * b // 2)
    return {"a": a, "b": b, "c": c, "d": d, "ab": a * b, "left": a * b - c, "more": a * b - c + d}


def _savings(generator: Random) -> Values:
    a, b, c = generator.randint(3, 9), generator.randint(4, 12), multiple(generator, 10, 60, 5)
    total, gap = c + a * b, multiple(generator, 10, 50, 10)
    return {
        "a": a,
        "b": b,
        "c": c,
        "ab": a * b,
        "t": total,
        "gap": gap,
        "p": total + gap,
        "prize": generator.choice(PRIZES),
    }


def _trip(generator: Random) -> Values:
    s, h, r, k = (
        multiple(generator, 30, 70, 10),
        generator.randint(2, 5),
        multiple(generator, 20, 90, 10),
        generator.randint(2, 4),
    )
    total = s * h + r * k
    return {"s": s, "h": h, "r": r, "k": k, "sh": s * h, "rk": r * k, "t": total, "x": total // 10, "hours": h + k}


def _bakery(generator: Random) -> Values:
    size, bags, a = generator.randint(3, 6), generator.randint(3, 9), generator.randint(4, 8)
    rest = size * bags
    b = rest // a + generator.randint(2, 5)
    return {"a": a, "b": b, "ab": a * b, "c": a * b - rest, "rest": rest, "size": size, "bags": bags,
            "treat": generator.choice(TREATS), "v": size - 1, "bv": bags * (size - 1)}  # fmt: skip


def _class(generator: Random) -> Values:
    b, g, c, p = generator.randint(3, 6), generator.randint(4, 9), generator.randint(2, 9), generator.randint(2, 5)
    return {"a": b * g, "b": b, "g": g, "c": c, "gc": g * c, "p": p, "gp": g + p, "gpc": (g + p) * c, "pb": p * b}


def _change(generator: Random) -> Values:
    a, p, q = generator.randint(3, 8), generator.randint(2, 6), generator.randint(3, 9)
    bill = 100 if a * p + q > 50 else 50
    return {"a": a, "p": p, "q": q, "ap": a * p, "t": a * p + q, "bill": bill, "ch": bill - a * p - q,
            "w": q - 2, "ch2": bill - a * p - q + 2}  # fmt: skip


def _ages(generator: Random) -> Values:
    c, b, a, y = generator.randint(4, 12), generator.randint(2, 4), generator.randint(3, 9), generator.randint(3, 9)
    times = {2: "twice", 3: "three times", 4: "four times"}[b]
    return {"c": c, "b": b, "a": a, "times": times, "bc": b * c, "t": b * c + a, "y": y, "ty": b * c + a + y}


def _garden(generator: Random) -> Values:
    part, a = generator.choice(((2, "half"), (3, "a third"), (4, "a quarter"), (5, "a fifth"))), generator.randint(3, 9)
    b = part[0] * generator.randint(2, 4)
    lost = a * b // part[0]
    return {"a": a, "b": b, "part": part[1], "n": part[0], "ab": a * b, "lost": lost, "left": a * b - lost,
            "crop": generator.choice(CROPS), "row": a * b - lost + b}  # fmt: skip


def _reading(generator: Random) -> Values:
    a, b, c, d = (
        multiple(generator, 10, 30, 5),
        generator.randint(3, 8),
        multiple(generator, 10, 40, 10),
        generator.randint(3, 7),
    )
    return {"a": a, "b": b, "c": c, "d": d, "ab": a * b, "cd": c * d, "p": a * b + c * d, "bd": b + d}


def _wages(generator: Random) -> Values:
    a, w, b, e = (
        multiple(generator, 20, 40, 5),
        generator.randint(8, 15),
        generator.randint(2, 6),
        generator.randint(3, 6),
    )
    total = a * w + b * (w + e)
    return {"a": a, "w": w, "b": b, "e": e, "aw": a * w, "v": w + e, "bv": b * (w + e), "t": total, "four": 4 * total}


def _tank(generator: Random) -> Values:
    out, m, start = generator.randint(2, 6), multiple(generator, 10, 30, 5), multiple(generator, 20, 80, 10)
    net = generator.randint(3, 9)
    return {"i": out + net, "o": out, "m": m, "s": start, "net": net, "nm": net * m, "t": start + net * m,
            "half": (start + net * m) - start}  # fmt: skip


def _tickets(generator: Random) -> Values:
    a, b, q, d = generator.randint(2, 5), generator.randint(2, 6), generator.randint(4, 8), generator.randint(2, 6)
    p = q + generator.randint(3, 6)
    t = a * p + b * q
    return {"a": a, "p": p, "b": b, "q": q, "ap": a * p, "bq": b * q, "t": t, "d": d, "td": t - d, "tp": t + p}


def _sale(generator: Random) -> Values:
    percent, n = generator.choice(((10, 10), (20, 5), (25, 4), (50, 2))), generator.randint(2, 5)
    price = 20 * generator.randint(1, 9)
    off = price // percent[1]
    return {"price": price, "pc": percent[0], "n": percent[1], "off": off, "new": price - off, "k": n, "t": n * (price - off),
            "prize": generator.choice(PRIZES), "saved": n * off}  # fmt: skip


def _sharing(generator: Random) -> Values:
    half, d = generator.randint(5, 30), generator.randint(2, 9)
    return {"n": 2 * half + d, "d": d, "even": 2 * half, "half": half, "more": half + d, "g": half - 3}


STORIES = (
    Story(_boxes, (
        ("{name} buys {a} boxes of {good} with {b} in each box and gives {c} of them to {friend}. How many are left?",
         "Start with the full boxes. {a} times {b} gives {a} * {b} = {ab} {good} in total. The present for {friend} takes some away: "
         "{ab} - {c} = {left}. So {name} still has {left} {good}."),
        ("A crate at the market in {town} holds {a} bags, and every bag has {b} {good}. If {c} go bad, how many can be sold?",
         "First count everything in the crate: {a} * {b} = {ab}. The bad ones cannot be sold, so subtract them: {ab} - {c} = {left}. "
         "The seller can offer {left} {good} to the customers."),
    ), ("And if {d} more {good} arrive the next day?",
        "Add the new ones to what remained after the first part: {left} + {d} = {more}. There would be {more} then.")),
    Story(_savings, (
        ("{name} has {c} dollars and saves {a} dollars every week. How much money does {he} have after {b} weeks?",
         "The weekly savings grow at a steady rate, so multiply: {a} * {b} = {ab} dollars. Together with the money from the beginning "
         "this makes {c} + {ab} = {t}. After that time {name} owns {t} dollars."),
        ("For {b} weeks {name} puts {a} dollars into a jar that already held {c} dollars. What is in the jar at the end?",
         "We look at the new coins first. That is {b} * {a} = {ab} dollars over the whole period. Now add the old amount: "
         "{ab} + {c} = {t}. At the end the jar contains {t} dollars."),
    ), ("{He} wants a {prize} that costs {p} dollars. How much is missing?",
        "Compare the price with the savings: {p} - {t} = {gap}. Another {gap} dollars are needed before the {prize} can be bought.")),
    Story(_trip, (
        ("{name} drives to {town} for {h} hours at {s} miles per hour and then {k} hours at {r} miles per hour. How far is the trip?",
         "Distance is speed times time, and we do it for both parts. The first part covers {s} * {h} = {sh} miles, and the second one "
         "covers {r} * {k} = {rk} miles. Adding them gives {sh} + {rk} = {t}, so the road is {t} miles long."),
        ("A train runs {h} hours at {s} km per hour and, after {town}, {k} more hours at {r} km per hour. Find the total distance.",
         "Split the journey at the stop. Before it the train travels {h} * {s} = {sh} km; after it the distance is {k} * {r} = {rk} km. "
         "The whole line therefore measures {sh} + {rk} = {t} km."),
    ), ("How long did the whole journey take?",
        "Only the times matter here. The two parts last {h} + {k} = {hours} hours, if we do not count any breaks.")),
    Story(_bakery, (
        ("A bakery in {town} makes {a} trays of {b} {treat} and sells {c}. The rest go into bags of {size}. How many bags are filled?",
         "All trays together hold {a} * {b} = {ab} {treat}. What the shop does not sell is {ab} - {c} = {rest}. Dividing these into "
         "equal bags gives {rest} / {size} = {bags}, so the baker fills {bags} bags."),
        ("{name} bakes {a} batches of {b} {treat}. After guests eat {c}, {he} packs the others in bags of {size}. How many bags is that?",
         "Let us go step by step. Baked: {a} * {b} = {ab}. Not eaten: {ab} - {c} = {rest}. Each bag takes the same number, and "
         "{rest} / {size} = {bags}. {name} needs {bags} bags for the {treat}."),
    ), ("If each bag loses one on the way, how many arrive?",
        "Every bag then carries {size} - 1 = {v}. Over all the bags this is {bags} * {v} = {bv}, so {bv} arrive safely.")),
    Story(_class, (
        ("A class of {a} pupils works in groups of {b}, and each group needs {c} sheets of paper. How many sheets does {name} hand out?",
         "To find the number of groups, divide the pupils: {a} / {b} = {g} groups. Paper is given per group, which means "
         "{g} * {c} = {gc}. {name} has to hand out {gc} sheets."),
        ("{a} visitors come to the museum in {town} in tours of {b} people. A tour uses {c} maps. How many maps are used?",
         "The visitors form {a} / {b} = {g} tours. Since every tour takes the same number of maps, the museum uses {g} * {c} = {gc}. "
         "That is {gc} maps for the day."),
    ), ("What changes if {p} more groups join?",
        "Now there are {g} + {p} = {gp} groups. They use {gp} * {c} = {gpc} in all, which is the new answer.")),
    Story(_change, (
        ("{name} buys {a} {good} at {p} dollars each and a bag for {q} dollars, and pays with a {bill} dollar note. What is the change?",
         "The {good} cost {a} * {p} = {ap} dollars. With the bag, the bill comes to {ap} + {q} = {t}. Taking this from the note leaves "
         "{bill} - {t} = {ch}, so {name} gets {ch} dollars back."),
        ("At a cafe, {a} friends each order a {p} dollar lunch and share one cake for {q} dollars. How much is left of {bill} dollars?",
         "Lunch for everybody is {p} * {a} = {ap} dollars, and the cake raises it to {ap} + {q} = {t}. They brought more than enough: "
         "{bill} - {t} = {ch}. The friends keep {ch} dollars."),
    ), ("What if the last item were 2 dollars cheaper?",
        "A lower price means more money back. The change rises by two, and {ch} + 2 = {ch2}, so the answer becomes {ch2} dollars.")),
    Story(_ages, (
        ("{name} is {a} years older than {friend}, and {friend} is {times} as old as a cousin aged {c}. How old is {name}?",
         "Work backwards from the cousin. {friend} is {b} * {c} = {bc} years old. {name} was born earlier, so add the difference: "
         "{bc} + {a} = {t}. That makes {name} {t} years old."),
        ("A tree in {town} is {c} years old. A second one is {times} that age, and the third is {a} years older still. How old is it?",
         "The second tree has lived for {c} * {b} = {bc} years. The oldest of the three goes beyond that, since {bc} + {a} = {t}. "
         "Its age is {t} years."),
    ), ("And in {y} years?", "Everybody ages at the same pace, so we only add: {t} + {y} = {ty} years at that time.")),
    Story(_garden, (
        ("{name} plants {a} rows of {b} {crop}, but {part} of the plants do not grow. How many {crop} grow?",
         "The garden starts with {a} * {b} = {ab} plants. To get {part}, divide by {n}: {ab} / {n} = {lost} are lost. "
         "The others do well, {ab} - {lost} = {left}. In the end {left} {crop} grow."),
        ("A farm near {town} has {a} fields with {b} boxes of {crop} each. It sells {part} of all boxes. How many boxes remain?",
         "Count the boxes on the farm before the sale, {b} * {a} = {ab}. The share that leaves is {ab} / {n} = {lost}. "
         "What stays is {ab} - {lost} = {left}, that is {left} boxes of {crop}."),
    ), ("Then one more set of {b} is added. How many now?",
        "One extra set simply adds to the result: {left} + {b} = {row}. There are {row} of them now.")),
    Story(_reading, (
        ("{name} reads {a} pages a day for {b} days and finishes the rest at {c} pages a day in {d} days. How long is the book?",
         "During the first stretch {he} reads {a} * {b} = {ab} pages. The faster or slower second stretch adds {c} * {d} = {cd} pages. "
         "Put together, {ab} + {cd} = {p}, so the book has {p} pages."),
        ("A printer works {b} days at {a} posters per day, then {d} days at {c} per day. How many posters does the shop in {town} get?",
         "We treat the two speeds apart. At the first one it prints {b} * {a} = {ab} posters, at the other one {d} * {c} = {cd}. "
         "The sum is {ab} + {cd} = {p}, and the shop receives {p} posters."),
    ), ("How many days is that altogether?",
        "Add the lengths of both periods and forget the pages for a moment: {b} + {d} = {bd} days altogether.")),
    Story(_wages, (
        ("{name} works {a} hours at {w} dollars an hour and {b} extra hours that pay {e} dollars more. What does {he} earn?",
         "Normal pay comes to {a} * {w} = {aw} dollars. An extra hour is worth {w} + {e} = {v} dollars, so those hours bring in "
         "{b} * {v} = {bv}. Altogether {name} earns {aw} + {bv} = {t} dollars."),
        ("A workshop in {town} sells {a} chairs for {w} dollars each and {b} painted ones for {e} dollars more. How much money is that?",
         "Plain chairs first: they bring {w} * {a} = {aw} dollars. The painted kind costs {w} + {e} = {v}, which adds {v} * {b} = {bv}. "
         "In total the workshop takes in {aw} + {bv} = {t} dollars."),
    ), ("What would four such weeks bring?",
        "Four equal weeks mean four times the money, that is 4 * {t} = {four} dollars.")),
    Story(_tank, (
        ("A tank holds {s} liters. Each minute {i} liters flow in and {o} flow out. What does it hold after {m} minutes?",
         "The level rises by the difference of both flows, {i} - {o} = {net} liters a minute. During the given time it gains "
         "{net} * {m} = {nm} liters. Added to the start, {s} + {nm} = {t}. The tank then holds {t} liters."),
        ("{name} has {s} points in a game. Every round wins {i} points and costs {o}. What is the score after {m} rounds?",
         "One round is worth {i} - {o} = {net} points after the cost. All rounds together earn {m} * {net} = {nm}. "
         "The old score counts too: {nm} + {s} = {t}. {name} reaches {t} points."),
    ), ("By how much did it grow?", "Take the start from the end: {t} - {s} = {half}. It grew by exactly this amount, {half}.")),
    Story(_tickets, (
        ("Tickets in {town} cost {p} dollars for adults and {q} for children. What do {a} adults and {b} children pay?",
         "Handle the grown-ups first: {a} * {p} = {ap} dollars. For the young ones it is {b} * {q} = {bq} dollars. "
         "The family pays {ap} + {bq} = {t} dollars at the gate."),
        ("{name} orders {a} large cakes at {p} dollars and {b} small ones at {q} dollars. How much is the order?",
         "The big ones come to {p} * {a} = {ap}, while the little ones come to {q} * {b} = {bq}. If we add both amounts we get "
         "{ap} + {bq} = {t}. The order costs {t} dollars."),
    ), ("They have a coupon for {d} dollars.",
        "A coupon is taken off at the very end, so {t} - {d} = {td}. With it only {td} dollars have to be paid.")),
    Story(_sale, (
        ("A {prize} costs {price} dollars and is now {pc} percent off. What do {k} of them cost?",
         "A reduction of {pc} percent is one part in {n}, so {price} / {n} = {off} dollars are saved on one. The sale price is "
         "{price} - {off} = {new}. For the whole purchase, {k} * {new} = {t} dollars are due."),
        ("{name} gets {pc} percent off the usual {price} dollars for a {prize} and buys {k}. How much does {he} spend?",
         "Find the discount to begin with: {price} / {n} = {off}. Each one is therefore sold at {price} - {off} = {new} dollars. "
         "Buying several multiplies this, {new} * {k} = {t}. {name} spends {t} dollars."),
    ), ("How much money was saved?", "The discount applies to every piece. This saves {k} * {off} = {saved} dollars in total.")),
    Story(_sharing, (
        ("{name} and {friend} share {n} {good} so that {name} gets {d} more. How many does each of them get?",
         "Put the extra ones aside: {n} - {d} = {even}. The remainder is split fairly, {even} / 2 = {half}, and that is the part of "
         "{friend}. {name} also takes the extra ones, {half} + {d} = {more}. They get {more} and {half}."),
        ("A rope of {n} meters is cut in two, and one piece is {d} meters longer. How long are the pieces?",
         "Without the difference both pieces would be equal. So remove it, {n} - {d} = {even}, and halve the result: {even} / 2 = {half} "
         "meters. The longer one measures {half} + {d} = {more}. The pieces are {half} and {more} meters."),
    ), ("What if the smaller part loses 3?",
        "Then the smaller part shrinks to {half} - 3 = {g}, while the larger one stays as it was.")),
)  # fmt: skip
