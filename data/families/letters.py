"""Short letters for an occasion, formal or informal, and what people ask for next."""

from dataclasses import dataclass
from random import Random

from data.families.lexicon import MEN, MONTHS, SURNAMES, TOWNS, WEEKDAYS, WOMEN, listing
from data.families.turn import Turn


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
