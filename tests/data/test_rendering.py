"""Laws of what a chat template gets beside the messages."""

import datetime
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aerie.configs.read import as_dict
from aerie.configs.schema.data import (
    DataConfig,
    DistillConfig,
    RenderConfig,
    ServerConfig,
    SourceConfig,
)
from aerie.configs.schema.heads import TargetConfig
from aerie.configs.schema.recipe import Recipe
from aerie.data import main, rendering, tokens
from aerie.data.chat import apply_template
from aerie.data.distill.answer import Thinking
from aerie.data.rendering import bind, fix_date, names_read, with_template_arguments, writes_date
from aerie.infer import main as infer
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.train import main as train
from tests import tiny
from tests.tiny import call

THOUGHT = "<think>\n\n</think>\n\n"
# As Qwen3's: the generation prompt holds an empty thought where thinking is switched off.
SWITCHED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}" + THOUGHT + ""
    "{% endif %}{{ m.content + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}" + THOUGHT + "{% endif %}"
    "{% endif %}"
)
OFF = RenderConfig(template_arguments={"enable_thinking": False})
SWITCH = "--data.template_arguments.enable_thinking"
QUESTION = [{"role": "user", "content": "2 + 2?"}]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe of a small online training, for a target with a thinking switch."""
    tiny.target(tmp_path / "target", chat_template=SWITCHED)
    rows = tiny.write_conversations(tmp_path / "rows.jsonl", 12)
    sections = {
        "run": str(tmp_path / "run"),
        "target": {"path": str(tmp_path / "target")},
        "data": {"conversations": [str(rows)], "held_out": 0.4},
        "features": {"mode": "online"},
        "train": {"max_steps": 1, "batch_size": 2},
        "bench": {"prompts": {"num_prompts": 1, "max_new_tokens": 4}, "warmup_prompts": 0},
    }
    return tiny.recipe(tmp_path / "recipe.yaml", sections)


def test_arguments_change_what_is_learnt(recipe: Path, capsys: Any) -> None:
    """A switch that the template reads makes the thought a part of the prompt."""
    for words, learnt in (((), f"[1:{THOUGHT}I "), ((SWITCH, "false"), f"{THOUGHT}[1:I ")):
        assert call(main, "show", "--config", recipe, "--plain", "--limit", 1, *words) == 0
        out, err = capsys.readouterr()
        assert learnt in out and not err


def test_an_argument_that_nothing_reads(recipe: Path, capsys: Any) -> None:
    """One warning names the arguments that the template does not read, and those that it does."""
    words = ("--data.template_arguments.effort", "low", "--data.template_arguments.day", "1")
    assert call(main, "show", "--config", recipe, *words) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"warning: .*does not read day, effort \(.*: enable_thinking\)", line)


def test_unset_arguments_leave_no_trace() -> None:
    """Records of recipes without arguments are as before there were any."""
    assert not {"template_arguments", "date"} & as_dict(DataConfig(("rows",))).keys()
    some = DataConfig(("rows",), template_arguments={"effort": "low"})
    assert as_dict(some)["template_arguments"] == {"effort": "low"}


def test_names_that_a_template_reads() -> None:
    """Of names that the template may set, only those with a default are arguments."""
    template = (
        "{% if tools %}{% set text = 1 %}{% endif %}{{ text }}{{ bos_token }}{% break %}"
        "{% if day is not defined %}{% set day = 2 %}{% endif %}{{ day }}{{ effort }}"
        "{% macro show(part) %}{% if part is undefined %}{% endif %}{% endmacro %}"
        "{% if tools %}{% set told = messages[0] %}{% endif %}{% if told is defined %}{% endif %}"
    )
    generation = "{%- generation -%}x{% endgeneration %}"
    for given in (f"{template}{generation}", {"default": "", "tool_use": template}):
        names = names_read(given)
        assert names.arguments == {"day", "effort"} and {"text", "tools"} <= names.all


def test_a_head_knows_its_arguments(recipe: Path, tmp_path: Path, capsys: Any) -> None:
    """A head keeps them; without a recipe they are used; other ones are warned of, with both."""
    assert call(train, "--config", recipe, SWITCH, "false") == 0
    head = tmp_path / "run/heads/eagle1"
    facts = json.loads((head / "config.json").read_text())["aerie"]
    assert facts["template_arguments"] == {"enable_thinking": False}
    capsys.readouterr()
    words = ("--prompt", "2 + 2?", "--max-new-tokens", 1, "--json")
    for options, prompt_tokens, warnings in (
        (("--target", tmp_path / "target", "--head", head), len(THOUGHT), 0),
        (("--target", tmp_path / "target", "--head", head, SWITCH, "true"), 0, 1),
        (("--config", recipe, SWITCH, "false"), len(THOUGHT), 0),
        (("--config", recipe), 0, 1),
    ):
        assert call(infer, "generate", *options, *words) == 0
        out, err = capsys.readouterr()
        ids = tiny.tokenizer(chat_template=SWITCHED)
        text = apply_template(
            bind(ids, OFF if prompt_tokens else RenderConfig()),
            QUESTION,
            add_generation_prompt=True,
        )
        counted = json.loads(out)["statistics"]["prompt_tokens"]
        assert counted == len(ids(text)["input_ids"])
        assert err.count("warning") == warnings
        assert not warnings or '{"enable_thinking": false}' in err
    decoder = SpeculativeDecoder.from_pretrained(tmp_path / "target", head)
    assert decoder.tokenizer.decode(decoder.encode("2 + 2?")[0]).endswith(THOUGHT)
    assert call(infer, "bench", "--config", recipe) == 0
    assert capsys.readouterr().err.count("was trained with data.template_arguments") == 1
    assert call(infer, "bench", "--config", recipe, SWITCH, "false") == 2  # another bench
    assert "template_arguments" in capsys.readouterr().err


def test_servers_get_the_arguments() -> None:
    """They are sent as chat_template_kwargs; the recipe's own word there wins."""
    server = ServerConfig(("http://a",), extra_body={"chat_template_kwargs": {"effort": "low"}})
    config = DistillConfig((SourceConfig("rows"),), server)
    render = RenderConfig(template_arguments={"enable_thinking": False, "effort": "high"})
    changed: Any = with_template_arguments(config, render).server
    sent = changed.extra_body["chat_template_kwargs"]
    assert sent == {"enable_thinking": False, "effort": "low"}
    assert with_template_arguments(config, RenderConfig()) is config
    tokenizer = bind(tiny.tokenizer(chat_template=SWITCHED), OFF)
    assert Thinking(tokenizer, {3}).prompt(QUESTION).endswith(f"<|assistant|>{THOUGHT}")


