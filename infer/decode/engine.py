"""The decoding loop; plain decoding (`vanilla`) is the same loop with a tree of one node."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from aerie.configs.errors import UserError, warn
from aerie.configs.read import validate
from aerie.configs.schema.data import RenderConfig
from aerie.configs.schema.decode import METHODS, USUAL, MethodConfig, TreeConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.data.chat import answer_text, encode_prompt
from aerie.data.rendering import bind, trained_arguments
from aerie.infer.decode.cached_lm import CachedLM
from aerie.infer.decode.check import Form, checked_lm
from aerie.infer.decode.clock import PHASES, Clock
from aerie.infer.decode.find_head import check_kind, check_levels, kind_at
from aerie.infer.decode.loaded_heads import LoadedHeads
from aerie.infer.decode.proposers import make_proposer
from aerie.infer.decode.roles import UNBOUNDED, Cycle, Proposer
from aerie.infer.decode.runners import CyclePlan, EagerRunner, Runners, bucket
from aerie.infer.decode.sampling import HONOURED, Decoding, Sampler, resolve
from aerie.infer.decode.verify import read, rule_of
from aerie.model.kv_cache import KeptRows
from aerie.model.target import Target, context_of, load_tokenizer

CHUNK = 2048  # tokens of a prompt that one forward reads: their mask is over all tokens before them


@dataclass
class Statistics:
    prompt_tokens: int
    decoding: Decoding
    cycle_tokens: list[int] = field(default_factory=list)  # new tokens per cycle, bonus included
    accepted: list[int] = field(default_factory=list)  # drafted tokens among them
    cycle_ms: list[float] = field(default_factory=list)
    cycle_nodes: list[int] = field(default_factory=list)  # drafted nodes
    # the rule that judged the drafts; R0 or R2 where nothing was drafted
    verify: str = "R0"
    draft_forwards: int = 0
    draft_levels: int = 0  # more than draft_forwards where one gives several
    draft_forwards_wasted: int = 0  # beyond the accepted length
    draft_nodes: int = 0
    ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def count(self, cycle: Cycle, ms: float) -> None:
        tree, verdict = cycle.tree, cycle.verdict
        if len(tree) > 1:
            self.verify = cycle.rule
        self.cycle_tokens.append(cycle.new_tokens)
        # an end token may cut the accepted path
        self.accepted.append(min(verdict.accepted, cycle.new_tokens))
        self.draft_forwards += tree.draft_forwards
        # Medusa and block heads give all levels in one forward
        self.draft_levels += max(tree.draft_forwards, tree.levels)
        self.draft_forwards_wasted += max(tree.draft_forwards - verdict.accepted, 0)
        self.draft_nodes += verdict.drafted
        self.cycle_nodes.append(verdict.drafted)
        self.cycle_ms.append(ms)

    @property
    def new_tokens(self) -> int:
        # the prefill's token comes first
        return 1 + sum(self.cycle_tokens)

    @property
    def target_forwards(self) -> int:
        return len(self.cycle_tokens)  # without the prefill

    @property
    def tau(self) -> float:
        return sum(self.cycle_tokens) / len(self.cycle_tokens) if self.cycle_tokens else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Leaves out the prefill and its token."""
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
        """The answer as a reader should see it; `new_ids` holds all its tokens."""
        return answer_text(self.decoder.tokenizer, self.new_ids)


