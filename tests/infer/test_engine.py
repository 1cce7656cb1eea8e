"""The decoder writes the same tokens as the target alone, whatever the head drafts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise, product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aerie.configs.schema.decode import (
    ChainConfig,
    DynamicConfig,
    EntropyConfig,
    HeuristicConfig,
    TreeConfig,
    VoteConfig,
)
from aerie.configs.schema.heads import TargetConfig
from aerie.infer.decode import engine, runners, sampling, shape
from aerie.infer.decode.roles import Cycle, Traits, TreeProposer
from aerie.infer.decode.tree import Tree
from aerie.model.kv_cache import KeptRows
from aerie.model.target import Target
from tests import tiny
from tests.infer.draws import TREES, decoder_of, greedy, make_target, prompts, steered
from tests.infer.laws import Counting, sampler
from tests.test_targets import small

LAST_PROMPT = prompts(6)[-1]
WHOLE_DRAFTS = {
    "eagle1": DynamicConfig(levels=4, k=2, nodes=9),
    "eagle3": TREES["small"],
    "medusa": ChainConfig(levels=4),
    "hydra": DynamicConfig(levels=3, k=1, nodes=4),
}


@pytest.mark.parametrize("kind", WHOLE_DRAFTS)
@pytest.mark.parametrize(
    ("new", "end"), [(1, None), (2, None), (3, None), (40, None), (20, 1), (20, 3)]
)
def test_a_perfect_draft(kind: str, new: int, end: int | None) -> None:
    """It is accepted whole, up to the answer's end, and costs what its head costs.

    end: the place of the token that is made the end token; it may be inside an accepted path.
    """
    target = make_target()
    trees: list[Tree] = []
    answer = greedy(target, LAST_PROMPT, 41)[0][LAST_PROMPT.shape[1] :]
    options = {"ids": torch.tensor(sorted({*answer, 0, 100, 200, 319}))} if kind == "eagle3" else {}
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": new}
    num_written = new
    if end is not None:
        settings["eos_token_id"] = answer[end]
        num_written = answer.index(answer[end]) + 1
    decoder = decoder_of(target, WHOLE_DRAFTS[kind], kind, **options)
    perfect = steered(decoder, [(LAST_PROMPT, answer)], right=True)
    settings["on_cycle"] = lambda cycle: trees.append(cycle.tree)
    generation = perfect.generate(LAST_PROMPT, **settings)
    statistics = generation.statistics
    assert generation.new_ids == answer[:num_written] and statistics.new_tokens == num_written
    assert {*statistics.cycle_tokens[:-1]} <= {WHOLE_DRAFTS[kind].levels + 1}
    forwards = [min(tree.levels, 1) if kind == "medusa" else tree.levels for tree in trees]
    assert [tree.draft_forwards for tree in trees] == forwards
    # Nothing is drafted beyond the limit.
    assert end is not None or sum(tree.levels + 1 for tree in trees) == new - 1
    assert statistics.draft_forwards == sum(forwards)
    assert statistics.draft_forwards_wasted == 0


@pytest.mark.parametrize(
    ("right", "lengths"), [(True, [4, 6, 8, 7]), (False, [4, 3, 2, *[1] * 25, 0])]
)
def test_the_heuristics_length(right: bool, lengths: list[int]) -> None:
    """Two more after a draft that was accepted whole, else one fewer; a prompt begins anew."""
    target = make_target()
    seen: list[int] = []
    answer = greedy(target, LAST_PROMPT, 31)[0][LAST_PROMPT.shape[1] :]
    decoder = decoder_of(target, ChainConfig(levels=20, stop=HeuristicConfig(start=4)))
    decoder = steered(decoder, [(LAST_PROMPT, answer)], right)
    for _ in range(2):
        decoder.generate(
            LAST_PROMPT,
            do_sample=False,
            max_new_tokens=30,
            on_cycle=lambda cycle: seen.append(cycle.tree.levels),
        )
    assert seen == 2 * lengths


@pytest.mark.parametrize("drafts", [True, False])
def test_a_stop_string(drafts: bool) -> None:
    """It ends an answer as in transformers, at the token that completes it.

    Inside an accepted path, with characters after it, begun in the prompt, and never found.
    """
    target = make_target()
    # From the third new token on: e, ?, ?, er, er, er, er, er, er, Q, nt, ?, " ow".
    text = greedy(target, LAST_PROMPT, 30)[0]
    start = LAST_PROMPT.shape[1] + 6
    ids = torch.tensor([text[:start]])
    decoder = engine.SpeculativeDecoder(target)
    if drafts:
        decoder = steered(decoder_of(target, TREES["small"]), [(ids, text[start:])], right=True)
    decoder.tokenizer = tiny.tokenizer()
    lengths = []
    for stop in ("rer", "ere", "rQn", ["nowhere", " o", "w "], "nowhere"):
        settings = {"do_sample": False, "max_new_tokens": 24, "stop_strings": stop}
        theirs = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), tokenizer=decoder.tokenizer, **settings
        )
        assert decoder.generate(ids, **settings).sequences.tolist() == theirs.tolist()
        lengths.append(theirs.shape[1] - ids.shape[1])
    assert lengths == [1, 1, 7, 9, 24]


def test_a_streamer_and_the_clock() -> None:
    """A streamer gets the prompt, then every cycle's tokens; the phases add up to the wall."""
    pieces: list[list[int]] = []
    streamer = SimpleNamespace(
        put=lambda value: pieces.append(value.flatten().tolist()), end=lambda: pieces.append([])
    )
    generation = decoder_of(make_target(), TREES["small"]).generate(
        LAST_PROMPT, do_sample=False, max_new_tokens=12, streamer=streamer, timed=True
    )
    statistics = generation.statistics
    prompt, first, *cycles, end = pieces
    assert prompt == LAST_PROMPT[0].tolist() and end == []
    assert [len(piece) for piece in cycles] == statistics.cycle_tokens
    assert [*first, *chain.from_iterable(cycles)] == generation.new_ids
    ms = statistics.ms
    assert sum(ms.values()) == pytest.approx(2 * ms["wall"], rel=1e-6)
    assert min(ms["prefill"], ms["draft"], ms["verify"], ms["commit"]) > 0
    in_cycles = ms["draft"] + ms["verify"] + ms["commit"]
    assert sum(statistics.cycle_ms) == pytest.approx(in_cycles, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.ones(2, 4, dtype=torch.long)}, "one prompt at a time"),
        ({"input_ids": torch.ones(1, 0)}, "the prompt is empty"),
        ({"input_ids": ["a", "b"]}, r"generate\(\) takes a text, messages, .* not this list"),
        ({"input_ids": {"role": "user"}}, "not this dict"),
        ({"input_ids": torch.full((1, 4), 999)}, "outside the target's vocabulary"),
        ({"max_new_tokens": 300}, "exceeds the target's context"),
        ({"max_new_tokens": 60}, "draft head's max_position_embeddings"),
        ({"num_beams": 4}, "does not know num_beams"),
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, "without padding"),
    ],
)
def test_what_cannot_be_decoded(change: dict[str, Any], message: str) -> None:
    decoder = decoder_of(make_target(), TREES["small"], max_position_embeddings=48)
    tiny.refused(
        message, decoder.generate, **{"input_ids": prompts(1)[0], "max_new_tokens": 8, **change}
    )


