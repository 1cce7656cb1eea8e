"""The decoding loop; plain decoding (`vanilla`) is the same loop with a tree of one node."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from aerie.configs.errors import UserError
from aerie.configs.read import validate
from aerie.configs.schema.decode import METHODS, USUAL, MethodConfig, TreeConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.data.chat import answer_text, apply_template
from aerie.infer.decode.cache import TargetStep
from aerie.infer.decode.check import Form, checked_lm
from aerie.infer.decode.graphs import Compiled, Graphs, bucket, cycle_of
from aerie.infer.decode.methods import Drafters, check_kind, kind_at, make_proposer
from aerie.infer.decode.sampling import HONOURED, Decoding, Sampler, resolve
from aerie.infer.decode.shape import Cycle, Proposer
from aerie.infer.decode.tree import Tree, root_only
from aerie.infer.decode.verify import judge, read, rule_of
from aerie.model.kv_cache import KeptRows
from aerie.model.target import Target, context_of, load_tokenizer

CHUNK = 2048  # tokens of a prompt that one forward reads: their mask is over all tokens before them
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
    draft_levels: int = 0  # more than draft_forwards where one gives several
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


class SpeculativeDecoder:
    """Decodes what the target alone would write, with a proposer's drafts (None: vanilla)."""

    def __init__(self, target: Target, proposer: Proposer | None = None) -> None:
        self.target, self.proposer = target, proposer or Proposer()
        self.form: Form = "chain" if self.proposer.is_chain else "tree"
        self.lm = checked_lm(target, self.proposer.after_blocks, self.form)
        self.cycle = cycle_of(target)
        # a captured commit is not compiled: it cannot be run twice
        names = ("draft", "extend") if self.is_captured else ("draft", "extend", "commit")
        self.compiled = {
            name: Compiled(getattr(self, name)) for name in names if self.cycle == "compiled"
        }
        self.graph_bytes, self.generator = (
            0,
            torch.Generator(target.device),
        )  # of the captured graphs

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
            values = {
                "path": str(target),
                **keys,
                "dtype": str(keys.get("dtype", "auto")).removeprefix("torch."),
            }
            config = validate(values, TargetConfig, "from_pretrained", {})
            target = Target.load(config, device or ("cuda" if torch.cuda.is_available() else "cpu"))
        elif keys or device:
            raise UserError(
                f"from_pretrained: the target is loaded already; leave {', '.join(keys) or 'device'} out"
            )
        if isinstance(target, PreTrainedModel):
            target = Target(
                target,
                TargetConfig(path=target.name_or_path or f"a loaded {type(target).__name__}"),
            )
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
            prompt = (
                [{"role": "user", "content": prompt}]
                if self.tokenizer.chat_template
                else self.tokenizer(prompt)
            )
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
            prompt = apply_template(
                self.tokenizer, prompt, tokenize=True, add_generation_prompt=True
            )
        try:
            ids = torch.as_tensor(prompt["input_ids"] if isinstance(prompt, Mapping) else prompt)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            known = "a text, messages, one prompt's token ids or what a tokenizer returns"
            raise UserError(
                f"generate() takes {known}, not this {type(prompt).__name__}"
            ) from error
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
        settings: HONOURED, by default the generation_config's; timed: waits for the device in each phase;
        on_cycle sees each cycle, whose tensors the next one may overwrite.
        UserError: padding, several prompts, ids outside the vocabulary, no room in the context, unknown settings.
        """
        if foreign := sorted(settings.keys() - set(HONOURED)):
            raise UserError(
                f"generate() does not know {', '.join(foreign)}; use {', '.join(HONOURED)}"
            )
        decoding = resolve(self.target.generation_config, **settings)
        if (
            isinstance(input_ids, Mapping)
            and attention_mask is None
            and "attention_mask" in input_ids
        ):
            attention_mask = torch.as_tensor(input_ids["attention_mask"])
        input_ids = self.encode(input_ids)
        self._check(input_ids, attention_mask, decoding.max_new_tokens)
        prompt, proposer, limit = (
            input_ids[0].to(self.target.device),
            self.proposer,
            decoding.max_new_tokens,
        )
        if generator is None:
            # seeded by torch.manual_seed
            generator = torch.Generator(self.target.device).manual_seed(
                int(torch.randint(2**62, (1,)))
            )
        own = self.generator if self.is_captured and decoding.do_sample else generator
        own.set_state(generator.get_state())
        # a graph that draws or judges is captured for these
        self.laws = decoding.temperature, decoding.top_k, decoding.top_p, decoding.min_p
        sampler, first_end = Sampler(decoding, own, prompt), self._first_end(decoding, prompt)
        rule = rule_of(None, sampler)
        statistics = Statistics(len(prompt), decoding, verify=rule)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        clock = self.clock = Clock(statistics.ms, timed and prompt.is_cuda)
        kept, rows = self.lm.cache.kept, len(prompt) + limit
        rows = (bucket(rows) if self.is_captured else rows) + max(
            proposer.max_nodes, proposer.draft_slots
        )
        if len(kept.positions) < rows:
            kept = KeptRows(rows, prompt.device, self.target.dtype)
        kept.restart()
        root = self._prefill(prompt, kept, sampler)  # [1]
        new = root.tolist()
        proposer.learn(new, None)
        clock.lap("prefill")
        answer, end = list[int](), first_end([], new)
        # a whole captured tree costs less than a short one; the context may have no room for its last nodes
        is_whole = self.is_captured and (proposer.is_fixed or proposer.grows_fixed)
        least = proposer.levels if is_whole and rows <= min(self.limits.values()) else 0
        while True:
            answer += new
            if streamer is not None:
                streamer.put(torch.tensor(new))
            remaining = limit - len(answer)
            if remaining == 0 or end is not None:
                break
            if kept.length == self.target.rope_switch:  # LongRoPE: all rows must be rotated anew
                self.lm.prefill(
                    torch.cat([prompt, torch.tensor(answer, device=prompt.device)]), kept
                )
            # (1) draft; the bonus token takes one place of what is left
            left = max(remaining - 1, least)
            levels = min(left, self.lm.max_levels, proposer.levels if proposer.is_fixed else left)
            run = self._run(kept, levels)
            tree = run.draft(root, levels)
            position, draft_ms = kept.length, clock.lap("draft")
            # (2) verify in one target forward
            step = run.extend(tree.tokens, tree.depth, tree.mask)
            # the logits are now after the processors that read the text and each path
            step = replace(step, logits=sampler.with_text(step.logits, tree))
            verdict = read(run.judge(tree, step.logits, sampler), len(tree))
            verify_ms = clock.lap("verify")
            new = chosen = [*verdict.tokens, verdict.bonus][:remaining]
            end = first_end(answer, new)
            new = new[:end]
            rule = rule_of(tree.proposal, sampler)
            cycle = Cycle(
                tree, step, verdict, sampler, rule, position, len(new), draft_ms, verify_ms
            )
            commit_ms = clock.lap("commit")
            if on_cycle is not None:
                on_cycle(cycle)
                # the watcher's time counts for no phase
                clock.lap(None)
            # (3) commit; the bonus token, the next root, has no row
            count = len(verdict.path)
            sampler.follow(verdict.new[:count])
            last = kept.positions[
                count - 1 : count
            ]  # for a captured commit, whose path has a fixed length
            if isinstance(run, Graphs):
                run.commit(verdict.nodes, verdict.new, step.features, last)
            else:
                run.commit(verdict.nodes[:count], verdict.new[:count], step.features)
            proposer.learn(chosen, cycle)
            kept.advance(count)
            root, accepted = verdict.new[count - 1 : count], min(verdict.accepted, len(new))
            # (4) count; beyond the accepted length a forward was wasted
            if len(tree) > 1:
                statistics.verify = rule
            statistics.cycle_tokens.append(len(new))
            statistics.accepted.append(accepted)
            statistics.draft_forwards += tree.draft_forwards
            statistics.draft_levels += max(tree.draft_forwards, tree.levels)
            statistics.draft_forwards_wasted += max(tree.draft_forwards - verdict.accepted, 0)
            statistics.draft_nodes += verdict.drafted
            statistics.cycle_nodes.append(verdict.drafted)
            statistics.cycle_ms.append(draft_ms + verify_ms + commit_ms + clock.lap("commit"))
        if streamer is not None:
            streamer.end()
        generator.set_state(own.get_state())
        clock.lap("other")
        statistics.ms["wall"] = sum(statistics.ms.values())
        ids = torch.tensor([answer], dtype=input_ids.dtype, device=input_ids.device)
        return Generation(torch.cat([input_ids, ids], dim=1), statistics, self)

    def _prefill(self, prompt: Tensor, kept: KeptRows, sampler: Sampler) -> Tensor:
        """The answer's first token [1]."""
        self.proposer.reset(prompt, kept, sampler)
        # LongRoPE's factors depend on the length: one forward reads all
        for part in prompt.split(CHUNK if self.target.rope_switch is None else len(prompt)):
            step, stop = (
                self.lm.read(part) if kept.length else self.lm.prefill(part, kept),
                kept.length + len(part),
            )
            is_last = stop == len(prompt)
            following = (
                sampler.choose(sampler.with_text(step.logits))
                if is_last
                else prompt[stop : stop + 1]
            )  # [1]
            self.proposer.commit(torch.cat([part[1:], following]), step.features)
            kept.advance(len(part))
        sampler.follow(following)
        return following

    def _first_end(
        self, decoding: Decoding, prompt: Tensor
    ) -> Callable[[list[int], list[int]], int | None]:
        """A function of the answer so far and its next tokens: how many of these to keep; None: all, and it goes on.

        Like transformers, it keeps the token in which a stop string ends, and finds one that began in the prompt.
        """
        stops = (
            StopStringCriteria(self.tokenizer, [*decoding.stop_strings])
            if decoding.stop_strings
            else None
        )
        before = [] if stops is None else prompt[-stops.maximum_token_len :].tolist()

        def first_end(answer: list[int], new: list[int]) -> int | None:
            for place, token in enumerate(new, start=1):
                if token in decoding.eos_token_ids:
                    return place
                if stops is not None:
                    text = [*before, *answer[-stops.maximum_token_len :], *new[:place]]
                    if bool(stops(torch.tensor([text]), None)):
                        return place
            return None

        return first_end

    @property
    def is_captured(self) -> bool:
        """Whether its cycles are CUDA graphs (of compiled or plain functions)."""
        return self.cycle == "captured" or (
            self.cycle == "compiled" and self.target.device.type == "cuda"
        )

    def _run(self, kept: KeptRows, levels: int) -> Any:
        """An object with draft, extend, judge and commit, as target.cycle says; eager for trees that must be short."""
        if self.cycle == "eager":
            kept.captured.pop(self, None)
        if self.cycle == "eager" or levels < self.proposer.levels:
            return self
        proposer = self.proposer
        is_chain = proposer.is_chain and proposer.commits_fixed
        # other trees have too many sizes
        if not (self.is_captured and (proposer.is_fixed or proposer.grows_fixed or is_chain)):
            torch._dynamo.maybe_mark_dynamic(kept.visible, 0)
            chosen = {
                name: getattr(self, name) for name in ("draft", "extend", "judge", "commit")
            } | self.compiled
            if not proposer.is_fixed:
                chosen["commit"] = self.commit
            if (
                not proposer.is_fixed or proposer.draws
            ):  # a generator cannot be handed to torch.compile
                chosen["draft"] = self.draft
            return SimpleNamespace(**chosen)
        kept.visible = kept.positions[: (width := bucket(kept.length))]
        torch._dynamo.maybe_mark_dynamic(kept.visible, 0)
        graphs, key = kept.captured.setdefault(self, {}), (width, proposer.is_fixed)
        if key not in graphs:
            graphs[key] = Graphs(self, next((one.pool for one in graphs.values()), None))
        return graphs[key]

    def draft(self, root: Tensor, max_levels: int) -> Tree:
        return self.proposer.propose(root, max_levels) if max_levels else root_only(root)

    def extend(self, tokens: Tensor, depth: Tensor, mask: Tensor) -> TargetStep:
        return self.lm.extend(tokens, depth, mask)

    def judge(self, tree: Tree, logits: Tensor, sampler: Sampler) -> Tensor:
        return judge(tree, logits, sampler)

    def commit(
        self, nodes: Tensor, new: Tensor, features: Tensor, last: Tensor | None = None
    ) -> None:
        if self.form == "tree":  # a chain's rows are in place already
            self.lm.cache.gather(nodes)
        self.proposer.commit(new, features.index_select(0, nodes), last)

    @property
    def limits(self) -> dict[str, int]:
        """How many tokens prompt and answer may have together, by what bounds them."""
        head = {"the draft head's max_position_embeddings": self.proposer.max_positions}
        return {"the target's context": context_of(self.target.config) or 2**31, **head}

    def _check(self, input_ids: Tensor, attention_mask: Tensor | None, new: int) -> None:
        shape, rows = tuple(input_ids.shape), self.target.vocab.embedding.shape[0]
        if len(shape) != 2 or shape[0] != 1 or shape[1] == 0:
            fix = "the prompt is empty" if 0 in shape else "give one prompt at a time, [1, T]"
            raise UserError(f"input_ids {list(shape)}: {fix}")
        if attention_mask is not None and not bool(attention_mask.all()):
            raise UserError(
                "attention_mask hides tokens of the prompt; pass the prompt without padding"
            )
        if int(input_ids.max()) >= rows:
            raise UserError(
                f"token id {int(input_ids.max())} is outside the target's vocabulary of {rows}"
            )
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

    def exclude(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the call's result; no phase counts its time."""
        before = self.lap(None)
        try:
            return work(*arguments)
        finally:
            self.lap(None)
            self._last -= before / 1000


def make_decoder(drafters: Drafters, asked: MethodConfig, head: str | None) -> SpeculativeDecoder:
    return SpeculativeDecoder(drafters.target, make_proposer(drafters, asked, head))
