"""Unit conversions, worked: the rule, the step with numbers, the result in a sentence."""

from dataclasses import dataclass
from random import Random

from aerie.data.corpus.families import Turn, multiple, people


@dataclass(frozen=True)
class Scale:
    """One large unit is `factor` small ones; `subjects` are things that are measured so."""

    large: str  # plural
    large_one: str
    small: str
    factor: int
    subjects: tuple[str, ...]
    remark: str


SCALES = (
    Scale("kilometers", "kilometer", "meters", 1000, ("the path around the lake", "a morning run", "the old bridge"),
          "Walking the larger unit takes about a quarter of an hour at a good pace."),
    Scale("meters", "meter", "centimeters", 100, ("a kitchen shelf", "a roll of ribbon", "a garden fence"),
          "A long step of a grown person is roughly the larger unit."),
    Scale("centimeters", "centimeter", "millimeters", 10, ("a screw", "a paper strip", "a pencil stub"),
          "On a ruler these are the long lines and the short ones between them."),
    Scale("feet", "foot", "inches", 12, ("a window board", "a ladder", "a wooden plank"),
          "Carpenters in America still use this pair every day."),
    Scale("yards", "yard", "feet", 3, ("a piece of cloth", "a school lawn", "a chain"),
          "Golf courses and football fields are marked this way."),
    Scale("kilograms", "kilogram", "grams", 1000, ("a sack of rice", "a parcel", "a large pumpkin"),
          "The prefix tells us the factor, because kilo stands for a thousand."),
    Scale("pounds", "pound", "ounces", 16, ("a bag of coffee", "a loaf of bread", "a small dog toy"),
          "Careful, another kind of ounce exists for liquids."),
    Scale("tons", "ton", "kilograms", 1000, ("a truck load of sand", "a boat", "a stone block"),
          "I assume the metric kind here, as most countries do."),
    Scale("hours", "hour", "minutes", 60, ("a concert", "a train ride", "a cooking class"),
          "Think of the long hand of a clock, which goes round once."),
    Scale("minutes", "minute", "seconds", 60, ("a song", "a short film", "an egg timer"),
          "A calm heart beats about once in the smaller unit."),
    Scale("days", "day", "hours", 24, ("a sea voyage", "a festival", "the repair of a roof"),
          "The earth turns around itself in that time."),
    Scale("weeks", "week", "days", 7, ("a summer course", "a school project", "a road closure"),
          "Calendars show this as one row from Monday to Sunday."),
    Scale("years", "year", "months", 12, ("a phone contract", "a guarantee", "the lease of a shop"),
          "Leap years do not matter for this count."),
    Scale("liters", "liter", "milliliters", 1000, ("a jug of juice", "a fish bowl", "a can of paint"),
          "A cube with edges of ten centimeters holds the larger one."),
    Scale("gallons", "gallon", "quarts", 4, ("a barrel of cider", "a bucket", "a pot of stew"),
          "The name of the smaller unit comes from the word for a fourth part."),
)  # fmt: skip

DOWN = (  # large to small: question, answer
    (
        "How many {small} are {n} {large}?",
        "One {one} equals {f} {small}. Going to the smaller unit means multiplying, so {n} * {f} = {m}. Therefore the result is {m} {small}.",
    ),
    (
        "Convert {n} {large} to {small}, please. It is for {subject}.",
        "Here we go from a big unit to a little one, and the number has to become larger. Each {one} contains {f} {small}: {n} * {f} = {m}. "
        "In the smaller unit, {subject} comes to {m} {small}.",
    ),
    (
        "{name} noted {n} {large} for {subject}, but the form asks for {small}. What should {name} write?",
        "{name} should write {m}. The reason is simple: there are {f} {small} in a {one}, and {n} * {f} = {m}. "
        "Do not forget to put the new unit, {small}, behind the number.",
    ),
    (
        "I need {subject} in {small}. All I know is that it is {n} {large}.",
        "No problem. Multiply by the factor between the two units, which is {f} for {large} and {small}. This gives {n} * {f} = {m}, "
        "so you can use {m} {small} from now on.",
    ),
)
UP = (  # small to large
    (
        "How many {large} are {m} {small}?",
        "We need {f} {small} to make one {one}. Going to the larger unit means dividing: {m} / {f} = {n}. That makes {n} {large} in total.",
    ),
    (
        "Convert {m} {small} to {large}, please. It is for {subject}.",
        "This time the unit gets bigger, so the number must shrink. Divide by {f}, because a {one} is made of {f} {small}: "
        "{m} / {f} = {n}. Hence {subject} comes to {n} {large}.",
    ),
    (
        "{name} measured {m} {small} for {subject}. The label should show {large}. What goes on the label?",
        "The label should show {n}. To see why, remember that every {one} has {f} {small}. Dividing gives {m} / {f} = {n}, "
        "and the unit on the label is {large}.",
    ),
    (
        "I would like to know {subject} in {large}, not in {small}. The value is {m}.",
        "Sure. Group the {small} in sets of {f}, since that is what one {one} holds. You get {m} / {f} = {n} full sets, "
        "or in other words {n} {large}.",
    ),
)
MIXED = (
    (
        "What is {n} {large} and {r} {small} in {small}?",
        "Only the first part has to be changed. It becomes {n} * {f} = {m} {small}. After that we add the part that was fine already: "
        "{m} + {r} = {t}. Altogether this is {t} {small}.",
    ),
    (
        "{name} says that {subject} takes {n} {large} and {r} {small}. Express that with a single number.",
        "Let us use {small} for everything. From the {large} we obtain {n} * {f} = {m}, and the remaining part brings it to "
        "{m} + {r} = {t}. As a single number, {name} can say {t} {small}.",
    ),
)
HEAT = (
    (
        "What is {c} degrees Celsius in Fahrenheit?",
        "Multiply by nine, divide by five and add 32. Step one: {c} * 9 = {c9}. Step two: {c9} / 5 = {c95}. Step three: {c95} + 32 = {f}. "
        "The thermometer would show {f} degrees Fahrenheit.",
    ),
    (
        "{name} reads {c} degrees Celsius on the oven. Which Fahrenheit value belongs to it?",
        "The Fahrenheit scale has smaller steps and another zero. Nine fifths of the value: first {c} / 5 = {c5}, then {c5} * 9 = {c95}. "
        "Now shift the zero, {c95} + 32 = {f}. {name} should look for {f} on the other scale.",
    ),
)


