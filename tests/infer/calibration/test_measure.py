"""What is recorded on a tiny target is what the cycles were, and recording changes no token."""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import (
    ChainConfig,
    DynamicConfig,
    EntropyConfig,
    MethodConfig,
    StaticConfig,
    TreeConfig,
)
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.infer.decode.calibrator import Calibrator, save
from aerie.infer.decode.drafters.eagle import EagleDrafter
from aerie.infer.decode.drafters.lm import DraftLMDrafter
from aerie.infer.decode.drafters.multi_token import MedusaDrafter
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.methods import Drafters, drafting
from aerie.infer.decode.methods import make_decoder as make_decoder_of
from aerie.infer.decode.proposer import CachedDrafter, Cycle, Drafting
from aerie.infer.measure.bench import calibrators_of
from aerie.infer.measure.bounds import FrontierRecorder, LawArrays
from aerie.infer.measure.calibrate import ARRAYS, Recording, Settings, analyse, read_arrays, record
from aerie.infer.measure.cycles import watched
from aerie.infer.measure.oracle import OracleArrays
from aerie.model.checkpoint import save_head
from aerie.model.storage import digests
from aerie.model.target import Target
from tests import tiny

WIDE = DynamicConfig(levels=3, k=4, nodes=8)
CHAIN = ChainConfig(levels=2)
MEDUSA = StaticConfig(choices=((0,), (1,), (0, 0)), children="best")
PROMPTS = [(torch.tensor([[7, 9, 11, 23, 5]]), "count"), (torch.tensor([[8, 30, 12]]), "sort")]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny.llama(eos_token_id=None), TargetConfig(path="tiny"))


def make_decoder(target: Target, tree: TreeConfig, kind: str = "eagle1", **more: Any) -> SpeculativeDecoder:
    embedding = target.ends.embedding.float()
    drafter: CachedDrafter
    if kind == "itself":
        drafter = DraftLMDrafter(target, target)
    elif kind == "medusa":
        drafter = MedusaDrafter(tiny.multi_token_head("medusa", target.ends, noise=0.3, num_heads=2).eval())
    else:
        make: Any = tiny.head if kind == "eagle1" else tiny.eagle3_head
        drafter = EagleDrafter(make(embedding, scale=8.0).eval(), target)
    return SpeculativeDecoder(target, drafting(drafter, tree, **more))


def recorded(
    target: Target, tree: TreeConfig, kind: str = "eagle1", **settings: Any
) -> tuple[Recording, list[list[Cycle]]]:
    """A recording and the cycles that it is of, by prompt."""
    cycles: list[list[Cycle]] = []
    before = -1

    def keep(cycle: Cycle) -> None:
        nonlocal before
        if not cycles or cycle.position < before:
            cycles.append([])
        before = cycle.position
        cycles[-1].append(cycle)

    asked = Settings(max_new_tokens=14, seed=3, **settings)
    return record(make_decoder(target, tree, kind), tree, PROMPTS, asked, (keep,)), cycles


