"""The decoding loop; plain decoding (`vanilla`) is the same loop with a tree of one node."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from aerie.configs.errors import UserError
from aerie.configs.read import validate
from aerie.configs.schema.decode import METHODS, USUAL, MethodConfig, TreeConfig, TypicalConfig, check_kind
from aerie.configs.schema.heads import TargetConfig
from aerie.data.chat import answer_text, apply_template
from aerie.infer.decode.check import Form, checked_lm
from aerie.infer.decode.methods import Drafters, kind_at, make_proposer
from aerie.infer.decode.sampling import Decoding, Sampler, resolve
from aerie.infer.decode.shape import Cycle, Proposer
from aerie.infer.decode.tree import root_only
from aerie.infer.decode.verify import rule_of, verify
from aerie.model.target import Target, context_of, load_tokenizer

SETTINGS = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "eos_token_id")
PHASES = ("prefill", "draft", "verify", "commit", "other", "wall")


@dataclass
class Statistics:
    prompt_tokens: int
    decoding: Decoding
    cycle_tokens: list[int] = field(default_factory=list)  # new tokens per cycle, bonus included
    accepted: list[int] = field(default_factory=list)  # drafted tokens among them
    cycle_ms: list[float] = field(default_factory=list)
    cycle_nodes: list[int] = field(default_factory=list)  # drafted nodes
    verify: str = "R0"  # the rule that judged the drafts; R0 or R2 where nothing was drafted
    draft_forwards: int = 0
    draft_forwards_wasted: int = 0  # beyond the accepted length
    draft_nodes: int = 0
    ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def new_tokens(self) -> int:
        return 1 + sum(self.cycle_tokens)

    @property
    def target_forwards(self) -> int:
        return len(self.cycle_tokens)  # without the prefill

    @property
    def tau(self) -> float:
        return sum(self.cycle_tokens) / len(self.cycle_tokens) if self.cycle_tokens else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Without the prefill and its token."""
        return (self.new_tokens - 1) / max((self.ms["wall"] - self.ms["prefill"]) / 1000, 1e-9)


@dataclass(frozen=True)
class Generation:
    sequences: Tensor  # prompt and answer [1, T + new]
    statistics: Statistics
    decoder: "SpeculativeDecoder" = field(repr=False)

    @property
    def new_ids(self) -> list[int]:
        return list(self.sequences[0, self.statistics.prompt_tokens :].tolist())

    @property
    def text(self) -> str:
        """The answer as a reader should see it; `new_ids` are all of it."""
        return answer_text(self.decoder.tokenizer, self.new_ids)


