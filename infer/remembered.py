"""A decoder that computes nothing twice: its parts' answers to calls that they have had before, in this order."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from infer.cached_lm import TargetStep
from infer.engine import SpeculativeDecoder
from infer.proposer import Cycle, Drafting, Proposer
from infer.sampling import Decoding, Sampler
from infer.tree import Tree

LM_CALLS = ("prefill", "extend", "keep")
DRAFTER_CALLS = ("reset", "commit", "start", "step")
PROPOSER_CALLS = ("reset", "propose", "commit")
SILENT = ("reset", "commit", "keep")  # calls without an answer, which can wait until there is something to answer

Path = tuple[int, ...]
Place = tuple[tuple[Path, ...], tuple[Path, ...]]  # the text, piece by piece, and the paths of the last answer's rows
NOWHERE: Place = ((), ())
Laws = dict[tuple[Decoding, int], tuple[Tensor, Tensor]]  # logits and their law


def remember(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """The same decoder, whose target and draft head run once for each text and path, and whose trees grow once.

    For many short answers to one prompt. A tree of which anything is drawn at random grows anew every time;
    verification and the loop itself run as ever.
    """
    decoder.lm = Remembered(decoder.lm, LM_CALLS, NodeRows())  # type: ignore[assignment]
    if isinstance(decoder.proposer, Drafting):
        decoder.proposer.drafter = Remembered(decoder.proposer.drafter, DRAFTER_CALLS, LawRows())
    if decoder.proposer is not None:
        decoder.proposer = RememberedProposer(decoder.proposer)
    decoder.make_sampler = partial(RememberedSampler, laws={})
    return decoder


class Rows(Protocol):
    """Of calls that answer with a row for each node: how the rows, which depend on text and path, are told apart."""

    def place(self, before: Place, name: str, given: tuple[Any, ...]) -> Place:
        """The text that the object has read after a call, and the paths of the rows of its answer."""
        ...

    def split(self, answer: Any) -> Sequence[Any]: ...

    def joined(self, rows: Sequence[Any]) -> Any: ...


class NodeRows:
    """Those of a target's `extend`: one for each node of a tree."""

    def place(self, before: Place, name: str, given: tuple[Any, ...]) -> Place:
        text, paths = before
        if name == "extend":
            tree: Tree = given[0]
            return text, _paths(tree)
        return ((*text, paths[given[0][-1]]), ()) if name == "keep" else NOWHERE

    def split(self, answer: TargetStep) -> Sequence[Any]:
        columns = (answer.logits, answer.last_hidden, answer.taps)
        return list(zip(*(column for column in columns if column is not None), strict=True))

    def joined(self, rows: Sequence[Any]) -> TargetStep:
        logits, last_hidden, *taps = (torch.stack(column) for column in zip(*rows, strict=True))
        return TargetStep(logits, last_hidden, taps[0] if taps else None)


class LawRows:
    """Those of a drafter's `start` and `step`: a law for each node."""

    def place(self, before: Place, name: str, given: tuple[Any, ...]) -> Place:
        text, paths = before
        if name == "commit":
            return (*text, tuple(given[0].tolist())), ()
        if name == "start":
            return text, ((),)
        if name == "step":
            tokens, parents = (column.tolist() for column in given)
            return text, tuple((*paths[parent], token) for token, parent in zip(tokens, parents, strict=True))
        return NOWHERE

    def split(self, answer: Tensor) -> Sequence[Any]:
        return list(answer)

    def joined(self, rows: Sequence[Any]) -> Tensor:
        return torch.stack(list(rows))


class _State:
    """What an object answered last, and the states that further calls lead to."""

    def __init__(self, answer: Any, place: Place) -> None:
        self.answer, self.place = answer, place
        self.next: dict[Any, _State] = {}


