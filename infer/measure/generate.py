"""Text as it is decoded: a transformers streamer that colours the accepted draft tokens."""

import sys
from argparse import Namespace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from aerie.configs.errors import warn
from aerie.configs.schema.decode import MethodConfig
from aerie.infer.decode.engine import make_decoder
from aerie.infer.decode.methods import Drafters
from aerie.infer.decode.sampling import resolve
from aerie.infer.decode.shape import Cycle
from aerie.infer.decode.tree import describe
from aerie.infer.measure.cycles import Origin, Recorder, keep_pools, lines_of
from aerie.infer.measure.tasks import encode
from aerie.model.storage import write_json, write_text
from aerie.model.target import Target

GREEN, PLAIN = "\033[32m", "\033[0m"


class ColouredStreamer(BaseStreamer):
    """Prints the answer; on a terminal, drafted tokens that the target accepted are green, its own tokens plain."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.green, self.plain = tokenizer, *((GREEN, PLAIN) if sys.stdout.isatty() else ("", ""))
        self.accepted = 0  # drafted tokens among those of the next put
        self._ids: list[int] | None = None  # of the answer; null: the prompt is still to come
        self._printed = ""

    def put(self, value: Tensor) -> None:
        if self._ids is None:
            self._ids = []
            return
        ids = value.tolist()
        for part, colour, end in ((ids[: self.accepted], self.green, self.plain), (ids[self.accepted :], "", "")):
            self._ids += part
            text = self.tokenizer.decode(self._ids, skip_special_tokens=True)
            if part and not text.endswith("\ufffd"):  # half a character: wait for the rest
                print(f"{colour}{text[len(self._printed) :]}{end}", end="", flush=True)
                self._printed = text
        self.accepted = 0

    def end(self) -> None:
        print(flush=True)


def answer(
    target: Target,
    tokenizer: Any,
    asked: MethodConfig,
    head: str | None,
    arguments: Namespace,
    settings: dict[str, Any],
) -> None:
    """Streams the answer to arguments.prompt to stdout; statistics, and the first tree if asked, go to stderr.

    settings: transformers' names; null: the target's generation_config.
    """
    decoder = make_decoder(Drafters(target), asked, head, "--method")
    if arguments.raw:
        ids = torch.tensor([tokenizer(arguments.prompt)["input_ids"]], device=target.device)
    else:
        ids = encode(arguments.prompt, tokenizer, target)
    streamer, recorder, drafted = ColouredStreamer(tokenizer), Recorder(), list[Cycle]()
    if arguments.cycles:
        keep_pools(decoder)

    def watch(cycle: Cycle) -> None:
        streamer.accepted = cycle.verdict.accepted
        if arguments.cycles:
            recorder(cycle)
        if len(cycle.tree) > 1 and not drafted:
            drafted.append(cycle)

    generator = torch.Generator(target.device).manual_seed(arguments.seed)
    generation = decoder.generate(ids, streamer=streamer, on_cycle=watch, generator=generator, timed=True, **settings)
    counted = generation.statistics
    if arguments.cycles:
        law = resolve(target.generation_config, **settings)
        key = (law.temperature, law.top_k, law.top_p)
        origin = Origin(0, asked.method, *key, task="generate", prompt_id="0", turn=0)
        write_text(arguments.cycles, "".join(lines_of(origin, recorder.records)))
    if (arguments.show_tree or arguments.save_tree) and not drafted:
        warn(f"{asked.method} drafted nothing in this answer: there is no tree to show")
    for cycle in drafted:
        names = [tokenizer.decode([token]) for token in cycle.tree.tokens.tolist()]
        if arguments.show_tree:
            print("\n" + describe(cycle.tree, names), file=sys.stderr)
        if arguments.save_tree is not None:
            write_json(arguments.save_tree, {"schema": 1, "method": asked.method, **tree_json(cycle, names)})
    seconds = (counted.ms["wall"] - counted.ms["prefill"]) / 1000
    sampling = {name: value for name, value in counted.decoding.items() if name != "eos_token_ids"}
    print(
        f"\n{counted.new_tokens} tokens in {counted.target_forwards} target forwards: tau {counted.tau:.2f}, "
        f"{(counted.new_tokens - 1) / max(seconds, 1e-9):.1f} tokens/s (prefill {counted.ms['prefill']:.0f} ms apart), "
        f"{counted.verify} | {sampling}",
        file=sys.stderr,
    )


def tree_json(cycle: Cycle, names: list[str]) -> dict[str, Any]:
    """The tree in level order with the text of each token, its confidence and survival, and whether it was accepted.

    The root's parent is null. The bonus token is the target's own, below the last accepted node.
    """
    tree, verdict = cycle.tree, cycle.verdict
    columns = {
        "node": range(len(tree)),
        "parent": [None, *tree.parents.tolist()[1:]],
        "depth": tree.depth.tolist(),
        "token": tree.tokens.tolist(),
        "text": names,
        "confidence": tree.confidence.exp().tolist(),
        "survival": tree.survival.exp().tolist(),
        "accepted": [node in verdict.path for node in range(len(tree))],
    }
    if tree.passengers is not None:
        columns["passenger"] = tree.passengers.tolist()
    nodes = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    facts = {"position": cycle.position, "levels": tree.levels, "accepted": verdict.accepted, "bonus": verdict.bonus}
    return {**facts, "nodes": nodes}
