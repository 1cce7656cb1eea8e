"""What a chat template gets besides the messages: the recipe's arguments and a date.

`recipe_tokenizer` binds both to the tokenizer that it loads, and `chat.apply_template`, which
renders everything, passes them on. A run keeps its date, so that it can go on after midnight.
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
from aerie.model.target_files import load_tokenizer

ARGUMENTS = "template_arguments"  # the key of the recipe, and of a head's record
SENT_AS = "chat_template_kwargs"  # the arguments' key in a request to a server
CLOCK = "strftime_now"  # transformers' function that tells a template the time
# transformers' own tag, by which a template marks answers
GENERATION_TAG = re.compile(r"{%[-+]?\s*(end)?generation\s*[-+]?%}")
# Stands before a template that asks the clock, and replaces its function. A template takes plain
# data only, so `aerie_date` holds what each of strftime's directives writes.
FIXED_CLOCK = """\
{%- macro strftime_now(format) -%}
{%- set made = namespace(text=format) -%}
{%- for directive, value in aerie_date.items() -%}
{%- set made.text = made.text.replace(directive, value) -%}
{%- endfor -%}
{{- made.text -}}
{%- endmacro %}
"""
DIRECTIVE = re.compile("%[-_0^#][A-Za-z]")  # strftime's directives with a flag
PLAIN_DIRECTIVES = [f"%{letter}" for letter in "aAbBcCdDeFgGhHIjmMnpPrRsStTuUVwWxXyYzZ"]
# What a template raises if it refuses the messages.
REFUSALS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError)
# What transformers passes to every template, besides the special tokens.
GIVEN = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "raise_exception",
    CLOCK,
}
OTHER_DATE = datetime.date(1999, 12, 31)
# Two conversations, since some templates write a date only if there is no system turn.
PROBES = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
]
PROBE_TOOLS = [{"type": "function", "function": {"name": "look", "description": "looks"}}]


class Bound(NamedTuple):
    """What `apply_template` passes to a tokenizer's template, besides the messages."""

    arguments: dict[str, Any]
    date: datetime.date

    def settings(self, template: str) -> dict[str, Any]:
        """The arguments of `apply_chat_template` that make it render with this template."""
        if CLOCK not in names_read(template).all:
            return self.arguments
        return {
            **self.arguments,
            "chat_template": FIXED_CLOCK + template,
            "aerie_date": _written(self.date, template, str(self.arguments)),
        }


def recipe_tokenizer(target: TargetConfig, config: RenderConfig) -> Any:
    """The target's tokenizer; its chat template gets the recipe's arguments and date.

    Prints the date that the template writes, and warns of arguments that it does not read.
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
    """The same tokenizer; its chat template gets the section's arguments and date from now on."""
    tokenizer.aerie_bound = Bound(dict(config.template_arguments), config.date or today())
    return tokenizer


def bound_to(tokenizer: Any) -> Bound:
    if "aerie_bound" not in vars(tokenizer):
        bind(tokenizer, RenderConfig())  # keeps today's date, also after midnight
    bound: Bound = tokenizer.aerie_bound
    return bound


def with_template_arguments(config: DistillConfig, render: RenderConfig) -> DistillConfig:
    """config, with the arguments in each request to its servers; its own extra_body wins."""
    server = config.server
    if server is None or not render.template_arguments:
        return config
    sent = {**render.template_arguments, **(server.extra_body.get(SENT_AS) or {})}
    return replace(config, server=replace(server, extra_body={**server.extra_body, SENT_AS: sent}))


# --- the date -------------------------------------------------------------------------------------


def today() -> datetime.date:
    """Today's date; nothing else asks the clock."""
    return datetime.date.today()


@cache
def _written(date: datetime.date, *texts: str) -> dict[str, str]:
    """What each of strftime's directives in the texts writes at midnight of the date."""
    midnight = datetime.datetime.combine(date, datetime.time())
    directives = [name for text in texts for name in DIRECTIVE.findall(text)]
    written = {name: midnight.strftime(name) for name in [*directives, *PLAIN_DIRECTIVES]}
    # The percent sign of "%%" begins no directive, so "\0" stands for it until the others are
    # replaced.
    return {"%%": "\0", **written, "\0": "%"}


def writes_date(tokenizer: Any) -> bool:
    """Whether the date changes what the template writes; its arguments may override the date."""
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
        return True  # it refuses the probes, so it may write one


def fix_date(recipe: Recipe, is_stage: bool = True) -> Recipe:
    """The recipe with the date that the template writes: the recipe's own, else the run's.

    The first stage of a run stores the run's date in a file, which the later stages read.
    """
    try:
        tokenizer = bind(load_tokenizer(recipe.target), recipe.data)
    except UserError:
        return recipe  # whoever needs the tokenizer reports the error
    requested = recipe.data.date
    if not writes_date(tokenizer):
        if requested is not None and not recipe.date_file.exists():
            path = recipe.target.path
            warn(f"data.date has no effect, since the chat template of {path} writes no date")
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

    all: set[str]  # with names that the template sets itself in one of its branches
    arguments: set[str]  # without these, and without what transformers passes


def names_read(template: Any) -> NamesRead:
    """The names that a template reads (or a mapping's templates); none if it is not Jinja."""
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
    """The names for which a template has a default, so that a caller may set them.

    Parameters of a macro, and names that the template sets from the messages, are not among them.
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
    """The template's arguments and date, for a record; empty if the template gets neither."""
    values = as_dict(config)
    return {name: values[name] for name in (ARGUMENTS, "date") if name in values}


def trained_arguments(head: str | Path) -> dict[str, Any] | None:
    """The template arguments of the head's training; None if no record of aerie names them."""
    directory = head_directory(head)
    facts = nested(read_json(directory / CONFIG), "aerie") or sound_record(directory)
    arguments: dict[str, Any] | None = facts.get(ARGUMENTS, {}) if facts else None
    return arguments


def trained_length(head: str | Path) -> int | None:
    """data.max_length of the head's training, in tokens; None if its recipe does not name it."""
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
                f"{head}: was trained with data.template_arguments {json.dumps(trained)}, but "
                f"the recipe has {json.dumps(config.template_arguments)}; "
                "the target may accept fewer drafts"
            )
