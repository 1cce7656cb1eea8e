"""Plans with clock times: how a day or an event unfolds when every part has a length."""

from dataclasses import dataclass
from random import Random

from data.families.lexicon import TOWNS, listing, people
from data.families.turn import Turn


@dataclass(frozen=True)
class Event:
    """A kind of event: its parts in order and a remark for each, and advice for the end."""

    name: str
    parts: tuple[tuple[str, str], ...]
    advice: str


EVENTS = (
    Event("workshop", (("welcome", "everybody gets a name tag"), ("lecture", "questions are collected"), ("exercise", "pairs work together"),
                       ("discussion", "each pair reports"), ("cleaning", "chairs go back")), "Print the handouts the day before."),
    Event("hike", (("warm-up", "shoes are checked"), ("climb", "walk slowly"), ("rest", "water and fruit"), ("descent", "mind the loose stones"),
                   ("bus ride", "the tickets are in the blue bag")), "Take rain jackets, even if the sky is clear."),
    Event("birthday party", (("arrival", "gifts go on the table"), ("games", "prizes for all"), ("cake", "candles first"), ("puppet show",
                             "the curtain needs two hooks"), ("farewell", "hand out balloons")), "Ask the parents about allergies."),
    Event("training", (("stretching", "start gently"), ("sprints", "with short breaks"), ("drills", "in two teams"), ("match", "seven on each side"),
                       ("cool-down", "easy jogging")), "Remember that beginners tire sooner."),
    Event("concert", (("sound check", "drums before voices"), ("opening act", "lights stay low"), ("main act", "no photos please"),
                      ("encore", "one slow piece"), ("clearing the hall", "side doors open")), "Keep the side exit free at all times."),
    Event("cooking class", (("shopping", "bring two baskets"), ("chopping", "sharp knives only"), ("simmering", "stir now and then"),
                            ("tasting", "season at the end"), ("dishes", "hot water helps")), "A clean apron saves trouble."),
    Event("school trip", (("roll call", "count twice"), ("museum tour", "with audio guides"), ("lunch", "sandwiches in the park"),
                          ("boat ride", "life vests on"), ("return", "call the parents")), "Two adults should walk at the back."),
    Event("market day", (("unloading", "use the north gate"), ("setting up", "tables under the roof"), ("selling", "coins in the small box"),
                         ("counting", "in pairs, to be safe"), ("packing", "leftovers are shared")), "Bring change for small notes."),
)  # fmt: skip
ASKING = (
    "Plan a {event} in {town} for {name}. It starts at {start}. {parts}.",
    "{name} needs a timetable for a {event} that begins at {start}: {parts}.",
    "Make a schedule: {event}, start {start}, {parts}.",
)
OPENING = (
    "Here is a plan for the {event} in {town}:",
    "This timetable should work for {name}:",
    "The {event} could run like this:",
)


def draw(generator: Random) -> list[Turn]:
    """A timetable, then a delay and a question about the end."""
    event = generator.choice(EVENTS)
    start, lengths = generator.randint(7, 16) * 60 + generator.choice((0, 0, 30)), []
    parts = sorted(generator.sample(range(5), generator.choice((3, 3, 4))))
    moment, lines = start, []
    for part in parts:
        title, remark = event.parts[part]
        length = generator.choice((10, 15, 20, 30, 45, 60))
        lengths.append(f"{title} {length} minutes")
        lines.append(f"{clock(moment)} {title}: {remark}")
        moment += length
    values = {
        "event": event.name,
        "town": generator.choice(TOWNS),
        "name": people(generator, 1)[0].name,
        "start": clock(start),
    }
    style = generator.randrange(len(ASKING))
    question = ASKING[style].format(**values, parts=listing(lengths))
    answer = OPENING[style].format(**values) + "\n\n" + "\n".join(lines) + f"\n{clock(moment)} end\n\n{event.advice}"
    delay = generator.choice((10, 15, 20, 30))
    late = Turn(f"We will be {delay} minutes late.",
                f"Then everything moves back by {delay} minutes: you begin at {clock(start + delay)} and are done at "
                f"{clock(moment + delay)}. The order stays the same.")  # fmt: skip
    total = Turn(
        "How long is it in total?",
        f"From {clock(start)} until {clock(moment)} it is {moment - start} minutes, breaks included.",
    )
    return [Turn(question, answer), *((late, total) if generator.random() < 0.5 else (total, late))]


def clock(minutes: int) -> str:
    """'9:05' for 545 minutes after midnight."""
    return f"{minutes // 60}:{minutes % 60:02d}"