# at most, of a cycle: a tree of 8 levels for eagle3, a chain for eagle1
KERNELS = {("eagle3", 0): 102, ("eagle3", 1): 108, ("eagle1", 0): 32, ("eagle1", 1): 104}


@pytest.mark.parametrize(("kind", "temperature"), KERNELS)
def test_a_cycle_reads_the_device_once(kind: str, temperature: int, monkeypatch: Any) -> None:
    """A cycle of a fixed tree, which launches few kernels beside the models' forwards."""
    target = make_target()
    counting = Counting()
    seen: list[tuple[int, int]] = []
    tree = DynamicConfig(levels=8) if kind == "eagle3" else TREES["chain"]
    decoder = decoder_of(target, tree, kind)
    proposer = cast(TreeProposer, decoder.proposer)
    models = ((target.decoder, "forward"), (target, "logits"), *proposer.drafter.forwards)
    for owner, name in models:
        monkeypatch.setattr(owner, name, partial(counting.around, 0, getattr(owner, name)))
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: counting.around(1, tolist, tensor))
    with counting:
        decoder.generate(
            prompts(1)[0],
            do_sample=temperature > 0,
            temperature=temperature,
            max_new_tokens=64,
            eos_token_id=[],
            generator=torch.Generator().manual_seed(0),
            on_cycle=lambda _: seen.append((counting.reads, counting.kernels)),
        )
    reads, kernels = zip(*seen[2:-8], strict=True)
    assert {after - before for before, after in pairwise(reads)} == {1}
    most = max(after - before for before, after in pairwise(kernels))
    assert most <= KERNELS[kind, temperature]


