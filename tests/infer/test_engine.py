"""The decoder writes token for token what the target writes alone, whatever the head drafts."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import ChainConfig, DynamicConfig, StaticConfig, TreeConfig
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.methods import DRAFTERS
from aerie.infer.decode.shape import Cycle, Drafter, Drafting, make_shape
from aerie.model.target import Target
from tests.infer.draws import TREES, greedy, make_head, make_target, prompts, tiny_vocabulary
from tests.infer.laws import SETTINGS

ROWS: dict[str, tuple[TreeConfig, str]] = {  # and the rule that judges them where tokens are sampled
    "chain": (ChainConfig(levels=4), "R1"),
    "chain of the best": (ChainConfig(levels=4, children="best"), "R2"),
    "eagle1": (StaticConfig(choices="eagle1"), "R3"),
    "eagle1 replaced": (StaticConfig(choices="eagle1", children="replaced"), "R4"),
    "medusa63": (StaticConfig(choices="medusa63", children="best"), "R2"),
}


def decoder(target: Target, tree: TreeConfig, kind: str = "eagle1", **changes: Any) -> SpeculativeDecoder:
    """A decoder with a random head."""
    drafter = DRAFTERS[kind](make_head(target, kind, **changes), target)
    return SpeculativeDecoder(target, Drafting(drafter, make_shape(tree)))


class Prophet(Drafter):
    """A drafter that knows the answer: everything it drafts is accepted. Its second choice is always wrong."""

    def __init__(self, answer: list[int]) -> None:
        self.answer, self.place, self.level = answer, 0, 0

    def reset(self, prompt: Tensor, capacity: int) -> None:
        self.place = 0

    def commit(self, tokens: Tensor, features: Tensor) -> None:
        self.place += 1 if self.place == 0 else len(tokens)

    def start(self) -> Tensor:
        self.level = 0
        return self._law(1)

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.level += 1
        return self._law(len(tokens))

    def _law(self, rows: int) -> Tensor:
        place = self.place + self.level
        known = self.answer[place] if place < len(self.answer) else 0
        return torch.full((rows, 320), -30.0).index_fill_(1, torch.tensor(known), 0.0)


@pytest.mark.parametrize(
    ("kind", "changes", "tree"),
    [
        *(("eagle1", {}, tree) for tree in TREES),
        ("eagle3", {"qk_norm": True}, "small"),
        ("eagle3", {"fc_norm": True, "norm_output": True}, "small"),
        ("eagle3", {"num_hidden_layers": 2}, "small"),
    ],
)
def test_greedy_output_equals_generate(kind: str, changes: dict[str, Any], tree: str) -> None:
    target = make_target()
    speculative = decoder(target, TREES[tree], kind, **changes)
    for ids in prompts(16 if kind == "eagle1" else 3):
        generation = speculative.generate(ids, do_sample=False, max_new_tokens=20)
        assert generation.sequences.tolist() == greedy(target, ids, 20)
        assert generation.statistics.new_tokens == 20


@pytest.mark.parametrize(("new", "end"), [(1, None), (2, None), (3, None), (11, None), (40, None), (20, 1), (20, 3)])
def test_right_drafts_are_all_accepted_and_counted_up_to_the_end(new: int, end: int | None) -> None:
    """The end token, the one at this place of the answer, may stand inside an accepted path."""
    target, ids = make_target(), prompts(4)[-1]
    answer = greedy(target, ids, 41)[0][ids.shape[1] :]
    tree = DynamicConfig(levels=4, k=2, nodes=9)
    settings = {"do_sample": False, "max_new_tokens": new, **({} if end is None else {"eos_token_id": answer[end]})}
    generation = SpeculativeDecoder(target, Drafting(Prophet(answer), make_shape(tree))).generate(ids, **settings)
    written = new if end is None else answer.index(answer[end]) + 1
    assert generation.new_ids == answer[:written] and generation.statistics.new_tokens == written
    cycles = generation.statistics.cycle_tokens
    assert sum(cycles) == written - 1 and all(tokens == 5 for tokens in cycles[:-1])
    assert generation.statistics.draft_forwards_wasted == 0


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(("temperature", "top_p"), [*SETTINGS, (0.0, 1.0)])
def test_every_cycle_is_verified_by_the_rule_of_its_row(row: str, temperature: float, top_p: float) -> None:
    (tree, rule), rules, widths = ROWS[row], set(), []

    def watch(cycle: Cycle) -> None:
        if len(cycle.tree) > 1:
            rules.add(cycle.rule)
            widths.append(len(cycle.tree))

    settings: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": 0, "max_new_tokens": 16}
    out = decoder(make_target(), tree, scale=3.0).generate(prompts(2)[-1], **settings, on_cycle=watch)
    assert rules == {rule if temperature else "R0"} == {out.statistics.verify}
    assert max(widths) <= make_shape(tree).max_nodes
    assert out.statistics.new_tokens == 16


class Mirror(Drafter):
    """A drafter whose laws are the target's own."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.text: list[int] = []
        self.paths: list[list[int]] = [[]]

    def reset(self, prompt: Tensor, capacity: int) -> None:
        self.text = prompt[:1].tolist()

    def commit(self, tokens: Tensor, features: Tensor) -> None:
        self.text += tokens.tolist()

    def start(self) -> Tensor:
        self.paths = [[]]
        return self._laws()

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        above = self.paths
        self.paths = [[*above[row], token] for row, token in zip(parents.tolist(), tokens.tolist(), strict=True)]
        return self._laws()

    def _laws(self) -> Tensor:
        batch = torch.tensor([[*self.text, *path] for path in self.paths])
        return self.target.model(batch).logits[:, -1].log_softmax(-1)


