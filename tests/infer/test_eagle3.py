"""Decoding with EAGLE-3 heads: lossless in every shape, taps fused, draft ids mapped to the target's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import ChainConfig, DynamicConfig, TreeConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.infer.decode.drafters.eagle import EagleDrafter
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.methods import load_head_for
from aerie.infer.decode.shape import Cycle, Drafting, make_shape
from aerie.model.checkpoint import save_head
from aerie.model.heads.eagle import Eagle3Head
from aerie.model.target import Target
from tests import tiny

TREES = {
    "small": DynamicConfig(levels=3, k=3, nodes=8),
    "published": DynamicConfig(levels=8, k=10, nodes=60),
    "chain": ChainConfig(levels=4),
}


def make_target(**changes: Any) -> Target:
    return Target(tiny.llama(**{"eos_token_id": None, **changes}), TargetConfig(path="tiny"))


def make_head(target: Target, **changes: Any) -> Eagle3Head:
    return tiny.eagle3_head(target.vocab.embedding.float(), **{"scale": 8.0, **changes}).eval()


def decoder(target: Target, tree: TreeConfig, **changes: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(target, Drafting(EagleDrafter(make_head(target, **changes), target), make_shape(tree)))


def prompts(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(5, 320, (1, 3 + 2 * n), generator=generator) for n in range(count)]


def greedy(target: Target, ids: Tensor, new: int) -> list[int]:
    out = target.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
    answer: list[int] = out[0].tolist()
    return answer


@pytest.mark.parametrize(
    "changes", [{"qk_norm": True}, {"fc_norm": True, "norm_output": True}, {"num_hidden_layers": 2}]
)
def test_every_flavour_decodes_what_the_target_writes(changes: dict[str, Any]) -> None:
    target = make_target()
    speculative = decoder(target, TREES["small"], **changes)
    for ids in prompts(3):
        assert speculative.generate(ids, do_sample=False, max_new_tokens=16).sequences[0].tolist() == greedy(
            target, ids, 16
        )


def test_drafting_a_tree_equals_drafting_each_path_alone() -> None:
    target, ids = make_target(), prompts(3)[-1][0]
    head = make_head(target, num_hidden_layers=2)
    with torch.inference_mode():
        taps = target.features(ids[None], after_blocks=(1, 2)).taps
        assert taps is not None

        def fresh() -> EagleDrafter:
            drafter = EagleDrafter(head, target)
            drafter.reset(torch.empty(0), 64)
            drafter.commit(torch.cat([ids[1:], torch.tensor([9])]), taps[0])
            return drafter

        tree = fresh()
        tree.start()
        tree.step(torch.tensor([11, 12, 13]), torch.tensor([0, 0, 0]))
        both = tree.step(torch.tensor([21, 22]), torch.tensor([2, 0]))
        assert both.shape == (2, 107)
        for row, path in enumerate([(13, 21), (11, 22)]):
            alone = fresh()
            alone.start()
            alone.step(torch.tensor([path[0]]), torch.tensor([0]))
            law = alone.step(torch.tensor([path[1]]), torch.tensor([0]))
            torch.testing.assert_close(both[row : row + 1], law, rtol=1e-4, atol=1e-4)
            # the path as one sequence: known features first, then the head's own outputs
            line = torch.cat([ids[1:], torch.tensor([9, *path])])[None]
            features = head.fuse(taps)
            for _ in path:
                count = features.shape[1]
                out = head(line[:, :count], features, torch.arange(count)[None])
                features = torch.cat([features, out[:, -1:]], dim=1)
            out = head(line, features, torch.arange(line.shape[1])[None])
            expected = head.logits(out[:, -1]).log_softmax(-1)
            torch.testing.assert_close(law, expected, rtol=1e-4, atol=1e-4)


class Knowing(EagleDrafter):
    """A head whose law is the known answer's next token, as a draft id; everything around the law is the real thing."""

    def __init__(self, head: Eagle3Head, target: Target, text: list[int]) -> None:
        super().__init__(head, target)
        inside = head.vocabulary.t2d
        self.answer = torch.where(inside, inside.cumsum(0) - 1, -1)[torch.tensor(text)]  # draft ids
        self.size = head.config.draft_vocab_size

    def _log_q(self) -> Tensor:
        assert self._hidden is not None
        laws = torch.full((self._hidden.shape[1], self.size), -30.0)
        place = self._length + self._levels + 1
        if place < len(self.answer):
            laws[:, self.answer[place]] = 0.0
        return laws