@pytest.mark.parametrize(
    ("kind", "family"), [("eagle1", "mistral"), ("eagle3", "llama"), ("hydra", "llama")]
)
def test_a_prompt_in_parts_and_a_fixed_width(kind: str, family: str, monkeypatch: Any) -> None:
    """Reading a prompt in parts, or looking at more columns than are kept, changes nothing."""
    target = Target(small(family), TargetConfig(family))
    ids = prompts(8)[-1] % 60 + 3
    decoder = decoder_of(target, TREES["small"], kind, **prefixed(kind))
    expected = trees_of(decoder, ids)
    advance = KeptRows.advance

    def widened(kept: KeptRows, count: int) -> None:
        advance(kept, count)
        kept.visible = kept.positions[: -(-kept.length // 32) * 32]

    for owner, name, value in ((engine, "CHUNK", 5), (KeptRows, "advance", widened)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert trees_of(decoder, ids) == expected


def prefixed(kind: str) -> dict[str, Any]:
    return {"prefix_layer": True} if kind == "hydra" else {}


def trees_of(decoder: engine.SpeculativeDecoder, ids: Tensor) -> list[Any]:
    """Drafted and chosen tokens of cycles with room for whole trees; greedy, then sampled."""
    seen: list[Any] = []

    def watch(cycle: Cycle) -> None:
        plan = decoder.runners.plan(cycle.sampler.decoding)
        if plan.has_whole_trees and not plan.by_level:
            assert cycle.tree.levels == decoder.proposer.levels  # all levels, to the end
        if cycle.position < ids.shape[1] + 24 - 5:
            seen.append((cycle.tree.tokens.tolist(), cycle.verdict.new.tolist()))

    settings: dict[str, Any] = {"max_new_tokens": 24, "on_cycle": watch}
    seen.append(decoder.generate(ids, do_sample=False, **settings).new_ids)
    generator = torch.Generator(decoder.target.device).manual_seed(0)
    before = generator.get_state()
    decoder.generate(ids, temperature=0.5, generator=generator, **settings)
    assert not generator.get_state().equal(before)
    return seen


FREE_DRAFT = Traits("nothing")
DRAWN_DRAFT = Traits("nothing", draws=True)
RULED_DRAFT = Traits("stop rule")
ALL_PARTS = {"draft", "extend", "judge", "commit"}


@pytest.mark.parametrize(
    ("mode", "on_gpu", "traits", "compiled", "captured"),
    [
        ("eager", True, FREE_DRAFT, set(), set()),
        ("captured", True, FREE_DRAFT, set(), ALL_PARTS),
        ("captured", True, RULED_DRAFT, set(), ALL_PARTS),
        ("captured", True, Traits("anything", has_few_sizes=True), set(), {"extend", "commit"}),
        ("captured", True, Traits("anything"), set(), set()),
        ("compiled", False, FREE_DRAFT, {"draft", "extend", "commit"}, set()),
        ("compiled", False, DRAWN_DRAFT, {"extend", "commit"}, set()),
        ("compiled", False, RULED_DRAFT, {"extend"}, set()),
        ("compiled", True, FREE_DRAFT, {"draft", "extend"}, ALL_PARTS),
        ("compiled", True, DRAWN_DRAFT, {"extend"}, ALL_PARTS),
    ],
)
def test_the_plan_of_a_cycle(
    mode: str, on_gpu: bool, traits: Traits, compiled: set[str], captured: set[str]
) -> None:
    """What is compiled and captured follows from the mode and from what the draft reads."""
    decoding = sampler(1.0, 1.0).decoding
    plan = runners.plan_cycle(mode, on_gpu, traits, decoding)
    assert (plan.compiled, plan.captured) == (compiled, captured)
    assert plan.by_level == (traits.reads == "stop rule" and bool(captured))
    by_text = replace(decoding, of_text={"min_length": 3})
    assert runners.plan_cycle(mode, on_gpu, traits, by_text).captured == captured - {"judge"}


def compiled_target() -> Target:
    return Target(make_target().model, TargetConfig("tiny", cycle="compiled"))


@pytest.mark.slow
@pytest.mark.parametrize("tree", [None, TREES["small"]])
def test_one_compiled_form_serves_all_lengths(tree: TreeConfig | None) -> None:
    """Compiled functions write what eager ones write."""
    written = []
    for target in (make_target(), compiled_target()):
        decoder = decoder_of(target, tree, "eagle3")
        is_compiled = decoder.runners.mode == "compiled"
        for number, ids in enumerate(prompts(4)):
            with torch._dynamo.config.patch(error_on_recompile=is_compiled and number > 1):
                answer = decoder.generate(ids, do_sample=False, max_new_tokens=20 + number)
            written.append((answer.new_ids, answer.statistics.cycle_tokens))
    assert written[:4] == written[4:]


def printing(function: Callable[..., Any], *arguments: Any) -> Any:
    print(end="")
    return function(*arguments)


@pytest.mark.parametrize("breaks", [False, True])
def test_what_cannot_be_compiled_runs_as_it_is(breaks: bool, capfd: Any, monkeypatch: Any) -> None:
    """All of a cycle compiles, but for a part that prints."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    target = compiled_target()
    for _ in range(2):  # each decoder has its own recompile limit
        decoder = decoder_of(target, TREES["chain"])
        if breaks:
            monkeypatch.setattr(decoder.lm, "extend", partial(printing, decoder.lm.extend))
        with torch._dynamo.config.patch(recompile_limit=1):
            answer = decoder.generate(LAST_PROMPT, do_sample=False, max_new_tokens=16)
        assert answer.sequences[0].tolist() == greedy(target, LAST_PROMPT, 16)[0]
    said = "warning: target.cycle compiled: extend cannot be compiled:"
    assert (said in capfd.readouterr().err) == breaks


class Tape(TorchDispatchMode):
    """A stand-in for a CUDA graph: replays the kernels of one run on the same tensors."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self.calls: list[Any] = []
        # A real graph's first run is a replay. Here it is the recorded run, as nothing may be
        # committed or drawn twice; but a level may be first replayed in a later cycle.
        self.is_done = "Runner." in str(function)
        with self:
            self.output = function()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in [] if self.is_done else self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                # else it is a view, or was written in place
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        self.is_done = False


ADAPTIVE = DynamicConfig(
    levels=3, k=3, nodes=8, stop=VoteConfig(signals=("probability",), probability_threshold=0.03)
)
CAPTURED = [
    ("", None),
    ("eagle1", ChainConfig(levels=3)),
    ("eagle3", TREES["small"]),
    ("hydra", TREES["small"]),
    ("eagle1", ADAPTIVE),
    ("eagle1", replace(ADAPTIVE, stop_read="late")),
    ("eagle1", ChainConfig(levels=3, stop=EntropyConfig(c=0.01))),
    ("medusa", TREES["small"]),
    ("eagle1", DynamicConfig(levels=3, k=3, nodes=8, children="sampled")),
]


def eager_and_captured(kind: str, tree: TreeConfig | None, device: str = "cpu") -> list[Any]:
    model = make_target().model.to(device)
    seen = []
    for cycle in ("eager", "captured"):
        target = Target(model, TargetConfig("tiny", cycle=cycle))  # type: ignore[arg-type]
        decoders = [decoder_of(target, tree, kind, **prefixed(kind))]
        if tree is not None:  # another proposer with the same head and other trees
            drafter = cast(TreeProposer, decoders[0].proposer).drafter
            twin = TreeProposer(drafter, shape.make_shape(DynamicConfig(levels=2, k=6, nodes=12)))
            decoders.append(engine.SpeculativeDecoder(target, twin))
        cases = product(prompts(4), decoders)
        seen.append([trees_of(decoder, ids) for ids, decoder in cases])
    return seen


@pytest.mark.parametrize(("kind", "tree"), CAPTURED)
def test_what_is_captured_once_serves_all_texts(kind: str, tree: Any, monkeypatch: Any) -> None:
    """Random trees with rejected branches, prompts of different lengths, narrow buckets."""
    tapes: list[Tape] = []

    def record_tape(function: Callable[[], Any], *_: Any) -> tuple[Callable[[], None], Any]:
        tapes.append(Tape(function))
        return tapes[-1].replay, tapes[-1].output

    for module in (sampling, shape):  # numpy's argmax is not a torch kernel
        monkeypatch.setattr(module, "argmax", lambda logits: logits.argmax(-1))
    monkeypatch.setattr(runners, "record_graph", record_tape)
    monkeypatch.setattr(runners, "bucket", lambda length: -(-length // 16) * 16)
    eager, captured = eager_and_captured(kind, tree)
    assert eager == captured and len(tapes) >= 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing is captured")
@pytest.mark.parametrize(("kind", "tree"), CAPTURED)
def test_cuda_graphs_write_the_same(kind: str, tree: Any, capfd: Any) -> None:
    eager, captured = eager_and_captured(kind, tree, "cuda")
    assert eager == captured and "target.cycle captured" not in capfd.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing waits")
@pytest.mark.parametrize(("kind", "tree"), [*CAPTURED[:4], CAPTURED[-1]])
def test_only_the_verdict_waits_for_a_gpu(kind: str, tree: Any) -> None:
    target = Target(make_target().model.to("cuda"), TargetConfig("tiny", cycle="eager"))
    made = decoder_of(target, tree, kind)

    def strict(function: Callable[..., Any], *arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        result = function(*arguments)
        torch.cuda.set_sync_debug_mode("default")
        return result

    eager = made.eager
    for name in ("draft", "extend", "judge", "commit"):
        setattr(eager, name, partial(strict, getattr(eager, name)))
    for temperature in (0.0, 1.0):
        made.generate(prompts(2)[-1], temperature=temperature, max_new_tokens=24)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device captures")
def test_what_cannot_be_captured_is_decoded_eagerly(capfd: Any) -> None:
    eager, captured = eager_and_captured(*CAPTURED[1])
    said = capfd.readouterr().err
    assert (
        eager == captured
        and said.count("warning: ") == said.count("captured: draft cannot be captured:") == 2
    )
