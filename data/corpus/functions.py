"""Small Python functions: a specification in words, the code, why it works and one checked example."""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from aerie.data.corpus.families import WOMEN, Turn, in_words

WORDS = "apple river lemon stone garden window music paper silver ocean tiger bread cloud forest candle mirror".split()


@dataclass(frozen=True)
class Spec:
    """A function: what it does in words, its code, why it works, and how to make an example argument.

    Texts may use {name}, {x} (the argument) and {k} (a constant).
    """

    names: tuple[str, ...]
    arguments: tuple[str, ...]
    task: str
    body: str
    reason: str
    example: Callable[[Random, int], object]
    constants: tuple[int, ...] = (0,)
    doc: str = ""


def _numbers(generator: Random, _: int) -> list[int]:
    return generator.sample(range(1, 20), generator.randint(3, 4))


def _words(generator: Random, _: int) -> list[str]:
    return generator.sample(WORDS, 3)


def _word(generator: Random, _: int) -> str:
    return generator.choice(WORDS)


def _around(generator: Random, k: int) -> list[int]:
    return generator.sample(range(max(0, k - 6), k + 7), 4)


def _integer(generator: Random, _: int) -> int:
    return generator.randint(2, 9)


LISTS, TEXTS, NUMBER = (
    ("numbers", "values", "items", "data"),
    ("text", "word", "name", "line"),
    ("n", "number", "value", "count"),
)
SPECS = (
    Spec(("total", "add_all", "sum_list"), LISTS, "adds up a list of numbers",
         "    result = 0\n    for item in {x}:\n        result += item\n    return result",
         "The loop visits each element once and keeps a running sum.", _numbers),
    Spec(("count_above", "how_many_over", "num_large"), LISTS, "counts how many numbers are greater than {k}",
         "    return sum(1 for v in {x} if v > {k})",
         "The generator yields a one for every number that passes the test, and sum counts them.", _around, (3, 5, 8, 10)),
    Spec(("keep_above", "filter_large", "only_big"), LISTS, "keeps the numbers that are greater than {k}",
         "    kept = []\n    for v in {x}:\n        if v > {k}:\n            kept.append(v)\n    return kept",
         "A new list is filled in the original order, so the input stays untouched.", _around, (3, 5, 8, 10)),
    Spec(("multiply_by", "scale", "stretch"), LISTS, "multiplies every number by {k}",
         "    return [{k} * v for v in {x}]",
         "A list comprehension builds the scaled copy in a single line.", _numbers, (2, 3, 4, 5, 10)),
    Spec(("largest", "find_max", "biggest"), LISTS, "finds the largest number without using max",
         "    best = {x}[0]\n    for v in {x}[1:]:\n        if v > best:\n            best = v\n    return best",
         "We remember the best candidate so far and replace it whenever something larger shows up.", _numbers),
    Spec(("smallest", "find_min", "lowest"), LISTS, "finds the smallest number without using min",
         "    low = {x}[0]\n    for v in {x}:\n        low = v if v < low else low\n    return low",
         "The variable low only moves down, which is why it ends at the minimum.", _numbers),
    Spec(("reverse_text", "backwards", "flip"), TEXTS, "reverses a string",
         "    return {x}[::-1]",
         "A slice with step minus one walks through the characters from the end.", _word),
    Spec(("count_vowels", "num_vowels", "vowels_in"), TEXTS, "counts the vowels in a string",
         "    found = 0\n    for letter in {x}.lower():\n        if letter in \"aeiou\":\n            found += 1\n    return found",
         "Lower case letters are enough for the comparison, so the text is converted before the loop.", _word),
    Spec(("is_palindrome", "same_both_ways", "mirrored"), TEXTS, "checks whether a string is a palindrome",
         "    clean = {x}.lower()\n    return clean == clean[::-1]",
         "A palindrome is equal to its own reversal, and case should not matter.",
         lambda g, _: g.choice(("level", "radar", *WORDS))),
    Spec(("shout", "make_loud", "emphasize"), TEXTS, "returns a string in upper case with {k_word} exclamation marks",
         "    return {x}.upper() + \"!\" * {k}",
         "Multiplying a string repeats it, and the plus sign glues both parts together.", _word, (1, 2, 3)),
    Spec(("first_letters", "initials", "acronym"), ("words", "names", "terms"), "joins the first letters of a list of words",
         "    letters = [w[0].upper() for w in {x}]\n    return \"\".join(letters)",
         "Index zero picks the first character; join then turns the list into a string.", _words),
    Spec(("longest_word", "longest", "pick_longest"), ("words", "names", "terms"), "returns the longest word of a list",
         "    return max({x}, key=len)",
         "The key tells max to compare lengths and not the alphabetical order.", _words),
    Spec(("word_lengths", "measure", "lengths"), ("words", "names", "terms"), "returns the length of each word in a list",
         "    return [len(w) for w in {x}]",
         "Calling len on every element gives the numbers in the same order as the words.", _words),
    Spec(("factorial", "fact", "product_up_to"), NUMBER, "computes the factorial of a number",
         "    product = 1\n    for i in range(2, {x} + 1):\n        product *= i\n    return product",
         "For zero and one the loop does nothing and the answer is one, as it should be.", lambda g, _: g.randint(2, 6)),
    Spec(("fibonacci", "fib", "nth_fibonacci"), NUMBER, "returns the n-th Fibonacci number, starting from 0 and 1",
         "    a, b = 0, 1\n    for _ in range({x}):\n        a, b = b, a + b\n    return a",
         "Two variables move along the sequence together, so no list is needed.", _integer),
    Spec(("is_even", "even", "check_even"), NUMBER, "tells whether a number is even",
         "    return {x} % 2 == 0",
         "The remainder of a division by two is zero exactly for even numbers.", _integer),
    Spec(("is_prime", "prime", "check_prime"), NUMBER, "tests whether a number is prime",
         "    if {x} < 2:\n        return False\n    divisor = 2\n    while divisor * divisor <= {x}:\n"
         "        if {x} % divisor == 0:\n            return False\n        divisor += 1\n    return True",
         "It is enough to try divisors up to the square root, because larger ones come in pairs with smaller ones.",
         lambda g, _: g.randint(2, 30)),
    Spec(("digit_sum", "sum_digits", "add_digits"), NUMBER, "adds the digits of a whole number",
         "    return sum(int(d) for d in str({x}))",
         "Turning the number into a string makes its digits easy to visit.", lambda g, _: g.randint(12, 99)),
    Spec(("countdown", "count_down", "descending"), NUMBER, "returns a list that counts down to 1",
         "    return list(range({x}, 0, -1))",
         "The stop value zero is not included, so the last element is one.", lambda g, _: g.randint(3, 6)),
    Spec(("power", "raise_it", "to_power"), NUMBER, "raises a number to the power of {k} with a loop",
         "    answer = 1\n    for _ in range({k}):\n        answer = answer * {x}\n    return answer",
         "Starting from one, each pass multiplies by the base again.", lambda g, _: g.randint(2, 5), (2, 3, 4)),
    Spec(("every_nth", "skip_some", "thin_out"), LISTS, "keeps every {k_ordinal} element of a list",
         "    return {x}[::{k}]",
         "The third part of a slice is the step width; the first element is always kept.", _numbers, (2, 3)),
    Spec(("without_duplicates", "unique", "dedupe"), LISTS, "removes duplicates but keeps the order",
         "    seen = set()\n    out = []\n    for v in {x}:\n        if v not in seen:\n            seen.add(v)\n"
         "            out.append(v)\n    return out",
         "The set answers quickly whether something appeared before, the list remembers the order.",
         lambda g, _: (lambda a: [a[0], a[1], a[0]])(g.sample(range(1, 20), 2))),
    Spec(("average", "mean_of", "mean"), LISTS, "computes the average and returns 0 for an empty list",
         "    if not {x}:\n        return 0\n    return sum({x}) / len({x})",
         "Checking for the empty list first avoids a division by zero.",
         lambda g, _: (lambda a, d: [a - d, a, a + d])(g.randint(6, 15), g.randint(1, 5))),
    Spec(("greet", "welcome", "say_hello"), ("name", "person", "guest"), "greets a person by name {k_word} times",
         "    line = \"Hello, \" + {x}\n    return \", \".join([line] * {k})",
         "A list with equal entries is joined by commas, which leaves none at the end.",
         lambda g, _: g.choice(WOMEN), (1, 2, 3)),
)  # fmt: skip

