"""Tiny targets, tokenizers, conversations and heads for tests, seeded and without downloads."""

import json
import random
import re
import shlex
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState, GradientState
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from aerie import __main__ as aerie_command
from aerie.configs.errors import UserError
from aerie.configs.schema.heads import KINDS
from aerie.data.feature_cache import CachedRow
from aerie.model.checkpoint import new_head
from aerie.model.heads.eagle import (
    DraftVocabulary,
    Eagle1Config,
    Eagle1Head,
    Eagle3Config,
    Eagle3Head,
)
from aerie.model.vocab_weights import VocabWeights

torch.set_num_threads(1)  # tests run beside other work

SPECIAL = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|pad|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NOUNS = ("boats", "apples", "letters", "stones", "lamps", "owls")
VERBS = ("count", "sort", "draw", "carry", "paint", "name")


@cache
def _tokenizer_json(vocab_size: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [turn["value"] for row in conversations(64, seed=0) for turn in row["conversations"]]
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def tokenizer(
    vocab_size: int = 320, chat_template: str | None = TEMPLATE
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with eos <|end|> and pad <|pad|>, and a chat template or None."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json(vocab_size)),
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=chat_template,
    )


def conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """ShareGPT rows of one to three turns."""
    chance = random.Random(seed)
    rows = []
    for number in range(count):
        turns = []
        for _ in range(chance.randint(1, 3)):
            verb, noun, amount = chance.choice(VERBS), chance.choice(NOUNS), chance.randint(2, 99)
            turns.append({"from": "human", "value": f"Please {verb} {amount} {noun}."})
            tail = " ".join(chance.choice(NOUNS) for _ in range(chance.randint(1, 6)))
            turns.append({"from": "gpt", "value": f"I {verb} {amount} {noun}: {tail}."})
        rows.append({"id": f"row-{number}", "conversations": turns})
    return rows


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_conversations(path: Path, count: int, seed: int = 0) -> Path:
    return write_rows(path, conversations(count, seed))


def llama(
    vocab_size: int = 320, hidden_size: int = 32, num_blocks: int = 4, seed: int = 0, **changes: Any
) -> LlamaForCausalLM:
    """A Llama with random weights. They are large (0.2, not 0.02), so a few tokens are likelier."""
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_blocks,
        "intermediate_size": 2 * hidden_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": SPECIAL.index("<|end|>"),
        "pad_token_id": SPECIAL.index("<|pad|>"),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**sizes | changes)).eval()


def target(directory: Path, chat_template: str | None = TEMPLATE, **sizes: Any) -> Path:
    """A target's directory as Hugging Face writes it: configs, safetensors, tokenizer."""
    model = llama(**sizes)
    model.save_pretrained(directory)
    tokenizer(model.config.vocab_size, chat_template).save_pretrained(directory)
    return directory


def vocab(vocab_size: int = 320, hidden_size: int = 32, seed: int = 0) -> VocabWeights:
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(vocab_size, hidden_size, generator=generator)
    lm_head = torch.randn(vocab_size, hidden_size, generator=generator)
    return VocabWeights(embedding, lm_head, None, 1.0, None)


def _eagle(
    module: Any, config: Any, embedding: Tensor, seed: int, scale: float, changes: dict[str, Any]
) -> Any:
    """A head (GQA 4:2) for an embedding [V, D]; its matrices are multiplied by scale."""
    vocab_size, width = embedding.shape
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "head_dim": width // 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
    }
    head = module(config(**sizes | changes))
    target_vocab = VocabWeights(embedding, embedding, None, 1.0, None)
    head.initialise(target_vocab, torch.Generator().manual_seed(seed))
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2 and name != "embed_tokens.weight":
            parameter.data.mul_(scale)
    return head


def head(embedding: Tensor, seed: int = 0, scale: float = 1.0, **changes: Any) -> Any:
    return _eagle(Eagle1Head, Eagle1Config, embedding, seed, scale, changes)