def test_the_drafter_sees_true_taps_of_accepted_tokens_only() -> None:
    """After cycles that accept whole paths its state equals that of a drafter that was handed the text at once."""
    target, ids = make_target(), prompts(3)[-1]
    knowing = Knowing(make_head(target, ids=torch.arange(320)), target, greedy(target, ids, 40))
    paths: list[list[int]] = []

    def watch(cycle: Cycle) -> None:
        paths.append(cycle.verdict.path)

    generation = SpeculativeDecoder(target, Drafting(knowing, make_shape(TREES["small"]))).generate(
        ids, do_sample=False, max_new_tokens=24, on_cycle=watch
    )
    assert any(path[-1] > len(path) for path in paths)  # the accepted rows are not the first ones
    with torch.inference_mode():
        taps = target.features(generation.sequences, after_blocks=(1, 2)).taps
        assert taps is not None
        kept = knowing._length
        fresh = EagleDrafter(knowing.head, target)
        fresh.reset(torch.empty(0), 256)
        fresh.commit(generation.sequences[0, 1 : kept + 1], taps[0, :kept])
        torch.testing.assert_close(knowing._hidden, fresh._hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tree", TREES)
def test_draft_ids_reach_the_target_through_d2t_and_a_lost_offset_shows(tree: str) -> None:
    target, ids = make_target(), prompts(3)[-1]
    text = greedy(target, ids, 40)
    known = torch.tensor(sorted({*text, 0, 100, 200, 300, 319}))
    head = make_head(target, ids=known)
    knowing = Knowing(head, target, text)
    found = SpeculativeDecoder(target, Drafting(knowing, make_shape(TREES[tree]))).generate(
        ids, do_sample=False, max_new_tokens=37
    )
    cycles = found.statistics.cycle_tokens
    assert found.sequences[0].tolist() == text[: len(ids[0]) + 37]
    assert all(tokens == TREES[tree].levels + 1 for tokens in cycles[:-1])
    knowing.target_ids = lambda columns: columns  # type: ignore[method-assign] # the mutation: columns taken for ids
    lost = SpeculativeDecoder(target, Drafting(knowing, make_shape(TREES[tree]))).generate(
        ids, do_sample=False, max_new_tokens=37
    )
    assert lost.new_ids == found.new_ids and lost.statistics.tau < 1.5


def test_a_head_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    target = make_target()
    save_head(make_head(target, after_blocks=(1, 4)), tmp_path / "deep")
    with pytest.raises(UserError, match=r"states after blocks \(1, 4\), and tiny has 4 blocks"):
        load_head_for(target, str(tmp_path / "deep"))
    target.generation_config.eos_token_id = [7, 8]
    save_head(make_head(target, ids=torch.tensor([1, 2, 9])), tmp_path / "endless")
    with pytest.raises(UserError, match=r"none of the target's end-of-turn tokens \[7, 8\] is in the draft vocabulary"):
        load_head_for(target, str(tmp_path / "endless"))


def test_positions_that_are_not_the_targets_are_noticed_when_a_head_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target()
    save_head(make_head(target), tmp_path / "same")
    load_head_for(target, str(tmp_path / "same"))
    assert capsys.readouterr().err == ""
    save_head(make_head(target, rope_theta=5e5, max_position_embeddings=64), tmp_path / "other")
    load_head_for(target, str(tmp_path / "other"))
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith(f"warning: {tmp_path / 'other'}: ") for line in lines] == [True, True]
    assert "rope_theta is 500,000" in lines[0] and "max_position_embeddings is 64, its target's 256" in lines[1]