# --- the date -------------------------------------------------------------------------------------

DATED = "{{ 'It is ' + strftime_now('%-d %B %Y, %H:%M') + '. ' }}" + tiny.TEMPLATE
FIRST = datetime.date(2026, 11, 27)


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the clock to so many days after the first one."""

    def set_to(days: int) -> None:
        monkeypatch.setattr(rendering, "today", lambda: FIRST + datetime.timedelta(days))

    set_to(0)
    return set_to


@pytest.fixture
def dated(recipe: Path, tmp_path: Path) -> Path:
    """The recipe, with a target whose template writes today's date."""
    tiny.tokenizer(chat_template=DATED).save_pretrained(tmp_path / "target")
    return recipe


def written(out: str) -> set[str]:
    """The dates in what is printed."""
    return set(re.findall(r"20\d\d-\d\d-\d\d", out))


def test_the_clock_stands_still(day: Any) -> None:
    """A template writes the date, at midnight, in every format; what surrounds it is as before."""
    template = (
        "  {% if true %}\n\n{{ strftime_now('%d' ~ '.%m %H:%M:%S %%d ' ~ '%' ~ 'B') }}{% endif %}"
        "{{ '%d' }}"
    )
    tokenizer = bind(tiny.tokenizer(chat_template=template), RenderConfig(date=FIRST))
    assert apply_template(tokenizer, QUESTION) == "\n27.11 00:00:00 %d November%d"
    unbound = tiny.tokenizer(chat_template=DATED)
    texts = []
    for days in (0, 1):  # one that nobody has bound keeps its first date
        day(days)
        texts.append(apply_template(unbound, QUESTION))
    assert texts[0] == texts[1] and texts[0].startswith("It is 27 November 2026, 00:00. ")


