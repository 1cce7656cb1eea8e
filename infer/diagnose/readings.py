"""Tries other readings of a head: what its file leaves open, or what a server may misread.

All readings use the same states of the target, so its forwards run only once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from aerie.data.progress import start_progress
from aerie.infer.diagnose.answers import LearntText, StatedText, last_norm, state_texts
from aerie.infer.diagnose.figures import Drafting
from aerie.infer.diagnose.ladder import chain_of, decoded
from aerie.infer.diagnose.patient import Patient
from aerie.infer.measure.bootstrap import Estimate, estimate
from aerie.model.checkpoint import rope_of
from aerie.model.heads import HEADS
from aerie.model.heads.eagle import EMBEDDING, DraftVocabulary
from aerie.model.target import Target
from aerie.model.target_files import default_taps
from aerie.model.vocab_weights import VocabWeights

# options that a file may have wrong -> the family of readings in verdict.yaml
FLAGS = {
    "norm_before_residual": "norm",
    "norm_output": "norm",
    "norm_before_fc": "norm",
    "fc_norm": "norm",
    "qk_norm": "norm",
    "bias": "bias",
    "qkv_bias": "bias",
}
SAME = 0.03  # up to this share of cycles differs between equal drafts, because of rounding
CLEAR = 0.05  # a better reading gains at least this much tau, as in verdict.yaml
TRIED = 6  # the chains of this many readings are compared with a server's
BASES = (10_000.0, 500_000.0, 1_000_000.0)  # RoPE's bases in published heads and targets


@dataclass(frozen=True)
class Reading:
    """A reading of a head that differs from what the head's file says."""

    family: str  # its name in verdict.yaml
    words: str  # a clause that tells the reading
    config: Any
    state: dict[str, Tensor]  # the weights by name
    is_before_norm: bool = False  # the head reads states from before the target's final norm

    def module(self) -> Any:
        """The head's module in this reading. Norms and biases that the file lacks do nothing."""
        kind = next(kind for kind in HEADS.values() if kind.config is type(self.config))
        with torch.device("meta"):  # shapes without memory
            module = kind.module(self.config)
        like = next(tensor for tensor in self.state.values() if tensor.is_floating_point())
        state = {}
        for name, tensor in module.state_dict().items():
            neutral = like.new_full(tensor.shape, float(not name.endswith("bias")))
            state[name] = self.state.get(name, neutral)
        module.load_state_dict(state, assign=True)
        return module.eval().requires_grad_(False)

    def drafting(self, patient: Patient, texts: Sequence[StatedText]) -> Drafting:
        """How far this reading's drafts are accepted; texts: with the states that it reads."""
        if not self.is_before_norm:
            return patient.drafting(self.module(), texts)
        before = [replace(text, last_hidden=text.before_norm) for text in texts]
        vocab = NormedVocab(**vars(patient.target.vocab), norm=last_norm(patient.target))
        return patient.drafting(self.module(), before, vocab)


@dataclass(frozen=True)
class NormedVocab(VocabWeights):
    """The target's vocabulary weights, whose logits apply the final norm first."""

    norm: nn.Module = nn.Identity()

    def logits(self, last_hidden: Tensor, rows: Tensor | slice | None = None) -> Tensor:
        return super().logits(self.norm(last_hidden), rows)


def readings_of(module: Any, target: Target) -> Iterator[Reading]:
    """Every other reading to try for a head's module."""
    config = module.config
    state = module.state_dict()
    for taps, note in other_taps(getattr(config, "after_blocks", ()), target.num_blocks).items():
        words = f"its taps are {[*taps]}{note}"
        yield Reading("taps", words, replace(config, after_blocks=taps), state)
    for name, family in FLAGS.items():
        is_on = vars(config).get(name)
        if is_on or (is_on is False and family == "norm"):
            words = f"{name} is {str(not is_on).lower()}"
            yield Reading(family, words, replace(config, **{name: not is_on}), state)
    if getattr(config, "rope_theta", None) is not None:
        ropes = [*((base, None) for base in BASES), rope_of(target.config)]
        for theta, scaling in ropes:
            if (theta, scaling) != (config.rope_theta, config.rope_scaling):
                words = f"RoPE's base is {theta:,.0f}, its scaling {scaling}"
                rope = replace(config, rope_theta=theta, rope_scaling=scaling)
                yield Reading("RoPE", words, rope, state)
    yield from other_weights_of(config, state, target.vocab)
    if not hasattr(config, "after_blocks"):
        words = "its features are from before the target's final norm"
        yield Reading("final norm", words, config, state, is_before_norm=True)


