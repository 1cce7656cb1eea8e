"""Laws of the loss mask: the answer and its end are learnt, whatever the template adds."""

import random
from itertools import compress, cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from aerie.configs.errors import UserError
from aerie.configs.schema.heads import TargetConfig
from aerie.data.chat import Chat, TokenRow, answer_text
from aerie.data.conversations import Conversation, Tally
from aerie.data.values import UnusableRow
from aerie.model.storage import template_path
from aerie.model.target_files import target_end_ids
from tests import tiny
from tests.data import chat_targets as targets

TURNS = (
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "How are you today?"},
    {"role": "assistant", "content": "I am fine, thank you."},
    {"role": "user", "content": "And what is two and two? <|assistant|>four<|im_end|></s>"},
    {"role": "assistant", "content": "The answer is four \N{OWL}, naïvely."},
)


def talk(*turns: str | tuple[str, str]) -> list[dict[str, str]]:
    """Messages of user and assistant in turn; a pair is (thinking, content)."""
    made: list[dict[str, str]] = []
    for role, turn in zip(cycle(("user", "assistant")), turns, strict=False):
        thought, content = turn if isinstance(turn, tuple) else ("", turn)
        made.append({"role": role, "content": content})
        if thought:
            made[-1]["reasoning_content"] = thought
    return made


def rows_of(
    template: str | None, eos: str, messages: Any = TURNS, trim_offsets: bool = True
) -> tuple[Any, list[TokenRow], Tally]:
    tokenizer, tally = targets.build_tokenizer(template, eos, trim_offsets), Tally(rows=1)
    chat = Chat(tokenizer, {tokenizer.eos_token_id}, tally)
    return tokenizer, chat.encode(chat.render(Conversation("here: row 1", tuple(messages)))), tally


def learnt(tokenizer: Any, row: TokenRow) -> list[str]:
    """The text of each turn's supervised tokens."""
    return [
        tokenizer.decode([*compress(row.input_ids, (turn == number for turn in row.turn_ids))])
        for number in sorted(set(row.turn_ids) - {0})
    ]


@pytest.mark.parametrize(
    ("template", "eos", "before"),
    [
        (tiny.TEMPLATE, "<|end|>", ""),
        (targets.TRIMMING, "<|im_end|>", ""),
        (template_path("configs/templates/vicuna.jinja").read_text(encoding="utf-8"), "</s>", " "),
    ],
    ids=["markers", "trimming", "vicuna"],
)
def test_answers_are_supervised(template: str, eos: str, before: str) -> None:
    """Supervised tokens decode to the answers and their end."""
    tokenizer, (row,), tally = rows_of(template, eos)
    answers = [turn["content"] for turn in TURNS if turn["role"] == "assistant"]
    assert (
        learnt(tokenizer, row) == [before + answer + eos for answer in answers] and not tally.counts
    )
    assert list(row.input_ids) == tokenizer.apply_chat_template(list(TURNS), return_dict=False)
    assert row.num_slots == row.num_supervised - 2  # no head drafts a turn's first token


def test_generation_markers() -> None:
    """Generation markers give the same mask."""
    generator = random.Random(0)
    words = [
        "hello",
        " there",
        "\n\n",
        " fine",
        "<|user|>",
        " naïve",
        " \N{OWL}",
        "7",
        " ",
        "the answer",
    ]
    for _ in range(30):
        count = 2 * generator.randint(1, 4)
        messages = talk(
            *(
                "".join(generator.choices(words, k=generator.randint(1, 9))) + "."
                for _ in range(count)
            )
        )
        # With trimmed offsets transformers would lose every answer that begins with a blank.
        tokenizer, (row,), _ = rows_of(tiny.TEMPLATE, "<|end|>", messages, trim_offsets=False)
        theirs = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        assert [int(turn > 0) for turn in row.turn_ids] == theirs["assistant_masks"]


