"""Laws of what a chat template gets beside the messages."""

import json
import re
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
from aerie.data import main
from aerie.data.chat import apply_template
from aerie.data.distill.answer import Thinking
from aerie.data.rendering import bind, names_read, with_template_arguments
from aerie.infer import main as infer
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