def other_taps(taps: tuple[int, ...], num_blocks: int) -> dict[tuple[int, ...], str]:
    """Other taps to try -> a note on who reads them so.

    It shifts all taps by one, shifts each tap by one, and takes the default taps.
    """
    if not taps:
        return {}
    guesses = {
        tuple(tap - 1 for tap in taps): ", as vLLM reads a head written for SGLang",
        tuple(tap + 1 for tap in taps): ", as SGLang reads a head written for vLLM",
    }
    for number, tap in enumerate(taps):
        for by in (-1, 1):
            guesses[(*taps[:number], tap + by, *taps[number + 1 :])] = ""
    default = default_taps(num_blocks) or taps
    guesses[default] = ", the default ones that llama.cpp and others assume"
    allowed = {}
    for guess, note in guesses.items():
        ascends = list(guess) == sorted({*guess}) and guess[0] >= 0 and guess[-1] < num_blocks
        if ascends and guess != taps and len(guess) == len(taps):
            allowed[guess] = note
    return allowed


def other_weights_of(
    config: Any, state: dict[str, Tensor], vocab: VocabWeights
) -> Iterator[Reading]:
    """Readings with the target's embedding or LM head, and with draft ids taken as target ids."""
    embedding = state.get(EMBEDDING, vocab.embedding)
    is_theirs = torch.equal(embedding, vocab.embedding)
    if embedding.shape == vocab.embedding.shape and not is_theirs:
        theirs = state | {EMBEDDING: vocab.embedding}
        yield Reading("embedding", "its embedding is the target's", config, theirs)
    ids = torch.arange(config.vocab_size, device=embedding.device)
    if getattr(config, "draft_vocab_size", config.vocab_size) < config.vocab_size:
        first = DraftVocabulary.of_ids(ids[: config.draft_vocab_size].cpu(), config.vocab_size)
        ids = ids[: config.draft_vocab_size] + state["d2t"]
        tables = {"d2t": first.d2t.to(ids.device), "t2d": first.t2d.to(ids.device)}
        as_ids = state | tables
        yield Reading("draft ids", "its draft ids are target ids", config, as_ids)
    names = [name for name in state if "lm_head" in name and name.endswith(".weight")]
    rows = vocab.lm_head[ids]
    if names and state[names[0]].shape == rows.shape:
        theirs = state | dict.fromkeys(names, rows)
        yield Reading("LM head", "its LM head is the target's", config, theirs)


def read_otherwise(patient: Patient, texts: Sequence[LearntText]) -> None:
    """Adds the other reading with the surest gain in tau over the file's reading."""
    if patient.kind not in HEADS:
        patient.symptoms.absent["reading"] = "the files of a draft LM have only one reading"
        return
    target = patient.target
    readings = [*readings_of(patient.module, target)]
    taps = {tap for reading in readings for tap in getattr(reading.config, "after_blocks", ())}
    stated = state_texts(target, texts, {*taps, *patient.taps})
    of_file = patient.drafting(patient.module, stated)
    gains: list[tuple[Reading, Estimate]] = []
    with start_progress(len(readings), "readings", "other readings") as progress:
        for reading in readings:
            gain = estimate([reading.drafting(patient, stated).side("tau"), of_file.side("tau")])
            if gain is not None:
                gains.append((reading, gain))
            progress.update()
    if not gains:
        patient.symptoms.absent["reading"] = "no answer has two tokens"
        return
    best, gain = max(gains, key=lambda pair: pair[1].low)
    figures = {"family": best.family, "words": best.words, "gain": gain}
    patient.symptoms.add("reading", figures)
    patient.symptoms.add("readings", {reading.words: gain for reading, gain in gains})
    patient.readings = [reading for reading, _ in gains]
    if gain.low > CLEAR and not best.is_before_norm:
        patient.better = best.module()


def explain_server(patient: Patient, texts: Sequence[LearntText]) -> None:
    """Adds the reading whose chains take as many cycles as the server, if the file's do not."""
    served = patient.steps.get("server")
    if served is None or not served.table.starts.any():
        return

    def distance(chain: Drafting) -> float:
        gaps = (chain.table.starts - served.table.starts).abs()
        return float(gaps.sum() / served.table.starts.sum())

    of_file = distance(patient.steps["chain"])
    if of_file < SAME:
        return
    symptoms = patient.symptoms
    forced = symptoms.values["ladder.teacher_forced.tau"].value
    share = symptoms.values["ladder.server.tau"].value / symptoms.values["ladder.chain.tau"].value

    def unlike(reading: Reading) -> float:
        """The distance between the reading's and the server's share of the file's tau."""
        gain = symptoms.values[f"readings.{reading.words}"].value
        return abs(1 + gain / forced - share)

    distances = []
    for reading in sorted(patient.readings, key=unlike)[:TRIED]:
        drafter = HEADS[patient.kind].drafter(reading.module(), patient.target)
        chain = decoded(patient.target, chain_of(drafter, patient.levels), texts, reading.words)
        distances.append((distance(chain), reading.words))
    nearest, words = min(distances, default=(1.0, ""))
    symptoms.add("server", {"differs": of_file})
    if nearest < of_file / 2:
        symptoms.add("server", {"words": words, "differs_so": nearest})
