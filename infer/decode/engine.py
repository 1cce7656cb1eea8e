"""The decoding loop: draft a tree, verify it in one target forward, commit what was accepted. Lossless.

Plain decoding (`vanilla`) is the same loop with a tree of one node: same cache, dtype, stop rules and token counter,
so that a speedup compares nothing but drafting.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import USUAL, MethodConfig, TreeConfig, TypicalConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.infer.decode.cache import CachedLM
from aerie.infer.decode.methods import Drafters, kind_at, make_proposer
from aerie.infer.decode.sampling import Decoding, Sampler, resolve
from aerie.infer.decode.shape import Cycle, Proposer
from aerie.infer.decode.tree import root_only
from aerie.infer.decode.verify import rule_of, verify
from aerie.model.target import Target

SETTINGS = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "eos_token_id")
PHASES = ("prefill", "draft", "verify", "commit", "other", "wall")


@dataclass
class Statistics:
    """What one generation cost and yielded. Counts stop at the end token and at max_new_tokens."""

    prompt_tokens: int
    decoding: dict[str, Any]
    cycle_tokens: list[int] = field(default_factory=list)  # new tokens per cycle, bonus included
    accepted: list[int] = field(default_factory=list)  # drafted tokens among them
    cycle_ms: list[float] = field(default_factory=list)  # wall time of each cycle
    cycle_nodes: list[int] = field(default_factory=list)  # drafted nodes of each cycle
    verify: str = "R0"  # the rule that judged the drafts (decode/verify.py); R0 or R2 where nothing was drafted
    draft_forwards: int = 0
    draft_forwards_wasted: int = 0  # beyond the accepted length: a level each, or the one of a Medusa head for all
    draft_nodes: int = 0
    ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def new_tokens(self) -> int:
        """Generated tokens; the first is the prefill's and nobody's draft."""
        return 1 + sum(self.cycle_tokens)

    @property
    def target_forwards(self) -> int:
        """Verifying forwards; the prefill is not one of them."""
        return len(self.cycle_tokens)

    @property
    def tau(self) -> float:
        """New tokens per cycle, bonus included; 1.0 without drafting."""
        return sum(self.cycle_tokens) / len(self.cycle_tokens) if self.cycle_tokens else 1.0


@dataclass(frozen=True)
class Generation:
    """Prompt and answer [1, T + new], and what they cost."""

    sequences: Tensor
    statistics: Statistics

    @property
    def new_ids(self) -> list[int]:
        ids: list[int] = self.sequences[0, self.statistics.prompt_tokens :].tolist()
        return ids


class SpeculativeDecoder:
    """Decodes with a target and a proposer (none: vanilla), token for token what the target alone would write."""

    def __init__(self, target: Target, proposer: Proposer | None = None, typical: TypicalConfig | None = None) -> None:
        """typical: Medusa's acceptance where tokens are sampled, which is NOT lossless."""
        if typical is not None and proposer is None:
            raise UserError("typical acceptance judges drafted tokens, and this decoder drafts none; give it a head")
        self.target, self.proposer, self.typical = target, proposer, typical
        self.make_sampler: Callable[[Decoding, torch.Generator], Sampler] = Sampler
        self.lm = CachedLM(target, () if proposer is None else proposer.after_blocks)

    @classmethod
    def from_pretrained(
        cls,
        target: str | Target,
        head: str | None = None,
        *,
        tree: TreeConfig | None = None,
        dtype: str = "auto",
        device_map: str | None = None,
        device: str | None = None,
    ) -> "SpeculativeDecoder":
        """A decoder for a target (local directory, Hub id or loaded Target) and a head directory; no head: vanilla.

        tree: null is the published one of the head's usual method; make_decoder has all methods.
        """
        if isinstance(target, str):
            target = Target.load(TargetConfig(path=target, dtype=dtype, device_map=device_map), device)  # type: ignore[arg-type]
        if head is None:
            return cls(target)
        return cls(target, make_proposer(Drafters(target), MethodConfig(USUAL[kind_at(head)], tree), head))

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        streamer: BaseStreamer | None = None,
        generator: torch.Generator | None = None,
        on_cycle: Callable[[Cycle], None] | None = None,
        timed: bool = False,
        **settings: Any,
    ) -> Generation:
        """Prompt and answer for input_ids [1, T], and statistics.

        settings are transformers' names: max_new_tokens, do_sample, temperature, top_k, top_p, min_p, eos_token_id;
        what is left out comes from the target's generation_config. timed synchronises the device around each phase.
        """
        foreign = sorted(settings.keys() - set(SETTINGS))
        if foreign:
            raise UserError(f"generate() does not know {', '.join(foreign)}; it takes {', '.join(SETTINGS)}")
        decoding = resolve(self.target.generation_config, **settings)
        prompt = self._checked_prompt(input_ids, attention_mask, decoding)
        if generator is None:  # one seeded from torch's global one, so that torch.manual_seed decides
            generator = torch.Generator(self.target.device).manual_seed(int(torch.randint(2**62, (1,))))
        run = _Run(self, prompt, decoding, generator, timed)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        # the streamer gets the prompt, the prefill's token, and then what each cycle adds
        tokens = run.prefill()
        while True:
            if streamer is not None:
                streamer.put(torch.tensor(tokens))
            if run.done:
                break
            tokens = run.cycle(on_cycle)
        if streamer is not None:
            streamer.end()
        run.clock.finish(run.statistics.ms)
        answer = torch.tensor([run.answer], dtype=input_ids.dtype, device=input_ids.device)
        return Generation(torch.cat([input_ids, answer], dim=1), run.statistics)

    def _checked_prompt(self, input_ids: Tensor, attention_mask: Tensor | None, decoding: Decoding) -> Tensor:
        shape, rows = list(input_ids.shape), self.target.vocab.embedding.shape[0]
        if len(shape) != 2 or shape[0] != 1:
            raise UserError(
                f"input_ids has shape {shape}; aerie decodes one prompt at a time, [1, T]: loop over prompts"
            )
        if shape[1] == 0:
            raise UserError("the prompt is empty: it needs at least one token")
        if attention_mask is not None and not bool(attention_mask.all()):
            raise UserError("attention_mask hides tokens of the prompt; pass the prompt without padding")
        if int(input_ids.max()) >= rows:
            raise UserError(f"token id {int(input_ids.max())} is outside the target's vocabulary of {rows}")
        length, new = shape[1], decoding.max_new_tokens
        limits = {"the target's context": int(getattr(self.target.config, "max_position_embeddings", None) or 2**31)}
        if self.proposer is not None:
            limits["the draft head's max_position_embeddings"] = self.proposer.max_positions
        for name, limit in limits.items():
            if length + new > limit:
                raise UserError(
                    f"prompt of {length} tokens + max_new_tokens {new} = {length + new} exceeds {name} ({limit}); "
                    f"shorten the prompt or lower max_new_tokens"
                )
        return input_ids[0].to(self.target.device)


