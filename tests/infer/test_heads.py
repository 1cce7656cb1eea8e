"""Drafters of heads: laws in the right places, only true features, and heads that do not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import (
    DynamicConfig,
    MethodConfig,
    StaticConfig,
    TreeConfig,
    published_tree,
)
from aerie.configs.schema.heads import TargetConfig
from aerie.infer.decode.find_head import check_levels
from aerie.infer.decode.loaded_heads import load_head_for
from aerie.infer.decode.roles import Cycle
from aerie.model.checkpoint import save_head
from aerie.model.heads import DRAFT_MODELS
from aerie.model.kv_cache import KeptRows
from aerie.model.target import Target
from tests import tiny
from tests.infer.draws import TREES, decoder_of, greedy, make_head, make_target, prompts
from tests.infer.steered import steered
from tests.model.drafted import log_laws

LOADED = [  # kind, options
    ("eagle1", {}),
    ("eagle3", {"num_hidden_layers": 2, "qk_norm": True, "fc_norm": True, "norm_output": True}),
    ("eagle3", {"norm_before_residual": True, "norm_before_fc": True, "num_key_value_heads": 4}),
    ("medusa", {}),
    ("hydra", {}),
    ("hydra", {"prefix_layer": True}),
    ("block", {"num_hidden_layers": 2, "anchor_feature": True, "markov_order": 3}),
    (
        "block",
        {"in_block": "causal", "sample_from_anchor": True, "markov_head": "gated", "block_size": 6},
    ),
    ("block", {"markov_rank": 0}),
]


def ready(drafter: Any, target: Target, text: Tensor) -> Any:
    """The drafter after it got the text [T]: its last token is the root."""
    features = target.features(text[None, :-1], after_blocks=drafter.after_blocks)
    known = features.last_hidden if features.taps is None else features.taps
    drafter.reset(text[:-1], kept := KeptRows(256, text.device, torch.float32), 5)
    drafter.commit(text[1:], known[0])
    kept.advance(len(text) - 1)
    return drafter


@pytest.mark.parametrize(("kind", "options"), LOADED)
@torch.inference_mode()
def test_laws_below_nodes(kind: str, options: dict[str, Any]) -> None:
    target = make_target()
    head, text = (
        make_head(target, kind, **options),
        torch.cat([prompts(3)[-1][0], torch.tensor([9])]),
    )
    drafter = ready(DRAFT_MODELS[kind].drafter(head, target), target, text)
    drafter.start()
    drafter.step(torch.tensor([11, 12, 13]), torch.tensor([0, 0, 0]))
    both = drafter.step(torch.tensor([21, 22]), torch.tensor([2, 0]))
    known = target.features(text[None, :-1], after_blocks=drafter.after_blocks)
    states = known.last_hidden[0], None if known.taps is None else known.taps[0]
    for law, path in zip(both, [(13, 21), (11, 22)], strict=True):
        expected = log_laws(head, target.vocab, torch.cat([text, torch.tensor(path)]), *states)[-1]
        torch.testing.assert_close(law, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "options"), LOADED)
@pytest.mark.parametrize("tree", [TREES["wide"], StaticConfig(choices="medusa63", children="best")])
def test_verified_nodes_were_drafted(kind: str, options: dict[str, Any], tree: TreeConfig) -> None:
    """Each node has a token from the drafter's law at its parent, and the target reads it once."""
    target, ids, read = make_target(), prompts(3)[-1], []
    if isinstance(tree, DynamicConfig) and kind not in ("eagle1", "eagle3"):
        tree = DynamicConfig(levels=4, k=6, nodes=40)
    decoder, nodes = decoder_of(target, tree, kind, **options), []
    proposer: Any = decoder.proposer
    proposer.shape.keeps_pool = True

    def watch(cycle: Cycle) -> None:
        nodes.append(cycle.tree.num_drafted)
        grown = cycle.tree
        laws = {} if grown.pool is None else grown.pool.log_laws()
        for node in range(1, len(grown)):
            law = laws[int(grown.parents[node])]
            column = (
                proposer.drafter.target_ids(torch.arange(len(law)))
                .tolist()
                .index(int(grown.tokens[node]))
            )
            assert float(grown.confidence[node]) == pytest.approx(float(law[column]), abs=1e-5)

    hook = target.decoder.register_forward_pre_hook(
        lambda _, __, keywords: read.append(keywords["input_ids"].shape[1]), with_kwargs=True
    )
    found = decoder.generate(ids, do_sample=False, max_new_tokens=12, on_cycle=watch)
    hook.remove()
    statistics = found.statistics
    assert [width - 1 for width in read[1:]] == nodes == statistics.cycle_nodes and sum(nodes) > 50
    assert statistics.draft_nodes == sum(nodes) >= sum(statistics.accepted)
    assert found.sequences.tolist() == greedy(target, ids, 12)


