"""One answer on the terminal, as it is decoded, with what it cost."""

import sys
from dataclasses import dataclass
from typing import Any

import torch

from infer.config import MethodConfig
from infer.decoders import Drafters, make_decoder
from infer.engine import Statistics
from infer.hardware import default_device
from infer.stream import ColouredStreamer, TreePrinter
from infer.tasks import encode
from model.config import TargetConfig
from model.target import Target, load_tokenizer


@dataclass(frozen=True)
class Question:
    """A prompt and how to sample its answer."""

    prompt: str
    raw: bool  # as it is, without the chat template
    seed: int
    settings: dict[str, Any]  # transformers' names; null: the target's generation_config


def answer(
    target_config: TargetConfig, asked: MethodConfig, head: str | None, question: Question, show_tree: bool
) -> None:
    """Streams the answer to stdout, accepted draft tokens in green; statistics (and the first tree) go to stderr."""
    target = Target.load(target_config, default_device())
    tokenizer = load_tokenizer(target_config)
    decoder = make_decoder(Drafters(target), asked, head, "--method")
    if question.raw:
        ids = torch.tensor([tokenizer(question.prompt)["input_ids"]], device=target.device)
    else:
        ids = encode(question.prompt, tokenizer, target)
    streamer = ColouredStreamer(tokenizer, coloured=sys.stdout.isatty())
    watcher = TreePrinter(tokenizer, streamer) if show_tree else streamer
    generation = decoder.generate(
        ids,
        streamer=streamer,
        on_cycle=watcher.on_cycle,
        generator=torch.Generator(target.device).manual_seed(question.seed),
        timed=True,
        **question.settings,
    )
    print(statistics_text(generation.statistics), file=sys.stderr)


def statistics_text(statistics: Statistics) -> str:
    """Tokens, forwards, tau, speed, the verification rule and the settings, on one line."""
    ms = statistics.ms
    seconds = (ms["wall"] - ms["prefill"]) / 1000
    rate = (statistics.new_tokens - 1) / seconds if seconds > 0 else 0.0
    settings = {k: v for k, v in statistics.decoding.items() if k != "eos_token_ids"}
    return (
        f"\n{statistics.new_tokens} tokens in {statistics.target_forwards} target forwards: tau {statistics.tau:.2f}, "
        f"{rate:.1f} tokens/s (prefill {ms['prefill']:.0f} ms apart), {statistics.verify} | {settings}"
    )
