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
from aerie.model.target import Target
from aerie.model.target_files import context_of, load_tokenizer

# The most tokens of a prompt that one forward reads: its mask has a column for each token so far.
CHUNK = 2048


@dataclass
class Statistics:
    """What one answer took, by cycle and in all. Draft forwards may give several levels each."""

    prompt_tokens: int
    decoding: Decoding
    cycle_tokens: list[int] = field(default_factory=list)  # new tokens per cycle, bonus included
    accepted: list[int] = field(default_factory=list)  # drafted tokens among them
    cycle_ms: list[float] = field(default_factory=list)
    cycle_nodes: list[int] = field(default_factory=list)  # drafted nodes
    verify: str = "R0"  # the rule that judged the drafts; R0 or R2 if there were none
    draft_forwards: int = 0
    draft_levels: int = 0
    draft_forwards_wasted: int = 0  # forwards of levels beyond the accepted length
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
        """New tokens per cycle, without the prefill and its token."""
        return sum(self.cycle_tokens) / len(self.cycle_tokens) if self.cycle_tokens else 1.0

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second, without the prefill and its token."""
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
    """Token ids [T] of a text without the chat template.

    Warns if the text spells the tokens that the tokenizer puts before every text.
    """
    ids: list[int] = tokenizer(text)["input_ids"]
    spelt = tokenizer(text, add_special_tokens=False)["input_ids"]
    count = next((n for n in range(1, len(ids)) if ids[n : n + len(spelt)] == spelt), 0)
    if count and ids[:count] == spelt[:count]:
        added = tokenizer.decode(ids[:count])
        warn(f"the prompt begins with {added} twice; leave it out, as the tokenizer adds it")
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
            raise UserError(f"{error}; pass tokenizer= to from_pretrained") from error

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
        """A decoder that drafts with a head; without a head, plain decoding.

        target: a directory, a Hub id, or a loaded Target or transformers model (with sdpa or eager
        attention; it is frozen). method, tree: by default the head's usual ones. tokenizer: by
        default that of the target's directory or Hub id, with the template arguments of the head's
        training. device (by default the GPU, if there is one) and keys (fields of TargetConfig,
        such as dtype) say how to load the target.
        UserError: head, method or tree do not fit the target or each other.
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
        # This also refuses a head for a method that takes none.
        if head or METHODS[row.method].heads:
            check_kind(row.method, kind, "from_pretrained")
        path = str(head) if head else None
        row = check_levels(row, path, "from_pretrained")
        decoder = make_decoder(LoadedHeads(target), row, path)
        if path:
            arguments = trained_arguments(path) or {}
            decoder.render = RenderConfig(template_arguments=arguments)
        # replaces the cached property, which would read the target's directory
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
        returns. A text becomes a user's turn in the chat template, or stays as it is if the
        tokenizer has none. settings: names of HONOURED. A setting that is left out has its value in
        the generation_config, else it is off, top_k too. timed: each phase waits for the device.
        on_cycle gets each cycle, whose tensors the next cycle may overwrite.
        UserError: padding, several prompts, ids outside the vocabulary, no room in the context,
        unknown settings.
        """
        if unknown := ", ".join(sorted(settings.keys() - set(HONOURED))):
            raise UserError(f"generate() does not know {unknown}; it takes {', '.join(HONOURED)}")
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
        # the rule of plain decoding, until something is drafted
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
        # --- prefill: the target reads the prompt and chooses the first token, which is the first
        # root
        num_rows = self._num_rows(len(prompt) + sampler.decoding.max_new_tokens, plan)
        kept = self._kept(num_rows)
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
            if kept.length == self.target.rope_switch:  # LongRoPE changes the rotation of all rows
                self._prefill_again(prompt, answer, kept)
            # --- (1) draft no deeper than the answer has room; the bonus token takes one place
            levels = self._num_levels(answer.remaining - 1, plan, num_rows)
            # Short trees at the answer's end run eagerly, whatever the plan.
            runner = self.runners.runner_for(levels)
            tree = runner.draft(root, levels)
            draft_ms = clock.lap("draft")
            # --- (2) verify all nodes in one forward of the target
            step = runner.extend(tree.tokens, tree.depth, tree.mask)
            # Penalties and bans read the text and each node's path, and change the logits here.
            step = replace(step, logits=sampler.with_text(step.logits, tree))
            # Until here the host runs ahead of the device; only `read` waits for it.
            verdict = read(runner.judge(tree, step.logits, sampler), len(tree))
            verify_ms = clock.lap("verify")
            chosen = [*verdict.tokens, verdict.bonus][: answer.remaining]
            # An end token inside the accepted path cuts off what follows.
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
                clock.lap(None)  # no phase counts the watcher's time
            # --- (3) commit the accepted path; the bonus token, the next root, has no row yet
            count = len(verdict.path)
            # As many new tokens as the path has nodes: the bonus token replaces the root.
            sampler.follow(verdict.new[:count])
            runner.accept(verdict, step.features)
            self.proposer.learn(chosen, cycle)
            kept.advance(count)
            # A slice of the tensor on the device: a host number would have to be copied there.
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
            fix = "the prompt is empty" if 0 in shape else "pass one prompt at a time, [1, T]"
            raise UserError(f"input_ids of shape {list(shape)}: {fix}")
        if attention_mask is not None and not bool(torch.as_tensor(attention_mask).all()):
            raise UserError("attention_mask hides tokens; pass the prompt without padding")
        largest = int(input_ids.max())
        if largest >= num_ids:
            raise UserError(
                f"token id {largest} is outside the target's vocabulary of {num_ids}; "
                "encode the prompt with the target's tokenizer"
            )
        for name, limit in self.limits.items():
            if shape[1] + num_new > limit:
                request = f"prompt of {shape[1]} tokens + max_new_tokens {num_new}"
                raise UserError(
                    f"{request} exceeds {name} {limit}; shorten the prompt or lower max_new_tokens"
                )

    @property
    def limits(self) -> dict[str, int]:
        """The most tokens of prompt and answer together, by the name of the limit."""
        return {
            "the target's context": context_of(self.target.config) or UNBOUNDED,
            "the draft head's max_position_embeddings": self.proposer.max_positions,
        }

    def _num_rows(self, num_tokens: int, plan: CyclePlan) -> int:
        """The rows of the cache for prompt, answer and the tree behind them."""
        num_tokens = bucket(num_tokens) if plan.captured else num_tokens
        return num_tokens + max(self.proposer.max_nodes, self.proposer.draft_slots)

    def _kept(self, num_rows: int) -> KeptRows:
        """The last text's rows if they have room, so that its caches and graphs serve again."""
        kept = self.lm.cache.kept
        # New rows mean new caches for the target and the head, and new graphs.
        if len(kept.positions) < num_rows:
            kept = KeptRows(num_rows, self.target.device, self.target.dtype)
        kept.restart()
        return kept

    def _prefill(self, prompt: Tensor, kept: KeptRows, sampler: Sampler) -> Tensor:
        """Reads the prompt [T] in parts; returns the answer's first token [1]."""
        # before the forwards, because the head reads each part right after the target
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
        """Reads prompt and answer again, because LongRoPE now rotates all rows by other factors."""
        tokens = torch.tensor(answer.tokens, device=prompt.device)
        self.lm.prefill(torch.cat([prompt, tokens]), kept)

    def _num_levels(self, room: int, plan: CyclePlan, num_rows: int) -> int:
        """How deep the next tree may be; room: tokens that the answer may take before the bonus."""
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

    It ends like transformers' answers: with an end token, or with the token that completes a stop
    string, even if that string began in the prompt.
    """

    def __init__(
        self, decoding: Decoding, prompt: Tensor, stop_strings: StopStringCriteria | None
    ) -> None:
        self.tokens: list[int] = []
        self._limit = decoding.max_new_tokens
        self._end_ids = decoding.eos_token_ids
        self._stop_strings = stop_strings
        self._prompt_end: list[int] = []  # the prompt's last tokens: a stop string may begin there
        if stop_strings is not None:
            self._prompt_end = prompt[-stop_strings.maximum_token_len :].tolist()
        self._is_complete = False

    @property
    def remaining(self) -> int:
        """How many tokens the answer may still take."""
        return self._limit - len(self.tokens)

    @property
    def has_ended(self) -> bool:
        return self._is_complete or self.remaining == 0

    def add(self, new: list[int]) -> list[int]:
        """Takes tokens, up to the one that ends the answer; returns those that it took."""
        for count, token in enumerate(new, start=1):
            self.tokens.append(token)
            if token in self._end_ids or self._completes_a_stop_string():
                self._is_complete = True
                return new[:count]
        return new

    def _completes_a_stop_string(self) -> bool:
        if self._stop_strings is None:
            return False
        # enough of the text to hold the beginning of any stop string that ends here
        longest = self._stop_strings.maximum_token_len
        text = [*self._prompt_end, *self.tokens[-2 * longest :]]
        return bool(self._stop_strings(torch.tensor([text]), None))


def make_decoder(heads: LoadedHeads, row: MethodConfig, head: str | None) -> SpeculativeDecoder:
    return SpeculativeDecoder(heads.target, make_proposer(heads, row, head))
