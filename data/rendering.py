"""What a chat template gets beside the messages: the recipe's arguments and a date.

They are bound to the tokenizer where it is loaded for a recipe, and `chat.apply_template`, which
renders everything, hands them over. A run keeps its date, so that it can go on after midnight.
"""

import datetime
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta, nodes

from aerie.configs.errors import UserError, rank, warn
from aerie.configs.read import as_dict, read_yaml
from aerie.configs.schema.data import DistillConfig, RenderConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.configs.schema.recipe import Recipe, read_date, with_date
from aerie.model.formats.content import nested
from aerie.model.hub import head_directory
from aerie.model.storage import (
    CONFIG,
    Lock,
    date_change,
    explained,
    read_json,
    sound_record,
    write_text,
)
from aerie.model.target import load_tokenizer

ARGUMENTS = "template_arguments"  # the key of the recipe, and of a head's record
SENT_AS = "chat_template_kwargs"  # to a server
CLOCK = "strftime_now"  # the function that transformers gives a template
# transformers' own tag, which marks answers
GENERATION_TAG = re.compile(r"{%[-+]?\s*(end)?generation\s*[-+]?%}")
# Stands before a template with a clock, whose function it takes the place of: a template can be
# given plain data only, so what each of strftime's directives writes.
FIXED_CLOCK = """\
{%- macro strftime_now(format) -%}
{%- set made = namespace(text=format) -%}
{%- for directive, value in aerie_date.items() -%}
{%- set made.text = made.text.replace(directive, value) -%}
{%- endfor -%}
{{- made.text -}}
{%- endmacro %}
"""
DIRECTIVE = re.compile("%[-_0^#][A-Za-z]")  # of strftime, beside the plain ones
PLAIN_DIRECTIVES = [f"%{letter}" for letter in "aAbBcCdDeFgGhHIjmMnpPrRsStTuUVwWxXyYzZ"]
# What a template raises that refuses its messages
REFUSALS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError)
# What transformers gives every template, beside the special tokens.
GIVEN = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "raise_exception",
    CLOCK,
}
OTHER_DATE = datetime.date(1999, 12, 31)
# Two talks, as some templates write a date only where there is no system turn.
PROBES = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
]
PROBE_TOOLS = [{"type": "function", "function": {"name": "look", "description": "looks"}}]


class Bound(NamedTuple):
    """What `apply_template` gives a tokenizer's template."""

    arguments: dict[str, Any]
    date: datetime.date

    def settings(self, template: str) -> dict[str, Any]:
        """What `apply_chat_template` gets beside the messages, to render with a template."""
        if CLOCK not in names_read(template).all:
            return self.arguments
        return {
            **self.arguments,
            "chat_template": FIXED_CLOCK + template,
            "aerie_date": _written(self.date, template, str(self.arguments)),
        }


def recipe_tokenizer(target: TargetConfig, config: RenderConfig) -> Any:
    """The target's tokenizer, whose chat template gets the recipe's arguments and its date.

    It says once which date the template writes, and which arguments it does not read.
    """
    tokenizer = bind(load_tokenizer(target), config)
    names = names_read(tokenizer.chat_template)
    unread = sorted(config.template_arguments.keys() - names.all)
    if unread and tokenizer.chat_template:
        readable = ", ".join(sorted(names.arguments)) or "none"
        warn(
            f"data.template_arguments: the chat template of {target.path} does not read "
            f"{', '.join(unread)} (arguments that it reads: {readable})"
        )
    if rank() == 0 and writes_date(tokenizer):
        date = bound_to(tokenizer).date
        print(f"the chat template writes the date {date} (data.date)", file=sys.stderr, flush=True)
    return tokenizer


def bind(tokenizer: Any, config: RenderConfig) -> Any:
    """The same tokenizer, whose chat template gets what the section says from now on."""
    tokenizer.aerie_bound = Bound(dict(config.template_arguments), config.date or today())
    return tokenizer


def bound_to(tokenizer: Any) -> Bound:
    if "aerie_bound" not in vars(tokenizer):
        bind(tokenizer, RenderConfig())  # the date stays when the clock goes on
    bound: Bound = tokenizer.aerie_bound
    return bound


def with_template_arguments(config: DistillConfig, render: RenderConfig) -> DistillConfig:
    """config, whose servers are sent the arguments, too; its own extra_body wins."""
    server = config.server
    if server is None or not render.template_arguments:
        return config
    sent = {**render.template_arguments, **(server.extra_body.get(SENT_AS) or {})}
    return replace(config, server=replace(server, extra_body={**server.extra_body, SENT_AS: sent}))


# --- the date -------------------------------------------------------------------------------------


def today() -> datetime.date:
    """Asks the clock; nothing else does."""
    return datetime.date.today()


@cache
def _written(date: datetime.date, *texts: str) -> dict[str, str]:
    """What each of strftime's directives in the texts writes at midnight of the date."""
    midnight = datetime.datetime.combine(date, datetime.time())
    directives = [name for text in texts for name in DIRECTIVE.findall(text)]
    written = {name: midnight.strftime(name) for name in [*directives, *PLAIN_DIRECTIVES]}
    # A written percent sign begins no directive: it stands aside while the others are replaced.
    return {"%%": "\0", **written, "\0": "%"}


