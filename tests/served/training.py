"""Trains a target and its heads, each in seconds, on a tiny corpus."""

from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter

from aerie.configs.schema.heads import KINDS, DraftLMSection, DraftLMTrain, TargetConfig, Train
from aerie.data.batches import Batch, collate, with_states
from aerie.data.chat import TokenRow
from aerie.model.checkpoint import new_head, save_head
from aerie.model.heads import DRAFT_MODELS
from aerie.model.heads.eagle import DraftVocabulary
from aerie.model.target import Target
from aerie.train.lm import LMObjective, new_causal_lm, save_causal_lm
from tests import tiny
from tests.served.rows import Row

BLOCKS = 8
CONVERSATIONS = 256
BATCH = 16
TARGET_STEPS = 160
HEAD_STEPS = 120
LM_SIZES: dict[str, Any] = {
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
# vLLM's attention on a CPU accepts a head_dim of 32
LAYER_SIZES = {"intermediate_size": 128, "num_attention_heads": 2, "head_dim": 32}
SIZES: dict[str, dict[str, Any]] = {
    "eagle1": LAYER_SIZES,
    "eagle3": LAYER_SIZES,
    "block": {**LAYER_SIZES, "block_size": 6, "mask_token_id": 4},
    "medusa": {},
    "hydra": {},
    "draft_lm": {**LM_SIZES, "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 1},
}
TRAINING: dict[str, dict[str, Any]] = {
    "eagle3": {"unroll_steps": 3},
    "block": {"anchors": 8},
    "draft_lm": {"distill": "kl"},
}


class Corpus(NamedTuple):
    batches: list[Batch]
    prompts: list[list[int]]


def make_corpus(tokenizer: Any, num_prompts: int) -> Corpus:
    """Training conversations, cut after the first answer, and prompts of other conversations."""
    rows = []
    for row in tiny.conversations(CONVERSATIONS + num_prompts):
        question, answer = (turn["value"] for turn in row["conversations"][:2])
        asked = tokenizer.encode(f"<|user|>{question}<|end|><|assistant|>")
        answered = tokenizer.encode(f"{answer}<|end|>")
        turn_ids = [0] * len(asked) + [1] * len(answered)
        rows.append(TokenRow(asked + answered, turn_ids, row["id"]))
    learnt, held_out = rows[:CONVERSATIONS], rows[CONVERSATIONS:]
    batches = []
    for start in range(0, CONVERSATIONS, BATCH):
        numbers = range(start, start + BATCH)
        batches.append(collate([learnt[number] for number in numbers], numbers))
    prompts = [list(row.input_ids[: row.turn_ids.index(1)]) for row in held_out]
    return Corpus(batches, prompts)


def train(objective: Any, batches: list[Batch], steps: int, rate: float) -> None:
    """Trains with AdamW and a linear decay; the loss is the mean over supervised tokens."""
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    for step, batch in enumerate(islice(cycle(batches), steps)):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        batch = objective.prepare(batch, step)
        scales = {name: 1 / float(count) for name, count in objective.counts(batch).items()}
        objective(batch).total(objective.weights, scales).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def train_target(directory: Path, tokenizer: Any, batches: list[Batch]) -> Target:
    """Trains a Llama on the corpus, saves it, and loads it from its files."""
    sizes = {**LM_SIZES, "num_hidden_layers": BLOCKS, "hidden_size": 64}
    lm = new_causal_lm(DraftLMSection(**sizes), tokenizer, 0, len(tokenizer))
    train(LMObjective(lm, None, DraftLMTrain()), batches, TARGET_STEPS, 1e-2)
    save_causal_lm(tokenizer, lm, directory)
    return Target.load(TargetConfig(str(directory), dtype="float32"))


def train_head(
    row: Row, target: Target, tokenizer: Any, batches: list[Batch], steps: int, out: Path
) -> None:
    """Trains a row's head on the batches and the target's states, and saves it in `out`."""
    section = KINDS[row.kind](**SIZES[row.kind] | row.head)
    settings = TypeAdapter(Train).validate_python({"kind": row.kind, **TRAINING.get(row.kind, {})})
    if isinstance(section, DraftLMSection):
        head: Any = new_causal_lm(section, tokenizer, 1, len(tokenizer))
    else:
        vocabulary = draft_vocabulary(batches, row.drafted_tokens or len(tokenizer), len(tokenizer))
        head = new_head(
            section, target.config, target.vocab, 1, after_blocks=row.taps, vocabulary=vocabulary
        )
    objective = DRAFT_MODELS[row.kind].objective(head, target.vocab, settings)
    taps = row.taps if section.reads_taps else ()
    batches = [with_states(target, taps, torch.float32, batch) for batch in batches]
    train(objective, batches, steps, 1e-2)
    if row.kind == "draft_lm":
        save_causal_lm(tokenizer, head, out)
    else:
        save_head(head, out)


def draft_vocabulary(batches: list[Batch], size: int, vocab_size: int) -> DraftVocabulary:
    """The corpus's most frequent tokens."""
    counts = sum(batch.input_ids.flatten().bincount(minlength=vocab_size) for batch in batches)
    ids = torch.as_tensor(counts).argsort(descending=True, stable=True)[:size].sort().values
    return DraftVocabulary.of_ids(ids, vocab_size)