@pytest.mark.parametrize(("kind", "options"), LOADED)
def test_true_features(kind: str, options: dict[str, Any]) -> None:
    """Its law equals that of a drafter that got the whole text at once, after many cycles."""
    target, ids, paths = make_target(), prompts(3)[-1], []
    more = options | ({"ids": torch.arange(320)} if kind == "eagle3" else {})
    decoder, text = decoder_of(target, TREES["small"], kind, **more), greedy(target, ids, 24)[0]
    drafter = decoder.proposer.drafter  # type: ignore[union-attr]
    found = steered(decoder, [(ids, text[ids.shape[1] :])], right=True).generate(
        ids,
        do_sample=False,
        max_new_tokens=24,
        on_cycle=lambda cycle: paths.append(cycle.verdict.path),
    )
    assert found.sequences[0].tolist() == text
    assert any(path[-1] > len(path) for path in paths)  # the accepted rows are not the first ones
    with torch.inference_mode():
        fresh = ready(DRAFT_MODELS[kind].drafter(drafter.head, target), target, found.sequences[0])
        torch.testing.assert_close(drafter.start(), fresh.start(), rtol=1e-4, atol=1e-4)


def test_misfits(tmp_path: Path) -> None:
    target = make_target()
    save_head(make_head(target, "eagle3", after_blocks=(1, 4)), tmp_path / "deep")
    with pytest.raises(UserError, match=r"states after blocks \(1, 4\), and tiny has 4 blocks"):
        load_head_for(target, str(tmp_path / "deep"))
    target.generation_config.eos_token_id = [7, 8]
    save_head(make_head(target, "eagle3", ids=torch.tensor([1, 2, 9])), tmp_path / "endless")
    with pytest.raises(
        UserError,
        match=r"none of the target's end-of-turn tokens \[7, 8\] is in the draft vocabulary",
    ):
        load_head_for(target, str(tmp_path / "endless"))
    save_head(make_head(target, "block", block_size=5), tmp_path / "short")
    short = str(tmp_path / "short")
    for method in ("block-tree", "block-chain"):  # their default depth is 7
        cut = check_levels(MethodConfig.of(method), short, "here").tree
        assert cut == published_tree(method, levels=4)
        with pytest.raises(
            UserError, match=r"here: tree: is 5 levels deep, and .*/short drafts at most 4"
        ):
            check_levels(MethodConfig.of(method, levels=5), short, "here")


def load(path: Path, dtype: Any = "float32") -> Target:
    return Target.load(TargetConfig(str(path), dtype=dtype))


def saved(target: Target, directory: Path, **changes: Any) -> str:
    """Saves a head with this target's fingerprint; returns the directory."""
    save_head(
        tiny.head(target.vocab.embedding.float(), **changes), directory, target=target.fingerprint()
    )
    return str(directory)


def test_other_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def warnings(target: Target, head: str) -> list[str]:
        """The warnings about a head, without the loader's progress bars."""
        load_head_for(target, head)
        return [
            line
            for line in capsys.readouterr().err.splitlines()
            if line.startswith(f"warning: {head}: ")
        ]

    own, other = load(tiny.target(tmp_path / "own")), load(tiny.target(tmp_path / "other", seed=1))
    head = saved(own, tmp_path / "head")
    assert warnings(own, head) == []
    (line,) = warnings(other, head)
    assert "made for a target with other weight files than" in line and "give its target" in line
    assert own.fingerprint() in line
    save_head(tiny.head(own.vocab.embedding.float()), tmp_path / "nameless")  # it names no target
    assert warnings(other, str(tmp_path / "nameless")) == []
    rope, longest = warnings(
        own, saved(own, tmp_path / "moved", rope_theta=5e5, max_position_embeddings=64)
    )
    assert (
        "rope_theta is 500,000" in rope
        and "max_position_embeddings is 64, its target's 256" in longest
    )
    # the same weights in another precision than the head was trained with are the same target
    tied = tiny.target(tmp_path / "tied", tie_word_embeddings=True)
    for path, trained, used in (
        (tmp_path / "own", "bfloat16", "float32"),
        (tied, "float32", "bfloat16"),
    ):
        head = saved(load(path, trained), tmp_path / f"{path.name} {trained}")
        assert warnings(load(path, used), head) == []