def test_dropped_thinking() -> None:
    """Dropped thinking fans out one row per answer."""
    messages = talk(
        "hello", ("first thought", "Fine."), "how are you", ("second thought", "Very fine.")
    )
    tokenizer, rows, _ = rows_of(targets.THINK_DROPPING, "<|im_end|>", messages)
    assert [learnt(tokenizer, row) for row in rows] == [
        ["<think>\nfirst thought\n</think>\n\nFine.<|im_end|>"],
        ["<think>\nsecond thought\n</think>\n\nVery fine.<|im_end|>"],
    ]
    assert "first thought" not in tokenizer.decode(rows[1].input_ids)
    assert [row.source for row in rows] == ["here: row 1, answer 1", "here: row 1, answer 2"]


STRADDLING = (
    "{% for m in messages %}"
    "{{ m['role'] + ': ' + m['content'] + ('</s>' if m['role'] == 'assistant' else ' ') }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "eos", "answer", "text", "counted"),
    [
        # text of the generation prompt is not learnt
        (
            targets.THINK_OPENING,
            "<|im_end|>",
            ("a thought", "Fine."),
            "a thought\n</think>\n\nFine.<|im_end|>",
            None,
        ),
        (
            targets.THINK_OPENING,
            "<|im_end|>",
            "Fine.",
            "Fine.<|im_end|>",
            "the end of the generation prompt",
        ),
        # the prompt's last blank joins the answer's first word
        (
            STRADDLING,
            "</s>",
            "boats are fine",
            " are fine</s>",
            "a token that straddles prompt and answer",
        ),
        (
            targets.CHATML,
            "<|im_end|>",
            "Fine.<|im_end|> And more.",
            "Fine.<|im_end|>",
            "text after an end-of-turn token that an answer spells out",
        ),
        # base models' EOS: learn up to the answer's last special token
        (
            targets.CHATML,
            "</s>",
            "Fine.",
            "Fine.<|im_end|>",
            "the end of an answer without an end-of-turn token",
        ),
    ],
)
def test_borders(template: str, eos: str, answer: Any, text: str, counted: str | None) -> None:
    """Nothing of the prompt is learnt, and nothing behind the end of the turn."""
    tokenizer, (row,), tally = rows_of(template, eos, talk("how", answer))
    assert learnt(tokenizer, row) == [text]
    assert [reason.startswith(counted or "") for _, reason in tally.counts] == (
        [True] if counted else []
    )


def test_refused_templates() -> None:
    """Tokenizers and templates that cannot make a mask are refused."""
    rewritten = "the template rewrites what stands before an answer"
    for template, reason in (
        (targets.NO_SYSTEM, "the chat template refuses the messages: No system role"),
        (
            targets.CHATML.replace("<|im_start|>assistant\\n", "bot: "),
            rewritten,
        ),  # only in the generation prompt
    ):
        with pytest.raises(UnusableRow) as caught:
            rows_of(template, "<|im_end|>")
        assert caught.value.reason == reason
    for broken, said in (
        (None, r"no chat template; name one with target\.chat_template"),
        ("{% for %}", "line 1:"),
    ):
        with pytest.raises(UserError, match=said):
            rows_of(broken, "</s>")
    with pytest.raises(UserError, match="a slow tokenizer has no character offsets"):
        Chat(SimpleNamespace(is_fast=False, name_or_path="slow"), set(), Tally())


def test_rewritten_prompts() -> None:
    """An answer follows the prompt that asked for it, also if the template then rewrites that."""
    template = "{{ messages | length }}" + targets.CHATML
    tokenizer, rows, _ = rows_of(template, "<|im_end|>")
    answers = [turn["content"] for turn in TURNS if turn["role"] == "assistant"]
    assert [learnt(tokenizer, row) for row in rows] == [[text + "<|im_end|>"] for text in answers]
    prompts = [tokenizer.decode(row.input_ids)[0] for row in rows]
    assert prompts == ["2", "4"]  # messages before the answer; with it there are 3 and 5


