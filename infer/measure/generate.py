"""Text as it is decoded: a transformers streamer that colours the accepted draft tokens."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from aerie.configs.errors import warn
from aerie.configs.schema.decode import MethodConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.infer.decode.engine import Statistics, make_decoder
from aerie.infer.decode.methods import Drafters
from aerie.infer.decode.sampling import resolve
from aerie.infer.decode.shape import Cycle
from aerie.infer.decode.tree import describe
from aerie.infer.measure.bench import default_device
from aerie.infer.measure.cycles import Origin, Recorder, keep_pools, lines_of
from aerie.infer.measure.tasks import encode
from aerie.model.storage import write_json, write_text
from aerie.model.target import Target, load_tokenizer

GREEN, PLAIN = "\033[32m", "\033[0m"


class ColouredStreamer(BaseStreamer):
    """Prints the answer; drafted tokens that the target accepted are green, its own tokens plain.

    Pass it as streamer and its `on_cycle` as on_cycle.
    """

    def __init__(self, tokenizer: Any, out: TextIO = sys.stdout, coloured: bool = True) -> None:
        self.tokenizer = tokenizer
        self.out = out
        self.coloured = coloured
        self._ids: list[int] = []
        self._printed = ""
        self._accepted = 0
        self._is_prompt = True

    def on_cycle(self, cycle: Cycle) -> None:
        self._accepted = cycle.verdict.accepted

    def put(self, value: Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        ids = value.tolist()
        drafted = min(self._accepted, len(ids))
        self._write(ids[:drafted], GREEN)
        self._write(ids[drafted:], "")
        self._accepted = 0

    def end(self) -> None:
        self.out.write("\n")
        self.out.flush()

    def _write(self, ids: list[int], colour: str) -> None:
        if not ids:
            return
        self._ids += ids
        text = self.tokenizer.decode(self._ids, skip_special_tokens=True)
        if text.endswith("\ufffd"):  # half a character: wait for the rest
            return
        piece, self._printed = text[len(self._printed) :], text
        self.out.write(f"{colour}{piece}{PLAIN}" if colour and self.coloured else piece)
        self.out.flush()


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
    cycles: Path | None = None  # every cycle as a line of JSON (infer/measure/cycles.py)

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
    recorder, drafted = Recorder(), list[Cycle]()
    if traces.cycles is not None:
        keep_pools(decoder)

    def watch(cycle: Cycle) -> None:
        streamer.on_cycle(cycle)
        if traces.cycles is not None:
            recorder(cycle)
        if len(cycle.tree) > 1 and not drafted:
            drafted.append(cycle)

    generation = decoder.generate(
        ids,
        streamer=streamer,
        on_cycle=watch,
        generator=torch.Generator(target.device).manual_seed(question.seed),
        timed=True,
        **question.settings,
    )
    if traces.cycles is not None:
        write_text(traces.cycles, "".join(lines_of(_origin(target, asked, question), recorder.records)))
    if traces.any_tree and not drafted:
        warn(f"{asked.method} drafted nothing in this answer: there is no tree to show")
    elif traces.any_tree:
        show_tree(drafted[0], tokenizer, asked.method, traces)
    print(statistics_text(generation.statistics), file=sys.stderr)


def show_tree(cycle: Cycle, tokenizer: Any, method: str, traces: Traces) -> None:
    """Prints a cycle's tree to stderr, or writes it as JSON, or both."""
    names = [tokenizer.decode([token]) for token in cycle.tree.tokens.tolist()]
    if traces.show_tree:
        print("\n" + describe(cycle.tree, names), file=sys.stderr)
    if traces.save_tree is not None:
        write_json(traces.save_tree, {"schema": 1, "method": method, **tree_json(cycle, names)})


def tree_json(cycle: Cycle, names: list[str]) -> dict[str, Any]:
    """The tree in level order with the text of each token, its confidence and survival, and whether it was accepted.

    The root's parent is null. The bonus token is the target's own, below the last accepted node.
    """
    tree = cycle.tree
    columns = {
        "node": range(len(tree)),
        "parent": [None, *tree.parents.tolist()[1:]],
        "depth": tree.depth.tolist(),
        "token": tree.tokens.tolist(),
        "text": names,
        "confidence": tree.confidence.exp().tolist(),
        "survival": tree.survival.exp().tolist(),
        "accepted": [node in cycle.verdict.path for node in range(len(tree))],
    }
    if tree.passengers is not None:
        columns["passenger"] = tree.passengers.tolist()
    return {
        "position": cycle.position,
        "levels": tree.levels,
        "accepted": cycle.verdict.accepted,
        "bonus": cycle.verdict.bonus,
        "nodes": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
    }


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