ASKING = (
    "Write a Python function `{name}({x})` that {task}. What does it return for {argument}?",
    "I need a function called {name} which {task}. The argument is {x}. Try it with {argument}.",
    "Please code `{name}` in Python: it {task} ({x} is the only parameter). Use {argument} as a test.",
    "How do I write a function {name}({x}) that {task}? My example is {argument}.",
)
ANSWERING = (
    "Here is the function:\n\n```python\ndef {name}({x}):\n{body}\n```\n\n{reason} For the input from your question it returns `{result}`.",
    "This does the job:\n\n```python\ndef {name}({x}):\n{body}\n```\n\nWhy it works: {reason} Running it once, I get {result} as expected.",
    "```python\ndef {name}({x}):\n{body}\n```\n\n{reason} With your test value the outcome is {result}, which you can check by hand.",
    "You can do it like this:\n\n```python\ndef {name}({x}):\n{body}\n```\n\n{reason} In your example the call gives back {result}.",
)
ORDINALS = {2: "second", 3: "third"}


def draw(generator: Random) -> list[Turn]:
    """A specification with its code, then another example and a test."""
    spec = generator.choice(SPECS)
    k, style = generator.choice(spec.constants), generator.randrange(len(ASKING))
    values = {"name": generator.choice(spec.names), "x": generator.choice(spec.arguments), "k": str(k)}
    values |= {"k_word": in_words(k), "k_ordinal": ORDINALS.get(k, "")}
    values |= {
        key: text.format(**values) for key, text in (("task", spec.task), ("body", spec.body), ("reason", spec.reason))
    }
    examples = [repr(spec.example(generator, k)) for _ in range(2)]
    run = compiled(f"def {values['name']}({values['x']}):\n{values['body']}", values["name"])
    results = [repr(run(_literal(text))) for text in examples]
    first = values | {"argument": examples[0], "result": results[0]}
    second = values | {"argument": examples[1], "result": results[1]}
    check = "Good idea, a test keeps it honest:\n\n```python\nassert {name}({argument}) == {result}\n```\n\nIt raises an error if the value is wrong."
    trace = "Following the code with that input, the value that comes back is {result}."
    follow = generator.choice((("Add a test for it.", check), ("What does it return for {argument}?", trace)))
    return [
        Turn(ASKING[style].format(**first), ANSWERING[style].format(**first)),
        Turn(follow[0].format(**second), follow[1].format(**second)),
    ]


def compiled(code: str, name: str) -> Callable[[object], object]:
    """The function `name` that code defines; the code is ours, from SPECS."""
    scope: dict[str, Callable[[object], object]] = {}
    exec(code, {}, scope)
    return scope[name]


def _literal(text: str) -> object:
    return ast.literal_eval(text)