class Remembered:
    """Stands for an object whose answers depend on the calls since the first of `calls`, and on nothing else.

    A call that continues a known history, or whose rows are all known, is answered from memory; for another one the
    whole history is put to the object itself.
    """

    def __init__(self, inner: Any, calls: tuple[str, ...], rows: Rows | None = None) -> None:
        self._inner, self._calls, self._rows = inner, calls, rows
        self._start = self._state = _State(None, NOWHERE)
        self._known: dict[tuple[tuple[Path, ...], Path], Any] = {}  # rows by text and path
        self._history: list[tuple[str, tuple[Any, ...]]] = []
        self._told = 0  # how many calls of this history the object has had

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        return partial(self._call, name, attribute) if name in self._calls else attribute

    def _call(self, name: str, method: Callable[..., Any], *given: Any) -> Any:
        if name == self._calls[0]:
            self._state, self._history, self._told = self._start, [], 0
        self._history.append((name, given))
        key = (name, *map(_key, given))
        if key not in self._state.next:
            self._state.next[key] = self._learned(name, method, given)
        self._state = self._state.next[key]
        return self._state.answer

    def _learned(self, name: str, method: Callable[..., Any], given: tuple[Any, ...]) -> _State:
        """The state after a call that this history has not had."""
        text, paths = place = NOWHERE if self._rows is None else self._rows.place(self._state.place, name, given)
        if name in SILENT:
            return _State(None, place)
        keys = [(text, path) for path in paths]
        if self._rows is None or not keys:
            return _State(self._asked(method, given), place)
        if not all(key in self._known for key in keys):
            self._known.update(zip(keys, self._rows.split(self._asked(method, given)), strict=True))
        return _State(self._rows.joined([self._known[key] for key in keys]), place)

    def _asked(self, method: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        """The object's own answer to the last call of the history."""
        for earlier, arguments in self._history[self._told : -1]:
            getattr(self._inner, earlier)(*arguments)
        self._told = len(self._history)
        return method(*given)


class RememberedProposer:
    """Stands for a proposer, until it turns out to draw at random: from then on it is asked every time."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._asked: Any = Remembered(proposer, PROPOSER_CALLS)
        self._generator = torch.Generator()

    @property
    def max_nodes(self) -> int:
        return self._proposer.max_nodes

    @property
    def max_positions(self) -> int:
        return self._proposer.max_positions

    @property
    def after_blocks(self) -> tuple[int, ...]:
        return self._proposer.after_blocks

    def reset(self, prompt: Tensor, capacity: int, sampler: Sampler) -> None:
        self._generator = sampler.generator
        self._asked.reset(prompt, capacity, sampler)

    def propose(self, root: Tensor, max_levels: int) -> Tree:
        if self._asked is self._proposer:
            return self._proposer.propose(root, max_levels)
        before = self._generator.get_state()
        tree: Tree = self._asked.propose(root, max_levels)
        if not torch.equal(before, self._generator.get_state()):
            self._asked = self._proposer  # which has had this prompt's calls, or could not have drawn
        return tree

    def commit(self, tokens: Tensor, features: Tensor, cycle: Cycle | None) -> None:
        self._asked.commit(tokens, features, cycle)


class RememberedSampler(Sampler):
    """A sampler that puts no logits through the processors twice. The very same logits: what is remembered is."""

    def __init__(self, decoding: Decoding, generator: torch.Generator, laws: Laws) -> None:
        super().__init__(decoding, generator)
        self._laws = laws

    def law(self, logits: Tensor) -> Tensor:
        key = (self.decoding, id(logits))
        if key not in self._laws:
            self._laws[key] = (logits, super().law(logits))  # with the logits, so that no others get their id
        return self._laws[key][1]


def _paths(tree: Tree) -> tuple[Path, ...]:
    """The tokens down to every node, the root's with them."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    paths: list[Path] = [(tokens[0],)]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return tuple(paths)


def _key(argument: Any) -> Any:
    """Something to look an argument up by: the bytes of tensors, what an answer depends on of other things."""
    if isinstance(argument, Tensor):
        return (tuple(argument.shape), argument.cpu().numpy().tobytes())
    if isinstance(argument, Tree):
        return tuple(map(_key, (argument.tokens, argument.depth, argument.mask)))
    if isinstance(argument, Sampler):
        return argument.decoding
    if isinstance(argument, Cycle):
        return tuple(argument.verdict.path), tuple(argument.verdict.tokens), argument.verdict.bonus
    return tuple(argument) if isinstance(argument, list) else argument