def eagle3_head(
    embedding: Tensor, ids: Tensor | None = None, seed: int = 0, scale: float = 1.0, **changes: Any
) -> Eagle3Head:
    """An EAGLE-3 head with taps (1, 2) that drafts the target ids [Vd] (None: every third id)."""
    vocab_size, width = embedding.shape
    ids = torch.arange(0, vocab_size, 3) if ids is None else ids
    vocabulary = DraftVocabulary.of_ids(ids, vocab_size)
    sizes = {
        "draft_vocab_size": vocabulary.size,
        "target_hidden_size": width,
        "after_blocks": (1, 2),
    }
    head: Eagle3Head = _eagle(Eagle3Head, Eagle3Config, embedding, seed, scale, sizes | changes)
    head.d2t.copy_(vocabulary.d2t)
    head.t2d.copy_(vocabulary.t2d)
    return head


def multi_token_head(
    kind: str, target_vocab: VocabWeights, noise: float = 0.0, seed: int = 0, **keys: Any
) -> Any:
    """A Medusa, Hydra or block head for a tiny Llama; noise moves every weight."""
    if kind == "block":
        keys = {"mask_token_id": 4, **keys}
    head = new_head(KINDS[kind](**keys), llama().config, target_vocab, seed, after_blocks=(1, 2))
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in head.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=noise)
    return head


def flip(path: Path, byte: int | None = None) -> None:
    """Flips one bit of a file, in this byte or in the middle one."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if byte is None else byte] ^= 0x10
    path.write_bytes(content)


def call(module: Any, *words: object) -> int:
    """Runs a command in this process; returns its exit code."""
    before = sys.argv
    sys.argv = ["main.py", *map(str, words)]
    try:
        return int(module.main())
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def session(text: str, capsys: Any, never: str = "\0", **names: object) -> str:
    """Types command lines one after another; returns what the last one writes to stdout.

    Below each command stand, indented, parts of what it must print, and `exit CODE` for a code
    other than 0. Spaces and line breaks count as one space. never: a text that no command may
    print. `aerie` runs in this process, other commands run in a shell. {name} is replaced by that
    name's value.
    """
    out = ""
    for block in re.split(r"\n(?=\S)", textwrap.dedent(text).strip()):
        line, *expected = map(str.strip, block.format(**names).splitlines())
        code, out, err = typed(line, capsys)
        printed = " ".join((out + err).split())
        if not any(part.startswith("exit ") for part in expected):
            expected.append("exit 0")
        for part in expected:
            is_said = part == f"exit {code}" or " ".join(part.split()) in printed
            assert is_said, f"{line}\n{part}\n{out}{err}"
        assert code != 2 or err.splitlines()[-1].startswith("error: "), err
        assert never not in out + err
    return out


def typed(line: str, capsys: Any) -> tuple[int, str, str]:
    """The exit code of a command line, and what it writes to stdout and stderr."""
    if not line.startswith("aerie "):
        done = subprocess.run(line, shell=True, check=False, capture_output=True, text=True)  # noqa: S602
        return done.returncode, done.stdout, done.stderr
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        for package in ("data", "infer"):
            patch.setattr(f"aerie.{package}.main.stop_on_signals", lambda: None)
        code = call(aerie_command, *shlex.split(line)[1:])
    return code, *capsys.readouterr()


def refused(message: str, function: Any, /, *arguments: Any, **options: Any) -> None:
    """Asserts that a call raises a UserError of one line that matches this pattern."""
    with pytest.raises(UserError, match=message, check=lambda error: "\n" not in str(error)):
        function(*arguments, **options)


def recipe(path: Path, values: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path


def rows(
    count: int, vocab_size: int = 320, hidden_size: int = 32, seed: int = 0
) -> list[CachedRow]:
    """Rows like a feature cache's, with random tokens and features and one or two answers."""
    generator = torch.Generator().manual_seed(seed)
    cached = []
    for number in range(count):
        lengths = torch.randint(3, 9, (4,), generator=generator)[: 2 + 2 * (number % 2)]
        # A question and its answer, or two: turn ids 0, 1, 0, 2.
        turn_ids = torch.tensor([0, 1, 0, 2][: len(lengths)]).repeat_interleave(lengths)
        ids = torch.randint(5, vocab_size, (len(turn_ids),), generator=generator)
        features = torch.randn(len(turn_ids), hidden_size, generator=generator)
        cached.append(CachedRow(ids, turn_ids.int(), features, None))
    return cached
