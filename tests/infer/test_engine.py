"""The decoder writes token for token what the target writes alone, whatever the head drafts."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import ChainConfig, DynamicConfig, TreeConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.infer.decode.drafters.eagle import EagleDrafter
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.shape import Drafting, make_shape
from aerie.model.heads.eagle import Eagle1Head
from aerie.model.target import Target
from tests import tiny

TREES = {
    "small": DynamicConfig(levels=3, k=3, nodes=8),
    "wide": DynamicConfig(levels=5, k=6, nodes=40),
    "chain": ChainConfig(levels=4),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield


def make_target(**changes: Any) -> Target:
    return Target(tiny.llama(**{"eos_token_id": None, **changes}), TargetConfig(path="tiny"))


def decoder(target: Target, tree: TreeConfig, head: Eagle1Head | None = None) -> SpeculativeDecoder:
    head = head or tiny.head(target.vocab.embedding.float(), scale=8.0)
    return SpeculativeDecoder(target, Drafting(EagleDrafter(head.eval(), target), make_shape(tree)))


def foreseeing(target: Target, answer: list[int], tree: TreeConfig) -> SpeculativeDecoder:
    return SpeculativeDecoder(target, Drafting(Prophet(answer, 320), make_shape(tree)))


class Prophet:
    """A drafter that knows the answer: everything it drafts is accepted. Its second choice is always wrong."""

    max_positions = 10_000
    after_blocks = ()

    def __init__(self, answer: list[int], vocab: int) -> None:
        self.answer, self.vocab, self.place, self.level = answer, vocab, 0, 0

    def reset(self, prompt: Tensor, capacity: int) -> None:
        self.place = 0

    def commit(self, tokens: Tensor, features: Tensor) -> None:
        self.place += 1 if self.place == 0 else len(tokens)

    def target_ids(self, columns: Tensor) -> Tensor:
        return columns

    def start(self) -> Tensor:
        self.level = 0
        return self._law(1)

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.level += 1
        return self._law(len(tokens))

    def _law(self, rows: int) -> Tensor:
        law = torch.full((rows, self.vocab), -30.0)
        place = self.place + self.level
        law[:, self.answer[place] if place < len(self.answer) else 0] = 0.0
        return law


def prompts(count: int, vocab: int = 320) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(5, vocab, (1, 3 + 2 * n), generator=generator) for n in range(count)]


def greedy(target: Target, ids: Tensor, new: int) -> list[list[int]]:
    out = target.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
    return list(out.tolist())


@pytest.mark.parametrize("tree", TREES)
def test_greedy_output_equals_generate_on_twenty_prompts(tree: str) -> None:
    target = make_target()
    speculative = decoder(target, TREES[tree])
    for ids in prompts(20):
        generation = speculative.generate(ids, do_sample=False, max_new_tokens=20)
        assert generation.sequences.tolist() == greedy(target, ids, 20)
        assert generation.statistics.new_tokens == 20


@pytest.mark.parametrize("new", [1, 2, 3, 11, 40])
def test_a_prophets_drafts_are_all_accepted_and_counted(new: int) -> None:
    target, ids = make_target(), prompts(3)[-1]
    answer = greedy(target, ids, 41)[0][ids.shape[1] :]
    speculative = SpeculativeDecoder(
        target, Drafting(Prophet(answer, 320), make_shape(DynamicConfig(levels=4, k=2, nodes=9)))
    )
    generation = speculative.generate(ids, do_sample=False, max_new_tokens=new)
    assert generation.new_ids == answer[:new]
    cycles = generation.statistics.cycle_tokens
    assert sum(cycles) == new - 1 and all(tokens == 5 for tokens in cycles[:-1])
    assert generation.statistics.draft_forwards_wasted == 0


@pytest.mark.parametrize("place", [1, 2, 3, 4, 7])
def test_an_end_token_inside_an_accepted_path_ends_the_answer(place: int) -> None:
    target, ids = make_target(), prompts(4)[-1]
    answer = greedy(target, ids, 20)[0][ids.shape[1] :]
    end = answer[place]
    first = answer.index(end)
    speculative = SpeculativeDecoder(
        target, Drafting(Prophet(answer, 320), make_shape(DynamicConfig(levels=5, k=1, nodes=6)))
    )
    generation = speculative.generate(ids, do_sample=False, max_new_tokens=20, eos_token_id=end)
    assert generation.new_ids == answer[: first + 1]
    assert generation.statistics.new_tokens == first + 1


def test_the_drafter_sees_true_features_of_accepted_tokens_only() -> None:
    """After any number of cycles its law equals that of a drafter that was handed the whole text at once."""
    target, ids = make_target(), prompts(3)[-1]
    speculative = decoder(target, TREES["wide"])
    generation = speculative.generate(ids, do_sample=False, max_new_tokens=24)
    drafter = speculative.proposer.drafter
    assert isinstance(drafter, EagleDrafter)
    text = generation.sequences[0]
    with torch.inference_mode():
        features = target.features(generation.sequences).last_hidden[0]
        kept = drafter._length
        fresh = EagleDrafter(drafter.head, target)
        fresh.reset(torch.empty(0), 256)
        fresh.commit(text[1 : kept + 1], features[:kept])
        torch.testing.assert_close(drafter.start(), fresh.start(), rtol=1e-4, atol=1e-4)


def test_drafting_a_tree_equals_drafting_each_path_alone() -> None:
    target, ids = make_target(), prompts(3)[-1][0]
    head = tiny.head(target.vocab.embedding.float(), scale=8.0)
    with torch.inference_mode():
        features = target.features(ids[None]).last_hidden[0]

        def fresh() -> EagleDrafter:
            drafter = EagleDrafter(head, target)
            drafter.reset(torch.empty(0), 64)
            drafter.commit(torch.cat([ids[1:], torch.tensor([9])]), features)
            return drafter

        tree = fresh()
        tree.start()
        tree.step(torch.tensor([11, 12, 13]), torch.tensor([0, 0, 0]))
        both = tree.step(torch.tensor([21, 22]), torch.tensor([2, 0]))
        for row, path in enumerate([(13, 21), (11, 22)]):
            alone = fresh()
            alone.start()
            alone.step(torch.tensor([path[0]]), torch.tensor([0]))
            law = alone.step(torch.tensor([path[1]]), torch.tensor([0]))
            torch.testing.assert_close(both[row : row + 1], law, rtol=1e-4, atol=1e-4)


class Collector(BaseStreamer):
    """A transformers streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_the_prompt_and_then_every_cycles_tokens() -> None:
    target, ids, streamer = make_target(), prompts(3)[-1], Collector()
    generation = decoder(target, TREES["small"]).generate(ids, do_sample=False, max_new_tokens=12, streamer=streamer)
    prompt, first, *cycles = streamer.pieces
    assert prompt == ids[0].tolist() and streamer.ended
    assert [len(piece) for piece in cycles] == generation.statistics.cycle_tokens
    assert first + sum(cycles, []) == generation.new_ids  # noqa: RUF017