def draw(generator: Random) -> list[Turn]:
    """One conversion and what follows from it."""
    return generator.choice((_plain, _plain, _plain, _mixed, _heat))(generator)


def _plain(generator: Random) -> list[Turn]:
    scale = generator.choice(SCALES)
    n, k = generator.randint(2, 12), generator.randint(2, 6)
    values = _values(scale, generator, n) | {
        "k": k,
        "nk": n + k,
        "mk": (n + k) * scale.factor,
        "half": n * scale.factor // 2,
    }
    question, answer = generator.choice(DOWN + UP)
    more = ("And if it were {k} {large} more?",
            "Then we start from {n} + {k} = {nk} {large}, and the same rule leads to {nk} * {f} = {mk} {small}.")  # fmt: skip
    half = ("What about half of that, in {small}?",
            "Half of the amount is easy to find in the smaller unit: {m} / 2 = {half}, so it is {half} {small}.")  # fmt: skip
    follow = half if n * scale.factor % 2 == 0 and generator.random() < 0.5 else more
    return _turns(values, ((question, f"{answer} {scale.remark}"), follow))


def _mixed(generator: Random) -> list[Turn]:
    scale = generator.choice(SCALES)
    n, rest = generator.randint(2, 9), _remainder(generator, scale.factor)
    total = n * scale.factor + rest
    values = _values(scale, generator, n) | {"r": rest, "t": total, "double": 2 * total}
    double = ("Now double it.", "Twice the time or length is 2 * {t} = {double}, and the unit is still {small}.")
    question, answer = generator.choice(MIXED)
    return _turns(values, ((question, f"{answer} {scale.remark}"), double))


def _heat(generator: Random) -> list[Turn]:
    celsius = multiple(generator, 5, 250, 5)
    values: dict[str, object] = {
        "name": people(generator, 1)[0].name,
        "c": celsius,
        "c9": celsius * 9,
        "c5": celsius // 5,
    }
    values |= {"c95": celsius * 9 // 5, "f": celsius * 9 // 5 + 32, "w": celsius + 5, "wf": celsius * 9 // 5 + 41}
    warmer = ("And five degrees more?",
              "Five Celsius degrees are nine Fahrenheit degrees, so the value rises to {f} + 9 = {wf}.")  # fmt: skip
    return _turns(values, (generator.choice(HEAT), warmer))


def _remainder(generator: Random, factor: int) -> int:
    """A part smaller than one large unit, round where the factor is large."""
    step = 50 if factor == 1000 else 5 if factor >= 60 else 1
    return step * generator.randint(1, max(1, factor // step - 1))


def _values(scale: Scale, generator: Random, count: int) -> dict[str, object]:
    subject = generator.choice(scale.subjects)
    return {"large": scale.large, "one": scale.large_one, "small": scale.small, "f": scale.factor, "subject": subject,
            "n": count, "m": count * scale.factor, "name": people(generator, 1)[0].name}  # fmt: skip


def _turns(values: dict[str, object], pairs: tuple[tuple[str, str], ...]) -> list[Turn]:
    return [Turn(question.format(**values), answer.format(**values)) for question, answer in pairs]
