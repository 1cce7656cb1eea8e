"""What of a loss of acceptance is not the head's: template, temperature, length, domain, target.

Each question compares two texts by their tables of laws.py (`compare_texts`).
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
from aerie.model.target import load_config, other_weights

CLASSES = 8  # of tokens, by the target's entropy
TEXT_LENGTHS = tuple(2**power for power in range(3, 24))  # at which acceptance may fall
FEW = 40  # tokens: fewer say nothing of a length
RARE = 1e-4  # share of the training's tokens
THINKING = ("enable_thinking", "thinking")  # arguments of chat templates
SYSTEM_TURNS: dict[str, tuple[Any, ...]] = {
    "without a system prompt": (),
    "with an empty system prompt": ({"role": "system", "content": ""},),
}
TEMPLATE_KINDS = ("thinking", "BOS", "system prompt", "arguments")
VARIED_PROMPTS = 12  # that are rendered in other ways
VARIED_TOKENS = 48  # of their answers
BY_TASK = "text.by_task."
SHOWN = {  # on the page
    "reading.words": "the best other reading of the head",
    "reading.gain": "  tokens more a cycle so",
    "text.temperature.0": "accepted at temperature 0",
    "text.temperature.1": "accepted at temperature 1",
    "text.temperature.loss": "accepted less at the requests' temperature than at 0",
    "text.accept.trained": "accepted after prompts of the training",
    "text.accept.answers": "accepted after these prompts",
    "text.gap.total": "the gap between them",
    "text.gap.vocabulary": "  of it, the draft vocabulary's part",
    "text.gap.text": "  the text's part: the target is less sure",
    "text.gap.head": "  the head's part",
    "text.template.best": "the best other way to render the prompts",
    "text.template.gain": "  accepted more so",
    "target.loss.total": "accepted more with the target of the training",
}
GAP = ("total", "vocabulary", "text", "head")


# --- two texts ------------------------------------------------------------------------------------


def compare_texts(
    better: pd.DataFrame, worse: pd.DataFrame, accept: str, seed: int = 0
) -> dict[str, Estimate | None]:
    """How much less of one text than of another is accepted, and three parts that sum to it.

    `vocabulary`: more of the target's choices are outside the draft vocabulary. `text`: of the
    others the head would accept less even if it accepted, where the target's entropy is alike, as
    much as of the better text. `head`: at the same entropy it accepts less. (The decomposition of
    Kitagawa, Oaxaca and Blinder, with classes of entropy.) Rows with one number are pairs.
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
    """Of each text, all tokens and the accepted ones by class; class 0: outside the vocabulary."""
    classes = np.where(table.inside, 1 + np.searchsorted(edges, table.entropy), 0)
    groups = table.assign(starts=1.0).groupby([table.row, pd.Series(classes, table.index)])
    sums = groups[["starts", accept]].sum().unstack(fill_value=0.0)
    columns = product(("starts", accept), range(len(edges) + 2))
    return sums.reindex(columns=pd.MultiIndex.from_tuples(columns), fill_value=0.0)


def _part(number: int, sums: PromptSums) -> FloatArray:
    """One of GAP, of sums [..., 2 * 2 * classes]."""
    texts = sums.reshape(*sums.shape[:-1], 2, 2, -1)
    starts, accepted = texts[..., 0, :], texts[..., 1, :]  # [..., 2, classes]
    inside = starts[..., 1:].sum(-1) / starts.sum(-1)  # [..., 2] share of tokens
    rate = accepted[..., 1:].sum(-1) / starts[..., 1:].sum(-1)  # [..., 2] at those inside
    overall = accepted.sum(-1) / starts.sum(-1)
    # the better text's rates [..., classes], with one token more of its mean rate in each
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
    """Acceptance by temperature, and how much less it is at the served one than at 0."""
    figures = {f"{t:g}": mean_over_texts(table, accept_at(t)) for t in sorted({0.0, 1.0, served})}
    loss = table[accept_at(0.0)] - table[accept_at(served)]
    return {**figures, "served": served, "loss": mean_over_texts(table.assign(loss=loss), "loss")}


