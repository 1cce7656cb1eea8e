"""The decoder writes the same tokens as the target alone, whatever the head drafts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aerie.configs.errors import UserError
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
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.roles import Cycle, TreeProposer
from aerie.infer.decode.shape import make_shape
from aerie.model.kv_cache import KeptRows
from aerie.model.target import Target
from tests import tiny
from tests.infer.draws import TREES, decoder_of, greedy, make_target, prompts
from tests.infer.steered import steered
from tests.targets import small


@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        ("eagle1", DynamicConfig(levels=4, k=2, nodes=9)),
        ("eagle3", TREES["small"]),
        ("medusa", ChainConfig(levels=4)),
        ("hydra", DynamicConfig(levels=3, k=1, nodes=4)),
    ],
)
@pytest.mark.parametrize(
    ("new", "end"), [(1, None), (2, None), (3, None), (40, None), (20, 1), (20, 3)]
)
def test_a_perfect_draft_is_accepted_whole_up_to_the_end_and_costs_what_its_head_costs(
    kind: str, tree: TreeConfig, new: int, end: int | None
) -> None:
    """end: the place in the answer whose token is made the end token; it may be inside an accepted path."""
    target, ids, trees = make_target(), prompts(4)[-1], []
    answer = greedy(target, ids, 41)[0][ids.shape[1] :]
    options = {"ids": torch.tensor(sorted({*answer, 0, 100, 200, 319}))} if kind == "eagle3" else {}
    settings = {
        "do_sample": False,
        "max_new_tokens": new,
        **({} if end is None else {"eos_token_id": answer[end]}),
    }
    perfect = steered(decoder_of(target, tree, kind, **options), [(ids, answer)], right=True)
    generation = perfect.generate(ids, **settings, on_cycle=lambda cycle: trees.append(cycle.tree))
    written, statistics = (
        new if end is None else answer.index(answer[end]) + 1,
        generation.statistics,
    )
    assert generation.new_ids == answer[:written] and statistics.new_tokens == written
    assert all(tokens == tree.levels + 1 for tokens in statistics.cycle_tokens[:-1])
    for grown in trees:
        assert grown.draft_forwards == (min(grown.levels, 1) if kind == "medusa" else grown.levels)
    assert (
        end is not None or sum(grown.levels + 1 for grown in trees) == new - 1
    )  # nothing is drafted beyond the limit
    assert statistics.draft_forwards == sum(grown.draft_forwards for grown in trees)
    assert statistics.draft_forwards_wasted == 0


@pytest.mark.parametrize("right", [True, False])
def test_the_heuristics_length_follows_what_was_accepted_and_begins_anew_with_a_prompt(
    right: bool,
) -> None:
    target, ids, lengths = make_target(), prompts(4)[-1], []
    answer = greedy(target, ids, 31)[0][ids.shape[1] :]
    tree = ChainConfig(levels=20, stop=HeuristicConfig(start=4))
    made = steered(decoder_of(target, tree), [(ids, answer)], right)
    for _ in range(2):
        made.generate(
            ids,
            do_sample=False,
            max_new_tokens=30,
            on_cycle=lambda cycle: lengths.append(cycle.tree.levels),
        )
    assert lengths == 2 * (
        [4, 6, 8, 7] if right else [4, 3, 2, *[1] * 25, 0]
    )  # two more, or one fewer


@pytest.mark.parametrize("drafted", [True, False])
def test_a_stop_string_ends_an_answer_at_the_token_that_completes_it_as_in_transformers(
    drafted: bool,
) -> None:
    """Stops inside an accepted path, with characters after it, begun in the prompt, and never found."""
    target, ids, words, lengths = make_target(), prompts(6)[-1], tiny.tokenizer(), []
    text = greedy(target, ids, 30)[
        0
    ]  # new tokens from the third on: e, ?, ?, er, er, er, er, er, er, Q, nt, ?, " ow"
    ids, answer = torch.tensor([text[: ids.shape[1] + 6]]), text[ids.shape[1] + 6 :]
    for stop in ("rer", "ere", "rQn", ["nowhere", " o", "w "], "nowhere"):
        made = SpeculativeDecoder(target)
        if drafted:
            made = steered(decoder_of(target, TREES["small"]), [(ids, answer)], right=True)
        made.tokenizer = words
        settings = {"do_sample": False, "max_new_tokens": 24, "stop_strings": stop}
        theirs = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), tokenizer=words, **settings
        )
        assert made.generate(ids, **settings).sequences.tolist() == theirs.tolist()
        lengths.append(theirs.shape[1] - ids.shape[1])
    assert lengths == [1, 1, 7, 9, 24]


def test_a_streamer_gets_the_prompt_and_then_every_cycles_tokens_and_phases_add_up() -> None:
    target, ids, pieces = make_target(), prompts(3)[-1], list[Any]()
    streamer = SimpleNamespace(
        put=lambda value: pieces.append(value.flatten().tolist()), end=lambda: pieces.append(0)
    )
    generation = decoder_of(target, TREES["small"]).generate(
        ids, do_sample=False, max_new_tokens=12, streamer=streamer, timed=True
    )
    prompt, first, *cycles, end = pieces
    assert prompt == ids[0].tolist() and end == 0
    assert [len(piece) for piece in cycles] == generation.statistics.cycle_tokens
    assert first + sum(cycles, []) == generation.new_ids  # noqa: RUF017
    ms = generation.statistics.ms
    assert sum(v for k, v in ms.items() if k != "wall") == pytest.approx(ms["wall"], rel=1e-6)
    assert min(ms["prefill"], ms["draft"], ms["verify"], ms["commit"]) > 0
    assert sum(generation.statistics.cycle_ms) == pytest.approx(
        ms["draft"] + ms["verify"] + ms["commit"], rel=1e-6
    )


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
def test_what_cannot_be_decoded_is_one_sentence(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"input_ids": prompts(1)[0], "max_new_tokens": 8, **change}
    with pytest.raises(UserError, match=message):
        decoder_of(make_target(), TREES["small"], max_position_embeddings=48).generate(**arguments)


class Counting(TorchDispatchMode):
    """Counts reads from the device, and kernels outside the models' forwards."""

    reads = kernels = inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        free = (
            name
            in "detach empty empty_like flatten item lift_fresh resolve_conj resolve_neg to view".split()
        )
        self.reads += name in ("item", "_local_scalar_dense", "nonzero")
        self.kernels += not (self.inside or free or func.is_view)
        return func(*args, **(kwargs or {}))

    def around(self, reads: int, function: Any, *arguments: Any, **keys: Any) -> Any:
        self.inside, self.reads = self.inside + 1, self.reads + reads
        result = function(*arguments, **keys)
        self.inside -= 1
        return result


