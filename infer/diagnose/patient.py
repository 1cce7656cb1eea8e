"""What is examined: a head, its target, and the texts on which both are measured."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from aerie.configs.errors import UserError
from aerie.configs.read import validate
from aerie.configs.schema.data import DataConfig
from aerie.configs.schema.decode import USUAL, MethodConfig, published_tree
from aerie.configs.schema.heads import TargetConfig, Train
from aerie.data.conversations import Tally
from aerie.data.rendering import bind, bound_to, trained_arguments
from aerie.data.tokens import tokenize
from aerie.infer.decode.find_head import check_levels, kind_at
from aerie.infer.decode.loaded_heads import LoadedHeads
from aerie.infer.decode.proposers import make_proposer
from aerie.infer.decode.roles import Proposer
from aerie.infer.diagnose.answers import LearntText, StatedText, state_texts
from aerie.infer.diagnose.figures import DEPTHS, Drafting, Symptoms
from aerie.infer.diagnose.laws import score_texts
from aerie.infer.measure.server import Server
from aerie.infer.measure.tasks import Prompt, encode_turn
from aerie.model.checkpoint import head_facts, is_targets, save_head
from aerie.model.heads import DRAFT_MODELS
from aerie.model.target import Target, VocabWeights, context_of, target_end_ids

ROOM = 32  # tokens: for an answer, and for other ways to render its prompt
MOST_TRAINED = 2000  # conversations of the head's training
MOST_TRAINED_TOKENS = 512  # of each


@dataclass
class Patient:
    """What is examined, and what was measured so far."""

    target: Target
    tokenizer: Any
    head: str  # a directory or a Hub id
    prompts: Sequence[Prompt]
    trained_on: Sequence[LearntText] = ()  # texts of the head's training
    temperature: float = 0.0  # of the requests
    trained_target: str | None = None  # for which the head was trained, where it is another
    server: Server | None = None  # that drafts with the head
    symptoms: Symptoms = field(default_factory=Symptoms)
    better: Any = None  # the head's module under its best other reading

    def __post_init__(self) -> None:
        self.steps: dict[str, Drafting] = {}  # of the ladder
        self.readings: list[Any] = []  # other readings of the head
        drafts = self.server.facts.draft_tokens if self.server else 0
        self.levels = drafts or DEPTHS  # of the chains that are decoded here
        self.kind = kind_at(self.head)
        self.heads = LoadedHeads(self.target)
        try:
            model = self.heads.model_of(self.head)
        except UserError as error:
            self.symptoms.add("file", {"problem": str(error)})
            return
        self.drafter = self.heads.of(self.head)
        self.module = model.model if isinstance(model, Target) else model
        self.taps = self.drafter.after_blocks

    def prompt_ids(self) -> list[list[int]]:
        """The first turns of the prompts; those that leave no room for answers are left out."""
        limit = self.drafter.max_positions
        limit = min(limit, context_of(self.target.config) or limit) - ROOM
        rendered = self.rendered(self.prompts, self.tokenizer)
        fits = [len(ids) <= limit for ids in rendered]
        if not any(fits):
            raise UserError(f"no prompt is short enough for the target or the head: {limit} tokens")
        if not all(fits):
            why = f"{fits.count(False)} of {len(fits)} are longer than {limit} tokens"
            self.symptoms.absent["prompts"] = f"{why}, first number {fits.index(False) + 1}"
        self.prompts = [*compress(self.prompts, fits)]
        return [*compress(rendered, fits)]

    def rendered(self, prompts: Sequence[Prompt], tokenizer: Any) -> list[list[int]]:
        """Token ids of the first turns, by this tokenizer's template."""
        return [encode_turn(prompt, (), tokenizer, self.target)[0].tolist() for prompt in prompts]

    def usual_tree(self) -> Proposer:
        """Of the published method of the head's kind; UserError where the head is too short."""
        method = USUAL[self.kind]
        row = MethodConfig(method, published_tree(method))
        proposer = make_proposer(self.heads, check_levels(row, self.head, method), self.head)
        assert proposer is not None
        return proposer

    def teacher_forced(self, texts: Sequence[LearntText]) -> Drafting:
        """The head as its file says, on these texts."""
        return self.drafting(self.module, state_texts(self.target, texts, self.taps))

    def mend(self, directory: Path) -> None:
        """Writes the head as it is best read; UserError if that is how its file reads."""
        if self.better is None:
            raise UserError(
                f"--mend {directory}: nothing is written: no other reading that a file can have "
                f"is clearly better for {self.head}"
            )
        if hasattr(self.better, "saves_embedding"):
            embedding = self.better.embed_tokens.weight
            self.better.saves_embedding = not is_targets(embedding, self.target.vocab)
        save_head(self.better, directory, **head_facts(self.head))

    @torch.no_grad()
    def drafting(
        self, head: Any, texts: Sequence[StatedText], vocab: VocabWeights | None = None
    ) -> Drafting:
        """From every token of the texts, as training's own objective measures it.

        head: its module, or another reading of it; vocab: what it drafts with, if not the target's.
        """
        values: dict[str, Any] = {"kind": self.kind, "eval_depths": self.levels}
        if self.kind == "eagle3":
            values["unroll_steps"] = 1  # of the loss, which nobody reads
        if self.kind == "draft_lm":
            values["distill"] = "soft_cross_entropy"  # so that it is measured against the target
        schema: Any = Train
        settings = validate(values, schema, "train", {})
        make_objective = DRAFT_MODELS[self.kind].objective
        objective = make_objective(head, vocab or self.target.vocab, settings)
        lines = []
        for text in texts:
            sums = objective.measure(text.batch(getattr(head.config, "after_blocks", ())))
            line = {}
            for position in range(1, DEPTHS + 1):
                hits, tries = sums.get(f"accuracy_at_{position}", (0, 0))
                line[f"hits_{position}"] = float(hits)
                line[f"tries_{position}"] = float(tries)
            chain, starts = sums["chain"]
            line["starts"] = float(starts)
            line["tokens"] = float(starts) + float(chain)  # each start ends with the bonus token
            lines.append(line)
        return Drafting.of_prompts(lines)

    def scored(self, texts: Sequence[LearntText]) -> pd.DataFrame:
        """The laws along these texts, at the temperatures that are looked at."""
        temperatures = sorted({0.0, 1.0, self.temperature})
        stated = state_texts(self.target, texts, self.taps)
        return score_texts(self.target, self.drafter, stated, temperatures)


def trained_texts(
    target: TargetConfig, tokenizer: Any, conversations: Path, head: str
) -> list[LearntText]:
    """The first conversations of a head's training, as training sees them."""
    arguments = trained_arguments(head)
    config = DataConfig(
        conversations=(str(conversations),),
        template_arguments=bound_to(tokenizer).arguments if arguments is None else arguments,
        held_out=0.0,
        limit=MOST_TRAINED,
        max_length=MOST_TRAINED_TOKENS,
    )
    tokenizer = bind(copy(tokenizer), config)
    rows = tokenize(config, tokenizer, target_end_ids(target, tokenizer), Tally()).train
    return [LearntText(*map(torch.tensor, (row.input_ids, row.turn_ids))) for row in rows]