def test_phases_add_up_to_the_wall_time() -> None:
    target, ids = make_target(), prompts(2)[-1]
    ms = decoder(target, TREES["small"]).generate(ids, do_sample=False, max_new_tokens=12, timed=True).statistics.ms
    assert sum(v for k, v in ms.items() if k != "wall") == pytest.approx(ms["wall"], rel=1e-6)
    assert min(ms["prefill"], ms["draft"], ms["verify"], ms["commit"]) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.ones(2, 4, dtype=torch.long)}, "one prompt at a time"),
        ({"input_ids": torch.ones(1, 0, dtype=torch.long)}, "empty"),
        ({"input_ids": torch.full((1, 4), 999)}, "outside the target's vocabulary"),
        ({"max_new_tokens": 300}, "exceeds the target's context"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"top_p": 0.0, "do_sample": True}, "top_p"),
        ({"num_beams": 4}, "does not know num_beams"),
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, "without padding"),
    ],
)
def test_what_cannot_be_decoded_is_one_sentence(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"input_ids": prompts(1)[0], "max_new_tokens": 8, **change}
    with pytest.raises(UserError, match=message):
        decoder(make_target(), TREES["small"]).generate(**arguments)


def test_a_head_shorter_than_the_answer_is_refused() -> None:
    target = make_target()
    short = tiny.head(target.vocab.embedding.float(), max_position_embeddings=16)
    with pytest.raises(UserError, match="draft head's max_position_embeddings"):
        decoder(target, TREES["small"], short).generate(prompts(1)[0], max_new_tokens=20)