CYCLES = {
    ("eagle3", 0): 102,
    ("eagle3", 1): 108,
    ("eagle1", 0): 32,
    ("eagle1", 1): 104,
}  # kernels, at most


@pytest.mark.parametrize(("kind", "temperature"), CYCLES)
def test_a_cycle_of_a_fixed_tree_reads_the_device_once(
    kind: str, temperature: int, monkeypatch: Any
) -> None:
    target, counting, seen, tolist = (
        make_target(),
        Counting(),
        list[tuple[int, int]](),
        Tensor.tolist,
    )
    made = decoder_of(target, DynamicConfig(levels=8) if kind == "eagle3" else TREES["chain"], kind)
    for owner, name in (
        (target.decoder, "forward"),
        (target, "logits"),
        *made.proposer.drafter.forwards,
    ):  # type: ignore
        monkeypatch.setattr(owner, name, partial(counting.around, 0, getattr(owner, name)))
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: counting.around(1, tolist, tensor))
    settings = {
        "do_sample": temperature > 0,
        "temperature": temperature,
        "max_new_tokens": 64,
        "eos_token_id": [],
    }
    settings["generator"] = torch.Generator().manual_seed(0)
    with counting:
        made.generate(
            prompts(1)[0],
            on_cycle=lambda _: seen.append((counting.reads, counting.kernels)),
            **settings,
        )
    cycles = {
        (after[0] - before[0], after[1] - before[1]) for before, after in pairwise(seen[2:-8])
    }
    assert {reads for reads, _ in cycles} == {1} and max(cycles)[1] <= CYCLES[kind, temperature]