def raw_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids [T] of a text without the chat template; warns if the text spells the tokens that
    the tokenizer puts before every text."""
    ids: list[int] = tokenizer(text)["input_ids"]
    spelt = tokenizer(text, add_special_tokens=False)["input_ids"]
    count = next((n for n in range(1, len(ids)) if ids[n : n + len(spelt)] == spelt), 0)
    if count and ids[:count] == spelt[:count]:
        added = tokenizer.decode(ids[:count])
        warn(f"the prompt begins with {added} twice: the tokenizer adds it; leave it out")
    return ids


class SpeculativeDecoder:
    """Decodes what the target alone would write, with a proposer's drafts (None: vanilla)."""

    def __init__(self, target: Target, proposer: Proposer | None = None) -> None:
        proposer = proposer or Proposer()
        form: Form = "chain" if proposer.is_chain else "tree"
        self.target = target
        lm = checked_lm(target, proposer.after_blocks, form)
        self.eager = EagerRunner(lm, proposer, form)
        self.runners = Runners(self.eager)
        self.render = RenderConfig()  # what the chat template gets

    @property
    def lm(self) -> CachedLM:
        """The target with its cache; set `eager.lm` to share one between decoders."""
        return self.eager.lm

    @property
    def proposer(self) -> Proposer:
        return self.eager.proposer

    @property
    def graph_bytes(self) -> int:
        """The memory of the CUDA graphs captured so far."""
        return self.runners.graph_bytes

    @cached_property
    def tokenizer(self) -> Any:
        """The target's own, unless from_pretrained was given one."""
        try:
            return bind(load_tokenizer(self.target.recipe), self.render)
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
        """A decoder for a head; all but the target may be left out.

        target: a directory, a Hub id, or a loaded Target or transformers model (with sdpa or eager
        attention; it is frozen). method, tree: by default the head's usual ones. tokenizer: by
        default that of the target's directory or Hub id; its chat template gets the arguments of
        the head's training. device (by default the GPU, if there is one) and keys (TargetConfig's:
        dtype, ...) are for loading the target.
        """
        # --- the target: loaded here, or taken as it is
        if not isinstance(target, Target | PreTrainedModel):
            dtype = str(keys.get("dtype", "auto")).removeprefix("torch.")
            values = {"path": str(target), **keys, "dtype": dtype}
            config = validate(values, TargetConfig, "from_pretrained", {})
            target = Target.load(config, device or ("cuda" if torch.cuda.is_available() else "cpu"))
        elif keys or device:
            names = ", ".join(keys) or "device"
            raise UserError(f"from_pretrained: the target is loaded already; leave {names} out")
        if isinstance(target, PreTrainedModel):
            path = target.name_or_path or f"a loaded {type(target).__name__}"
            target = Target(target, TargetConfig(path=path))
        # --- the row: the head's usual method, unless another is named
        kind = kind_at(str(head)) if head else "none"
        values = {
            "method": method or USUAL.get(kind, "vanilla"),
            "tree": tree if head else None,
        }
        row = validate(values, MethodConfig, "from_pretrained", {})
        # a head for a method without one is refused as well
        if head or METHODS[row.method].heads:
            check_kind(row.method, kind, "from_pretrained")
        path = str(head) if head else None
        row = check_levels(row, path, "from_pretrained")
        decoder = make_decoder(LoadedHeads(target), row, path)
        if path:
            arguments = trained_arguments(path) or {}
            decoder.render = RenderConfig(template_arguments=arguments)
        # takes the place of the cached property, which would look at the target's directory
        if tokenizer is not None:
            decoder.tokenizer = tokenizer
        return decoder

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
        """Decodes one prompt.

        input_ids: a text, messages, token ids [T] or [1, T] (list or tensor), or what a tokenizer
        returns. A text is a user's turn in the chat template; a tokenizer without one takes it as
        it is. settings: HONOURED, by default the generation_config's; what neither sets is off,
        top_k too. timed: waits for the device in each phase. on_cycle sees each cycle, whose
        tensors the next one may overwrite.
        UserError: padding, several prompts, ids outside the vocabulary, no room in the context,
        unknown settings.
        """
        if unknown := ", ".join(sorted(settings.keys() - set(HONOURED))):
            raise UserError(f"generate() does not know {unknown}; use {', '.join(HONOURED)}")
        # What was asked for, else the model's own settings, else the defaults.
        decoding = resolve(self.target.generation_config, **settings)
        if isinstance(input_ids, Mapping) and attention_mask is None:
            attention_mask = input_ids.get("attention_mask")
        input_ids = self.encode(input_ids)
        self._check(input_ids, attention_mask, decoding.max_new_tokens)
        prompt = input_ids[0].to(self.target.device)
        plan = self.runners.plan(decoding)
        if generator is None:  # seeded by torch.manual_seed
            generator = torch.Generator(prompt.device)
            generator.manual_seed(int(torch.randint(2**62, (1,))))
        # Graphs draw from a generator of their own, which goes on from the caller's state.
        draws_from = self.runners.generator if plan.captured else generator
        draws_from.set_state(generator.get_state())
        sampler = Sampler(decoding, draws_from, prompt)
        # Until something is drafted, the rule is that of plain decoding.
        statistics = Statistics(len(prompt), decoding, verify=rule_of(None, sampler))
        clock = Clock(statistics.ms, timed and prompt.is_cuda)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        answer = self._decode(prompt, plan, sampler, statistics, clock, streamer, on_cycle)
        if streamer is not None:
            streamer.end()
        # The caller's generator goes on where this answer's draws ended.
        generator.set_state(draws_from.get_state())
        clock.lap("other")
        statistics.ms["wall"] = sum(statistics.ms.values())
        ids = torch.tensor([answer], dtype=input_ids.dtype, device=input_ids.device)
        return Generation(torch.cat([input_ids, ids], dim=1), statistics, self)

    def _decode(
        self,
        prompt: Tensor,
        plan: CyclePlan,
        sampler: Sampler,
        statistics: Statistics,
        clock: Clock,
        streamer: BaseStreamer | None,
        on_cycle: Callable[[Cycle], None] | None,
    ) -> list[int]:
        """The answer's token ids."""
        # --- prefill: the answer's first token, which is the first root
        num_rows = self._num_rows(len(prompt) + sampler.decoding.max_new_tokens, plan)
        kept = self._kept(num_rows)
        # The target reads the prompt and chooses the first token, which nobody drafted.
        root = self._prefill(prompt, kept, sampler)  # [1]
        answer = AnswerSoFar(sampler.decoding, prompt, self._stop_strings(sampler.decoding))
        new = answer.add(root.tolist())
        self.proposer.learn(new, None)
        clock.lap("prefill")
        self.runners.begin(plan, kept, clock, sampler)
        while True:
            if streamer is not None:
                streamer.put(torch.tensor(new))
            if answer.has_ended:
                return answer.tokens
            if kept.length == self.target.rope_switch:  # LongRoPE: all rows must be rotated anew
                self._prefill_again(prompt, answer, kept)
            # --- (1) draft; the bonus token takes one place of what is left
            # A tree deeper than what is left of the answer would be drafted for nothing.
            levels = self._num_levels(answer.remaining - 1, plan, num_rows)
            # short trees at the answer's end run eagerly, whatever the plan
            runner = self.runners.runner_for(levels)
            tree = runner.draft(root, levels)
            draft_ms = clock.lap("draft")
            # --- (2) verify all nodes in one forward of the target
            step = runner.extend(tree.tokens, tree.depth, tree.mask)
            # The processors that read the text and each path change the logits here.
            step = replace(step, logits=sampler.with_text(step.logits, tree))
            # Everything before runs ahead of the device; only here does the host wait for it.
            verdict = read(runner.judge(tree, step.logits, sampler), len(tree))
            verify_ms = clock.lap("verify")
            chosen = [*verdict.tokens, verdict.bonus][: answer.remaining]
            # An end token inside the accepted path cuts what follows it.
            new = answer.add(chosen)
            cycle = Cycle(
                tree,
                step,
                verdict,
                sampler,
                rule=rule_of(tree.draft_laws, sampler),
                position=kept.length,
                new_tokens=len(new),
                draft_ms=draft_ms,
                verify_ms=verify_ms,
            )
            commit_ms = clock.lap("commit")
            if on_cycle is not None:
                on_cycle(cycle)
                clock.lap(None)  # the watcher's time counts for no phase
            # --- (3) commit the accepted path; the bonus token, the next root, has no row yet
            count = len(verdict.path)
            # The path's nodes but the root, and the bonus token: as many as the path has nodes.
            sampler.follow(verdict.new[:count])
            runner.accept(verdict, step.features)
            self.proposer.learn(chosen, cycle)
            kept.advance(count)
            # A slice of the device's own tensor, as a number would have to be copied back.
            root = verdict.new[count - 1 : count]
            commit_ms += clock.lap("commit")
            statistics.count(cycle, draft_ms + verify_ms + commit_ms)

    def encode(self, prompt: Any) -> Tensor:
        """Token ids [1, T] of any prompt that `generate` takes."""
        if isinstance(prompt, str):
            user_turn = [{"role": "user", "content": prompt}]
            prompt = user_turn if self.tokenizer.chat_template else raw_ids(self.tokenizer, prompt)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
            prompt = encode_prompt(self.tokenizer, prompt)
        try:
            ids = torch.as_tensor(prompt["input_ids"] if isinstance(prompt, Mapping) else prompt)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            known = "a text, messages, one prompt's token ids or what a tokenizer returns"
            raise UserError(
                f"generate() takes {known}, not this {type(prompt).__name__}"
            ) from error
        # one prompt's ids without a batch dimension
        return ids[None] if ids.ndim == 1 else ids

    def _check(self, input_ids: Tensor, attention_mask: Any, num_new: int) -> None:
        shape = tuple(input_ids.shape)
        num_ids = self.target.vocab.embedding.shape[0]
        if len(shape) != 2 or shape[0] != 1 or shape[1] == 0:
            fix = "the prompt is empty" if 0 in shape else "give one prompt at a time, [1, T]"
            raise UserError(f"input_ids {list(shape)}: {fix}")
        if attention_mask is not None and not bool(torch.as_tensor(attention_mask).all()):
            raise UserError("attention_mask hides tokens of the prompt; pass it without padding")
        largest = int(input_ids.max())
        if largest >= num_ids:
            raise UserError(f"token id {largest} is outside the target's vocabulary of {num_ids}")
        for name, limit in self.limits.items():
            if shape[1] + num_new > limit:
                request = f"prompt of {shape[1]} tokens + max_new_tokens {num_new}"
                raise UserError(f"{request} exceeds {name} {limit}; lower either")

    @property
    def limits(self) -> dict[str, int]:
        """How many tokens prompt and answer may have together, by what bounds them."""
        return {
            "the target's context": context_of(self.target.config) or UNBOUNDED,
            "the draft head's max_position_embeddings": self.proposer.max_positions,
        }

    def _num_rows(self, num_tokens: int, plan: CyclePlan) -> int:
        """Rows of the cache for prompt, answer and the tree behind them."""
        num_tokens = bucket(num_tokens) if plan.captured else num_tokens
        return num_tokens + max(self.proposer.max_nodes, self.proposer.draft_slots)

    def _kept(self, num_rows: int) -> KeptRows:
        """The last text's, if it has room: then its caches and graphs are used again."""
        kept = self.lm.cache.kept
        # A new KeptRows means new caches for the target and the head, and new graphs.
        if len(kept.positions) < num_rows:
            kept = KeptRows(num_rows, self.target.device, self.target.dtype)
        kept.restart()
        return kept

    def _prefill(self, prompt: Tensor, kept: KeptRows, sampler: Sampler) -> Tensor:
        """Reads the prompt [T] in parts; returns the answer's first token [1]."""
        # before the forwards: the head reads each part as the target has read it
        self.proposer.reset(prompt, kept, sampler)
        # LongRoPE's factors depend on the length, so one forward reads all of the prompt.
        size = CHUNK if self.target.rope_switch is None else len(prompt)
        for part in prompt.split(size):
            step = self.lm.read(part) if kept.length else self.lm.prefill(part, kept)
            end = kept.length + len(part)
            if end < len(prompt):
                following = prompt[end : end + 1]  # [1]
            else:
                following = sampler.choose(sampler.with_text(step.logits))
            # A head pairs the feature of each token with the token after it.
            self.proposer.commit(torch.cat([part[1:], following]), step.features)
            kept.advance(len(part))
        sampler.follow(following)
        return following

    def _prefill_again(self, prompt: Tensor, answer: "AnswerSoFar", kept: KeptRows) -> None:
        """Writes the rows of prompt and answer anew, where LongRoPE turns to its other factors."""
        tokens = torch.tensor(answer.tokens, device=prompt.device)
        self.lm.prefill(torch.cat([prompt, tokens]), kept)

    def _num_levels(self, room: int, plan: CyclePlan, num_rows: int) -> int:
        """How deep the next tree may be; room: tokens that the answer may have beside the bonus
        token.
        """
        bound = self.proposer.levels
        # Whole trees need rows beyond the answer's end, for which the context must have room.
        if plan.has_whole_trees and num_rows <= min(self.limits.values()):
            room = max(room, bound or 0)
        levels = min(room, self.lm.max_levels)
        return levels if bound is None else min(levels, bound)

    def _stop_strings(self, decoding: Decoding) -> StopStringCriteria | None:
        if not decoding.stop_strings:
            return None
        return StopStringCriteria(self.tokenizer, [*decoding.stop_strings])


