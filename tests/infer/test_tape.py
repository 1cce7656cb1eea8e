"""The forwards of an answer, noted and made again: the same numbers, as many as the statistics count, and no trace."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aerie.configs.schema.decode import Method, MethodConfig
from aerie.infer.decode.engine import SpeculativeDecoder, make_decoder
from aerie.infer.decode.methods import Drafters
from aerie.infer.decode.shape import Cycle, Drafting
from aerie.infer.measure import reference as module
from aerie.infer.measure.lossless import write_miniature
from aerie.infer.measure.reference import Call, Part, Tape, taped
from aerie.model.target import Target

IDS = torch.tensor([[1, 5, 3, 4, 1, 6, 3, 2, 7, 0, 5, 4, 2, 6, 1, 7, 3, 0, 4]])
ROWS: list[tuple[Method, str | None]] = [
    ("vanilla", None),
    ("pld", None),
    ("lookahead", None),
    ("sps", "draft_lm"),
    ("medusa", "medusa"),
    ("hydra", "hydra"),
    ("eagle", "eagle1"),
    ("eagle2", "eagle1"),
    ("eagle3", "eagle3"),
]
SETTINGS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> tuple[Drafters, Path]:
    directory = tmp_path_factory.mktemp("miniature")
    return Drafters(Target.load(write_miniature(directory, vocabulary=48))), directory / "heads"


def decoder(miniature: tuple[Drafters, Path], method: Method, kind: str | None) -> SpeculativeDecoder:
    drafters, heads = miniature
    return make_decoder(drafters, MethodConfig(method), None if kind is None else str(heads / kind))


@dataclass
class Keeping(Tape):
    """A tape that keeps what the noted forwards returned."""

    outputs: list[list[Tensor]] = field(default_factory=list)

    def noting(self, part: Part, function: Callable[..., Any]) -> Callable[..., Any]:
        noted = super().noting(part, function)

        def kept(*arguments: Any, **keywords: Any) -> Any:
            before = len(self.calls)
            output = noted(*arguments, **keywords)
            if len(self.calls) > before:
                self.outputs.append(tensors(output))
            return output

        return kept


def tensors(output: Any) -> list[Tensor]:
    """A model's states, or a function's tensor, as they are now."""
    if isinstance(output, Tensor):
        return [output.clone()]
    return [each.clone() for each in (output.last_hidden_state, *(output.hidden_states or ()))]


def cycles_of(calls: list[Call]) -> Iterator[list[int]]:
    """The places of the calls of each cycle; it begins with what takes in the cycle before, and ends with the target.

    The calls after the last one take in what nobody asks for: they are a cycle of their own.
    """
    places: list[int] = []
    for place, call in enumerate(calls):
        if places and calls[places[-1]].part == "target" and call.part == "draft":
            yield places
            places = []
        elif places and call.part == "target" and place >= 2 and calls[place - 2].part == "target":
            yield places  # a target whose drafter has no forwards: a cycle is its forward and its LM head
            places = []
        places.append(place)
    yield places


@pytest.mark.parametrize(("method", "kind"), ROWS)
def test_forwards_made_again_return_the_same_bit_for_bit(
    miniature: tuple[Drafters, Path], method: Method, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cycle by cycle from the last one: its forwards stand behind rows that no later one has written over yet."""
    monkeypatch.setattr(module, "Tape", Keeping)
    tape, _ = taped(decoder(miniature, method, kind), IDS, **SETTINGS)
    assert isinstance(tape, Keeping) and len(tape.outputs) == len(tape.calls) > 4
    with torch.inference_mode():
        for cycle in reversed(list(cycles_of(tape.calls))):
            for place in cycle:
                again = tensors(tape.calls[place].again())
                assert len(again) == len(tape.outputs[place])
                assert all(map(torch.equal, again, tape.outputs[place])), (place, tape.calls[place].part)


