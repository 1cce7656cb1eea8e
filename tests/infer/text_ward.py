"""A target that answers in several ways, and heads that have learnt one of them or all.

After `Now:`, which the template writes without thinking, it answers at once. Else it thinks first.
It also knows another language and longer conversations; after two BOS it answers in that language.
"""

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from aerie.configs.schema.data import RenderConfig
from aerie.configs.schema.heads import DraftLMSection, DraftLMTrain, TargetConfig
from aerie.data.batches import Batch, collate
from aerie.data.chat import TokenRow
from aerie.data.rendering import bind
from aerie.infer.diagnose.answers import LearntText
from aerie.infer.measure.tasks import Prompt
from aerie.model.checkpoint import load_head, save_head
from aerie.model.storage import read_json, write_json
from aerie.model.target import Target
from aerie.train.lm import LMObjective, new_causal_lm, save_causal_lm
from tests import tiny
from tests.served import training
from tests.served.rows import Row

BOS = "<|pad|>"
TEMPLATE = (
    BOS + "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if enable_thinking is defined and not enable_thinking %}Now:{% endif %}{% endif %}"
)
AT_ONCE = {"enable_thinking": False}
OTHER_WORDS = {
    "boats": "bateaux", "apples": "pommes", "letters": "lettres", "stones": "pierres",
    "lamps": "lampes", "owls": "hiboux", "count": "comptez", "sort": "triez", "draw": "tirez",
    "carry": "portez", "paint": "peignez", "name": "nommez", "Please": "Veuillez", "I ": "Je ",
}  # fmt: skip
BLOCK = 32  # of weights that share a scale
UNSEEN = 77  # seed of the questions that no training has
Exchange = tuple[str, str]  # a question and its answer


def exchanges(count: int, seed: int) -> list[Exchange]:
    rows = tiny.conversations(count, seed)
    return [(turns[0]["value"], turns[1]["value"]) for turns in (r["conversations"] for r in rows)]


def translated(text: str) -> str:
    for word, other in OTHER_WORDS.items():
        text = text.replace(word, other)
    return text


def talks(count: int, seed: int) -> Iterator[tuple[list[dict[str, str]], Exchange]]:
    """Three turns, and the question and answer behind them."""
    rows = exchanges(4 * count, seed)
    for first in range(0, 4 * count, 4):
        before = []
        for question, answer in rows[first : first + 3]:
            before.append({"role": "user", "content": question})
            before.append({"role": "assistant", "content": answer})
        yield before, rows[first + 3]


def tokenizer(**arguments: Any) -> Any:
    loaded = tiny.tokenizer(chat_template=TEMPLATE)
    loaded.bos_token = BOS
    return bind(loaded, RenderConfig(template_arguments=arguments))