class _Run:
    """The state of one generation."""

    def __init__(
        self, decoder: SpeculativeDecoder, prompt: Tensor, decoding: Decoding, generator: torch.Generator, timed: bool
    ) -> None:
        self.lm, self.proposer, self.typical = decoder.lm, decoder.proposer, decoder.typical
        self.prompt, self.decoding = prompt, decoding
        self.sampler = decoder.make_sampler(decoding, generator)
        self.clock = Clock(prompt.device if timed else None)
        rule = rule_of(None, self.sampler, self.typical)
        self.statistics = Statistics(prompt.shape[0], decoding.as_dict(), verify=rule)
        self.answer: list[int] = []
        self.done = False
        self._root = prompt[-1:]

    def prefill(self) -> list[int]:
        """Runs the prompt through the target and the drafter; the answer's first token."""
        nodes = self.proposer.max_nodes if self.proposer else 1
        self.clock.start()
        capacity = self.prompt.shape[0] + self.decoding.max_new_tokens + nodes
        step = self.lm.prefill(self.prompt, capacity)
        choice = self.sampler.choose(step.logits)  # [1]
        first = int(choice)
        if self.proposer is not None:
            self.proposer.reset(self.prompt, capacity, self.sampler)
            self.proposer.commit(torch.cat([self.prompt[1:], choice]), step.features, None)
        # the prefill's token is nobody's draft: it is the first root
        self._root = choice
        self.clock.lap("prefill")
        return self._take([first])

    def cycle(self, on_cycle: Callable[[Cycle], None] | None) -> list[int]:
        """Drafts, verifies and commits once; the answer's new tokens."""
        # (1) draft: the bonus token takes one place of what is left
        remaining, began = self.decoding.max_new_tokens - len(self.answer), self.clock.elapsed_ms
        if self.proposer is None or remaining < 2:
            tree = root_only(self._root)  # the bonus token alone fills what is left
        else:
            tree = self.proposer.propose(self._root, max_levels=remaining - 1)
        position = self.lm.length
        draft_ms = self.clock.lap("draft")
        # (2) verify in one target forward
        step = self.lm.extend(tree)
        verdict = verify(tree, step.logits, self.sampler, self.typical)
        verify_ms = self.clock.lap("verify")
        taken = self._take([*verdict.tokens, verdict.bonus])
        rule = rule_of(tree.proposal, self.sampler, self.typical)
        cycle = Cycle(tree, step, verdict, self.sampler, rule, position, len(taken), draft_ms, verify_ms)
        if on_cycle is not None:  # the time of whoever watches is nobody's
            self.clock.lap("commit")
            on_cycle(cycle)
            self.clock.skip()
        # (3) commit: the target keeps the rows of the accepted path; the bonus token is the next root and has none yet
        self.lm.keep(verdict.path)
        tokens = torch.tensor([*verdict.tokens, verdict.bonus], device=self._root.device)
        if self.proposer is not None:
            path = torch.tensor(verdict.path, device=self._root.device)
            self.proposer.commit(tokens, step.features.index_select(0, path), cycle)
        self._root = tokens[-1:]
        # (4) count; beyond the accepted length a forward was wasted
        statistics = self.statistics
        if len(tree) > 1:
            statistics.verify = rule
        statistics.cycle_tokens.append(len(taken))
        statistics.accepted.append(min(verdict.accepted, len(taken)))
        statistics.draft_forwards += tree.draft_forwards
        statistics.draft_forwards_wasted += tree.draft_forwards - min(verdict.accepted, tree.draft_forwards)
        statistics.draft_nodes += tree.num_drafted
        statistics.cycle_nodes.append(tree.num_drafted)
        self.clock.lap("commit")
        statistics.cycle_ms.append(self.clock.elapsed_ms - began)
        return taken

    def _take(self, tokens: list[int]) -> list[int]:
        """Appends tokens up to the end token and max_new_tokens."""
        tokens = tokens[: self.decoding.max_new_tokens - len(self.answer)]
        end = next((place for place, token in enumerate(tokens) if token in self.decoding.eos_token_ids), None)
        tokens = tokens if end is None else tokens[: end + 1]
        self.answer += tokens
        self.done = end is not None or len(self.answer) >= self.decoding.max_new_tokens
        return tokens


