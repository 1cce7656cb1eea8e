"""Answers prompts on the command line, and shows what a cycle of an answer costs."""

import json
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.generation.streamers import BaseStreamer

from aerie.data.chat import answer_text, encode_prompt
from aerie.data.conversations import system_turns
from aerie.data.progress import format_bytes
from aerie.data.questions import RowQuestion
from aerie.infer.decode.engine import Generation, SpeculativeDecoder, Statistics, raw_ids
from aerie.infer.decode.roles import Cycle
from aerie.infer.decode.sampling import Decoding, resolve
from aerie.infer.decode.tree import describe
from aerie.infer.measure.bench import CYCLE_PHASES, clocked

CHAT_HELP = "/reset begins a new conversation, /exit or Ctrl-D quits, Ctrl-C stops an answer"


class ColouredStreamer(BaseStreamer):
    """Prints the answer as it comes; on a terminal, accepted draft tokens are green."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.accepted = 0  # how many of the next put's tokens were drafted
        self.text = ""  # printed so far
        self._ids: list[int] | None = None  # the answer's; None: the first put brings the prompt

    def put(self, value: Tensor) -> None:
        if self._ids is None:
            self._ids = []
            return
        ids = value.tolist()
        green, end = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("", "")
        self._print(ids[: self.accepted], green, end)
        self._print(ids[self.accepted :])
        self.accepted = 0

    def _print(self, ids: list[int], colour: str = "", end: str = "") -> None:
        self._ids = [*(self._ids or ()), *ids]
        text = answer_text(self.tokenizer, self._ids)
        if ids and not text.endswith("\ufffd"):  # a character is incomplete: wait for its rest
            print(f"{colour}{text[len(self.text) :]}{end}", end="", flush=True)
            self.text = text

    def end(self) -> None:
        print(flush=True)


def answer_prompts(
    prompts: list[RowQuestion], decoder: SpeculativeDecoder, arguments: Namespace
) -> None:
    """Answers every turn of each prompt; each prompt starts with the same seed."""
    for question in prompts:
        generator = torch.Generator(decoder.target.device).manual_seed(arguments.seed)
        history = list(question.before)
        # A prompt without turns ends with a tool's result, which the target answers.
        for turn in question.turns or (None,):
            if turn is not None:
                history.append({"role": "user", "content": turn})
            text = history[-1]["content"]
            if arguments.raw:
                prompt = raw_ids(decoder.tokenizer, text)
            else:
                prompt = encode_prompt(decoder.tokenizer, history, question.tools)
            streamer = None if arguments.json else ColouredStreamer(decoder.tokenizer)
            if streamer and len(prompts) + len(question.before) + len(question.turns) > 2:
                print(f"> {text}")  # the question, if there are several
            generation = answer_turn(decoder, prompt, arguments, generator, streamer)
            history.append({"role": "assistant", "content": generation.text})
            if arguments.json:
                statistics = generation.statistics
                facts = {
                    "prompt": text,
                    "text": generation.text,
                    "new_ids": generation.new_ids,
                    "tau": statistics.tau,
                    "tokens_per_s": statistics.tokens_per_s,
                    "statistics": asdict(statistics),
                }
                print(json.dumps(facts, default=sorted), flush=True)


def run_chat(
    decoder: SpeculativeDecoder, arguments: Namespace, system_prompt: str | None = None
) -> None:
    """Answers each line from stdin, typed or piped, as the next turn of a conversation."""
    bound, limit = min(decoder.limits.items(), key=lambda item: item[1])
    full = f"{bound} of {limit:,} tokens is full; /reset begins a new conversation"
    settings = resolve(decoder.target.generation_config, max_new_tokens=arguments.max_new_tokens)
    generator = torch.Generator(decoder.target.device).manual_seed(arguments.seed)
    history = system_turns(system_prompt)
    if sys.stdin.isatty():
        print(CHAT_HELP, file=sys.stderr)
    for text in typed_lines():
        if text == "/exit":
            break
        if text == "/reset":
            history = system_turns(system_prompt)
        elif re.fullmatch(r"/\w*", text):
            print(CHAT_HELP, file=sys.stderr)
        elif text:
            history.append({"role": "user", "content": text})
            room = limit - decoder.encode(history).shape[1]
            if room < 1:
                history.pop()
                print(full, file=sys.stderr)
                continue
            arguments.max_new_tokens = min(settings.max_new_tokens, room)
            streamer = ColouredStreamer(decoder.tokenizer)
            try:
                answer_turn(decoder, history, arguments, generator, streamer)
            except KeyboardInterrupt:
                print("\nstopped", file=sys.stderr)
            history.append({"role": "assistant", "content": streamer.text})


def typed_lines() -> Iterator[str]:
    """The lines of stdin. Ctrl-C drops a line that is being typed; on an empty line it quits."""
    readline: Any = None
    with suppress(ImportError):  # some Pythons are built without it
        import readline  # with it, input() lets a user edit and recall lines
    prompt = "\n> " if sys.stdin.isatty() else ""
    while True:
        try:
            yield input(prompt).strip()
        except (EOFError, KeyboardInterrupt) as error:
            print(file=sys.stderr)
            is_typing = readline is not None and readline.get_line_buffer()
            if isinstance(error, EOFError) or not is_typing:
                return


class WorkCounter(TorchDispatchMode):
    """Counts kernels, and the bytes that matrix products and attention read."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernels += not func.is_view
        if any(word in str(func) for word in ("mm", "linear", "attention")):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.bytes += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))