class Ward:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizers = {True: tokenizer(), False: tokenizer(**AT_ONCE)}  # by thinking
        self.at_once = [self._row(*pair) for pair in exchanges(192, 0)]
        self.twice_bos = [
            self._row(question, translated(answer), twice_bos=True)
            for question, answer in exchanges(96, 4)
        ]
        self.all = [*self.at_once, *self.twice_bos, *self._others()]
        model = new_causal_lm(
            DraftLMSection(**training.LM_SIZES, num_hidden_layers=8, hidden_size=64),
            self.tokenizers[True],
            0,
            len(self.tokenizers[True]),
        )
        self.target = self.trained(model, self.all, 160, "target")

    def _others(self) -> Iterator[TokenRow]:
        chance = random.Random(0)
        for question, answer in exchanges(128, 1):
            thought = f"<{chance.randint(10, 99)} {question[::-1]}>"
            yield self._row(question, thought + answer, thinking=True)
        for question, answer in exchanges(96, 2):
            yield self._row(translated(question), translated(answer))
        for before, (question, answer) in talks(96, 3):
            yield self._row(question, answer, before)

    def _row(
        self,
        question: str,
        answer: str,
        before: Sequence[Any] = (),
        thinking: bool = False,
        twice_bos: bool = False,
    ) -> TokenRow:
        loaded = self.tokenizers[thinking]
        messages = [*before, {"role": "user", "content": question}]
        arguments = {} if thinking else AT_ONCE
        text = loaded.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **arguments
        )
        prompt = loaded.encode(BOS * twice_bos + text)
        ids = loaded.encode(f"{answer}<|end|>")
        return TokenRow(prompt + ids, [0] * len(prompt) + [1] * len(ids), "")

    def trained(self, model: Any, rows: Sequence[TokenRow], steps: int, name: str) -> Target:
        objective = LMObjective(model, None, DraftLMTrain())
        training.train(objective, batches_of(rows), steps, 1e-2)
        save_causal_lm(self.tokenizers[True], model, self.directory / name)
        return self.load(name)

    def load(self, name: str) -> Target:
        return Target.load(TargetConfig(str(self.directory / name), dtype="float32"))

    def head(self, name: str, rows: Sequence[TokenRow], steps: int = 120) -> None:
        """Trains an EAGLE-3 head that learns these rows."""
        directory = self.directory / name
        loaded = self.tokenizers[True]
        batches = batches_of(rows)
        training.train_head(Row(name, "eagle3"), self.target, loaded, batches, steps, directory)
        self.record(name, name)

    def record(self, name: str, new_name: str, **facts: Any) -> None:
        """Saves a head with facts, and with its target's."""
        head = load_head(self.directory / name, vocab=self.target.vocab)
        facts |= {"target": self.target.fingerprint(), "target_path": self.target.recipe.path}
        save_head(head, self.directory / new_name, **facts)

    def fine_tuned(self) -> Target:
        """The target, which has then learnt to answer with the question's words in capitals."""
        model = LlamaForCausalLM.from_pretrained(self.target.recipe.path)
        rows = [self._row(question, f"NOW. {question}") for question, _ in exchanges(64, 5)]
        return self.trained(model, rows, 12, "fine_tuned")


def batches_of(rows: Sequence[TokenRow]) -> list[Batch]:
    shuffled = random.Random(0).sample(list(rows), len(rows))
    batches = []
    for start in range(0, len(rows), training.BATCH):
        part = shuffled[start : start + training.BATCH]
        batches.append(collate(part, range(len(part))))
    return batches


def learnt(rows: Sequence[TokenRow]) -> list[LearntText]:
    return [LearntText(torch.tensor(row.input_ids), torch.tensor(row.turn_ids)) for row in rows]


def prompts(count: int, other_language: bool = False, long: bool = False) -> list[Prompt]:
    """Of questions that no training has; long: every second one follows other turns."""
    questions = [question for question, _ in exchanges(count, UNSEEN)]
    before: list[tuple[Any, ...]] = [()] * count
    if long:
        for number, (turns, _) in enumerate(talks(count, UNSEEN)):
            before[number] = tuple(turns) if number % 2 else ()
    if other_language:
        questions = list(map(translated, questions))
    return [
        Prompt(str(number), "asked", (question,), turns)
        for number, (question, turns) in enumerate(zip(questions, before, strict=True))
    ]


def coarse(weight: torch.Tensor) -> torch.Tensor:
    """Rounded to a few values, as by a careless quantisation."""
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-6) / 3
    return (weight / scale).round() * scale


def quantised(target: Target, directory: Path) -> Target:
    """The target with blocks of 8-bit weights of few values."""
    shutil.copytree(target.recipe.path, directory)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("proj.weight"):
            rows, columns = (size // BLOCK for size in tensor.shape)
            blocks = coarse(tensor).view(rows, BLOCK, columns, BLOCK)
            scale = blocks.abs().amax((1, 3)) / 448.0  # [rows, columns]
            packed = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            tensors[name] = packed.view(tensor.shape)
            tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    values = read_json(directory / "config.json")
    values["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
        "fmt": "e4m3",
    }  # fmt: skip
    write_json(directory / "config.json", values)
    return Target.load(TargetConfig(str(directory), dtype="float32"))
