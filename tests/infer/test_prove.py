"""The proof holds for every method, and finds each way in which one could be wrong."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.decode import METHODS, Method, MethodConfig
from aerie.configs.schema.measure import SamplingConfig
from aerie.infer.decode import engine, verify
from aerie.infer.decode import shape as chain
from aerie.infer.decode import verify as rejection
from aerie.infer.decode.engine import SpeculativeDecoder, make_decoder
from aerie.infer.decode.methods import Drafters
from aerie.infer.decode.sampling import Sampler, draw
from aerie.infer.decode.shape import Cycle
from aerie.infer.decode.tree import Tree
from aerie.infer.decode.verify import Verdict
from aerie.infer.measure.lossless import (
    ALPHA,
    EDGES,
    LENGTH,
    LENGTHS,
    MINIATURES,
    SETTINGS,
    Difference,
    GreedyResult,
    Law,
    Reference,
    Row,
    SampledProver,
    compare_greedy,
    conclude,
    reference,
    table,
    write_miniature,
)
from aerie.model.target import Target
from tests.infer.steered import steered

KINDS = ("draft_lm", "medusa", "hydra", "eagle1", "eagle3")
ROWS = [
    pytest.param(method, kind, id=f"{method}-{kind}" if kind else method)
    for method, published in METHODS.items()
    for kind in (published.heads or (None,))
]
LEVEL = ALPHA / (len(ROWS) * len(SETTINGS))
HOT, WARM = SETTINGS
NUM_PROMPTS, MOST_PROMPTS = 24, 240  # that each row answers; that it may answer in search of an edge


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("miniature")


@pytest.fixture(scope="module")
def sampled(miniature: Path) -> SampledProver:
    return SampledProver(miniature)


class Prompts:
    """A target in miniature, and any number of random prompts of 2 to 25 tokens with what transformers answers."""

    def __init__(self, directory: Path, vocabulary: int) -> None:
        self.heads = directory / "heads"
        self.target = Target.load(write_miniature(directory, vocabulary=vocabulary))
        self._vocabulary = vocabulary
        self._generator = torch.Generator().manual_seed(7)
        self._known: list[Reference] = []

    def first(self, count: int) -> list[Reference]:
        while len(self._known) < count:
            ids = torch.randint(0, self._vocabulary, (1, 2 + len(self._known) % NUM_PROMPTS), generator=self._generator)
            self._known.append(reference(self.target, ids))
        return self._known[:count]

    def decoder(self, asked: MethodConfig, kind: str | None) -> SpeculativeDecoder:
        return make_decoder(Drafters(self.target), asked, None if kind is None else str(self.heads / kind))


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    """More words than the widest tree has children: every draft can be wrong."""
    return Prompts(tmp_path_factory.mktemp("wordy"), 96)


@pytest.fixture(scope="module")
def terse(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    """So few words that a text repeats itself."""
    return Prompts(tmp_path_factory.mktemp("terse"), 12)


def edges_of(found: GreedyResult) -> set[str]:
    """The edges that were met, in answers that are all identical."""
    assert found.identical == found.prompts and not found.differences
    return {edge for edge, count in found.edges.items() if count}


def assert_identical_in_every_edge_case(prompts: Prompts, method: Method, kind: str | None) -> None:
    """Drafts as they come, and ones that are right and ones that are wrong for certain; else further prompts."""
    asked, met = MethodConfig(method), set[str]()
    wanted = set(EDGES)
    if method == "pld":  # transformers' matching cuts a guess before an end token
        wanted -= {"ended"}
    if method == "vanilla":  # drafts nothing
        wanted = set()
    for count in range(NUM_PROMPTS, MOST_PROMPTS + 1, NUM_PROMPTS):
        known = prompts.first(count)[-NUM_PROMPTS:]
        met |= edges_of(compare_greedy(prompts.decoder(asked, kind), known))
        for right in (True, False) if kind else ():
            told = steered(prompts.decoder(asked, kind), known[: NUM_PROMPTS // 2], right)
            met |= edges_of(compare_greedy(told, known[: NUM_PROMPTS // 2]))
        if wanted <= met:
            break
    assert met == wanted


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind"), ROWS)
def test_greedy_answers_of_every_row_are_generates_own_in_every_edge_case(
    wordy: Prompts, terse: Prompts, method: Method, kind: str | None
) -> None:
    """Twenty-four prompts; all rejected, all accepted, an end token and a limit inside a path are all among them."""
    assert_identical_in_every_edge_case(wordy if kind else terse, method, kind)


@pytest.mark.parametrize(("method", "kind"), [("eagle2", "eagle1"), ("medusa", "medusa")])
def test_greedy_answers_are_generates_own_in_every_edge_case(wordy: Prompts, method: Method, kind: str) -> None:
    assert_identical_in_every_edge_case(wordy, method, kind)


def test_the_references_are_generates_own_also_with_an_end_token(terse: Prompts) -> None:
    for known in terse.first(4):
        end = known.answer[7]
        own = terse.target.model.generate(
            known.ids,
            attention_mask=torch.ones_like(known.ids),
            do_sample=False,
            max_new_tokens=max(LENGTHS),
            eos_token_id=end,
            pad_token_id=end,
        )
        wanted = known.answer[: known.answer.index(end) + 1]
        assert own[0, known.ids.shape[1] :].tolist() == wanted


def test_a_wrong_token_is_found_with_the_gap_of_its_logit(terse: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    def second_best(tree: Tree, logits: Tensor, sampler: Sampler, typical: Any) -> Verdict:
        right = verify.verify(tree, logits, sampler, typical)
        return replace(right, bonus=int(logits[right.path[-1]].topk(2).indices[1]))

    monkeypatch.setattr(engine, "verify", second_best)
    found = compare_greedy(terse.decoder(MethodConfig("vanilla"), None), terse.first(2))
    assert found.identical == 0 and not found.holds(exact=False)
    first = found.differences[0]
    known = terse.first(1)[0]
    assert first.position == 1 and first.theirs == known.answer[1] != first.ours
    text = torch.cat([known.ids, torch.tensor([known.answer[:1]])], dim=1)
    best = terse.target.model(text).logits[0, -1].topk(2)
    assert first.gap == pytest.approx(float(best.values[0] - best.values[1]), rel=1e-4)
    assert best.indices.tolist() == [first.theirs, first.ours] and first.rounding < 1e-4


def test_a_difference_within_rounding_fails_only_where_answers_must_be_exact() -> None:
    near, far = Difference(0, 3, 1, 2, gap=0.06, rounding=0.1), Difference(1, 3, 1, 2, gap=0.2, rounding=0.1)
    found = GreedyResult(prompts=2, identical=1, differences=[near])
    row = Row(MethodConfig("pld"), None)
    laws = (Law(1.0, 1.0, 0.4, 0.3), Law(0.6, 0.8, 0.5, 0.3))
    assert not conclude(row, found, laws, 1e-3, exact=True).holds
    rounded = conclude(row, found, laws, 1e-3, exact=False)
    assert rounded.holds and rounded.verdict == "lossless up to rounding"
    assert "pld: prompt 0, new token 3: 1 instead of 2, logits 0.06 apart" in table([rounded])
    found.differences.append(far)
    assert conclude(row, found, laws, 1e-3, exact=False).verdict == "FAILED: greedy"
    wrong = conclude(row, None, (Law(0.6, 0.8, 1e-7, 0.3),), 1e-3, exact=True)
    assert wrong.verdict == "FAILED: law at T=0.6/p=0.8" and not wrong.holds
    assert not conclude(row, None, (Law(0.6, 0.8, float("nan"), 0.3),), 1e-3, exact=True).holds


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_p"), [(each.temperature, each.top_p) for each in SETTINGS])
@pytest.mark.parametrize(("method", "kind"), ROWS)
def test_sampled_answers_of_every_row_have_the_targets_law(
    sampled: SampledProver, method: Method, kind: str | None, temperature: float, top_p: float
) -> None:
    """5,000 answers of four tokens; Bonferroni over all rows and both settings."""
    found = sampled.prove(Row(MethodConfig(method), kind), SamplingConfig(temperature, top_p=top_p), 5000, seed=0)
    assert found.p_value > LEVEL
    assert found.accepted_per_answer > 0.05 or method == "vanilla"


@pytest.mark.parametrize(("method", "kind"), [("sps", "draft_lm"), ("eagle", "eagle1"), ("eagle3", "eagle3")])
def test_sampled_answers_have_the_targets_law(sampled: SampledProver, method: Method, kind: str) -> None:
    found = sampled.prove(Row(MethodConfig(method), kind), WARM, 300, seed=0)
    assert found.p_value > LEVEL and found.accepted_per_answer > 0.05


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("sps-svip", "draft_lm"),
        ("sps-confidence", "draft_lm"),
        ("deagle", "eagle1"),
        ("ddd", "eagle1"),
        ("opt-tree", "eagle1"),
        ("svip", "eagle3"),
    ],
)
def test_stop_rules_have_their_say_in_the_answers_that_are_drawn(
    sampled: SampledProver, miniature: Path, method: Method, kind: str
) -> None:
    """Some trees end before what is left to write does."""
    head = str(miniature / "heads" / kind)
    decoder = make_decoder(Drafters(sampled.target), MINIATURES.get(method, MethodConfig(method)), head)
    early: list[bool] = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        left = [LENGTH - 1]

        def watch(cycle: Cycle, left: list[int] = left) -> None:
            early.append(0 < cycle.tree.levels < left[0] - 1)
            left[0] -= cycle.new_tokens

        decoder.generate(
            sampled.ids, max_new_tokens=LENGTH, temperature=1.0, top_k=0, generator=generator, on_cycle=watch
        )
    assert any(early)


Broken = Callable[[pytest.MonkeyPatch], None]


def drafts_judge_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """q for p."""

    def reject(tree: Tree, p: Tensor, generator: torch.Generator) -> Verdict:
        assert tree.proposal is not None
        q = tree.proposal.over(p.shape[-1])
        return rejection.reject(tree, torch.where(q.sum(-1, keepdim=True) > 0, q, p), generator)

    monkeypatch.setattr(verify, "reject", reject)


def residual_is_reversed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rejection.residual
    monkeypatch.setattr(rejection, "residual", lambda p, q: right(q, p))


def residual_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "residual", lambda p, q: p)


def bonus_is_not_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(tree: Tree, logits: Tensor, sampler: Sampler, typical: Any) -> Verdict:
        right = verify.verify(tree, logits, sampler, typical)
        last = right.path[-1]
        if last in tree.parents[1:].tolist():
            return right
        return replace(right, bonus=int(draw(logits[last : last + 1].softmax(-1), sampler.generator)))

    monkeypatch.setattr(engine, "verify", judge)


def sibling_is_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "without", lambda q, tokens: q)


def bonus_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """R2's own trap: a choice that is no child must be the bonus token."""

    def judge(tree: Tree, logits: Tensor, sampler: Sampler, typical: Any) -> Verdict:
        right = verify.verify(tree, logits, sampler, typical)
        last = right.path[-1]
        return replace(right, bonus=int(sampler.choose(logits[last : last + 1])))

    monkeypatch.setattr(engine, "verify", judge)


