"""Finds what template, temperature, length, domain and target take from acceptance.

`compare_texts` compares two sets of texts by their tables from laws.py.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from aerie.configs.schema.data import RenderConfig
from aerie.data.rendering import bind, bound_to, names_read, trained_arguments
from aerie.data.values import UnusableRow
from aerie.infer.diagnose.answers import LearntText, answer_greedily
from aerie.infer.diagnose.figures import Symptoms, shown
from aerie.infer.diagnose.laws import accept_at, drafts_in, mean_over_texts
from aerie.infer.diagnose.patient import Patient
from aerie.infer.measure.bench import load_quietly
from aerie.infer.measure.bootstrap import Estimate, PromptSums, Side, estimate
from aerie.infer.measure.statistics import FloatArray
from aerie.infer.measure.tasks import Prompt
from aerie.model.checkpoint import head_facts
from aerie.model.formats.content import TargetFacts
from aerie.model.target_files import load_config, other_weights

CLASSES = 8  # classes of tokens, by the target's entropy
TEXT_LENGTHS = tuple(2**power for power in range(3, 24))  # at which acceptance may fall
FEW = 40  # fewer tokens tell nothing about a length
RARE = 1e-4  # a token with a smaller share of the training's tokens is rare
THINKING = ("enable_thinking", "thinking")  # arguments of chat templates
SYSTEM_TURNS: dict[str, tuple[Any, ...]] = {
    "without a system prompt": (),
    "with an empty system prompt": ({"role": "system", "content": ""},),
}
TEMPLATE_KINDS = ("thinking", "BOS", "system prompt", "arguments")
VARIED_PROMPTS = 12  # how many prompts are rendered in other ways
VARIED_TOKENS = 48  # the most tokens of an answer to such a prompt
BY_TASK = "text.by_task."
SHOWN = {  # figures that the terminal shows -> their words, up to 53 columns
    "reading.words": "the best other reading of the head",
    "reading.gain": "  its gain in tokens per cycle",
    "text.temperature.0": "accepted at temperature 0",
    "text.temperature.1": "accepted at temperature 1",
    "text.temperature.loss": "the loss from 0 to the requests' temperature",
    "text.accept.trained": "accepted after the training's prompts",
    "text.accept.answers": "accepted after these prompts",
    "text.gap.total": "the gap between these two",
    "text.gap.vocabulary": "  the draft vocabulary's part",
    "text.gap.text": "  the text's part: the target is less sure",
    "text.gap.head": "  the head's part",
    "text.template.best": "the best other way to render the prompts",
    "text.template.gain": "  its gain in acceptance",
    "target.loss.total": "the gain with the target of the training",
}
GAP = ("total", "vocabulary", "text", "head")


# --- two texts ------------------------------------------------------------------------------------


def compare_texts(
    better: pd.DataFrame, worse: pd.DataFrame, accept: str, seed: int = 0
) -> dict[str, Estimate | None]:
    """The gap in acceptance between two texts (`total`), and the three parts that sum to it.

    `vocabulary`: more of the target's choices are outside the draft vocabulary. `text`: the target
    is less sure. `head`: less is accepted at the same entropy of the target. (Kitagawa, Oaxaca and
    Blinder's decomposition, with classes of entropy.) Rows with one number are pairs.
    """
    inside = [table.entropy[table.inside] for table in (better, worse)]
    edges = np.unique(np.quantile(pd.concat(inside), np.linspace(0, 1, CLASSES + 1)[1:-1]))
    sums = [_sums_by_class(table, accept, edges) for table in (better, worse)]
    side = pd.concat(sums, axis=1).fillna(0.0)
    return {
        name: estimate([Side(side, partial(_part, number))], seed=seed)
        for number, name in enumerate(GAP)
    }


def _sums_by_class(table: pd.DataFrame, accept: str, edges: FloatArray) -> pd.DataFrame:
    """Each text's tokens and accepted tokens by class; class 0 is outside the draft vocabulary."""
    classes = np.where(table.inside, 1 + np.searchsorted(edges, table.entropy), 0)
    groups = table.assign(starts=1.0).groupby([table.row, pd.Series(classes, table.index)])
    sums = groups[["starts", accept]].sum().unstack(fill_value=0.0)
    columns = product(("starts", accept), range(len(edges) + 2))
    return sums.reindex(columns=pd.MultiIndex.from_tuples(columns), fill_value=0.0)


def _part(number: int, sums: PromptSums) -> FloatArray:
    """Part `number` of GAP [...], from sums [..., 2 texts * 2 columns * classes]."""
    texts = sums.reshape(*sums.shape[:-1], 2, 2, -1)
    starts, accepted = texts[..., 0, :], texts[..., 1, :]  # [..., 2, classes]
    inside = starts[..., 1:].sum(-1) / starts.sum(-1)  # [..., 2] the share of tokens inside
    rate = accepted[..., 1:].sum(-1) / starts[..., 1:].sum(-1)  # [..., 2] acceptance of these
    overall = accepted.sum(-1) / starts.sum(-1)  # [..., 2]
    # The better text's rates [..., classes]. One more token with its mean rate fills empty classes.
    rates = (accepted[..., 0, 1:] + rate[..., :1]) / (starts[..., 0, 1:] + 1.0)
    weights = starts[..., 1, 1:] / starts[..., 1, 1:].sum(-1, keepdims=True)
    alike = (rates * weights).sum(-1)  # the worse text's tokens at the better text's rates
    total = overall[..., 0] - overall[..., 1]
    text = inside[..., 1] * (rate[..., 0] - alike)
    head = inside[..., 1] * (alike - rate[..., 1])
    parts: tuple[FloatArray, ...] = (total, total - text - head, text, head)
    return parts[number]


# --- temperature and length -----------------------------------------------------------------------


def temperature_figures(table: pd.DataFrame, served: float) -> dict[str, Any]:
    """Acceptance by temperature, and the loss from temperature 0 to the served one."""
    figures = {f"{t:g}": mean_over_texts(table, accept_at(t)) for t in sorted({0.0, 1.0, served})}
    loss = table[accept_at(0.0)] - table[accept_at(served)]
    return {**figures, "served": served, "loss": mean_over_texts(table.assign(loss=loss), "loss")}


def length_figures(table: pd.DataFrame, accept: str) -> dict[str, Any]:
    """The length from which on the loss at the same entropy is surest, and that loss.

    A length is a power of two with FEW tokens on both sides. {} without one.
    """
    falls = {}
    for length in TEXT_LENGTHS:
        is_long = table.length >= length
        if FEW <= is_long.sum() <= len(table) - FEW:
            falls[length] = compare_texts(table[~is_long], table[is_long], accept)["head"]
    worst = _surest(falls)
    if worst is None:
        return {}
    before = mean_over_texts(table[table.length < worst], accept)
    return {"at": worst, "loss": falls[worst], "before": before}


def _surest(figures: Mapping[Any, Estimate | None]) -> Any:
    """The key of the figure whose interval has the highest lower end; None without figures."""
    lows = {key: figure.low for key, figure in figures.items() if figure is not None}
    return max(lows, key=lambda key: lows[key], default=None)


# --- the text that the head was trained on --------------------------------------------------------


def trained_figures(
    trained: pd.DataFrame, answered: pd.DataFrame, learnt: Sequence[int], accept: str
) -> dict[str, Any]:
    """Figures of answers to the training's prompts and to these, and the gap with its parts.

    learnt: the tokens of the training's own answers.
    """
    answered = answered.assign(row=answered.row + 1 + trained.row.max())  # rows are not pairs
    shares = pd.Series(learnt).value_counts(normalize=True)
    figures = {}
    for name, table in (("trained", trained), ("answers", answered)):
        figures[f"accept.{name}"] = mean_over_texts(table, accept)
        figures[f"entropy.{name}"] = mean_over_texts(table, "entropy")
        figures[f"outside.{name}"] = mean_over_texts(table.assign(out=~table.inside), "out")
        is_rare = table.token.map(shares).fillna(0.0) < RARE
        figures[f"rare.{name}"] = mean_over_texts(table.assign(rare=is_rare), "rare")
    gap = compare_texts(trained, answered, accept)
    return {**figures, **{f"gap.{name}": part for name, part in gap.items()}}


# --- the template ---------------------------------------------------------------------------------


def template_variants(patient: Patient) -> dict[str, list[list[int]]]:
    """Token ids of the first prompts, rendered in other ways, by the words for the way."""
    prompts = patient.prompts[:VARIED_PROMPTS]
    tokenizer = patient.tokenizer
    served = bound_to(tokenizer)
    ways: dict[str, dict[str, Any]] = {"": served.arguments}
    trained = trained_arguments(patient.head)
    if trained is not None:  # the head's files name the arguments
        ways["with the template arguments of training"] = trained
    switches = names_read(tokenizer.chat_template).arguments & {*THINKING}
    if switches:
        ways["with thinking"] = served.arguments | dict.fromkeys(switches, True)
        ways["without thinking"] = served.arguments | dict.fromkeys(switches, False)
    variants = {}
    for way, arguments in ways.items():
        bound = bind(copy(tokenizer), RenderConfig(template_arguments=arguments, date=served.date))
        variants[way] = patient.rendered(prompts, bound)
    for way, system in SYSTEM_TURNS.items():
        with suppress(UnusableRow):
            changed = [replace(prompt, before=_with_system(prompt, system)) for prompt in prompts]
            variants[way] = patient.rendered(changed, tokenizer)
    bos = tokenizer.bos_token_id
    if bos is not None:
        variants["with one BOS more"] = [[bos, *ids] for ids in variants[""]]
        variants["without BOS"] = [ids[ids[0] == bos :] for ids in variants[""]]
    # A way tells nothing if an earlier way gives the same tokens.
    distinct: dict[str, list[list[int]]] = {}
    for way, ids in variants.items():
        if ids not in distinct.values():
            distinct[way] = ids
    del distinct[""]
    return distinct


def _with_system(prompt: Prompt, system: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*system, *(turn for turn in prompt.before if turn["role"] != "system"))


def template_figures(gains: Mapping[str, Estimate | None]) -> dict[str, Any]:
    """The gain of each other way to render the prompts, and the best way."""
    best = _surest(gains)
    if best is None:
        return {}
    kind = next((kind for kind in TEMPLATE_KINDS if kind in best), None)
    return {"best": best, "kind": kind, "gain": gains[best], **gains}


# --- the target -----------------------------------------------------------------------------------


def examine_target(patient: Patient, texts: list[LearntText]) -> None:
    """Adds whether the target is another one than the head was trained for, and what that costs."""
    target = patient.target
    facts = head_facts(patient.head)
    difference = other_weights(facts.get("target"), target.recipe, target.config, target.vocab)
    settings = getattr(load_config(target.recipe), "quantization_config", None) or {}
    patient.symptoms.add("target", {"other": difference, "quantised": settings.get("quant_method")})
    trained_for = patient.trained_target or (difference and _still_there(facts))
    if trained_for is None:
        why = "no other target was named (--trained-target DIR) or found"
        patient.symptoms.absent["target.loss"] = why
        return
    original = load_quietly(replace(target.recipe, path=trained_for, revision=None), None)
    theirs = replace(patient, target=original, symptoms=Symptoms())
    prompts = [text.prompt.tolist() for text in texts]
    trained = theirs.scored(answer_greedily(original, prompts))
    accept = accept_at(patient.temperature)
    patient.symptoms.add("target.loss", compare_texts(trained, patient.scored(texts), accept))
    patient.symptoms.add("target", {"accept": mean_over_texts(trained, accept)})


def _still_there(facts: dict[str, Any]) -> str | None:
    """The directory that the head's facts name as its target, if the weights are still there."""
    path = str(facts.get("target_path"))
    is_same = Path(path).is_dir() and not TargetFacts.load(path).other_weights(facts["target"])
    return path if is_same else None


# --- all of it ------------------------------------------------------------------------------------


def examine_text(patient: Patient, texts: list[LearntText]) -> None:
    """Adds acceptance by temperature, length, task, training text and template."""
    if not any(map(drafts_in, texts)):
        patient.symptoms.absent["text"] = "no answer has two tokens"
        return
    accept = accept_at(patient.temperature)
    answers = patient.scored(texts)
    add = patient.symptoms.add
    add("text", {"outside": mean_over_texts(answers.assign(out=~answers.inside), "out")})
    add("text.temperature", temperature_figures(answers, patient.temperature))
    add("text.length", length_figures(answers, accept))
    tasks = answers.row.map({row: prompt.task for row, prompt in enumerate(patient.prompts)})
    by_task = {task: mean_over_texts(part, accept) for task, part in answers.groupby(tasks)}
    add("text.by_task", by_task)
    if patient.trained_on:
        # The target answers these, too: people's answers would add a gap that is the text's.
        prompts = [text.prompt.tolist() for text in patient.trained_on[: len(texts)]]
        trained = patient.scored(answer_greedily(patient.target, prompts))
        learnt = torch.cat([text.ids[text.turn_ids > 0] for text in patient.trained_on])
        add("text", trained_figures(trained, answers, learnt.tolist(), accept))
    gains = {}
    served = answers[answers.row < VARIED_PROMPTS]
    for way, ids in template_variants(patient).items():
        texts = answer_greedily(patient.target, ids, VARIED_TOKENS)
        if any(map(drafts_in, texts)):
            gains[way] = compare_texts(patient.scored(texts), served, accept)["head"]
    add("text.template", template_figures(gains))


def text_lines(symptoms: Symptoms) -> list[str]:
    """The lines with SHOWN's figures for the terminal."""
    by_task = [name for name in symptoms.values if name.startswith(BY_TASK)]
    tasks = {name: f"accepted in {name.removeprefix(BY_TASK)}" for name in by_task}
    shown_lines = SHOWN if len(tasks) < 2 else SHOWN | tasks
    return [
        f"{words:<53}{shown(symptoms.values[name])}"
        for name, words in shown_lines.items()
        if name in symptoms.values
    ]