def test_end_of_turn(tmp_path: Path) -> None:
    """End of turn is any eos of tokenizer or generation config."""
    tokenizer = targets.build_tokenizer(targets.CHATML, "<|im_end|>")
    for listed, others in ((None, set[int]()), (3, {3}), ([3, 4], {3, 4})):
        GenerationConfig(eos_token_id=listed).save_pretrained(tmp_path)
        assert target_end_ids(TargetConfig(path=str(tmp_path)), tokenizer) == {
            tokenizer.eos_token_id,
            *others,
        }


def test_channels() -> None:
    """Of an answer with channels only the final message is shown, and the text only grows."""
    tokenizer, marks = tiny.tokenizer(), ["<|start|>", "<|channel|>", "<|message|>", "<|return|>"]
    plain = "<|channel|>final<|message|>Two owls."
    ids = tokenizer(f"{plain}<|end|>")["input_ids"]
    assert answer_text(tokenizer, ids) == plain  # to this tokenizer it is ordinary text
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    thinking = "<|channel|>analysis<|message|>Owls, final.<|end|><|start|>assistant"
    for text, shown in (
        (f"{thinking}{plain}<|return|>", "Two owls."),
        (thinking, ""),
        ("Two owls.<|end|>", "Two owls."),
    ):
        ids = tokenizer(text)["input_ids"]
        parts = [answer_text(tokenizer, ids[:end]) for end in range(1, len(ids) + 1)]
        assert parts[-1] == shown and all(shown.startswith(part) for part in parts)


TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds up"}}]
CALLING = targets.CHATML.replace(
    "+ m['content']",
    "+ (m['content'] or '') + (m.tool_calls[0].function | tojson if m.tool_calls else '')",
)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"id-{name}", "type": "function", "function": function}