class Clock:
    """Milliseconds per phase; the time of whoever watches the cycles belongs to none, nor to the wall time."""

    # given a device it synchronises at each lap, so that a phase pays for its own kernels
    def __init__(self, device: torch.device | None) -> None:
        self._waits = device is not None and device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._began = self._last = 0.0

    def _now(self) -> float:
        if self._waits:
            torch.cuda.synchronize()
        return time.perf_counter()

    def start(self) -> None:
        self._began = self._last = self._now()

    @property
    def elapsed_ms(self) -> float:
        """From the start to the last lap."""
        return 1000 * (self._last - self._began)

    def lap(self, phase: str) -> float:
        """Ends a phase; its milliseconds."""
        now = self._now()
        seconds, self._last = now - self._last, now
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        return 1000 * seconds

    def skip(self) -> None:
        """Counts nothing since the last lap."""
        now = self._now()
        self._began += now - self._last
        self._last = now

    def finish(self, ms: dict[str, float]) -> None:
        """Fills ms: the phases, the wall time since start, and under "other" what belongs to no phase."""
        self.lap("other")
        ms.update({phase: 1000 * seconds for phase, seconds in self._seconds.items()})
        ms["wall"] = self.elapsed_ms


def make_decoder(
    drafters: Drafters, asked: MethodConfig, head: str | None, place: str = "method"
) -> SpeculativeDecoder:
    """A decoder for a method as the recipe has it at this place; head: the directory, null where it needs none."""
    return SpeculativeDecoder(drafters.target, make_proposer(drafters, asked, head, place), asked.typical)
