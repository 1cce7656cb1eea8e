"""Text as it is decoded: a transformers streamer that colours the accepted draft tokens."""

import sys
from argparse import Namespace
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
        self._ids: list[int] | None = None  # of the answer; null: the prompt is still to come
        self._printed = ""
        self._accepted = 0

    def on_cycle(self, cycle: Cycle) -> None:
        self._accepted = cycle.verdict.accepted

    def put(self, value: Tensor) -> None:
        if self._ids is None:
            self._ids = []
            return
        ids = value.tolist()
        for part, colour in ((ids[: self._accepted], GREEN), (ids[self._accepted :], "")):
            self._ids += part
            text = self.tokenizer.decode(self._ids, skip_special_tokens=True)
            if part and not text.endswith("\ufffd"):  # half a character: wait for the rest
                piece, self._printed = text[len(self._printed) :], text
                self.out.write(f"{colour}{piece}{PLAIN}" if colour and self.coloured else piece)
                self.out.flush()
        self._accepted = 0

    def end(self) -> None:
        self.out.write("\n")
        self.out.flush()


def answer(
    config: TargetConfig, asked: MethodConfig, head: str | None, arguments: Namespace, settings: dict[str, Any]
) -> None:
    """Streams the answer to arguments.prompt to stdout; statistics, and the first tree if asked, go to stderr.

    settings: transformers' names; null: the target's generation_config.
    """
    target, tokenizer = Target.load(config, default_device()), load_tokenizer(config)
    decoder = make_decoder(Drafters(target), asked, head, "--method")
    if arguments.raw:
        ids = torch.tensor([tokenizer(arguments.prompt)["input_ids"]], device=target.device)
    else:
        ids = encode(arguments.prompt, tokenizer, target)
    streamer = ColouredStreamer(tokenizer, coloured=sys.stdout.isatty())
    recorder, drafted = Recorder(), list[Cycle]()
    if arguments.cycles:
        keep_pools(decoder)

    def watch(cycle: Cycle) -> None:
        streamer.on_cycle(cycle)
        if arguments.cycles:
            recorder(cycle)
        if len(cycle.tree) > 1 and not drafted:
            drafted.append(cycle)

    generator = torch.Generator(target.device).manual_seed(arguments.seed)
    generation = decoder.generate(ids, streamer=streamer, on_cycle=watch, generator=generator, timed=True, **settings)
    if arguments.cycles:
        law = resolve(target.generation_config, **settings)
        sampling = (law.temperature, law.top_k, law.top_p)
        origin = Origin(0, asked.method, *sampling, task="generate", prompt_id="0", turn=0)
        write_text(arguments.cycles, "".join(lines_of(origin, recorder.records)))
    if (arguments.show_tree or arguments.save_tree) and not drafted:
        warn(f"{asked.method} drafted nothing in this answer: there is no tree to show")
    for cycle in drafted:
        names = [tokenizer.decode([token]) for token in cycle.tree.tokens.tolist()]
        if arguments.show_tree:
            print("\n" + describe(cycle.tree, names), file=sys.stderr)
        if arguments.save_tree is not None:
            write_json(arguments.save_tree, {"schema": 1, "method": asked.method, **tree_json(cycle, names)})
    print(statistics_text(generation.statistics), file=sys.stderr)


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
