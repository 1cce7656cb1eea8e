"""The people, towns and small words that the task families draw from."""

from dataclasses import dataclass
from random import Random
from typing import Protocol

WOMEN = (
    "Ada Alice Amara Anna Beth Carla Chloe Clara Dana Diana Elena Ella Emma Erin Esther Fatima Flora Grace Hana Hannah "
    "Helen Ida Ines Irene Iris Jane Julia Kate Laura Lena Lily Lucy Mara Maria Maya Mina Nadia Nina Nora Olga Olivia "
    "Paula Priya Rita Rosa Ruth Sara Sofia Tara Vera Yuki Zoe"
).split()
MEN = (
    "Adam Ahmed Alan Alex Anton Ben Boris Carl Chen Daniel David Diego Emil Eric Felix Finn Frank George Hassan Henry "
    "Hugo Ivan Jack Jacob James Jonas Karl Kofi Leo Liam Luca Luis Marco Mark Martin Max Milo Nils Noah Omar Oscar Otto "
    "Paul Pedro Peter Ravi Sam Simon Theo Thomas Victor Walter"
).split()
SURNAMES = (
    "Adler Baker Brandt Carter Castillo Chandra Cooper Dalton Evans Fischer Foster Garcia Grant Hansen Hughes Ito Keller "
    "Kim Larsen Lopez Mason Meyer Moreno Murphy Novak Okafor Olsen Parker Patel Price Quinn Reed Rossi Sato Shaw Silva "
    "Stone Turner Wagner Walsh Weber Young"
).split()
TOWNS = (
    "Ashford Bergen Bristol Calder Dover Elmwood Fairview Geneva Halden Ipswich Jasper Kent Linden Lisbon Milford Newport "
    "Oakdale Oslo Porto Quincy Ridgeway Salem Taunton Turin Utrecht Vernon Weston York"
).split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
SMALL_NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()


@dataclass(frozen=True)
class Person:
    """A name and its pronouns."""

    name: str
    subject: str
    possessive: str
    object: str


def people(generator: Random, count: int) -> list[Person]:
    """Distinct people, women and men mixed."""
    chosen = generator.sample([(name, True) for name in WOMEN] + [(name, False) for name in MEN], count)
    return [Person(n, "she", "her", "her") if woman else Person(n, "he", "his", "him") for n, woman in chosen]


def multiple(generator: Random, low: int, high: int, step: int = 1) -> int:
    """A multiple of step in [low, high], both ends of which are multiples themselves."""
    return generator.randrange(low, high + 1, step)


def in_words(number: int) -> str:
    """'seven' for 7; digits above twelve."""
    return SMALL_NUMBERS[number] if number < len(SMALL_NUMBERS) else str(number)