def length_figures(table: pd.DataFrame, accept: str) -> dict[str, Any]:
    """From which length on less is accepted at the same entropy, and how much less.

    The lengths are powers of two, with FEW tokens on both sides; {} without one.
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
    """The key of the figure whose interval begins highest; None without any."""
    lows = {key: figure.low for key, figure in figures.items() if figure is not None}
    return max(lows, key=lambda key: lows[key], default=None)


# --- the text that the head was trained on --------------------------------------------------------


def trained_figures(
    trained: pd.DataFrame, answered: pd.DataFrame, learnt: Sequence[int], accept: str
) -> dict[str, Any]:
    """The gap in acceptance between answers to the training's prompts and these, and its parts.

    learnt: the tokens of the training's answers.
    """
    answered = answered.assign(row=answered.row + 1 + trained.row.max())  # no pairs
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
    """Other token ids of the first turns, by the way in which some prompts are rendered."""
    prompts = patient.prompts[:VARIED_PROMPTS]
    tokenizer = patient.tokenizer
    served = bound_to(tokenizer)
    ways: dict[str, dict[str, Any]] = {"": served.arguments}
    trained = trained_arguments(patient.head)
    if trained is not None:  # else its files do not name them
        ways["with the template arguments of training"] = trained
    for name in sorted(names_read(tokenizer.chat_template).arguments & {*THINKING}):
        ways["with thinking"] = served.arguments | {name: True}
        ways["without thinking"] = served.arguments | {name: False}
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
    # ways that write the same tokens as one before them tell nothing
    distinct: dict[str, list[list[int]]] = {}
    for way, ids in variants.items():
        if ids not in distinct.values():
            distinct[way] = ids
    del distinct[""]
    return distinct


def _with_system(prompt: Prompt, system: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*system, *(turn for turn in prompt.before if turn["role"] != "system"))


def template_figures(gains: Mapping[str, Estimate | None]) -> dict[str, Any]:
    """What other ways to render the prompts gain, and the best of them."""
    best = _surest(gains)
    if best is None:
        return {}
    kind = next((kind for kind in TEMPLATE_KINDS if kind in best), None)
    return {"best": best, "kind": kind, "gain": gains[best], **gains}


# --- the target -----------------------------------------------------------------------------------


def examine_target(patient: Patient, texts: list[LearntText]) -> None:
    """Another target than the head was trained for: its fingerprint, and acceptance on both."""
    target = patient.target
    facts = head_facts(patient.head)
    difference = other_weights(facts.get("target"), target.recipe, target.config, target.vocab)
    settings = getattr(load_config(target.recipe), "quantization_config", None) or {}
    patient.symptoms.add("target", {"other": difference, "quantised": settings.get("quant_method")})
    trained_for = patient.trained_target or (difference and _still_there(facts))
    if trained_for is None:
        patient.symptoms.absent["target.loss"] = "no other target; name it with --trained-target"
        return
    original = load_quietly(replace(target.recipe, path=trained_for, revision=None), None)
    theirs = replace(patient, target=original, symptoms=Symptoms())
    prompts = [text.prompt.tolist() for text in texts]
    trained = theirs.scored(answer_greedily(original, prompts))
    accept = accept_at(patient.temperature)
    patient.symptoms.add("target.loss", compare_texts(trained, patient.scored(texts), accept))
    patient.symptoms.add("target", {"accept": mean_over_texts(trained, accept)})


def _still_there(facts: dict[str, Any]) -> str | None:
    """The directory that a head's facts name as its target, if it still holds those weights."""
    path = str(facts.get("target_path"))
    is_same = Path(path).is_dir() and not TargetFacts.load(path).other_weights(facts["target"])
    return path if is_same else None


# --- all of it ------------------------------------------------------------------------------------


def examine_text(patient: Patient, texts: list[LearntText]) -> None:
    """What the text takes from a head: temperature, length, domain and template."""
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
        # the target's own answers, too: a gap to people's words would be the text's
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
    """What the terminal shows of it."""
    by_task = [name for name in symptoms.values if name.startswith(BY_TASK)]
    tasks = {name: f"accepted in {name.removeprefix(BY_TASK)}" for name in by_task}
    shown_lines = SHOWN if len(tasks) < 2 else SHOWN | tasks
    return [
        f"{words:<53}{shown(symptoms.values[name])}"
        for name, words in shown_lines.items()
        if name in symptoms.values
    ]
