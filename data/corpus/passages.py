"""Questions over a short passage, answered in a full sentence with the reason.

Answers name the fact in other words than the passage, so that copying from the prompt does not produce them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from aerie.data.corpus.families import MONTHS, TOWNS, WEEKDAYS, Turn, in_words, people

Values = dict[str, str]


@dataclass(frozen=True)
class Passage:
    """A text with open slots, what fills them, and question and answer pairs."""

    fill: Callable[[Random], Values]
    text: str
    questions: tuple[tuple[str, str], ...]


def draw(generator: Random) -> list[Turn]:
    """A passage with one question, then two more about the same passage."""
    passage = generator.choice(PASSAGES)
    first, second = people(generator, 2)
    values = {
        "name": first.name,
        "he": first.subject,
        "his": first.possessive,
        "him": first.object,
        "friend": second.name,
    }
    values |= {"He": first.subject.title(), "His": first.possessive.title(), "town": generator.choice(TOWNS)}
    values |= {"day": generator.choice(WEEKDAYS), "month": generator.choice(MONTHS), **passage.fill(generator)}
    asked = generator.sample(passage.questions, 3)
    turns = [Turn(question.format(**values), answer.format(**values)) for question, answer in asked]
    style = generator.choice(
        ("{text}\n\n{question}", "Read this: {text}\n\nQuestion: {question}", "{question}\n\nText: {text}")
    )
    opening = style.format(text=passage.text.format(**values), question=turns[0].question)
    return [Turn(opening, turns[0].answer), *turns[1:]]


def _pick(**choices: str) -> Callable[[Random], Values]:
    """Fills every slot with one of its options, which commas separate."""
    options = {slot: [option.strip() for option in text.split(",")] for slot, text in choices.items()}
    return lambda generator: {slot: generator.choice(words) for slot, words in options.items()}


def _counts(fill: Callable[[Random], Values], **ranges: tuple[int, int]) -> Callable[[Random], Values]:
    """The same, with numbers in words for some slots."""

    def filled(generator: Random) -> Values:
        return fill(generator) | {slot: in_words(generator.randint(*bounds)) for slot, bounds in ranges.items()}

    return filled


PASSAGES = (
    Passage(
        _pick(shop="bakery, bookshop, flower shop, toy store, tea house", cause="a broken pipe, a power cut, a burst boiler, a fallen tree",
              helper="neighbors, students, firefighters, customers"),
        "{name} runs a small {shop} in {town}. On {day} it had to close because of {cause}. The {helper} came to help, and two days later "
        "the doors were open again.",
        (("Why was the {shop} closed?",
          "It could not open since {cause} had caused trouble that day. Nobody works safely under such conditions, so closing was "
          "the sensible choice for {name}."),
         ("Who helped {name}?",
          "The text mentions the {helper}. Thanks to them the work went quickly, which explains why business could start again after "
          "such a short time."),
         ("How long did the problem last?",
          "About two days. We know this from the end of the story, where the place opens again for everyone."),
         ("Where does this happen?", "Everything takes place in {town}, the home of the {shop}.")),
    ),
    Passage(
        _counts(_pick(animal="fox, owl, hedgehog, swan, deer", spot="a barn, the river, a playground, an old mill",
                      injury="wing, leg, foot, eye"), weeks=(2, 9)),
        "On a cold evening in {month}, {name} found a young {animal} near {spot}. Its {injury} was hurt. {He} called {friend}, a vet, who cared "
        "for it for {weeks} weeks until it could return to the wild.",
        (("Why did {name} call {friend}?",
          "{He} needed an expert. The {animal} had a hurt {injury}, and as a vet {friend} knew how to treat an animal in that state."),
         ("What happened to the {animal} in the end?",
          "It got well and was set free. The treatment took some time, {weeks} weeks to be exact, but after that nature was its home once more."),
         ("Where was the animal?", "It was discovered not far from {spot}, where {name} happened to pass by in the evening."),
         ("When did this happen?", "During {month}. The passage adds that the evening was cold.")),
    ),
    Passage(
        _counts(_pick(place="museum, castle, lighthouse, theater, library", reason="the roof leaked, the stairs were unsafe, the paint was "
                      "poisonous, the floor had sunk"), years=(2, 9), rooms=(3, 12)),
        "The old {place} of {town} was shut for {years} years because {reason}. Since {month} visitors can see {rooms} rooms again. "
        "The entrance is free on {day}.",
        (("Why was the {place} shut for so long?",
          "The building was not safe: {reason}. Repairs of that kind are slow and expensive, and so the public had to wait {years} years."),
         ("On which day should I go to save money?",
          "Choose {day}. You do not have to pay on that day of the week, while other days probably cost something."),
         ("How much of it can be visited?", "At the moment {rooms} rooms are open. The passage does not say whether more will follow."),
         ("Since when is it open?", "It opened its doors again in {month}, after all the work was done.")),
    ),
    Passage(
        _counts(_pick(plant="basil, cactus, fern, orchid, rose", place="kitchen, bathroom, balcony, office, hallway",
                      mistake="too much water, too little light, cold air, very dry soil"), days=(3, 12)),
        "{name} got a {plant} from {friend} and put it in the {place}. After {days} days the leaves turned brown. A gardener blamed {mistake}. "
        "{name} changed that, and by {month} the plant had new leaves.",
        (("What was wrong with the {plant}?",
          "According to the gardener the cause was {mistake}. The brown leaves were a sign that something had to change, and after the "
          "change the plant recovered."),
         ("Who gave {name} the plant?", "It was a present. {friend} is named as the giver at the very beginning."),
         ("How quickly did the trouble show?",
          "Rather soon. It took no more than {days} days for the color of the leaves to change, so {name} noticed it early."),
         ("Did the plant survive?", "Yes, it did. The new growth in {month} proves that it is healthy again.")),
    ),
    Passage(
        _counts(_pick(sport="rowing, tennis, running, swimming, chess", rival="Dover, Salem, Kent, Turin, Oslo",
                      trouble="heavy rain, a late bus, strong wind, an injury"), points=(2, 9)),
        "The {sport} team of {town} met its rival from {rival} on {day}. Despite {trouble}, {name} and {friend} won by {points} points. "
        "The coach thanked the fans, who had stayed until the end.",
        (("Was it an easy win?",
          "Not at all. They had to deal with {trouble}, which usually makes {sport} harder. Still, the final lead of {points} points was clear."),
         ("Whom did the coach thank?",
          "The thanks went to the supporters. They did not leave early, and a loyal crowd can give a team strength."),
         ("Who was the opponent?", "The opponent came from {rival}. It is described as a rival, so both sides know each other well."),
         ("Who scored the victory?", "Two players are named, {name} together with {friend}. Both belong to the team of {town}.")),
    ),
    Passage(
        _counts(_pick(thing="wallet, violin, suitcase, laptop, umbrella", vehicle="bus, tram, train, taxi, ferry",
                      reward="a cake, flowers, concert tickets, a handmade scarf"), hours=(2, 9)),
        "{name} left a {thing} in the {vehicle} to {town}. The driver, {friend}, saw it, looked for a phone number and called. {hours} "
        "hours later it was back, and {name} brought {reward} to say thanks.",
        (("How did the owner get the {thing} back?",
          "An honest driver made it possible. {friend} searched for a way to reach {name} and made a phone call, instead of keeping "
          "what was not {friend}'s own."),
         ("What did {friend} receive?", "The reward was {reward}. With this gift {name} wanted to show how glad {he} was."),
         ("How long was it gone?", "Only for {hours} hours. That is lucky, because lost things often never return."),
         ("Where was it forgotten?", "It was forgotten on the way to {town}, inside a {vehicle}.")),
    ),
    Passage(
        _counts(_pick(food="honey, cheese, olive oil, jam, chocolate", drop="a dry spring, late frost, high costs, a new disease",
                      plan="sell online, open a shop, offer tours, hire a cook"), percent=(2, 9)),
        "A family farm near {town} makes {food}. Last year its sales fell by {percent} percent after {drop}. {name}, the owner, now wants to "
        "{plan} and hopes for better numbers in {month}.",
        (("Why did the sales fall?",
          "The drop followed {drop}. Less could be produced or sold than usual, and this explains the loss of {percent} percent."),
         ("What does {name} plan to do?",
          "The idea is to {plan}. With such a step the farm can reach more people who like {food}, and the income may rise again."),
         ("What does the farm produce?", "Its product is {food}, made by a family that lives close to {town}."),
         ("When is an improvement expected?", "The hope is for {month}. Nobody can be sure, but there is a clear plan.")),
    ),
    Passage(
        _counts(_pick(material="copper, glass, wood, rubber, steel", finding="became warm in the sun, bent a little under load, weighed more "
                      "than expected, made a dull sound, kept its shape", tool="scale, lamp, hammer, camera"), times=(3, 12)),
        "In the science class of {friend}, {name} tested a piece of {material} with a {tool}. After {times} trials {he} wrote that the sample "
        "{finding}. The result will be shown in {town} on {day}.",
        (("What did {name} learn about the sample?",
          "The notes say that it {finding}. Since the trial was repeated {times} times, the statement does not rest on chance."),
         ("Which tool was used?", "The tool was a {tool}. Without it {name} could not have observed the {material} so closely."),
         ("Where can people see the result?", "It goes on show in {town}. Anyone who is interested should come on {day}."),
         ("Who teaches the class?", "The teacher is {friend}, and {name} is one of the pupils.")),
    ),
)  # fmt: skip
