"""What a chat template gets beside the messages: the arguments of `data.template_arguments`.

They are bound to the tokenizer where it is loaded for a recipe, and `chat.apply_template`, which
renders everything, hands them over.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateSyntaxError, meta, nodes

from aerie.configs.errors import warn
from aerie.configs.schema.data import DistillConfig, RenderConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.model.formats.content import nested
from aerie.model.hub import head_directory
from aerie.model.storage import CONFIG, read_json, sound_record
from aerie.model.target import load_tokenizer

ARGUMENTS = "template_arguments"  # the key of the recipe, and of a head's record
SENT_AS = "chat_template_kwargs"  # to a server
# transformers' own tag, which marks answers
GENERATION_TAG = re.compile(r"{%[-+]?\s*(end)?generation\s*[-+]?%}")
# What transformers gives every template, beside the special tokens.
GIVEN = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "raise_exception",
    "strftime_now",
}


def recipe_tokenizer(target: TargetConfig, config: RenderConfig) -> Any:
    """The target's tokenizer, whose chat template gets the recipe's arguments."""
    tokenizer = load_tokenizer(target)
    names = names_read(tokenizer.chat_template)
    unread = sorted(config.template_arguments.keys() - names.all)
    if unread and tokenizer.chat_template:
        readable = ", ".join(sorted(names.arguments)) or "none"
        warn(
            f"data.template_arguments: the chat template of {target.path} does not read "
            f"{', '.join(unread)} (arguments that it reads: {readable})"
        )
    return bind(tokenizer, config)


def bind(tokenizer: Any, config: RenderConfig) -> Any:
    """The same tokenizer, whose chat template gets what the section says."""
    tokenizer.aerie_settings = dict(config.template_arguments)
    return tokenizer


def settings_of(tokenizer: Any) -> dict[str, Any]:
    """What `apply_chat_template` of a tokenizer gets beside the messages."""
    return dict(vars(tokenizer).get("aerie_settings", {}))


def with_template_arguments(config: DistillConfig, render: RenderConfig) -> DistillConfig:
    """config, whose servers are sent the arguments, too; its own extra_body wins."""
    server = config.server
    if server is None or not render.template_arguments:
        return config
    sent = {**render.template_arguments, **(server.extra_body.get(SENT_AS) or {})}
    return replace(config, server=replace(server, extra_body={**server.extra_body, SENT_AS: sent}))


# --- what a template reads ------------------------------------------------------------------------


class NamesRead(NamedTuple):
    """The names that a template takes from outside."""

    all: set[str]  # with those that it may set itself, in a branch
    arguments: set[str]  # without them, and without what transformers gives


def names_read(template: Any) -> NamesRead:
    """Of a template, or of several by name; none if it is no Jinja, which rendering reports."""
    texts = template.values() if isinstance(template, Mapping) else [template or ""]
    names = NamesRead(set(), set())
    environment = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True)
    for text in texts:
        with suppress(TemplateSyntaxError):
            tree = environment.parse(GENERATION_TAG.sub("", text))
            read = meta.find_undeclared_variables(tree)
            own = {node.name for node in tree.find_all(nodes.Name) if node.ctx != "load"}
            own -= set(_with_default(tree))
            is_token = {name for name in read if name.endswith("_token")}
            names.all.update(read)
            names.arguments.update(read - own - is_token - GIVEN)
    return names


def _with_default(tree: nodes.Template) -> Iterator[str]:
    """The names that a template asks whether they are defined: it sets those that are not."""
    for node in tree.find_all((nodes.Test, nodes.Filter)):
        if node.name in ("defined", "undefined", "default") and isinstance(node.node, nodes.Name):
            yield node.node.name


# --- what a head was trained with -----------------------------------------------------------------


def facts_of(config: RenderConfig) -> dict[str, Any]:
    """For a record: what the templates of its rows got; nothing if they got nothing."""
    return {ARGUMENTS: config.template_arguments} if config.template_arguments else {}


def trained_arguments(head: str | Path) -> dict[str, Any] | None:
    """The template arguments of the head's training; None if no record of ours says so."""
    directory = head_directory(head)
    facts = nested(read_json(directory / CONFIG), "aerie") or sound_record(directory)
    arguments: dict[str, Any] | None = facts.get(ARGUMENTS, {}) if facts else None
    return arguments


def warn_of_other_arguments(config: RenderConfig, heads: Iterable[str | None]) -> None:
    """Warns of heads that were trained with other template arguments."""
    for head in heads:
        trained = trained_arguments(head) if head else None
        if trained is not None and trained != config.template_arguments:
            warn(
                f"{head}: was trained with data.template_arguments {json.dumps(trained)}, and "
                f"these are {json.dumps(config.template_arguments)}; fewer drafts may fit"
            )