@pytest.mark.parametrize(
    ("tree", "kind"), [(WIDE, "eagle1"), (CHAIN, "eagle3"), (CHAIN, "itself"), (MEDUSA, "medusa"), (WIDE, "itself")]
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_recording_with_an_oracle_changes_no_token(
    target: Target, tree: TreeConfig, kind: str, temperature: float
) -> None:
    plain, seen = recorded(target, tree, kind, temperature=temperature)
    deep, again = recorded(target, tree, kind, temperature=temperature, oracle_levels=5)
    for one, other in zip(seen, again, strict=True):
        assert [c.verdict for c in one] == [c.verdict for c in other]
        assert all(torch.equal(a.tree.tokens, b.tree.tokens) for a, b in zip(one, other, strict=True))
    assert plain.oracle is None and deep.oracle is not None and deep.oracle.oracle.size
    assert (deep.oracle.oracle >= deep.oracle.accepted).all() and (deep.oracle.oracle <= deep.oracle.cap).all()
    assert (deep.oracle.cap >= deep.oracle.proposed).all()
    assert (deep.oracle.position - deep.oracle.answered == np.array([4, 2])[deep.oracle.prompt]).all()


def test_laws_are_those_of_target_and_head_at_every_asked_place(target: Target) -> None:
    recording, cycles = recorded(target, CHAIN, "itself")
    laws = recording.laws
    assert laws is not None and laws.tvd.size == sum(
        min(c.verdict.accepted + 1, c.tree.num_drafted) for each in cycles for c in each
    )
    assert laws.tvd == pytest.approx(0.0, abs=1e-5) and laws.kl_qp == pytest.approx(0.0, abs=1e-4)
    assert laws.agrees.all() and laws.accepted.all() and laws.q == pytest.approx(laws.p, abs=1e-5)
    assert laws.q == pytest.approx(laws.top_q) and (laws.entropy > 0).all()
    assert laws.ranked[:, 0] == pytest.approx(np.log(laws.top_q), abs=1e-5)
    assert (np.diff(laws.ranked, axis=1) <= 0).all()


@pytest.mark.parametrize(
    ("tree", "kind", "temperature"),
    [(WIDE, "eagle1", 0.0), (WIDE, "eagle3", 1.0), (CHAIN, "eagle1", 0.7), (CHAIN, "eagle3", 0.0)],
)
def test_what_must_hold_between_laws_holds(target: Target, tree: TreeConfig, kind: str, temperature: float) -> None:
    recording, cycles = recorded(target, tree, kind, temperature=temperature)
    laws = recording.laws
    assert laws is not None and laws.tvd.size
    assert (laws.largest_gap <= laws.tvd + 1e-9).all() and (laws.tvd <= np.sqrt(laws.kl_pq / 2) + 1e-9).all()
    assert (laws.tvd <= np.sqrt(laws.kl_qp / 2) + 1e-9).all() and (laws.largest_gap >= np.abs(laws.q - laws.p)).all()
    assert np.isinf(laws.kl_pq).all() == (kind == "eagle3")  # a third of the vocabulary
    row = 0
    for prompt, each in enumerate(cycles):
        for number, cycle in enumerate(each):
            for node in cycle.verdict.path:
                children = [n for n in range(1, len(cycle.tree)) if int(cycle.tree.parents[n]) == node]
                if not children:
                    continue
                assert (laws.prompt[row], laws.cycle[row], laws.token[row]) == (
                    prompt, number, int(cycle.tree.tokens[children[0]])
                )  # fmt: skip
                p = cycle.sampler.law(cycle.step.logits)[node]
                assert laws.p[row] == pytest.approx(float(p[laws.token[row]]), abs=1e-5)
                assert laws.q[row] == pytest.approx(float(cycle.tree.confidence[children[0]].exp()), abs=1e-5)
                assert laws.followed[row] == any(child in cycle.verdict.path for child in children)
                row += 1
    assert row == laws.tvd.size


def test_frontiers_hold_what_reranking_dropped_and_are_held_against_the_text(target: Target) -> None:
    recording, cycles = recorded(target, WIDE, "itself")
    frontier, levels = recording.frontier, recording.levels
    assert frontier is not None and levels is not None
    whole = [level for level in zip(levels.prompt, levels.depth, strict=True) if level[1] == 3]
    assert (frontier.depth == 3).sum() == 4 * len(whole)  # k of each level, though a tree keeps 7 nodes in all
    assert levels.held[levels.depth == 1].all() and (levels.mass <= 1.0).all()  # the target drafts for itself
    for depth in (1, 2, 3):
        assert frontier.accepted[frontier.depth == depth].sum() == levels.held[levels.depth == depth].sum() > 0
    assert levels.depth.size == sum(cycle.tree.levels for each in cycles for cycle in each)
    chosen = (levels.prompt == 0) & (levels.cycle == 0)
    tree = cycles[0][0].tree
    first = tree.survival[tree.depth == 1].exp()
    assert levels.mass[chosen][0] >= float(first.sum()) - 1e-6
    chain = recorded(target, CHAIN, "itself")[0].levels
    assert chain is not None and chain.depth.size and chain.held.all() and chain.reached.all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chain_is_in_the_text_exactly_when_it_is_accepted(target: Target, temperature: float) -> None:
    levels = recorded(target, CHAIN, temperature=temperature)[0].levels
    assert levels is not None and levels.depth.size and (levels.reached == levels.held).all()


def test_what_lies_beyond_the_text_is_left_out(target: Target) -> None:
    decoder = make_decoder(target, CHAIN, "itself")
    with watched(decoder) as growth:
        assert growth is not None
        whole, cut = FrontierRecorder(growth), FrontierRecorder(growth)

        def on_cycle(cycle: Cycle) -> None:
            whole(cycle)
            cut(cycle)

        text = decoder.generate(PROMPTS[0][0], max_new_tokens=14, on_cycle=on_cycle).sequences[0].tolist()
    whole.finish(text)
    cut.finish(text[:-4])
    places = [(c, d) for c, d in zip(whole.levels().cycle, whole.levels().depth, strict=True)]
    kept = [(c, d) for c, d in zip(cut.levels().cycle, cut.levels().depth, strict=True)]
    assert 0 < len(kept) < len(places) and kept == places[: len(kept)]
    assert cut.levels().held.all()  # none was held against a text that had ended


def test_the_oracle_of_a_target_that_drafts_for_itself_is_the_cap(target: Target) -> None:
    oracle = recorded(target, CHAIN, "itself", oracle_levels=5)[0].oracle
    assert oracle is not None
    assert (oracle.oracle == oracle.cap).all() and oracle.cap.max() == 5 and (oracle.proposed <= 2).all()
    sampled = recorded(target, CHAIN, "itself", oracle_levels=5, temperature=1.0)[0].oracle
    assert sampled is not None and (sampled.oracle == sampled.cap).all()


def test_a_greedy_oracle_counts_the_draft_tokens_that_the_answer_goes_on_with(target: Target) -> None:
    tree = replace(CHAIN, levels=6)
    recording, _ = recorded(target, replace(tree, stop=EntropyConfig(h=0.0)), oracle_levels=6)  # stops after one token
    oracle = recording.oracle
    cycles = recorded(target, tree)[1]
    assert oracle is not None and (oracle.proposed == 1).all()
    reached = {cycle.position: cycle.verdict.accepted for cycle in cycles[0]}
    both = [place for place in np.flatnonzero(oracle.prompt == 0) if oracle.position[place] in reached]
    assert len(both) > 1
    assert [int(oracle.oracle[place]) for place in both] == [reached[int(oracle.position[place])] for place in both]


def test_what_is_written_is_read_back(target: Target, tmp_path: Path) -> None:
    recording, _ = recorded(target, CHAIN, oracle_levels=3)
    recording.write(tmp_path)
    for name, kind in (("laws", LawArrays), ("oracle", OracleArrays)):
        found: Any = read_arrays(tmp_path / ARRAYS, name, kind)
        for field in fields(kind):
            assert np.array_equal(getattr(found, field.name), getattr(getattr(recording, name), field.name))
    with pytest.raises(UserError, match="calibrate"):
        read_arrays(tmp_path / ARRAYS, "nothing", OracleArrays)
    (tmp_path / "cut.npz").write_bytes((tmp_path / ARRAYS).read_bytes()[:100])
    with pytest.raises(UserError, match="not an npz"):
        read_arrays(tmp_path / "cut.npz", "laws", LawArrays)


def test_analysis_is_json_for_every_kind_of_draft(target: Target) -> None:
    import json

    for tree, kind, temperature in ((WIDE, "eagle1", 0.0), (CHAIN, "eagle3", 1.0), (MEDUSA, "medusa", 0.0)):
        recording, _ = recorded(target, tree, kind, temperature=temperature, oracle_levels=4)
        value = json.loads(json.dumps(analyse(recording, str), allow_nan=False))
        assert value["prompts"] == 2 and [row["task"] for row in value["by_task"]] == ["count", "sort"]
        assert value["laws"]["inequalities"]["gap_above_tv"] == 0.0
        assert sum(row["nodes"] for row in value["by_task"]) == recording.nodes.prompt.size
    vanilla = record(SpeculativeDecoder(target), None, PROMPTS, Settings(4, oracle_levels=3))
    assert analyse(vanilla, str)["laws"] is None and vanilla.oracle is None


@pytest.mark.parametrize("kind", ["temperature", "isotonic"])
@pytest.mark.parametrize("tree", [WIDE, CHAIN, MEDUSA, replace(WIDE, rank="confidence")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_calibrated_trees_are_drafted_from_mapped_confidence_and_write_the_same_text(
    target: Target, kind: Any, tree: TreeConfig, temperature: float
) -> None:
    calibrate = Calibrator(3.0, (0.0, 0.5, 0.9), (0.05, 0.2, 0.9)).map(kind)
    head = "medusa" if tree is MEDUSA else "eagle1"
    answers, seen = [], []
    for more in ({}, {"calibrate": calibrate}):
        decoder = make_decoder(target, tree, head, **more)
        assert isinstance(decoder.proposer, Drafting)

        def keep(cycle: Cycle) -> None:
            seen.append(cycle)

        sampling: dict[str, Any] = {"temperature": temperature, "do_sample": temperature > 0, "top_k": 0}
        generator = torch.Generator().manual_seed(1)
        answers.append(
            decoder.generate(PROMPTS[0][0], max_new_tokens=12, on_cycle=keep, generator=generator, **sampling).new_ids
        )
    if temperature == 0:
        assert answers[0] == answers[1]
    first = next(cycle.tree for cycle in seen if cycle.position == seen[0].position and cycle is not seen[0])
    plain = seen[0].tree
    assert int(plain.tokens[1]) == int(first.tokens[1])  # the same law, and no map moves its ranks
    assert float(first.confidence[1]) == pytest.approx(float(calibrate(plain.confidence[1:2])), abs=1e-5)
    assert math.isclose(float(first.survival[1]), float(first.confidence[1]), abs_tol=1e-6)


def test_the_calibrator_is_read_from_beside_the_head(tmp_path: Path) -> None:
    place, head = tiny.target(tmp_path / "target"), tmp_path / "head"
    save_head(tiny.head(tiny.llama().get_input_embeddings().weight.detach(), scale=8.0), head)
    loaded = Target.load(TargetConfig(path=str(place)))
    asked = MethodConfig.of("eagle2", levels=2, k=3, nodes=6, calibrated="isotonic")
    with pytest.raises(UserError, match="calibrate"):
        make_decoder_of(Drafters(loaded), asked, str(head))
    with pytest.raises(UserError, match="calibrate"):
        calibrators_of([asked], [str(head)])
    save(Calibrator(1.0, (0.0, 1.0), (0.0, 0.5), head=digests(head)), head)
    one = calibrators_of([asked, asked], [str(head), str(head)])
    seen: list[Cycle] = []
    decoder = make_decoder_of(Drafters(loaded), asked, str(head))
    decoder.generate(PROMPTS[0][0], max_new_tokens=4, do_sample=False, on_cycle=seen.append)
    assert 0 < float(seen[0].tree.confidence[1].exp()) <= 0.5 + 1e-6
    save(Calibrator(1.0, (0.0, 1.0), (0.0, 0.6), head=digests(head)), head)
    assert one and one != calibrators_of([asked], [str(head)])  # a bench depends on it
    assert calibrators_of([MethodConfig("eagle2")], [str(head)]) == {}


def test_watching_a_calibrated_tree_sees_its_own_survival(target: Target) -> None:
    calibrate = Calibrator(2.0, (0.0, 1.0), (0.0, 0.5)).map("isotonic")
    cycles: list[Cycle] = []
    decoder = make_decoder(target, WIDE, calibrate=calibrate)
    recording = record(decoder, WIDE, PROMPTS[:1], Settings(10), (cycles.append,))
    frontier, tree = recording.frontier, cycles[0].tree
    assert frontier is not None
    seen = frontier.survival[frontier.depth == 1][:4]  # the first cycle's
    own = tree.survival[tree.depth == 1].exp().tolist()
    assert own and seen[: len(own)] == pytest.approx(own, rel=1e-5)
