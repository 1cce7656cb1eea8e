"""The patient of a diagnosis: a head, its target, and the texts on which both are measured."""

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
from aerie.model.target import Target
from aerie.model.target_files import context_of, target_end_ids
from aerie.model.vocab_weights import VocabWeights

ROOM = 32  # tokens that a prompt leaves for its answer and other ways to render it
MOST_TRAINED = 2000  # conversations read from the head's training data
MOST_TRAINED_TOKENS = 512  # tokens read of each


@dataclass
class Patient:
    """A head under examination, and what was measured so far."""

    target: Target
    tokenizer: Any
    head: str  # a directory or a Hub id
    prompts: Sequence[Prompt]
    trained_on: Sequence[LearntText] = ()  # texts that the head was trained on
    temperature: float = 0.0  # of the requests
    trained_target: str | None = None  # the target that the head was trained for, if another
    server: Server | None = None  # it drafts with the head
    symptoms: Symptoms = field(default_factory=Symptoms)
    better: Any = None  # the head's module in a better reading, if there is one

    def __post_init__(self) -> None:
        self.steps: dict[str, Drafting] = {}  # of the ladder, by name
        self.readings: list[Any] = []  # other readings of the head
        drafts = self.server.facts.draft_tokens if self.server else 0
        self.levels = drafts or DEPTHS  # the length of the chains to decode
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
        """Token ids of the first turns, without prompts that leave no room, or UserError."""
        limit = self.drafter.max_positions
        limit = min(limit, context_of(self.target.config) or limit) - ROOM
        rendered = self.rendered(self.prompts, self.tokenizer)
        fits = [len(ids) <= limit for ids in rendered]
        if not any(fits):
            raise UserError(
                f"all prompts are too long: the target and the head have room for {limit} tokens"
            )
        if not all(fits):
            why = f"{fits.count(False)} of {len(fits)} are longer than {limit} tokens"
            self.symptoms.absent["prompts"] = f"{why}, the first is number {fits.index(False) + 1}"
        self.prompts = [*compress(self.prompts, fits)]
        return [*compress(rendered, fits)]

    def rendered(self, prompts: Sequence[Prompt], tokenizer: Any) -> list[list[int]]:
        """Token ids of the first turns, rendered by this tokenizer's template."""
        return [encode_turn(prompt, (), tokenizer, self.target)[0].tolist() for prompt in prompts]

    def usual_tree(self) -> Proposer:
        """The published method's proposer; raises UserError if the head drafts too few levels."""
        method = USUAL[self.kind]
        row = MethodConfig(method, published_tree(method))
        proposer = make_proposer(self.heads, check_levels(row, self.head, method), self.head)
        assert proposer is not None
        return proposer

    def teacher_forced(self, texts: Sequence[LearntText]) -> Drafting:
        """How far the head, read as its file says, is accepted on these texts."""
        return self.drafting(self.module, state_texts(self.target, texts, self.taps))

    def mend(self, directory: Path) -> None:
        """Writes the head in its best reading; raises UserError if the file's own is the best."""
        if self.better is None:
            raise UserError(
                f"--mend {directory}: wrote nothing, because no other reading that a file can "
                f"have is clearly better for {self.head}"
            )
        if hasattr(self.better, "saves_embedding"):
            embedding = self.better.embed_tokens.weight
            self.better.saves_embedding = not is_targets(embedding, self.target.vocab)
        save_head(self.better, directory, **head_facts(self.head))

    @torch.no_grad()
    def drafting(
        self, head: Any, texts: Sequence[StatedText], vocab: VocabWeights | None = None
    ) -> Drafting:
        """How far drafts from every token of the texts are accepted, by training's own measure.

        head: the head's module in any reading. vocab: what it drafts with; None: the target's.
        """
        values: dict[str, Any] = {"kind": self.kind, "eval_depths": self.levels}
        if self.kind == "eagle3":
            values["unroll_steps"] = 1  # only the loss needs more, and nobody reads the loss
        if self.kind == "draft_lm":
            values["distill"] = "soft_cross_entropy"  # so accuracy means agreement with the target
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
        """`score_texts` of these texts, at temperatures 0 and 1 and at the requests'."""
        temperatures = sorted({0.0, 1.0, self.temperature})
        stated = state_texts(self.target, texts, self.taps)
        return score_texts(self.target, self.drafter, stated, temperatures)


def trained_texts(
    target: TargetConfig, tokenizer: Any, conversations: Path, head: str
) -> list[LearntText]:
    """The first conversations of a head's training, with training's loss mask."""
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
