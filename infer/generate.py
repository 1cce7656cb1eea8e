"""One answer on the terminal, as it is decoded, with what it cost."""

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infer.config import MethodConfig
from infer.cycle_log import Origin
from infer.cycle_recorder import CycleRecorder
from infer.decoders import Drafters, make_decoder
from infer.engine import Statistics
from infer.hardware import default_device
from infer.proposer import Cycle
from infer.sampling import resolve
from infer.stream import ColouredStreamer
from infer.tasks import encode
from infer.tree_dump import FirstTree
from infer.watch import watched
from model.config import TargetConfig
from model.errors import warn
from model.files import write_text
from model.target import Target, load_tokenizer


@dataclass(frozen=True)
class Question:
    """A prompt and how to sample its answer."""

    prompt: str
    raw: bool  # as it is, without the chat template
    seed: int
    settings: dict[str, Any]  # transformers' names; null: the target's generation_config


@dataclass(frozen=True)
class Traces:
    """What is shown of an answer's drafting besides the answer."""

    show_tree: bool = False  # the first tree as text on stderr
    save_tree: Path | None = None  # the same as JSON
    cycles: Path | None = None  # every cycle as a line of JSON (infer/cycle_log.py)

    @property
    def any_tree(self) -> bool:
        return self.show_tree or self.save_tree is not None


def answer(
    target_config: TargetConfig, asked: MethodConfig, head: str | None, question: Question, traces: Traces
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
    tree = FirstTree(tokenizer, asked.method, traces.show_tree, traces.save_tree)
    with watched(decoder) if traces.cycles is not None else nullcontext() as growth:
        recorder = CycleRecorder(_origin(target, asked, question), growth) if traces.cycles is not None else None
        watchers = [each for each in (streamer.on_cycle, tree if traces.any_tree else None, recorder) if each]

        def watch(cycle: Cycle) -> None:
            for watcher in watchers:
                watcher(cycle)

        generation = decoder.generate(
            ids,
            streamer=streamer,
            on_cycle=watch,
            generator=torch.Generator(target.device).manual_seed(question.seed),
            timed=True,
            **question.settings,
        )
    if traces.cycles is not None and recorder is not None:
        write_text(traces.cycles, "".join(recorder.lines))
    if traces.any_tree and not tree.is_done:
        warn(f"{asked.method} drafted nothing in this answer: there is no tree to show")
    print(statistics_text(generation.statistics), file=sys.stderr)


def _origin(target: Target, asked: MethodConfig, question: Question) -> Origin:
    decoding = resolve(target.generation_config, **question.settings)
    sampling = (decoding.temperature, decoding.top_k, decoding.top_p)
    return Origin(0, asked.method, *sampling, task="generate", prompt_id="0", turn=0)


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
