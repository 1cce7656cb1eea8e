"""Answers on the command line: streamed with accepted draft tokens in colour, as lines of JSON, or turn by turn."""

import json
import re
import sys
from argparse import Namespace
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.generation.streamers import BaseStreamer

from aerie.data.chat import answer_text
from aerie.data.conversations import Message
from aerie.data.progress import format_bytes
from aerie.infer.decode.engine import Generation, SpeculativeDecoder, Statistics
from aerie.infer.decode.sampling import resolve
from aerie.infer.decode.shape import Cycle
from aerie.infer.decode.tree import describe
from aerie.infer.measure.bench import clocked

COMMANDS = "/reset begins a new conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


class ColouredStreamer(BaseStreamer):
    """Prints the answer; on a terminal, drafted tokens that the target accepted are green."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self._colours = (
            tokenizer,
            ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("", ""),
        )
        self.accepted = 0  # drafted tokens among those of the next put
        self._ids: list[int] | None = None  # of the answer; None: the prompt is still to come
        self.text = ""  # printed so far

    def put(self, value: Tensor) -> None:
        if self._ids is None:
            self._ids = []
            return
        ids = value.tolist()
        for part, (colour, end) in (
            (ids[: self.accepted], self._colours),
            (ids[self.accepted :], ("", "")),
        ):
            self._ids += part
            text = answer_text(self.tokenizer, self._ids)
            if part and not text.endswith("\ufffd"):  # half a character: wait for the rest
                print(f"{colour}{text[len(self.text) :]}{end}", end="", flush=True)
                self.text = text
        self.accepted = 0

    def end(self) -> None:
        print(flush=True)


def answer_prompts(
    prompts: list[list[Message]], decoder: SpeculativeDecoder, arguments: Namespace
) -> None:
    """Answers every turn of the user that has no answer yet; each prompt begins with the seed."""
    for messages in prompts:
        generator, history = (
            torch.Generator(decoder.target.device).manual_seed(arguments.seed),
            list[Message](),
        )
        for message, following in zip(messages, [*messages[1:], {"role": "user"}], strict=True):
            history.append(message)
            if message["role"] not in ("user", "tool") or following["role"] != "user":
                continue
            prompt = decoder.tokenizer(message["content"]) if arguments.raw else history
            streamer = None if arguments.json else ColouredStreamer(decoder.tokenizer)
            if streamer is not None and len(prompts) + len(messages) > 2:
                print(f"> {message['content']}")  # which one is answered
            generation = answer(decoder, prompt, arguments, generator, streamer)
            history.append({"role": "assistant", "content": generation.text})
            if arguments.json:
                counted, ids = generation.statistics, generation.new_ids
                row = {
                    "prompt": message["content"],
                    "text": generation.text,
                    "new_ids": ids,
                    "tau": counted.tau,
                }
                row |= {"tokens_per_s": counted.tokens_per_s, "statistics": asdict(counted)}
                print(json.dumps(row, default=sorted), flush=True)


def run_chat(decoder: SpeculativeDecoder, arguments: Namespace) -> None:
    """Answers each line typed or piped in, with the conversation so far."""
    bound, limit = min(decoder.limits.items(), key=lambda item: item[1])
    full = f"{bound} of {limit:,} tokens is full; /reset begins a new conversation"
    most = resolve(
        decoder.target.generation_config, max_new_tokens=arguments.max_new_tokens
    ).max_new_tokens
    generator, history = (
        torch.Generator(decoder.target.device).manual_seed(arguments.seed),
        list[Message](),
    )
    is_terminal, typed = sys.stdin.isatty(), lambda: ""
    if is_terminal:
        with suppress(ImportError):  # some Pythons are built without it
            import readline  # input() then edits its line and remembers those before

            typed = readline.get_line_buffer
        print(COMMANDS, file=sys.stderr)
    while True:
        try:
            text = input("\n> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt) as error:
            print(file=sys.stderr)
            if isinstance(error, KeyboardInterrupt) and typed():
                continue  # drops the line
            break
        if text == "/exit":
            break
        if text in ("", "/reset"):
            history = [] if text else history
            continue
        if re.fullmatch(r"/\w*", text):
            print(COMMANDS, file=sys.stderr)
            continue
        history.append({"role": "user", "content": text})
        room = limit - decoder.encode(history).shape[1]
        if room < 1:
            history.pop()
            print(full, file=sys.stderr)
            continue
        arguments.max_new_tokens, streamer = min(most, room), ColouredStreamer(decoder.tokenizer)
        try:
            if len(answer(decoder, history, arguments, generator, streamer).new_ids) == room:
                print(full, file=sys.stderr)
        except KeyboardInterrupt:
            print("\nstopped", file=sys.stderr)
        history.append({"role": "assistant", "content": streamer.text})


class Work(TorchDispatchMode):
    """Counts kernels, and the bytes that products and attention read."""

    kernels = bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernels += not func.is_view
        if any(word in func._schema.name for word in ("mm", "linear", "attention")):
            self.bytes += sum(
                part.nbytes for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)
            )
        return func(*args, **(kwargs or {}))


def cycle_work(
    decoder: SpeculativeDecoder, prompt: Any, counted: Statistics, settings: dict[str, Any]
) -> Any:
    """For a median cycle of an answer: kernels, bytes read, the speed of reading as a share of a copy's, and the copy's
    bytes a second."""
    work, seen, device = Work(), list[tuple[int, int]](), decoder.target.device
    more = min(24, min(decoder.limits.values()) - counted.prompt_tokens)
    with patch.object(decoder, "cycle", "eager"), work:  # the same kernels, one by one
        watch = lambda _: seen.append((work.kernels, work.bytes))  # noqa: E731
        decoder.generate(
            prompt, on_cycle=watch, **settings | {"max_new_tokens": more, "eos_token_id": []}
        )
    steps = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(seen)]
    kernels, read = map(median, zip(*steps or [(0, 0)], strict=True))
    blocks = torch.ones(
        2, 2**30 if device.type == "cuda" else 2**27, dtype=torch.uint8, device=device
    )
    speed = (
        1000 * blocks.nbytes / min(clocked(device, blocks[0].copy_, blocks[1])[0] for _ in range(5))
    )
    seconds = (counted.ms["wall"] - counted.ms["prefill"]) / 1000 / counted.target_forwards
    return kernels, read, read / seconds / speed, speed


def profile(
    decoder: SpeculativeDecoder, prompt: Any, counted: Statistics, settings: dict[str, Any]
) -> str:
    """What a cycle of an answer took, and the share of a copy's speed at which it read its weights and caches."""
    kernels, read, share, speed = cycle_work(decoder, prompt, counted, settings)
    ms = {
        phase: counted.ms[phase] / counted.target_forwards
        for phase in ("draft", "verify", "commit", "other")
    }
    phases = ", ".join(f"{phase} {part:.2f}" for phase, part in ms.items())
    when = " before compiling" if decoder.cycle == "compiled" else ""
    return (
        f"a cycle: {sum(ms.values()):.2f} ms ({phases}), {kernels:,.0f} kernels{when}; {format_bytes(read)} read by products "
        f"and attention, at {share:.0%} of a copy's {speed / 1e9:.1f} GB/s"
    ) + (f"; graphs take {format_bytes(decoder.graph_bytes)}" if decoder.graph_bytes else "")