def calling(*calls: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation with calls; their results stand in another order than they."""
    results = [
        {"role": "tool", "content": f"result of {made['id']}", "tool_call_id": made["id"]}
        for made in (*calls[1:], *calls[:1])
    ]
    asked = [TURNS[0], TURNS[1], {"role": "assistant", "content": "", "tool_calls": [*calls]}]
    return [*asked, *results, {"role": "assistant", "content": "three"}]


@pytest.mark.parametrize(
    ("template", "part"),
    [
        (CALLING.replace("(m['content'] or '')", "m['role']"), "a system turn"),
        (CALLING.replace("in messages", "in messages[:1] + messages[2:]"), "a user's turn"),
        (CALLING.replace("if m.tool_calls", "if m.tools"), "the call of a tool"),
        (CALLING.replace("function | tojson", "function.name"), "the call of a tool"),
        (CALLING.replace("'] or ''", "'] if m.role != 'tool' else ''"), "the result of a tool"),
    ],
)
def test_the_template_leaves_out(template: str, part: str) -> None:
    """What the template loses is left out, and the part is named."""
    reasons = []
    try:
        _, _, tally = rows_of(template, "<|im_end|>", calling(call("add", a=1.5, b="zwei")))
        reasons = [reason for _, reason in tally.counts]
    except UnusableRow as error:
        reasons = [error.reason]
    assert reasons == [f"the template leaves out {part}"]


def test_a_row_ends_before_a_lost_text() -> None:
    """What stands before a text that the template loses is learnt; the rest is counted."""
    template = CALLING.replace("function | tojson", "function.name")
    messages = [*talk("hello", "Fine."), *calling(call("add", a=1))[1:]]
    tokenizer, (row,), tally = rows_of(template, "<|im_end|>", messages)
    assert learnt(tokenizer, row) == ["Fine.<|im_end|>"]
    assert tally.counts == {("left out", "the template leaves out the call of a tool"): 1}
    assert tally.examples.popitem()[1].endswith("message 4")


def test_lost_tools() -> None:
    """A template that does not read tools leaves their row out; one that does keeps it."""
    tally = Tally()
    for template, is_kept in ((CALLING, False), ("{{ tools | tojson }}" + CALLING, True)):
        tokenizer = targets.build_tokenizer(template, "<|im_end|>")
        chat = Chat(tokenizer, {tokenizer.eos_token_id}, tally)
        conversation = Conversation("here: row 1", tuple(calling(call("add"))), TOOLS)
        assert chat.forms.holds(conversation) is is_kept


def test_other_forms() -> None:
    """Calls are given as the template reads them: as text, or one by one, with their results."""
    as_text = CALLING.replace(
        "function | tojson", "function.name + ' ' + m.tool_calls[0].function.arguments"
    )
    as_python = CALLING.replace(
        "function | tojson", "function.name ~ ' ' ~ m.tool_calls[0].function.arguments"
    )
    for template, calls, expected, form in (
        (as_text, [call("add", a=1)], ['add {"a": 1}', "three"], "the arguments of calls"),
        (as_python, [call("add", a=1)], ['add {"a": 1}', "three"], "the arguments of calls"),
        (
            CALLING,
            [call("add", a=1), call("sub"), call("mul")],
            [
                '{"name": "add", "arguments": {"a": 1}}',
                '{"name": "sub", "arguments": {}}',
                '{"name": "mul", "arguments": {}}',
                "three",
            ],
            "parallel calls given one by one",
        ),
    ):
        tokenizer, (row,), tally = rows_of(template, "<|im_end|>", calling(*calls))
        assert learnt(tokenizer, row) == [text + "<|im_end|>" for text in expected]
        assert [reason.startswith(form) for _, reason in tally.counts] == [True]
        text = tokenizer.decode(row.input_ids)
        order = [
            text.index(spelt)
            for made in calls
            for spelt in (made["function"]["name"], f"result of {made['id']}")
        ]
        assert order == sorted(order)


def test_marked_answers_are_context() -> None:
    """An answer that is only context is read, not learnt, and numbers no turn."""
    tokenizer = targets.build_tokenizer(targets.CHATML, "<|im_end|>")
    chat = Chat(tokenizer, {tokenizer.eos_token_id}, Tally())
    marked = Conversation("here: row 1", tuple(TURNS), context_only=frozenset({2}))
    (row,) = chat.encode(chat.render(marked))
    assert learnt(tokenizer, row) == [TURNS[4]["content"] + "<|im_end|>"]
    assert str(TURNS[2]["content"]) in tokenizer.decode(row.input_ids)


def test_a_header_ends_the_turn() -> None:
    """Where the next message's header is the end of a turn (GLM), every answer ends with it."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<|im_end|>' if "
        "m.role == 'tool' else '' }}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function | tojson }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '' }}{% endif %}"
    )
    tokenizer = targets.build_tokenizer(template, "</s>")
    ends = set(tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "</s>"]))
    chat = Chat(tokenizer, ends, Tally())
    messages = (*talk("hello", "Fine.", "more"), *calling(call("add", a=1))[2:4])
    for end, last in ((2, "<|im_start|>"), (4, "<|im_end|>")):
        (row,) = chat.encode(chat.render(Conversation("here: row 1", messages[:end])))
        assert [text[-len(last) :] for text in learnt(tokenizer, row)][-1] == last
        assert learnt(tokenizer, row)[0] == "Fine.<|im_start|>"


def test_thoughts_change_no_other_turn() -> None:
    """A thought in another form leaves a system turn that speaks of the tags as it is."""
    system = {"role": "system", "content": "Reason inside <think> and </think>, then answer."}
    messages = [system, *talk("hello", ("a thought", "Fine."))]
    tokenizer, (row,), tally = rows_of(targets.CHATML, "<|im_end|>", messages)
    assert system["content"] in tokenizer.decode(row.input_ids)
    assert learnt(tokenizer, row) == ["<think>\na thought\n</think>\n\nFine.<|im_end|>"]
    assert [reason for _, reason in tally.counts] == ["thoughts given in <think> tags"]


def test_an_end_within_an_answer() -> None:
    """An answer of two messages is learnt to its last end, as its first text is not its last."""
    template = targets.CHATML.replace(
        "+ m['content']", "+ ((m.thinking + '<|im_end|>') if m.thinking else '') + m['content']"
    )
    messages = talk("hello", ("a thought", "Fine."))
    tokenizer, (row,), _ = rows_of(template, "<|im_end|>", messages)
    assert learnt(tokenizer, row) == ["a thought<|im_end|>Fine.<|im_end|>"]


