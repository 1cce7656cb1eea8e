"""Text as it is decoded, accepted draft tokens in colour."""

import sys
from argparse import Namespace
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from aerie.configs.schema.decode import MethodConfig
from aerie.infer.decode.engine import make_decoder
from aerie.infer.decode.methods import Drafters
from aerie.infer.decode.shape import Cycle
from aerie.infer.decode.tree import Tree, describe
from aerie.infer.measure.tasks import encode
from aerie.model.target import Target

GREEN, PLAIN = "\033[32m", "\033[0m"


class ColouredStreamer(BaseStreamer):
    """Prints the answer; on a terminal, drafted tokens that the target accepted are green."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self._colours = tokenizer, (GREEN, PLAIN) if sys.stdout.isatty() else ("", "")
        self.accepted = 0  # drafted tokens among those of the next put
        self._ids: list[int] | None = None  # of the answer; null: the prompt is still to come
        self._printed = ""

    def put(self, value: Tensor) -> None:
        if self._ids is None:
            self._ids = []
            return
        ids = value.tolist()
        for part, (colour, end) in ((ids[: self.accepted], self._colours), (ids[self.accepted :], ("", ""))):
            self._ids += part
            text = self.tokenizer.decode(self._ids, skip_special_tokens=True)
            if part and not text.endswith("\ufffd"):  # half a character: wait for the rest
                print(f"{colour}{text[len(self._printed) :]}{end}", end="", flush=True)
                self._printed = text
        self.accepted = 0

    def end(self) -> None:
        print(flush=True)


def answer(target: Target, tokenizer: Any, asked: MethodConfig, head: str | None, arguments: Namespace) -> None:
    """Streams the answer to stdout, statistics to stderr."""
    decoder = make_decoder(Drafters(target), asked, head)
    plain = tokenizer(arguments.prompt, return_tensors="pt")["input_ids"] if arguments.raw else None
    ids = encode(arguments.prompt, tokenizer, target) if plain is None else plain
    streamer, trees = ColouredStreamer(tokenizer), list[Tree]()

    def watch(cycle: Cycle) -> None:
        streamer.accepted = cycle.verdict.accepted
        if len(cycle.tree) > 1 and not trees:
            trees.append(cycle.tree)

    generator = torch.Generator(target.device).manual_seed(arguments.seed)
    settings = {name: getattr(arguments, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p")}
    generation = decoder.generate(ids, streamer=streamer, on_cycle=watch, generator=generator, timed=True, **settings)
    counted = generation.statistics
    for tree in trees if arguments.show_tree else ():
        print("\n" + describe(tree, [tokenizer.decode([token]) for token in tree.tokens.tolist()]), file=sys.stderr)
    seconds = (counted.ms["wall"] - counted.ms["prefill"]) / 1000
    used = {name: value for name, value in asdict(counted.decoding).items() if name != "eos_token_ids"}
    print(
        f"\n{counted.new_tokens} tokens in {counted.target_forwards} target forwards: tau {counted.tau:.2f}, "
        f"{(counted.new_tokens - 1) / max(seconds, 1e-9):.1f} tokens/s (prefill {counted.ms['prefill']:.0f} ms), "
        f"{counted.verify} | {used}",
        file=sys.stderr,
    )
