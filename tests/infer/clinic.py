"""A target that has learnt a few sentences, and heads that draft for it: trained in seconds."""

import json
import random
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aerie.configs.read import validate
from aerie.configs.schema.heads import KINDS, TargetConfig, Train
from aerie.data.batches import Batch, collate
from aerie.data.feature_cache import CachedRow
from aerie.infer.diagnose.answers import LearntText, StatedText, last_norm, state_texts
from aerie.infer.diagnose.patient import Patient
from aerie.infer.diagnose.readings import NormedVocab
from aerie.infer.measure.tasks import Prompt
from aerie.model.checkpoint import new_head, save_head
from aerie.model.heads import HEADS
from aerie.model.heads.eagle import DraftVocabulary
from aerie.model.storage import CONFIG, WEIGHTS
from aerie.model.target import Target
from aerie.model.target_files import load_tokenizer
from tests import tiny

THETA = 500_000.0
SIZES = {
    "hidden_size": 64,
    "num_blocks": 5,
    "initializer_range": 0.08,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
}
TAPS = (1, 3)
PLACES = ("harbour", "forest", "market", "garden")
ROWS = 16  # of a training step
KEYS: dict[str, dict[str, Any]] = {  # of a section `head`, by kind
    "eagle3": {"lm_head": "frozen", "lm_head_init": "target"},
    "medusa": {"num_heads": 4},
    "block": {"mask_token_id": 4, "block_size": 5},
}


def question(chance: random.Random) -> tuple[str, str]:
    """A question and what the target learns to answer."""
    verb, noun = chance.choice(tiny.VERBS), chance.choice(tiny.NOUNS)
    count, where = chance.randint(2, 9), chance.choice(PLACES)
    counted = ", ".join(f"{number} {noun}" for number in range(1, min(count, 4) + 1))
    answer = f"I {verb} {count} {noun} in the {where}: {counted}. The {where} has {count} {noun}."
    return f"Please {verb} {count} {noun} in the {where}.", answer


def questions(count: int, seed: int) -> list[tuple[str, str]]:
    chance = random.Random(seed)
    return [question(chance) for _ in range(count)]


def text_of(tokenizer: Any, asked: str, answer: str) -> LearntText:
    messages = [{"role": "user", "content": asked}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ids = tokenizer(answer)["input_ids"]
    return LearntText.of_answer(prompt, [*ids, tokenizer.eos_token_id])


def fit(
    parameters: Sequence[Any], rows: Sequence[CachedRow], loss_of: Any, steps: int, rate: float
) -> None:
    """Trains on random rows; loss_of: (batch) -> its loss."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    chance = random.Random(1)
    for _ in range(steps):
        loss = loss_of(collate(chance.choices(rows, k=ROWS), range(ROWS)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()


def train_lm(directory: Path, rows: Sequence[LearntText], steps: int, **sizes: Any) -> Path:
    """A tiny Llama that has learnt these texts' answers."""
    tiny.target(directory, **sizes)
    model = tiny.llama(**sizes).train()

    def loss_of(batch: Batch) -> Any:
        labels = batch.input_ids.where(batch.turn_ids > 0, -100)
        return model(input_ids=batch.input_ids, labels=labels).loss

    parts = [CachedRow(row.ids, row.turn_ids, torch.empty(len(row.ids), 0), None) for row in rows]
    fit([*model.parameters()], parts, loss_of, steps, 4e-3)
    model.eval().save_pretrained(directory)
    return directory


class Ward:
    """The target, and heads for it that are trained when they are first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.servers: list[Any] = []
        self.tokenizer = tiny.tokenizer()
        self.rows = [text_of(self.tokenizer, *pair) for pair in questions(128, seed=0)]
        path = root / "target"
        if not path.exists():
            train_lm(path, self.rows, steps=250, **SIZES)
        recipe = TargetConfig(str(path))
        self.target = Target.load(recipe)
        self.tokenizer = load_tokenizer(recipe)
        self.prompts = [
            Prompt(str(number), "clinic", (asked,))
            for number, (asked, _) in enumerate(questions(8, seed=5))
        ]

    @cached_property
    def stated(self) -> list[StatedText]:
        return state_texts(self.target, self.rows, range(SIZES["num_blocks"]))

    def head(self, kind: str, name: str = "", steps: int = 150, **keys: Any) -> Path:
        """A trained head; keys: of the section, or rows, vocabulary, before_norm."""
        directory = self.root / "heads" / (name or kind)
        if not directory.exists() and kind == "draft_lm":
            train_lm(directory, self.rows, 200, **SIZES | {"num_blocks": 2})
        elif not directory.exists():
            with torch.enable_grad():
                head = self.train(kind, steps, **keys)
            save_head(head, directory, target=self.target.fingerprint())
        return directory

    def train(
        self,
        kind: str,
        steps: int,
        rows: int | None = None,
        vocabulary: Tensor | None = None,
        before_norm: bool = False,
        **keys: Any,
    ) -> Any:
        target = self.target
        values = {"kind": kind, **KEYS.get(kind, {}), **keys}
        section: Any = validate(values, KINDS[kind], "head", {})
        ids = torch.arange(320) if vocabulary is None else vocabulary
        draft = DraftVocabulary.of_ids(ids, 320) if kind == "eagle3" else None
        taps = TAPS if section.reads_taps else ()
        head: Any = new_head(section, target.config, target.vocab, 0, "", taps, draft).float()
        if getattr(section, "bias", False):
            head.fc.bias.data.normal_(generator=torch.Generator().manual_seed(0))
        schema: Any = Train
        unroll = {"unroll_steps": 4} if kind == "eagle3" else {}
        settings = validate({"kind": kind, **unroll}, schema, "train", {})
        vocab = target.vocab
        if before_norm:
            vocab = NormedVocab(**vars(vocab), norm=last_norm(target))
        objective = HEADS[kind].objective(head, vocab, settings).train()

        def loss_of(batch: Batch) -> Any:
            output = objective(batch)
            count = next(iter(output.terms.values()))[1]
            return output.total(objective.weights) / count

        parts = [part for part in head.parameters() if part.requires_grad]
        cached = []
        for row in self.stated[:rows]:
            states = torch.cat([row.states[tap] for tap in taps], -1) if taps else None
            features = row.before_norm if before_norm else row.last_hidden
            cached.append(CachedRow(row.text.ids, row.text.turn_ids, features, states))
        fit(parts, cached, loss_of, steps, 3e-3)
        return head.eval()

    def patient(self, head: Path, **changes: Any) -> Patient:
        return Patient(self.target, self.tokenizer, str(head), self.prompts, **changes)

    def broken(
        self,
        head: Path,
        name: str,
        tensors: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
        **values: Any,
    ) -> Path:
        """A copy of a head's files with other values in config.json (None: left out) or tensors."""
        directory = self.root / "broken" / name
        directory.mkdir(parents=True)
        config = json.loads((head / CONFIG).read_text()) | values
        kept = {key: value for key, value in config.items() if value is not None}
        (directory / CONFIG).write_text(json.dumps(kept))
        save_file(tensors(load_file(head / WEIGHTS)), directory / WEIGHTS)
        return directory
