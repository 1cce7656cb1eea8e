"""The embedded corpus (ShareGPT conversations, Spec-Bench questions) and its tokenizer.

Each family of tasks is a YAML file in data/corpus. Its rules in `draw` are drawn in order, and its
`turns` give the texts; frame.yaml holds what stands around them. Rules and slots are Jinja
expressions over the drawn values. Whoever moves a rule changes every conversation, because the
random numbers are drawn in the rules' order.
"""

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from aerie.configs.errors import UserError
from aerie.configs.read import read_yaml
from aerie.configs.schema.data import SyntheticConfig
from aerie.model.storage import write_text

# the categories of the measuring questions, in their order
FAMILIES = ("arithmetic", "conversion", "code", "table", "passage", "letter", "schedule")
SYSTEM_SHARE = 0.2  # of the conversations
NUM_TURNS = (1, 1, 2, 2, 3)  # drawn uniformly
ATTEMPTS = 100  # draws of one row before a family counts as exhausted


class Turn(NamedTuple):
    question: str
    answer: str


def run_corpus_function(code: str, name: str, argument: str) -> str:
    """The repr of what a function of the corpus returns for an argument."""
    scope: dict[str, Any] = {}
    exec(f"{code}\nresult = {name}({argument})", scope)
    return repr(scope["result"])


# Writes plain text, so nothing is escaped for HTML.
ENVIRONMENT = Environment(  # noqa: S701
    variable_start_string="{", variable_end_string="}", undefined=StrictUndefined
)


def in_words(number: int) -> str:
    return str(dict(enumerate(FRAME["numbers"])).get(number, number))


def listing(parts: list[str]) -> str:
    """'a, b and c'"""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def clock(minutes: int) -> str:
    """545 minutes after midnight: 9:05"""
    return f"{minutes // 60}:{minutes % 60:02d}"


ENVIRONMENT.filters |= {"in_words": in_words, "listing": listing, "clock": clock}
FUNCTIONS = {
    "accumulate": accumulate,
    "range": range,
    "repr": repr,
    "result_of": run_corpus_function,
    "zip": zip,
}
template_of = cache(ENVIRONMENT.from_string)


@cache
def _book(name: str) -> dict[str, Any]:
    content = read_yaml(Path(__file__).with_name("corpus") / f"{name}.yaml")[0]
    return {**content, **{key: words.split() for key, words in content.pop("words", {}).items()}}


FRAME: dict[str, Any] = _book("frame")


def draw_task(family: str, generator: Random) -> list[Turn]:
    def draw(rule: Any) -> Any:
        """Draws from a list, or evaluates an expression.

        A mapping's rules are drawn in order and stored under their names; the last is returned.
        """
        if isinstance(rule, list):
            return generator.choice(rule)
        if not isinstance(rule, Mapping):
            text(f"{{% set result = {rule} %}}")
            return context.vars["result"]
        value = None
        for name, part in rule.items():
            value = values[name] = draw(part)
        return value

    def text(template: str) -> str:
        return "".join(template_of(template).root_render_func(context))

    def people(count: int) -> list[dict[str, str]]:
        names = generator.sample([*values["women"], *values["men"]], count)
        return [{"name": name, "he": "she" if name in values["women"] else "he"} for name in names]

    book = _book(family)
    values: dict[str, Any] = {
        **FUNCTIONS,
        **_book("words"),
        **book,
        **{name: getattr(generator, name) for name in ("choice", "sample", "random")},
        "integer": lambda low, high, step=1: generator.randrange(low, high + 1, step),
        "several": lambda count, options: [generator.choice(options) for _ in range(count)],
        "people": people,
        "draw": draw,
        "text": text,
    }
    # One context for all rules: making one for each would take most of the time.
    context = template_of("").new_context(values, shared=True)
    draw(book["draw"])
    return [Turn(text(question), text(answer)) for question, answer in draw(book["turns"])]


def opening_key(question: str) -> str:
    return " ".join(re.findall(r"\w+", question.lower()))


def write_corpus(config: SyntheticConfig, directory: Path) -> dict[str, int]:
    """Writes the three files; returns each one's number of rows.

    No training conversation begins with a question of the other two files.
    """
    taken: set[str] = set()  # opening questions that must not occur again
    files: dict[str, list[dict[str, Any]]] = {
        "train.jsonl": [],
        "prompts.jsonl": [],
        "calibration.jsonl": [],
    }

    def fresh(generator: Random, category: str) -> list[Turn]:
        for _ in range(ATTEMPTS):
            turns = draw_task(category, generator)
            if opening_key(turns[0].question) not in taken:
                return turns
        raise UserError(
            f"synthetic.num_prompts: {ATTEMPTS} draws gave no new {category} question; "
            f"lower it below {config.num_prompts:,}"
        )

    def merged(generator: Random, category: str, turns: list[Turn]) -> list[Turn]:
        if generator.random() >= FRAME["merged_share"].get(category, 0.0):
            return turns
        first, second, *rest = turns
        gap = "\n\n" if "\n" in first.question else " "
        return [
            Turn(f"{first.question}{gap}{second.question}", f"{first.answer}\n\n{second.answer}"),
            *rest,
        ]

    for name in ("prompts", "calibration"):
        for index in range(config.num_prompts):
            generator = Random(f"{config.seed}/{name}/{index}")
            category = FAMILIES[index % len(FAMILIES)]
            turns = fresh(generator, category)
            taken.add(opening_key(turns[0].question))
            turns = merged(generator, category, turns)[: generator.choice((1, 1, 2))]
            taken.add(opening_key(turns[0].question))
            files[f"{name}.jsonl"].append(
                {
                    "question_id": index,
                    "category": category,
                    "turns": [turn.question for turn in turns],
                    "reference": [turn.answer for turn in turns],
                }
            )
    for index in range(config.num_conversations):
        generator = Random(f"{config.seed}/train/{index}")
        category = generator.choice(FAMILIES)
        turns = merged(generator, category, fresh(generator, category))
        num_turns = generator.choice(NUM_TURNS)
        while len(turns) < num_turns:  # the family has no more to say: go on with another topic
            turns = [*turns, fresh(generator, generator.choice(FAMILIES))[0]]
        messages = list[dict[str, str]]()
        for question, answer in turns[:num_turns]:
            messages += [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        if generator.random() < SYSTEM_SHARE:
            prompt, opening = generator.choice(FRAME["system_prompts"])
            messages[1]["value"] = opening + messages[1]["value"]
            messages.insert(0, {"from": "system", "value": prompt})
        files["train.jsonl"].append({"id": f"synthetic-{index}", "conversations": messages})
    for name, rows in files.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_text(directory / name, text)
    return {name: len(rows) for name, rows in files.items()}


SPECIAL_TOKENS = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|pad|>")
# A word or one digit with the space before it, signs, white space. A draft LM learns sums from
# single digits.
PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    user, assistant, system, end, pad = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=pad,
        additional_special_tokens=[user, assistant, system],
        clean_up_tokenization_spaces=False,
        chat_template="".join(FRAME["chat_template"]),
    )
