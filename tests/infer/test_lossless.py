"""`verify` passes for every method, and finds each planted fault.

Drafters, shapes and stop rules that no paper combined are lossless, too, and the rules end trees.
"""

import math
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from aerie.configs.schema.decode import (
    METHODS,
    ConfidenceConfig,
    ConstantConfig,
    EntropyConfig,
    ExactConfig,
    HeuristicConfig,
    MarginalGainConfig,
    Method,
    MethodConfig,
    ProbabilitySumConfig,
    StopConfig,
    VoteConfig,
)
from aerie.configs.schema.measure import PromptsConfig, SamplingConfig
from aerie.infer.decode import runners, verify
from aerie.infer.decode.engine import SpeculativeDecoder, make_decoder
from aerie.infer.decode.loaded_heads import LoadedHeads
from aerie.infer.decode.sampling import Sampler
from aerie.infer.decode.tree import Tree
from aerie.infer.measure import lossless
from aerie.model.storage import read_json
from aerie.model.target import Target
from tests.infer.draws import greedy, steered

ROWS = [(method, (published.heads or (None,))[0]) for method, published in METHODS.items()]
LEVEL = lossless.ALPHA / (len(ROWS) * len(lossless.PROOF_SAMPLINGS))
NUM_PROMPTS, MOST_PROMPTS = 6, 120  # answered by each row; at most, to meet every edge case
# settings of Qwen2.5's instruction models, without their end ids; then every setting that looks
# at the text
QWEN = {
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "do_sample": True,
}
OF_TEXT: dict[str, Any] = {
    "repetition_penalty": 1.5,
    "no_repeat_ngram_size": 3,
    "min_new_tokens": 5,
    "suppress_tokens": [7],
    "bad_words_ids": [[5], [8, 9]],
    "sequence_bias": [[[11], 2.0], [[11, 12], 4.0]],
}
ENDS = {"eos_token_id": [94, 95], "pad_token_id": 94}
LAW = {(0,): 0.5, (1,): 0.3, (2,): 0.19, (3,): 0.008, (4,): 0.002}