def listing(parts: list[str]) -> str:
    """'a, b and c'."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def sentence(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


@dataclass(frozen=True)
class Turn:
    """What the user asks and what the assistant answers."""

    question: str
    answer: str


def merged(first: Turn, second: Turn) -> Turn:
    """Both questions in one turn, and both answers, each in a paragraph of its own."""
    gap = "\n\n" if "\n" in first.question else " "
    return Turn(f"{first.question}{gap}{second.question}", f"{first.answer}\n\n{second.answer}")


class Family(Protocol):
    """A task family: the first turn and the follow-ups that build on it, drawn afresh at each call."""

    def __call__(self, generator: Random) -> list[Turn]: ...


@dataclass(frozen=True)
class Occasion:
    """What the letter is for (the user's words), its body, a line that can be added, and the reply."""

    purpose: str
    formal: bool
    details: str  # options of the slot {detail}, separated by commas
    body: str
    addition: tuple[str, str]
    reply: str


OCCASIONS = (
    Occasion("invite a friend to {detail}", False,
             "a birthday party, a picnic, a house warming, a game night, a garden party",
             "I am planning {detail} and it would not be the same without you. Come to my place in {town} on {day} around {hour}. There will be "
             "music, good food and plenty of time to talk. You only need to bring yourself, but a dessert is always welcome!",
             ("what to wear", "Wear something comfortable, as we will spend most of the time outside."),
             "thanks for thinking of me! Of course I will be there on {day}, and I am bringing a lemon tart."),
    Occasion("thank a friend for {detail}", False,
             "the lovely scarf, the concert ticket, help with moving, the cook book, a ride to the airport",
             "Thank you so much for {detail}. It made my whole week brighter, and I still smile when I think about it. You always seem to know "
             "what I need before I do. Let me return the favor soon: dinner is on me on {day}, if you happen to be in {town}.",
             ("my new job", "By the way, I have started a new job and I like it a lot."),
             "it was my pleasure! Dinner sounds perfect, so let us say seven o'clock at the usual corner."),
    Occasion("say sorry to a friend for {detail}", False,
             "missing the party, a late answer, the broken vase, forgetting our call, losing the key",
             "I owe you an apology for {detail}. There is no good excuse, I simply was not careful enough that week. Our friendship matters to me, "
             "and I want to make things right. Could we meet in {town} on {day}? The coffee is on me, and I promise to be on time.",
             ("a small present", "I also have a small present for you, as a sign that I mean it."),
             "do not worry, I am not angry any more. {day} works, and coffee is always a good start."),
    Occasion("congratulate a friend on {detail}", False,
             "the new baby, passing the exam, the wedding, a promotion, the first marathon",
             "What wonderful news! I jumped up from my chair when I heard about {detail}. You have worked hard and waited long, and nobody deserves "
             "this joy more than you. I would love to celebrate with you in {month}, so keep a weekend free for your old friend.",
             ("our school days", "Do you remember how we dreamed of such days back at school?"),
             "your message means a lot to me. Yes, we must celebrate; any weekend in {month} is fine."),
    Occasion("tell my family about {detail}", False,
             "my trip to the coast, the new flat, my first week at work, the hiking tour, the language course",
             "Greetings from {town}! Let me tell you a little about {detail}. The first day was confusing, yet by {day} everything felt familiar. "
             "People here are friendly, the food is better than expected, and I sleep like a stone. I miss you all and will call at {hour}.",
             ("the weather", "The weather changes every hour, from bright sun to sudden rain."),
             "we were so happy to read your lines. Call whenever you like, someone is always at home."),
    Occasion("apply for a job as {detail}", True,
             "a nurse, a gardener, an office clerk, a driver, a librarian",
             "I am writing to apply for the position of {detail} that was advertised in {month}. For several years I have done similar work in {town}, "
             "where I learned to stay calm and exact under pressure. I would be glad to introduce myself in person, for instance on {day}. "
             "My references are enclosed.",
             ("my language skills", "In addition, I speak French and Spanish fluently."),
             "thank you for your application. We would like to meet you on {day} at ten in our office."),
    Occasion("complain about {detail}", True,
             "a broken heater, a late delivery, the noise next door, a wrong invoice, a rude clerk",
             "I regret to inform you of a problem with {detail}. In spite of two phone calls nothing has happened since {month}. I must ask you to solve "
             "the matter by {day} at the latest; otherwise I shall have to look for another company. A short confirmation would be appreciated.",
             ("a refund", "I also expect a partial refund for the trouble this has caused."),
             "please accept our apologies. A colleague will contact you before {day} to settle the issue."),
    Occasion("ask my manager for leave because of {detail}", True,
             "a family visit, a medical check, a wedding abroad, an exam, a house move",
             "I would like to request three days of leave, starting on {day}, because of {detail}. All urgent tasks will be finished before, and a "
             "colleague from the {town} team has agreed to answer my calls. Please let me know whether this suits the schedule for {month}.",
             ("working from home", "If needed, I could work from home on one of these days."),
             "your leave is approved. Please hand over the open tasks before {day} and enjoy the time."),
    Occasion("resign from my job as {detail}", True,
             "a teacher, a sales agent, a cook, an engineer, a night guard",
             "Please accept this letter as notice that I will leave my post as {detail} at the end of {month}. The years with the company in {town} have "
             "taught me a great deal, and I am grateful for the trust I received. I will gladly help to train the person who follows me.",
             ("the reason", "The reason is purely personal, as I am moving closer to my parents."),
             "we accept your notice with regret. Thank you for the excellent work, and let us stay in touch after {month}."),
    Occasion("ask the city office about {detail}", True,
             "a building permit, a parking card, the new bus line, a dog license, the library hours",
             "I have a question about {detail} and could not find an answer on your website. Could you tell me which papers are required and how long the "
             "process takes? As I work in {town}, I can only visit the counter on {day} after {hour}. Any advice would be very helpful.",
             ("the fee", "It would also help me to know the fee in advance."),
             "thank you for your question. Bring your passport on {day}; the process usually takes one week."),
)  # fmt: skip
ASKING = (
    "Write a short letter to {recipient} to {purpose}. Sign as {sender}. Mention {facts}.",
    "Can you help me {purpose}? The letter goes to {recipient}, facts: {facts}. My name is {sender}.",
    "I am {sender} and want to {purpose}. Please draft a few lines to {recipient} ({facts}).",
)
CLOSINGS = {
    True: ("Yours sincerely", "Kind regards", "With best regards"),
    False: ("See you soon", "All the best", "Warm hugs"),
}


def draw(generator: Random) -> list[Turn]:
    """A letter, then an added line or the reply."""
    occasion = generator.choice(OCCASIONS)
    sender, friend = generator.sample(WOMEN + MEN, 2)
    surname = generator.choice(SURNAMES)
    title = "Ms." if sender in WOMEN else "Mr."
    recipient = f"{generator.choice(('Ms.', 'Mr.'))} {surname}" if occasion.formal else friend
    full = f"{sender} {generator.choice(SURNAMES)}" if occasion.formal else sender
    values = {"detail": generator.choice(occasion.details.split(",")).strip(), "town": generator.choice(TOWNS)}
    values |= {
        "day": generator.choice(WEEKDAYS),
        "month": generator.choice(MONTHS),
        "hour": f"{generator.randint(1, 9)} o'clock",
    }
    used = [values[slot] for slot in ("town", "day", "hour", "month") if f"{{{slot}}}" in occasion.body]
    style = generator.randrange(len(ASKING))
    purpose = occasion.purpose.format(**values)
    question = ASKING[style].format(recipient=recipient, purpose=purpose, sender=full, facts=listing(used))
    greeting = "Dear" if occasion.formal else ("Dear", "Hi", "Hello")[style]
    answer = (
        f"{greeting} {recipient},\n\n{occasion.body.format(**values)}\n\n{CLOSINGS[occasion.formal][style]},\n{full}"
    )
    return [Turn(question, answer), *_next(generator, occasion, values, full, recipient, title)]


def _next(
    generator: Random, occasion: Occasion, values: dict[str, str], sender: str, recipient: str, title: str
) -> list[Turn]:
    topic, line = occasion.addition
    added = Turn(f"Please add a sentence about {topic}.", f'You could put this right before the closing: "{line}"')
    address = f"{title} {sender.split()[-1]}" if occasion.formal else sender
    reply = Turn(f"Now write the answer from {recipient}.",
                 f"Dear {address},\n\n{occasion.reply.format(**values)}\n\n{'Respectfully' if occasion.formal else 'Cheers'},\n{recipient}")  # fmt: skip
    return [added, reply] if generator.random() < 0.5 else [reply, added]


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
ASKING_schedules = (
    "Plan a {event} in {town} for {name}. It starts at {start}. {parts}.",
    "{name} needs a timetable for a {event} that begins at {start}: {parts}.",
    "Make a schedule: {event}, start {start}, {parts}.",
)
OPENING = (
    "Here is a plan for the {event} in {town}:",
    "This timetable should work for {name}:",
    "The {event} could run like this:",
)


def draw_schedules(generator: Random) -> list[Turn]:
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
    style = generator.randrange(len(ASKING_schedules))
    question = ASKING_schedules[style].format(**values, parts=listing(lengths))
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


def draw_tables(generator: Random) -> list[Turn]:
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