class SpeculativeDecoder:
    """Decodes with a target and a proposer (none: vanilla) what the target alone would write."""

    def __init__(self, target: Target, proposer: Proposer | None = None, typical: TypicalConfig | None = None) -> None:
        """typical: Medusa's acceptance where tokens are sampled, which is NOT lossless."""
        if typical is not None and proposer is None:  # its bonus token is the argmax
            raise UserError("typical acceptance needs drafted tokens; give the decoder a head")
        self.target, self.proposer, self.typical = target, proposer, typical
        form: Form = "chain" if proposer is None or proposer.is_chain else "tree"
        self.lm = checked_lm(target, () if proposer is None else proposer.after_blocks, form)

    @cached_property
    def tokenizer(self) -> Any:
        """The target's own, unless from_pretrained was given one."""
        try:
            return load_tokenizer(self.target.recipe)
        except UserError as error:
            raise UserError(f"{error}; give from_pretrained tokenizer=") from error

    @classmethod
    def from_pretrained(
        cls,
        target: str | PathLike[str] | Target | PreTrainedModel,
        head: str | PathLike[str] | None = None,
        *,
        method: str | None = None,
        tree: TreeConfig | dict[str, Any] | None = None,
        tokenizer: Any = None,
        device: str | None = None,
        **keys: Any,
    ) -> "SpeculativeDecoder":
        """target: a directory, a Hub id, or a loaded Target or transformers model (sdpa or eager attention; frozen).

        method, tree: by default the head's usual ones; tokenizer: by default that of the target's directory or Hub id.
        device (by default the GPU, if there is one) and keys (TargetConfig's: dtype, ...) are for loading the target.
        """
        if not isinstance(target, Target | PreTrainedModel):
            values = {"path": str(target), **keys, "dtype": str(keys.get("dtype", "auto")).removeprefix("torch.")}
            config = validate(values, TargetConfig, "from_pretrained", {})
            target = Target.load(config, device or ("cuda" if torch.cuda.is_available() else "cpu"))
        elif keys or device:
            raise UserError(f"from_pretrained: the target is loaded already; leave {', '.join(keys) or 'device'} out")
        if isinstance(target, PreTrainedModel):
            target = Target(target, TargetConfig(path=target.name_or_path or f"a loaded {type(target).__name__}"))
        kind = kind_at(str(head)) if head else "none"
        named = {"method": method or USUAL.get(kind, "vanilla"), "tree": tree if head else None}
        asked = validate(named, MethodConfig, "from_pretrained", {})
        if head or METHODS[asked.method].heads:
            check_kind(asked.method, kind, "from_pretrained")
        decoder = make_decoder(Drafters(target), asked, str(head) if head else None)
        if tokenizer is not None:
            decoder.tokenizer = tokenizer
        return decoder

    def encode(self, prompt: Any) -> Tensor:
        """Token ids [1, T] of any prompt that `generate` takes."""
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}] if self.tokenizer.chat_template else self.tokenizer(prompt)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
            prompt = apply_template(self.tokenizer, prompt, tokenize=True, add_generation_prompt=True)
        try:
            ids = torch.as_tensor(prompt["input_ids"] if isinstance(prompt, Mapping) else prompt)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            known = "a text, messages, one prompt's token ids or what a tokenizer returns"
            raise UserError(f"generate() takes {known}, not this {type(prompt).__name__}") from error
        return ids[None] if ids.ndim == 1 else ids

    @torch.inference_mode()
    def generate(
        self,
        input_ids: str | Sequence[Any] | Mapping[str, Any] | Tensor,
        *,
        attention_mask: Tensor | None = None,
        streamer: BaseStreamer | None = None,
        generator: torch.Generator | None = None,
        on_cycle: Callable[[Cycle], None] | None = None,
        timed: bool = False,
        **settings: Any,
    ) -> Generation:
        """input_ids: a text, messages, token ids [T] or [1, T] (list or tensor), or what a tokenizer returns.

        A text is a user's turn in the chat template; a tokenizer without one takes it as it is.
        settings: SETTINGS, else the generation_config's; on_cycle sees each cycle; timed waits for the device.
        UserError: padding, several prompts, ids outside the vocabulary, no room in the context, unknown settings.
        """
        if foreign := sorted(settings.keys() - set(SETTINGS)):
            raise UserError(f"generate() does not know {', '.join(foreign)}; use {', '.join(SETTINGS)}")
        decoding = resolve(self.target.generation_config, **settings)
        if isinstance(input_ids, Mapping) and attention_mask is None and "attention_mask" in input_ids:
            attention_mask = torch.as_tensor(input_ids["attention_mask"])
        input_ids = self.encode(input_ids)
        self._check(input_ids, attention_mask, decoding.max_new_tokens)
        prompt, proposer, limit = input_ids[0].to(self.target.device), self.proposer, decoding.max_new_tokens
        if generator is None:
            # torch.manual_seed decides
            generator = torch.Generator(self.target.device).manual_seed(int(torch.randint(2**62, (1,))))
        sampler = Sampler(decoding, generator)
        rule = rule_of(None, sampler, self.typical)
        statistics = Statistics(len(prompt), decoding, verify=rule)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        clock = Clock(statistics.ms, timed and prompt.is_cuda)
        capacity = len(prompt) + limit + (1 if proposer is None else proposer.max_nodes)
        step = self.lm.prefill(prompt, capacity)
        root = sampler.choose(step.logits)  # [1]
        new = root.tolist()
        if proposer is not None:
            proposer.reset(prompt, capacity, sampler)
            proposer.commit(torch.cat([prompt[1:], root]), step.features, None)
        clock.lap("prefill")
        answer: list[int] = []
        while True:
            answer += new
            if streamer is not None:
                streamer.put(torch.tensor(new))
            remaining = limit - len(answer)
            if remaining == 0 or answer[-1] in decoding.eos_token_ids:
                break
            if self.lm.cache.length == self.target.rope_switch:  # LongRoPE: all rows are to be turned anew
                self.lm.prefill(torch.cat([prompt, torch.tensor(answer, device=prompt.device)]), capacity)
                self.lm.cache.length -= 1  # the root's row comes with its tree
            # (1) draft; the bonus token takes one place of what is left
            levels = min(remaining - 1, self.lm.max_levels)
            tree = root_only(root) if proposer is None or levels == 0 else proposer.propose(root, levels)
            position, draft_ms = self.lm.cache.length, clock.lap("draft")
            # (2) verify in one target forward
            step = self.lm.extend(tree)
            verdict = verify(tree, step.logits, sampler, self.typical)
            verify_ms = clock.lap("verify")
            new = [*verdict.tokens, verdict.bonus][:remaining]
            ends = (place for place, token in enumerate(new, start=1) if token in decoding.eos_token_ids)
            new = new[: next(ends, remaining)]
            rule = rule_of(tree.proposal, sampler, self.typical)
            cycle = Cycle(tree, step, verdict, sampler, rule, position, len(new), draft_ms, verify_ms)
            commit_ms = clock.lap("commit")
            if on_cycle is not None:
                on_cycle(cycle)
                # the watcher's time counts for no phase
                clock.lap(None)
            # (3) commit; the bonus token, the next root, has no row
            self.lm.keep(verdict.path, verdict.nodes)
            if proposer is not None:
                proposer.commit(verdict.new, step.features.index_select(0, verdict.nodes), cycle)
            root, accepted = verdict.new[-1:], min(verdict.accepted, len(new))
            # (4) count; beyond the accepted length a forward was wasted
            if len(tree) > 1:
                statistics.verify = rule
            statistics.cycle_tokens.append(len(new))
            statistics.accepted.append(accepted)
            statistics.draft_forwards += tree.draft_forwards
            statistics.draft_forwards_wasted += max(tree.draft_forwards - verdict.accepted, 0)
            statistics.draft_nodes += tree.num_drafted
            statistics.cycle_nodes.append(tree.num_drafted)
            statistics.cycle_ms.append(draft_ms + verify_ms + commit_ms + clock.lap("commit"))
        if streamer is not None:
            streamer.end()
        clock.lap("other")
        statistics.ms["wall"] = sum(statistics.ms.values())
        ids = torch.tensor([answer], dtype=input_ids.dtype, device=input_ids.device)
        return Generation(torch.cat([input_ids, ids], dim=1), statistics, self)

    @property
    def limits(self) -> dict[str, int]:
        """How many tokens prompt and answer may have together, by what bounds them."""
        limits = {"the target's context": context_of(self.target.config) or 2**31}
        if self.proposer is not None:
            limits["the draft head's max_position_embeddings"] = self.proposer.max_positions
        return limits

    def _check(self, input_ids: Tensor, attention_mask: Tensor | None, new: int) -> None:
        shape, rows = tuple(input_ids.shape), self.target.vocab.embedding.shape[0]
        if len(shape) != 2 or shape[0] != 1 or shape[1] == 0:
            fix = "the prompt is empty" if 0 in shape else "give one prompt at a time, [1, T]"
            raise UserError(f"input_ids {list(shape)}: {fix}")
        if attention_mask is not None and not bool(attention_mask.all()):
            raise UserError("attention_mask hides tokens of the prompt; pass the prompt without padding")
        if int(input_ids.max()) >= rows:
            raise UserError(f"token id {int(input_ids.max())} is outside the target's vocabulary of {rows}")
        for name, limit in self.limits.items():
            if shape[1] + new > limit:
                asked = f"prompt of {shape[1]} tokens + max_new_tokens {new}"
                raise UserError(f"{asked} exceeds {name} {limit}; lower either")


class Clock:
    def __init__(self, ms: dict[str, float], waits: bool) -> None:
        self.ms, self.waits, self._last = ms, waits, 0.0
        self.lap(None)

    def lap(self, phase: str | None) -> float:
        """Ends a phase, adds its milliseconds to ms and returns them; None: adds them nowhere."""
        if self.waits:
            torch.cuda.synchronize()
        now = time.perf_counter()
        ms, self._last = 1000 * (now - self._last), now
        if phase is not None:
            self.ms[phase] += ms
        return ms


def make_decoder(drafters: Drafters, asked: MethodConfig, head: str | None) -> SpeculativeDecoder:
    return SpeculativeDecoder(drafters.target, make_proposer(drafters, asked, head), asked.typical)