def writes_date(tokenizer: Any) -> bool:
    """Whether the date changes what the template writes; its arguments may take the place of it."""
    bound = bound_to(tokenizer)
    if CLOCK not in names_read(tokenizer.chat_template).all:
        return False
    if not bound.arguments:
        return True
    template = tokenizer.get_chat_template()
    renders = []
    try:
        for tried in (bound, bound._replace(date=OTHER_DATE)):
            settings = tried.settings(template)
            for tools in (None, PROBE_TOOLS):
                text = tokenizer.apply_chat_template(
                    PROBES, tools=tools, tokenize=False, **settings
                )
                renders.append(text)
        return bool(renders[:2] != renders[2:])
    except REFUSALS:
        return True  # not known


def fix_date(recipe: Recipe, is_stage: bool = True) -> Recipe:
    """The recipe with the date that the template writes in this run: the recipe's, else the run's.

    The first stage of a run decides, and keeps the date for the others.
    """
    try:
        tokenizer = bind(load_tokenizer(recipe.target), recipe.data)
    except UserError:
        return recipe  # who needs the tokenizer reports it
    requested = recipe.data.date
    if not writes_date(tokenizer):
        if requested is not None and not recipe.date_file.exists():
            warn(f"data.date: the chat template of {recipe.target.path} writes no date")
        return recipe
    kept = bound_to(tokenizer).date
    if is_stage:
        with explained(recipe.root), Lock(recipe.date_file.with_name(".date.lock")) as lock:
            lock.acquire()  # the shares of a stage may begin at the same time
            if not recipe.date_file.exists():
                write_text(recipe.date_file, f"{kept}\n")
    if recipe.date_file.exists():
        kept = read_date(recipe.date_file)
    if requested is not None and requested != kept:
        warn(f"{recipe.root}: {date_change(kept, requested)}")
    return with_date(recipe, requested or kept)


# --- what a template reads ------------------------------------------------------------------------


class NamesRead(NamedTuple):
    """The names that a template takes from outside."""

    all: set[str]  # with those that it may set itself, in a branch
    arguments: set[str]  # without them, and without what transformers gives


def names_read(template: Any) -> NamesRead:
    """The names that a template, or several by name, reads; none where it is no Jinja."""
    texts = template.values() if isinstance(template, Mapping) else [template or ""]
    parts = list(map(_names_in, texts))
    return NamesRead(
        set().union(*(part.all for part in parts)), set().union(*(part.arguments for part in parts))
    )


@cache
def _names_in(text: str) -> NamesRead:
    environment = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True)
    try:
        tree = environment.parse(GENERATION_TAG.sub("", text))
    except TemplateSyntaxError:
        return NamesRead(set(), set())
    read = meta.find_undeclared_variables(tree)
    assigned = {node.name for node in tree.find_all(nodes.Name) if node.ctx != "load"}
    assigned -= set(_with_default(tree))
    is_token = {name for name in read if name.endswith("_token")}
    return NamesRead(read, read - assigned - is_token - GIVEN)


def _with_default(tree: nodes.Template) -> Iterator[str]:
    """The names that a template asks whether they are defined, and sets where they are not.

    Not those of a macro's parameters or of what it takes from the messages.
    """
    local = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "param"}
    for assign in tree.find_all(nodes.Assign):
        names = list(assign.find_all(nodes.Name))
        if any(name.ctx == "load" and name.name not in GIVEN - {"messages"} for name in names):
            local.update(name.name for name in names if name.ctx == "store")
    for node in tree.find_all((nodes.Test, nodes.Filter)):
        is_asked = node.name in ("defined", "undefined", "default")
        if is_asked and isinstance(node.node, nodes.Name) and node.node.name not in local:
            yield node.node.name


# --- what a head was trained with -----------------------------------------------------------------


def facts_of(config: RenderConfig) -> dict[str, Any]:
    """What the template of a record's rows got beside them; empty if it got nothing."""
    values = as_dict(config)
    return {name: values[name] for name in (ARGUMENTS, "date") if name in values}


def trained_arguments(head: str | Path) -> dict[str, Any] | None:
    """The template arguments of the head's training; None if no record of ours says so."""
    directory = head_directory(head)
    facts = nested(read_json(directory / CONFIG), "aerie") or sound_record(directory)
    arguments: dict[str, Any] | None = facts.get(ARGUMENTS, {}) if facts else None
    return arguments


def trained_length(head: str | Path) -> int | None:
    """The most tokens of a row of the head's training; None if no record of ours says so."""
    recipe = head_directory(head) / "recipe.yaml"
    data = nested(read_yaml(recipe)[0], "data") if recipe.is_file() else {}
    length: int | None = data.get("max_length")
    return length


def warn_of_other_arguments(config: RenderConfig, heads: Iterable[str | None]) -> None:
    """Warns of heads that were trained with other template arguments."""
    for head in heads:
        trained = trained_arguments(head) if head else None
        if trained is not None and trained != config.template_arguments:
            warn(
                f"{head}: was trained with data.template_arguments {json.dumps(trained)}, and "
                f"these are {json.dumps(config.template_arguments)}; fewer drafts may fit"
            )