class AnswerSoFar:
    """The answer's tokens, and whether it has ended.

    It ends like transformers' answers: with an end token, or with the token in which a stop string
    ends, also if that string began in the prompt.
    """

    def __init__(
        self, decoding: Decoding, prompt: Tensor, stop_strings: StopStringCriteria | None
    ) -> None:
        self.tokens: list[int] = []
        self._limit = decoding.max_new_tokens
        self._end_ids = decoding.eos_token_ids
        self._stop_strings = stop_strings
        self._prompt_end: list[int] = []  # where a stop string may begin
        if stop_strings is not None:
            self._prompt_end = prompt[-stop_strings.maximum_token_len :].tolist()
        self._is_complete = False

    @property
    def remaining(self) -> int:
        """Tokens that it may still have."""
        return self._limit - len(self.tokens)

    @property
    def has_ended(self) -> bool:
        return self._is_complete or self.remaining == 0

    def add(self, new: list[int]) -> list[int]:
        """Takes these tokens, up to the one that ends the answer; returns those that it took."""
        for count, token in enumerate(new, start=1):
            self.tokens.append(token)
            if token in self._end_ids or self._completes_a_stop_string():
                self._is_complete = True
                return new[:count]
        return new

    def _completes_a_stop_string(self) -> bool:
        if self._stop_strings is None:
            return False
        # Enough of the text that any stop string ending here begins in it.
        longest = self._stop_strings.maximum_token_len
        text = [*self._prompt_end, *self.tokens[-2 * longest :]]
        return bool(self._stop_strings(torch.tensor([text]), None))


def make_decoder(heads: LoadedHeads, row: MethodConfig, head: str | None) -> SpeculativeDecoder:
    return SpeculativeDecoder(heads.target, make_proposer(heads, row, head))