def answer(
    decoder: SpeculativeDecoder, prompt: Any, arguments: Namespace, generator: Any, streamer: Any
) -> Generation:
    """The answer, streamed to stdout unless streamer is None; statistics to stderr."""
    trees = list[str]()

    def watch(cycle: Cycle) -> None:
        if streamer is not None:
            streamer.accepted = cycle.verdict.accepted
        if arguments.show_tree and len(cycle.tree) > 1 and not trees:
            names = [decoder.tokenizer.decode([token]) for token in cycle.tree.tokens.tolist()]
            trees.append(describe(cycle.tree, names))

    settings = {
        name: getattr(arguments, name)
        for name in ("max_new_tokens", "temperature", "top_k", "top_p")
    }
    begun = generator.get_state()
    made = decoder.generate(
        prompt, streamer=streamer, on_cycle=watch, generator=generator, timed=True, **settings
    )
    counted = made.statistics
    for tree in trees:
        print("\n" + tree, file=sys.stderr)
    print(
        f"\n{counted.new_tokens} tokens in {counted.target_forwards} target forwards: tau {counted.tau:.2f}, "
        f"{counted.tokens_per_s:.1f} tokens/s (prefill {counted.ms['prefill']:.0f} ms), "
        f"{counted.verify} at T {counted.decoding.temperature:g}",
        file=sys.stderr,
    )
    if arguments.profile and counted.target_forwards:
        generator.set_state(
            begun
        )  # the same answer once more, as the first one may have waited for a compiler
        again = decoder.generate(prompt, generator=generator, timed=True, **settings).statistics
        print(profile(decoder, prompt, again, settings), file=sys.stderr)
    if not made.text.strip():
        fix = "a model that thinks first may need a larger --max-new-tokens"
        print(f"there is no text to show in these tokens: {fix}", file=sys.stderr)
    return made