@pytest.mark.parametrize(
    ("kind", "family"), [("eagle1", "mistral"), ("eagle3", "llama"), ("hydra", "llama")]
)
def test_a_prompt_read_in_parts_and_cycles_that_look_at_more_columns_than_are_kept_give_the_same(
    kind: str, family: str, monkeypatch: Any
) -> None:
    target, ids, advance = (
        Target(small(family), TargetConfig(family)),
        prompts(8)[-1] % 60 + 3,
        KeptRows.advance,
    )
    made = decoder_of(
        target, TREES["small"], kind, **({"prefix_layer": True} if kind == "hydra" else {})
    )
    expected = trees_of(made, ids)

    def widened(kept: KeptRows, count: int) -> None:
        """Rounds columns up to a multiple of 32, as forwards of fixed width see them."""
        advance(kept, count)
        kept.visible = kept.positions[: -(-kept.length // 32) * 32]

    for owner, name, value in ((engine, "CHUNK", 5), (KeptRows, "advance", widened)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert trees_of(made, ids) == expected


def trees_of(made: SpeculativeDecoder, ids: Tensor) -> list[Any]:
    """Drafted and chosen tokens of cycles with room for whole trees, and the answer; greedy, then sampled."""
    told = list[Any]()

    def watch(cycle: Cycle) -> None:
        plan = made.runners.plan(cycle.sampler.decoding)
        if plan.has_whole_trees and not plan.by_level:
            assert cycle.tree.levels == made.proposer.levels  # all levels, to the end
        if cycle.position < ids.shape[1] + 24 - 5:
            told.append((cycle.tree.tokens.tolist(), cycle.verdict.new.tolist()))

    told.append(made.generate(ids, do_sample=False, max_new_tokens=24, on_cycle=watch).new_ids)
    generator = torch.Generator(made.target.device).manual_seed(0)
    asked: dict[str, Any] = {"temperature": 0.5, "generator": generator, "max_new_tokens": 24}
    before = generator.get_state()
    made.generate(ids, on_cycle=watch, **asked)
    assert not generator.get_state().equal(before)
    return told


def test_all_of_a_cycle_compiles(capfd: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    target, ids = (
        Target(make_target().model, TargetConfig("tiny", cycle="compiled")),
        prompts(2)[-1],
    )
    for _ in range(2):  # each decoder has its own recompile limit
        with torch._dynamo.config.patch(recompile_limit=1):
            decoder = decoder_of(target, TREES["chain"], "eagle1")
            answer = decoder.generate(ids, do_sample=False, max_new_tokens=16)
        assert answer.new_ids == greedy(target, ids, 16)[0][ids.shape[1] :]
    assert "runs as it is" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("tree", [None, TREES["small"]])
def test_compiled_functions_write_the_same_and_one_form_serves_all_lengths(
    tree: TreeConfig | None,
) -> None:
    found, plain = list[Any](), make_target()
    for target in (plain, compiled := Target(plain.model, TargetConfig("tiny", cycle="compiled"))):
        made = decoder_of(target, tree, "eagle3")
        for number, ids in enumerate(prompts(4)):
            with torch._dynamo.config.patch(error_on_recompile=target is compiled and number > 1):
                answer = made.generate(ids, do_sample=False, max_new_tokens=20 + number)
            found.append((answer.new_ids, answer.statistics.cycle_tokens))
    assert found[:4] == found[4:]


def test_what_cannot_be_compiled_runs_as_it_is_and_a_line_says_so(
    capfd: Any, monkeypatch: Any
) -> None:
    target, ids = (
        Target(make_target().model, TargetConfig("tiny", cycle="compiled")),
        prompts(2)[-1],
    )
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    made = decoder_of(target, TREES["small"])
    monkeypatch.setattr(
        made.lm, "extend", lambda *tree, extend=made.lm.extend: (print(end=""), extend(*tree))[1]
    )
    assert (
        made.generate(ids, do_sample=False, max_new_tokens=12).new_ids
        == greedy(target, ids, 12)[0][ids.shape[1] :]
    )
    assert "warning: target.cycle compiled: extend runs as it is:" in capfd.readouterr().err


class Tape(TorchDispatchMode):
    """A stand-in for a CUDA graph: replays the kernels of one run on the same tensors."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        # A real graph's first run is a replay. Here it is the recorded run, as nothing may be committed or drawn twice;
        # but a level may be first replayed in a later cycle.
        self.calls, self.is_done = list[Any](), "Runner." in str(function)
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
                if (
                    isinstance(old, Tensor) and old.data_ptr() != new.data_ptr()
                ):  # else a view, or written in place
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
]
CAPTURED += [("eagle1", replace(ADAPTIVE, stop_read=read)) for read in ("each", "late")]
CAPTURED += [("eagle1", ChainConfig(levels=3, stop=EntropyConfig(c=0.01)))]
CAPTURED += [
    ("medusa", TREES["small"]),
    ("eagle1", DynamicConfig(levels=3, k=3, nodes=8, children="sampled")),
]


def eager_and_captured(kind: str, tree: TreeConfig | None, device: str = "cpu") -> list[Any]:
    model, found = make_target().model.to(device), list[Any]()
    for cycle in ("eager", "captured"):
        target = Target(model, TargetConfig("tiny", cycle=cycle))  # type: ignore
        changes = {"prefix_layer": True} if kind == "hydra" else {}
        made = [decoder_of(target, tree, kind, **changes)]
        if isinstance(
            made[0].proposer, TreeProposer
        ):  # another proposer with the same head and other trees
            twin = TreeProposer(
                made[0].proposer.drafter, make_shape(DynamicConfig(levels=2, k=6, nodes=12))
            )
            made.append(SpeculativeDecoder(target, twin))
        found.append([trees_of(one, ids) for ids in prompts(4) for one in made])
    return found


@pytest.mark.parametrize(("kind", "tree"), CAPTURED)
def test_what_is_captured_at_one_place_of_a_text_serves_all_others(
    kind: str, tree: Any, monkeypatch: Any
) -> None:
    """Random trees with rejected branches, prompts of different lengths, and buckets of few columns."""
    tapes = list[Tape]()
    for module in (sampling, shape):  # numpy's argmax is not a torch kernel
        monkeypatch.setattr(module, "argmax", lambda logits: logits.argmax(-1))
    monkeypatch.setattr(
        runners, "record_graph", lambda f, *_: (tapes.append(t := Tape(f)), (t.replay, t.output))[1]
    )
    monkeypatch.setattr(runners, "bucket", lambda length: -(-length // 16) * 16)
    eager, captured = eager_and_captured(kind, tree)
    assert eager == captured and len(tapes) >= 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing is captured")
@pytest.mark.parametrize(("kind", "tree"), CAPTURED)
def test_cuda_graphs_write_what_eager_cycles_write(kind: str, tree: Any, capfd: Any) -> None:
    eager, captured = eager_and_captured(kind, tree, "cuda")
    assert eager == captured and "target.cycle captured" not in capfd.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing waits")
@pytest.mark.parametrize(("kind", "tree"), [*CAPTURED[:4], CAPTURED[-1]])
def test_nothing_of_a_cycle_but_the_reading_of_its_verdict_waits_for_a_gpu(
    kind: str, tree: Any
) -> None:
    target = Target(make_target().model.to("cuda"), TargetConfig("tiny", cycle="eager"))
    made = decoder_of(target, tree, kind)

    def strict(function: Callable[..., Any], *arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        result = function(*arguments)
        torch.cuda.set_sync_debug_mode("default")
        return result

    eager = made.runners.eager
    for name in ("draft", "extend", "judge", "commit"):
        setattr(eager, name, partial(strict, getattr(eager, name)))
    for temperature in (0.0, 1.0):
        made.generate(prompts(2)[-1], temperature=temperature, max_new_tokens=24)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device captures")
def test_what_cannot_be_captured_is_decoded_eagerly_and_a_line_says_so(capfd: Any) -> None:
    eager, captured = eager_and_captured(*CAPTURED[1])
    said = capfd.readouterr().err
    assert (
        eager == captured
        and said.count("warning: ") == said.count("captured: draft cannot be captured:") == 2
    )