@pytest.mark.parametrize("row", ["chain", "eagle1", "eagle1 replaced"])
def test_a_draft_of_the_targets_own_laws_is_always_accepted(row: str) -> None:
    target, accepted = tiny_vocabulary(), []
    shape = make_shape(ROWS[row][0])

    def watch(cycle: Cycle) -> None:
        accepted.append(cycle.verdict.accepted)
        assert cycle.verdict.accepted == cycle.tree.levels

    settings: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "top_k": 0, "max_new_tokens": 30}
    SpeculativeDecoder(target, Drafting(Mirror(target), shape)).generate(
        torch.tensor([[1, 5, 3]]), **settings, on_cycle=watch
    )
    assert max(accepted) == shape.levels


class Collector(BaseStreamer):
    """A transformers streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_the_prompt_and_then_every_cycles_tokens_and_phases_add_up() -> None:
    target, ids, streamer = make_target(), prompts(3)[-1], Collector()
    generation = decoder(target, TREES["small"]).generate(
        ids, do_sample=False, max_new_tokens=12, streamer=streamer, timed=True
    )
    prompt, first, *cycles = streamer.pieces
    assert prompt == ids[0].tolist() and streamer.ended
    assert [len(piece) for piece in cycles] == generation.statistics.cycle_tokens
    assert first + sum(cycles, []) == generation.new_ids  # noqa: RUF017
    ms = generation.statistics.ms
    assert sum(v for k, v in ms.items() if k != "wall") == pytest.approx(ms["wall"], rel=1e-6)
    assert min(ms["prefill"], ms["draft"], ms["verify"], ms["commit"]) > 0
    assert sum(generation.statistics.cycle_ms) == pytest.approx(ms["draft"] + ms["verify"] + ms["commit"], rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.ones(2, 4, dtype=torch.long)}, "one prompt at a time"),
        ({"input_ids": torch.ones(1, 0, dtype=torch.long)}, "at least one token"),
        ({"input_ids": torch.full((1, 4), 999)}, "outside the target's vocabulary"),
        ({"max_new_tokens": 300}, "exceeds the target's context"),
        ({"max_new_tokens": 60}, "draft head's max_position_embeddings"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"top_p": 0.0, "do_sample": True}, "top_p"),
        ({"num_beams": 4}, "does not know num_beams"),
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, "without padding"),
    ],
)
def test_what_cannot_be_decoded_is_one_sentence(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"input_ids": prompts(1)[0], "max_new_tokens": 8, **change}
    with pytest.raises(UserError, match=message):
        decoder(make_target(), TREES["small"], max_position_embeddings=48).generate(**arguments)