def test_templates_that_write_a_date() -> None:
    """One does, unless an argument takes the date's place."""
    template = (
        "{% if date_string is not defined %}{% set date_string = strftime_now('%Y') %}{% endif %}"
        "{% if messages[0].role != 'system' %}{{ date_string }}{% endif %}"
    )
    for arguments, expected in (({}, True), ({"a": 1}, True), ({"date_string": "now"}, False)):
        tokenizer = tiny.tokenizer(chat_template=template)
        assert writes_date(bind(tokenizer, RenderConfig(template_arguments=arguments))) == expected
    beside_tools = tiny.tokenizer(
        chat_template="{% if tools %}{{ strftime_now('%Y') ~ a }}{% endif %}" + tiny.TEMPLATE
    )
    assert writes_date(bind(beside_tools, RenderConfig(template_arguments={"a": 1})))
    assert not writes_date(tiny.tokenizer(chat_template="{# strftime_now #}" + tiny.TEMPLATE))


def test_online_training_goes_on_tomorrow(
    dated: Path, day: Any, tmp_path: Path, capsys: Any
) -> None:
    """A run keeps its first date; another one is refused, and both are named."""
    words = ("--config", dated, "--train.max_steps", 4, "--train.max_seconds")
    assert call(train, *words, 1e-9, "--plan") == 0 and not (tmp_path / "run").exists()
    for days, budget in ((0, 1e-9), (1, 100)):
        day(days)
        assert call(train, *words, budget) == 0
        out, err = capsys.readouterr()
        assert written(err) == {"2026-11-27"} and err.count("writes the date") == 1 + (not days)
    assert "train eagle1: 4 steps" in out and (tmp_path / "run/date.txt").exists()
    record = json.loads((tmp_path / "run/heads/eagle1/provenance.json").read_text())
    assert record["date"] == record["inputs"]["data"]["date"] == "2026-11-27"
    assert call(train, *words, 100, "--data.date", "2026-11-28") == 2
    change = "the date that the template writes was 2026-11-27, is 2026-11-28"
    assert change in capsys.readouterr().err.splitlines()[-1]


def test_shares_of_two_days(dated: Path, day: Any, tmp_path: Path, capsys: Any) -> None:
    """Shares of two days are one cache, from which a third day trains and measures."""
    words = ("--config", dated, "--features.mode", "cached", "--features.shard_tokens", 300)
    for days, share in enumerate(("1/2", "2/2")):
        day(days)
        assert call(main, "features", *words, "--shard", share) == 0
    day(2)
    assert call(main, "features", *words) == 0
    assert "whole, reused" in capsys.readouterr().out
    assert call(train, *words) == 0 and call(infer, "bench", *words) == 0
    assert written(capsys.readouterr().err) == {"2026-11-27"}
    record = json.loads((tmp_path / "run/bench/provenance.json").read_text())
    assert record["inputs"]["date"] == "2026-11-27"


def test_two_starts_at_once(dated: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Where another share fixes the date first, this one takes it."""
    target = TargetConfig(str(tmp_path / "target"))
    recipe = Recipe(str(tmp_path / "run"), target, DataConfig(("rows",)))
    days = [FIRST, FIRST + datetime.timedelta(1)]

    def meanwhile() -> datetime.date:
        date = days.pop()
        if days:
            fix_date(recipe)
        return date

    monkeypatch.setattr(rendering, "today", meanwhile)
    assert fix_date(recipe).data.date == FIRST


def test_kept_rows_are_of_their_day(
    dated: Path, day: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Rows that were tokenised yesterday are not read where today's date is written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tokens, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(tokens, "num_cores", lambda: 1)
    target = TargetConfig(str(tmp_path / "target"))
    data = DataConfig((str(tmp_path / "rows.jsonl"),))
    texts = []
    for days in (0, 1, 1):
        day(days)
        rows, tokenizer, _ = tokens.tokenize_for_target(target, data)
        texts.append(tokenizer.decode(rows.train[0].input_ids)[:22])
    assert texts == ["It is 27 November 2026", *["It is 28 November 2026"] * 2]


def test_dates_are_said_once(
    dated: Path, recipe: Path, day: Any, tmp_path: Path, capsys: Any
) -> None:
    """Without a run today's date is said in a line; without a date nothing is said or kept."""
    words = ("generate", "--target", tmp_path / "target", "--prompt", "Hi", "--max-new-tokens", 1)
    assert call(infer, *words) == 0
    assert capsys.readouterr().err.count("2026-11-27") == 1
    tiny.tokenizer().save_pretrained(tmp_path / "target")
    assert call(infer, *words) == 0 and call(train, "--config", recipe) == 0
    assert not written(capsys.readouterr().err) and not list((tmp_path / "run").glob("*date*"))
    words = ("--run", tmp_path / "other", "--data.date", "2026-11-28")
    assert call(train, "--config", recipe, *words) == 0
    assert "writes no date" in capsys.readouterr().err