class Prompts:
    """A miniature, and random prompts of 2 to 7 tokens with transformers' answers."""

    def __init__(
        self, directory: Path, vocabulary: int, generation: Any = None, model_type: str = "llama"
    ) -> None:
        written = lossless.write_miniature(directory, vocabulary=vocabulary, model_type=model_type)
        self.heads, self.config = directory / "heads", replace(written, generation=generation or {})
        self.target, self._vocabulary = Target.load(self.config), vocabulary
        self._generator = torch.Generator().manual_seed(7)
        self._known: list[lossless.GreedyReference] = []

    def first(self, count: int) -> list[lossless.GreedyReference]:
        while len(self._known) < count:
            ids = torch.randint(
                0,
                self._vocabulary,
                (1, 2 + len(self._known) % NUM_PROMPTS),
                generator=self._generator,
            )
            self._known.append(lossless.greedy_reference(self.target, ids))
        return self._known[:count]

    def decoder(self, method: Method, kind: str | None) -> SpeculativeDecoder:
        head = None if kind is None else str(self.heads / kind)
        return make_decoder(LoadedHeads(self.target), MethodConfig.of(method), head)

    def edges(self, method: Method, kind: str | None, count: int = NUM_PROMPTS) -> set[str]:
        """The answers to the last prompts of `count` are generate's; returns the edge cases met.

        With a head's own drafts, and with steered ones.
        """
        known = self.first(count)[-NUM_PROMPTS:]
        few, met = known[: NUM_PROMPTS // 2], set[str]()
        trials = [
            (self.decoder(method, kind), known),
            *(
                (steered(self.decoder(method, kind), few, right), few)
                for right in (True, False)
                if kind
            ),
        ]
        for result in (lossless.compare_greedy(*trial) for trial in trials):
            assert result.identical == result.prompts and not result.differences
            met |= {edge for edge, times in result.edges.items() if times}
        return met


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> lossless.SampledProver:
    return lossless.SampledProver(tmp_path_factory.mktemp("miniature"))


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    return Prompts(
        tmp_path_factory.mktemp("wordy"), 96
    )  # more tokens than the widest tree's children


@pytest.fixture(scope="module")
def terse(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    return Prompts(tmp_path_factory.mktemp("terse"), 12)  # so that texts repeat


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind"), ROWS)
def test_greedy(wordy: Prompts, terse: Prompts, method: Method, kind: str | None) -> None:
    """Greedy answers of every row are those of transformers in every edge case."""
    met, wanted = set[str](), set() if method == "vanilla" else set(lossless.EDGES)
    if method == "pld":  # it cuts its guesses before an end token
        wanted -= {"ended"}
    for count in range(NUM_PROMPTS, MOST_PROMPTS + 1, NUM_PROMPTS):
        met |= (wordy if kind else terse).edges(method, kind, count)
        if wanted <= met:
            break
    assert met == wanted


@pytest.fixture(scope="module", params=[QWEN | ENDS, OF_TEXT | ENDS], ids=["Qwen2.5", "all"])
def penalised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    return Prompts(tmp_path_factory.mktemp("penalised"), 96, request.param, "qwen2")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind"), ROWS)
def test_greedy_of_text(penalised: Prompts, method: Method, kind: str | None) -> None:
    """They are, too, where laws look at the text."""
    assert {"accepted", "ended", "cut"} <= penalised.edges(method, kind) or not kind


@pytest.fixture(scope="module")
def of_text(tmp_path_factory: pytest.TempPathFactory) -> lossless.SampledProver:
    laws = {**QWEN, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    return lossless.SampledProver(
        tmp_path_factory.mktemp("of_text"), laws, "qwen2", prompt=(1, 5, 3)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind"), ROWS)
def test_sampled(
    sampled: lossless.SampledProver,
    of_text: lossless.SampledProver,
    method: Method,
    kind: str | None,
) -> None:
    """Sampled answers have the target's law, also where it looks at the text."""
    setting = lossless.PROOF_SAMPLINGS[ROWS.index((method, kind)) % len(lossless.PROOF_SAMPLINGS)]
    at_text = SamplingConfig(0.7, top_k=20, top_p=0.8)
    for prover, sampling, draws in ((sampled, setting, 500), (of_text, at_text, 300)):
        law = prover.prove(MethodConfig.of(method), kind, sampling, draws, seed=0)
        assert law.p_value > LEVEL
        # in a short text without repeats there is nothing to look up
        assert (
            law.accepted_per_answer > 0.05
            or method == "vanilla"
            or (prover is of_text and kind is None)
        )


def test_lost_law(of_text: lossless.SampledProver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A law that is lost on the way down a tree is found."""

    def roots_for_all(self: Any, logits: Tensor, tree: Tree | None = None) -> Tensor:
        return self.after(self.text.expand(len(logits), -1), logits)

    monkeypatch.setattr(Sampler, "with_text", roots_for_all)
    assert (
        of_text.prove(MethodConfig.of("eagle"), "eagle1", SamplingConfig(1.0), 300, seed=0).p_value
        < 1e-6
    )


def second_best(tree: Tree, logits: Tensor, sampler: Sampler) -> Tensor:
    """`judge` with a wrong bonus token."""
    judged = verify.judge(tree, logits, sampler)
    last = judged[0].tolist().count(0) - 1
    judged[2, last] = logits[judged[1, last]].topk(2).indices[1]
    return judged


def test_wrong_token(terse: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong token is found, with the gap of its logit."""
    monkeypatch.setattr(runners, "judge", second_best)
    result = lossless.compare_greedy(terse.decoder("vanilla", None), terse.first(1))
    (ids, answer), first = terse.first(1)[0], result.differences[0]
    best = (
        terse.target.model(torch.cat([ids, torch.tensor([answer[:1]])], dim=1))
        .logits[0, -1]
        .topk(2)
    )
    assert first.position == 1 and best.indices.tolist() == [first.theirs, first.ours]
    assert (
        first.gap == pytest.approx(float(best.values[0] - best.values[1]), rel=1e-4)
        and first.rounding < 1e-4
    )


@pytest.mark.parametrize(
    ("gap", "is_exact", "p_value", "verdict"),
    [
        (0.06, True, 0.5, "FAILED: greedy"),
        (0.06, False, 0.5, "lossless up to rounding"),
        (0.2, False, 0.5, "FAILED: greedy"),
        (0.06, False, math.nan, "FAILED: law at T=0.6/p=0.8"),
    ],
)
def test_verdicts(gap: float, is_exact: bool, p_value: float, verdict: str) -> None:
    """A difference within rounding fails only where answers must be exact; a p-value may be NaN."""
    greedy = lossless.GreedyResult(2, 1, {}, [lossless.Difference(0, 3, 1, 2, gap, rounding=0.1)])
    laws = (lossless.LawTest(0.6, 0.8, p_value, 0.3),)
    row = lossless.ProofRow(MethodConfig.of("pld"), None, greedy=greedy, laws=laws)
    row.judge(1e-3, is_exact)
    assert (row.verdict, row.holds) == (verdict, not verdict.startswith("FAILED"))


def test_answer_law(sampled: lossless.SampledProver) -> None:
    """The law of an answer is the product of its tokens' laws."""
    law = lossless.answer_law(sampled.target, sampled.ids, 3, SamplingConfig(0.7))
    assert len(law) == 8**3 and math.isclose(sum(law.values()), 1.0, rel_tol=1e-6)
    answer = (4, 0, 7)
    with torch.inference_mode():
        text = torch.cat([sampled.ids, torch.tensor([answer])], dim=1)
        laws = (sampled.target.model(text).logits[0, -4:-1] / 0.7).softmax(-1)
    assert law[answer] == pytest.approx(
        math.prod(float(laws[n, token]) for n, token in enumerate(answer)), rel=1e-4
    )


def test_p_value() -> None:
    """It is that of Pearson's test with rare answers pooled."""
    seen = np.random.default_rng(0).multinomial(1000, list(LAW.values()))
    wanted = np.array([chance * 1000 for chance in LAW.values()])
    ours = lossless.p_value(
        LAW, Counter({answer: int(count) for answer, count in zip(LAW, seen, strict=True)})
    )
    cells = [
        [*side[:3], side[3:].sum()] for side in (seen, wanted)
    ]  # all but the last expect 5 or more
    assert ours == pytest.approx(float(chisquare(*cells).pvalue), rel=1e-9)
    assert (
        lossless.p_value(LAW, Counter({(0,): 500, (1,): 300, (2,): 190, (9,): 1})) == 0.0
    )  # (9,) has probability 0
    assert lossless.p_value({(0,): 1.0}, Counter({(0,): 10})) == 1.0


def test_verify(
    wordy: Prompts,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It prints a table, and its code is 1 where a method is not lossless."""
    written = tmp_path / "proof.json"
    options = Namespace(
        methods="vanilla,eagle2", prompts=2, draws=200, seed=0, json=written, plan=False
    )
    heads = {"eagle1": str(wordy.heads / "eagle1")}
    assert lossless.run_verify(options, wordy.config, heads, PromptsConfig()) == 0
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["vanilla", "eagle2", "eagle2"]
    assert all("2/2" in row and row.endswith("lossless") for row in rows)
    assert rows[2].startswith("eagle2 drawn")
    assert read_json(written)["holds"]
    monkeypatch.setattr(runners, "judge", second_best)
    assert lossless.run_verify(options, wordy.config, heads, PromptsConfig()) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAILED: greedy, law at T=0.6/p=0.8") == printed.count("0/2") == 3
    assert not read_json(written)["holds"]


RULES: dict[str, StopConfig] = {
    "constant": ConstantConfig(),
    "heuristic": HeuristicConfig(start=2),
    "entropy": EntropyConfig(h=0.5),
    "confidence": ConfidenceConfig(threshold=0.5),
    "vote": VoteConfig(signals=("probability",), probability_threshold=0.6),
    "probability_sum": ProbabilitySumConfig(checks=(1, 2), threshold=0.7),
    "marginal_gain": MarginalGainConfig(threshold=0.6),
    "exact": ExactConfig(),
}
SHAPES: dict[str, tuple[Method, str, dict[str, Any]]] = {  # method, kind of head, tree
    "draft LM, dynamic": (
        "sps",
        "draft_lm",
        {"shape": "dynamic", "levels": 4, "k": 3, "nodes": 10},
    ),
    "draft LM, static": ("sps", "draft_lm", {"shape": "static", "choices": "eagle1"}),
    "EAGLE-3, static": ("eagle", "eagle3", {}),
    "EAGLE-3, chain": ("eagle-chain", "eagle3", {}),
    "Medusa": ("medusa", "medusa", {}),
    "Hydra": ("hydra", "hydra", {}),
    "Medusa, dynamic": ("medusa", "medusa", {"shape": "dynamic", "levels": 4, "k": 3, "nodes": 10}),
    "draft LM, drawn": (
        "sps",
        "draft_lm",
        {"shape": "dynamic", "levels": 4, "k": 2, "nodes": 5, "children": "sampled"},
    ),
    "Medusa, drawn": (
        "medusa",
        "medusa",
        {"shape": "dynamic", "levels": 4, "k": 3, "nodes": 9, "children": "sampled"},
    ),
    "Hydra, chain": ("hydra", "hydra", {"shape": "chain", "levels": 4}),
    "block": ("block-tree", "block", {"levels": 4, "k": 3, "nodes": 10}),
    "block, chain": ("block-chain", "block", {"levels": 4}),
    "block, static": ("block-tree", "block", {"shape": "static", "choices": "eagle1"}),
}
DRAWN = """entropy vote confidence marginal_gain probability_sum heuristic vote
exact marginal_gain entropy marginal_gain confidence entropy""".split()
SAMPLED = dict(zip(SHAPES, DRAWN, strict=True))  # the rule with which each shape is sampled


def asked(shape: str, rule: str) -> MethodConfig:
    method, _, changes = SHAPES[shape]
    return MethodConfig.of(method, **changes, stop=RULES[rule])


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        pytest.param(shape, rule, marks=() if SAMPLED[shape] == rule else pytest.mark.slow)
        for shape in SHAPES
        for rule in RULES
    ],
)
def test_combined_greedy(shape: str, rule: str, sampled: lossless.SampledProver) -> None:
    """Greedy answers are those of transformers, and the rule ends some trees."""
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(0, lossless.VOCABULARY, (1, 3 + 2 * n), generator=generator) for n in range(3)
    ]
    decoder = sampled.decoder(asked(shape, rule), SHAPES[shape][1])
    trees: list[Tree] = []
    for ids in prompts:
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16}
        written = decoder.generate(
            ids, on_cycle=lambda cycle: trees.append(cycle.tree), **settings
        ).sequences
        assert written.tolist() == greedy(sampled.target, ids, 16)
    deepest = decoder.proposer.shape.levels  # type: ignore[union-attr]
    levels = [tree.levels for tree in trees]
    assert (
        sum(0 < level < deepest for level in levels) > 2
        if rule != "constant"
        else max(levels) == deepest
    )
    for tree in trees:  # if one forward gives all laws, a rule saves only nodes to verify
        assert tree.draft_forwards == (
            min(tree.levels, 1) if shape.startswith(("Medusa", "block")) else tree.levels
        )


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "rule"), SAMPLED.items())
def test_combined_sampled(shape: str, rule: str, sampled: lossless.SampledProver) -> None:
    """Sampled answers have the target's law."""
    found = sampled.prove(asked(shape, rule), SHAPES[shape][1], SamplingConfig(1.0), 1500, seed=0)
    assert found.accepted_per_answer > 0.1
    assert found.p_value > lossless.ALPHA / len(SAMPLED)