def test_a_loss_in_calls_one_by_one() -> None:
    """What is lost in a form with more messages than the row names no message of the row."""
    template = CALLING.replace("(m['content'] or '')", "(m['content'] or '').split('</think>')[-1]")
    refusal = "{% if m.tool_calls | length > 1 %}{{ raise_exception('One call') }}{% endif %}"
    template = template.replace("{{ '<|im_start|>' + m", f"{refusal}{{{{ '<|im_start|>' + m")
    messages = calling(call("add", a=1), call("sub"))
    messages[-1] |= {"reasoning_content": "a thought"}
    with pytest.raises(UnusableRow, match="the chat template refuses the messages: One call"):
        rows_of(template, "<|im_end|>", messages)


def test_an_end_without_a_text() -> None:
    """An end-of-turn id that the tokenizer does not know changes nothing."""
    tokenizer, tally = targets.build_tokenizer(targets.CHATML, "<|im_end|>"), Tally()
    chat = Chat(tokenizer, {tokenizer.eos_token_id, len(tokenizer) + 7}, tally)
    (row,) = chat.encode(chat.render(Conversation("here: row 1", tuple(TURNS[:3]))))
    assert learnt(tokenizer, row) == [TURNS[2]["content"] + "<|im_end|>"] and not tally.counts


JOINING = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "<|im_start|>model\n{% else %}{{ m.content }}{% if loop.last or loop.nextitem.role == 'user' %}"
    "<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if messages[-1].role != 'user' %}<|im_start|>model\n{% endif %}"
)


def test_joined_answers() -> None:
    """Of two answers that a template joins, nothing is learnt that the prompt has already."""
    tokenizer = targets.build_tokenizer(
        JOINING.replace("messages[-1]", "add_generation_prompt and messages[-1]"), "<|im_end|>"
    )
    messages = (*talk("hello", "the first"), {"role": "assistant", "content": "the second"})
    tally = Tally()
    chat = Chat(tokenizer, {tokenizer.eos_token_id}, tally)
    rendered = chat.render(Conversation("here: row 1", messages))
    assert learnt(tokenizer, chat.encode(rendered)[0]) == ["the first<|im_end|>"]
    assert [*tally.counts] == [("left out", "the template joins an answer with an earlier one")]
    marked = Conversation("here: row 1", messages, context_only=frozenset({1}))
    with pytest.raises(UnusableRow, match="joins an answer with an earlier one: message 3"):
        chat.render(marked)


@pytest.mark.parametrize("word", ["a", "name"])
def test_a_short_text_beside_a_call(word: str) -> None:
    """A text is not taken for one that the template writes itself."""
    template = CALLING.replace("(m['content'] or '')", "('' if m.tool_calls else m['content'])")
    messages = calling(call("add", a=1))
    messages[2] |= {"content": word}
    with pytest.raises(UnusableRow, match="leaves out the text of an answer: message 3"):
        rows_of(template, "<|im_end|>", messages)


@pytest.mark.parametrize("field", ["name", "tool_call_id"])
def test_results_without_ids(field: str) -> None:
    """Results are paired with their calls by their order; no id is made up in a text."""
    template = targets.CHATML.replace(
        "+ m['content']",
        "+ m['content'] + (m.tool_calls | map(attribute='function') | list | tojson "
        f"if m.tool_calls else '') + ('(' ~ m.{field} ~ ')' if m.role == 'tool' else '')",
    )
    messages = calling(call("add", a=1), call("sub", b=2))
    for message in messages:
        message.pop("tool_call_id", None)
        for made in message.get("tool_calls", ()):
            made.pop("id", None)
    tokenizer, (row,), tally = rows_of(template, "<|im_end|>", messages)
    text = tokenizer.decode(row.input_ids)
    assert text.count("(add)") == text.count("(sub)") == (field == "name")
    assert "pair" not in text and [kind for kind, _ in tally.counts] == ["mended"]