def cycle_work(
    decoder: SpeculativeDecoder, prompt: Any, prompt_tokens: int, settings: dict[str, Any]
) -> tuple[float, float]:
    """(kernels, bytes that matrix products and attention read) of an answer's median cycle."""
    counter = WorkCounter()
    totals: list[tuple[int, int]] = []

    def watch(_: Cycle) -> None:
        totals.append((counter.kernels, counter.bytes))

    more = min(24, min(decoder.limits.values()) - prompt_tokens)
    settings = settings | {"max_new_tokens": more, "eos_token_id": []}
    with patch.object(decoder.runners, "mode", "eager"), counter:  # the same kernels, one by one
        decoder.generate(prompt, on_cycle=watch, **settings)
    kernels, read = np.median(np.diff(totals, axis=0), axis=0)
    return kernels, read


def copy_speed(device: torch.device) -> float:
    """The bytes that a copy in the device's memory reads and writes in a second."""
    size = 2**30 if device.type == "cuda" else 2**27
    blocks = torch.ones(2, size, dtype=torch.uint8, device=device)
    ms = min(clocked(device, blocks[0].copy_, blocks[1])[0] for _ in range(5))
    return 1000 * blocks.nbytes / ms


def profile(
    decoder: SpeculativeDecoder, prompt: Any, statistics: Statistics, settings: dict[str, Any]
) -> str:
    """A line with a cycle's times, kernels, bytes, and speed of reading against a copy's."""
    kernels, read = cycle_work(decoder, prompt, statistics.prompt_tokens, settings)
    speed = copy_speed(decoder.target.device)
    seconds = (statistics.ms["wall"] - statistics.ms["prefill"]) / 1000 / statistics.target_forwards
    ms = {phase: statistics.ms[phase] / statistics.target_forwards for phase in CYCLE_PHASES}
    phases = ", ".join(f"{phase} {part:.2f}" for phase, part in ms.items())
    when = " before compiling" if decoder.runners.mode == "compiled" else ""
    return (
        f"a cycle: {sum(ms.values()):.2f} ms ({phases}), {kernels:,.0f} kernels{when}; "
        f"matrix products and attention read {format_bytes(read)}, "
        f"at {read / seconds / speed:.0%} of a copy's {speed / 1e9:.1f} GB/s; "
        f"graphs take {format_bytes(decoder.graph_bytes)}"
    )


def sampling_words(decoding: Decoding) -> str:
    """The sampling in words: 'T 0', 'T 0.6, of all tokens' or 'T 0.6, top-k 20, top-p 0.8'."""
    if not decoding.do_sample:
        return "T 0"
    cuts = {
        "top-k": decoding.top_k or None,
        "top-p": decoding.top_p if decoding.top_p < 1 else None,
        "min-p": decoding.min_p or None,
    }
    words = [f"{name} {value:g}" for name, value in cuts.items() if value is not None]
    return ", ".join([f"T {decoding.temperature:g}", *(words or ["of all tokens"])])


def answer_turn(
    decoder: SpeculativeDecoder, prompt: Any, arguments: Namespace, generator: Any, streamer: Any
) -> Generation:
    """The answer, which the streamer (if any) prints to stdout; statistics go to stderr."""
    trees: list[str] = []

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
    state = generator.get_state()
    generation = decoder.generate(
        prompt, streamer=streamer, on_cycle=watch, generator=generator, timed=True, **settings
    )
    statistics = generation.statistics
    for tree in trees:
        print("\n" + tree, file=sys.stderr)
    print(
        f"\n{statistics.new_tokens} tokens in {statistics.target_forwards} target forwards: "
        f"tau {statistics.tau:.2f}, {statistics.tokens_per_s:.1f} tokens/s "
        f"(prefill {statistics.ms['prefill']:.0f} ms), "
        f"{statistics.verify} at {sampling_words(statistics.decoding)}",
        file=sys.stderr,
    )
    if arguments.profile and statistics.target_forwards:
        # Time the same answer again, because the first one may have waited for a compiler.
        generator.set_state(state)
        again = decoder.generate(prompt, generator=generator, timed=True, **settings).statistics
        print(profile(decoder, prompt, again, settings), file=sys.stderr)
    if not generation.text.strip():
        print(
            "these tokens hold no text to show; "
            "a model that thinks first may need a larger --max-new-tokens",
            file=sys.stderr,
        )
    return generation