@pytest.mark.parametrize(("method", "kind"), [("vanilla", None), ("sps", "draft_lm")])
def test_a_replay_without_branches_returns_the_same_in_its_own_order(
    miniature: tuple[Drafters, Path], method: Method, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[list[Tensor]] = []
    plain = Call.again

    def kept(call: Call) -> Any:
        output = plain(call)
        again.append(tensors(output))
        return output

    monkeypatch.setattr(module, "Tape", Keeping)
    tape, _ = taped(decoder(miniature, method, kind), IDS, **SETTINGS)
    assert isinstance(tape, Keeping)
    monkeypatch.setattr(Call, "again", kept)
    seconds = tape.replay(torch.device("cpu"))
    assert seconds["target"] > 0 and (seconds["draft"] > 0) == (kind is not None)
    assert len(again) == len(tape.outputs)
    for one, other in zip(again, tape.outputs, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize(("method", "kind"), ROWS)
def test_there_are_as_many_forwards_as_the_statistics_count(
    miniature: tuple[Drafters, Path], method: Method, kind: str | None
) -> None:
    """The target's with their LM heads; the draft's by what each kind runs for a law, and to take in a cycle."""
    drafted: list[bool] = []

    def watch(cycle: Cycle) -> None:
        drafted.append(cycle.tree.draft_forwards > 0)

    tape, generation = taped(decoder(miniature, method, kind), IDS, on_cycle=watch, **SETTINGS)
    counted = generation.statistics
    laws, cycles, trees = counted.draft_forwards, counted.target_forwards, sum(drafted)
    assert cycles == len(drafted) > 2 and (trees > 2 or kind is None)
    wanted = {
        None: 0,
        "draft_lm": 2 * laws,  # the LM and its LM head
        "medusa": laws,
        "hydra": laws + cycles,  # the prefix layer
        "eagle1": laws + (laws - trees) + cycles,  # LM heads; the head below the root; the head's true features
        "eagle3": laws + (laws - trees) + 2 * cycles,  # and their fusion
    }
    parts = [call.part for call in tape.calls]
    assert parts.count("target") == 2 * cycles and parts.count("draft") == wanted[kind]


@pytest.mark.parametrize(("method", "kind"), ROWS)
def test_the_decoder_is_unchanged_afterwards_and_writes_the_same(
    miniature: tuple[Drafters, Path], method: Method, kind: str | None
) -> None:
    speculative = decoder(loaded_anew(miniature), method, kind)
    own = speculative.generate(IDS, **SETTINGS)
    owners = owners_of(speculative)
    before = [set(vars(owner)) for owner in owners]
    functions = [getattr(owner, name) for owner, name in places_of(speculative)]
    tape, generation = taped(speculative, IDS, **SETTINGS)
    tape.replay(torch.device("cpu"))
    assert generation.new_ids == own.new_ids
    assert [set(vars(owner)) for owner in owners] == before
    assert [getattr(owner, name) for owner, name in places_of(speculative)] == functions
    noted = len(tape.calls)
    assert speculative.generate(IDS, **SETTINGS).new_ids == own.new_ids and len(tape.calls) == noted


def loaded_anew(miniature: tuple[Drafters, Path]) -> tuple[Drafters, Path]:
    """With a target that no earlier test has touched."""
    drafters, heads = miniature
    return Drafters(Target.load(drafters.target.recipe)), heads


def places_of(speculative: SpeculativeDecoder) -> list[tuple[Any, str]]:
    """(owner, attribute) of every function that is noted."""
    places: list[tuple[Any, str]] = [(speculative.target.decoder, "forward"), (speculative.target, "logits")]
    proposer = speculative.proposer
    return places + (list(proposer.drafter.forwards()) if isinstance(proposer, Drafting) else [])  # type: ignore[attr-defined]


def owners_of(speculative: SpeculativeDecoder) -> list[Any]:
    return [owner for owner, _ in places_of(speculative)]


def test_the_decoder_is_unchanged_after_an_answer_that_fails(miniature: tuple[Drafters, Path]) -> None:
    speculative = decoder(loaded_anew(miniature), "eagle2", "eagle1")
    before = [set(vars(owner)) for owner in owners_of(speculative)]

    def fails(cycle: Cycle) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        taped(speculative, IDS, on_cycle=fails, **SETTINGS)
    assert [set(vars(owner)) for owner in owners_of(speculative)] == before