def sampled_token_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop rule that takes back the token which made it stop."""
    right = chain.Chain.grow

    def grow(self: chain.Chain, drafter: Any, root: Tensor, max_levels: int, sampler: Sampler) -> Tree:
        tree = right(self, drafter, root, max_levels, sampler)
        if tree.proposal is None or float(tree.confidence[-1].exp()) >= 0.2:
            return tree
        kept = {name: getattr(tree, name)[:-1] for name in ("tokens", "parents", "depth", "confidence", "survival")}
        proposal = None if len(tree) == 2 else replace(tree.proposal, laws=tree.proposal.laws[:-1])
        return replace(tree, **kept, mask=tree.mask[:-1, :-1], levels=tree.levels - 1, proposal=proposal)

    monkeypatch.setattr(chain.Chain, "grow", grow)


MUTATIONS: list[tuple[Method, str, SamplingConfig, Broken]] = [
    ("sps", "draft_lm", HOT, drafts_judge_themselves),
    ("eagle", "eagle1", HOT, drafts_judge_themselves),
    ("sps", "draft_lm", WARM, residual_is_reversed),
    ("eagle-chain", "eagle3", WARM, residual_is_reversed),
    ("eagle", "eagle1", WARM, residual_is_reversed),
    ("sps", "draft_lm", WARM, residual_is_forgotten),
    ("eagle", "eagle1", WARM, residual_is_forgotten),
    ("sps", "draft_lm", WARM, bonus_is_not_processed),
    ("eagle", "eagle1", WARM, bonus_is_not_processed),
    ("eagle2", "eagle1", WARM, bonus_is_not_processed),
    ("eagle", "eagle1", HOT, sibling_is_not_removed),
    ("eagle2", "eagle1", WARM, bonus_is_drawn_anew),
    ("medusa", "medusa", WARM, bonus_is_drawn_anew),
    ("sps-confidence", "draft_lm", HOT, sampled_token_is_dropped),
    ("sps-confidence", "draft_lm", WARM, sampled_token_is_dropped),
]
SUBTLE: dict[Broken, int] = {sibling_is_not_removed: 5000, bonus_is_drawn_anew: 5000, sampled_token_is_dropped: 3000}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kind", "sampling", "broken"),
    [pytest.param(*each, id=f"{each[0]} {each[3].__name__} T{each[2].temperature}") for each in MUTATIONS],
)
def test_a_broken_rule_is_found(
    sampled: SampledProver,
    method: Method,
    kind: str,
    sampling: SamplingConfig,
    broken: Broken,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the same path; with the draws of the proof, of which most need less than all."""
    broken(monkeypatch)
    draws = SUBTLE.get(broken, 1000)
    assert sampled.prove(Row(MethodConfig(method), kind), sampling, draws, seed=0).p_value < 1e-6
