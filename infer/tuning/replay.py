"""What any dynamic tree would have had accepted, from a recording: no model, exact counts of cycles and forwards."""

from dataclasses import dataclass, fields

import numpy as np

from infer.tuning.recording import Floats, Integers, Recording


@dataclass(frozen=True)
class Cycles:
    """What a tree does to the recorded answers. draft_levels sums the levels drafted; tokens exclude the prefill's."""

    tokens: int
    target_forwards: int
    draft_trees: int  # cycles that drafted (the last token of an answer may need no draft)
    draft_levels: int
    accepted: int

    @property
    def tau(self) -> float:
        return self.tokens / self.target_forwards if self.target_forwards else 1.0


def path_ranks(recording: Recording, levels: int, k: int) -> Integers:
    """[P, levels]: as `_full_ranks`, no draft deeper than what max_new_tokens leaves beside the bonus token."""
    ranks = _full_ranks(recording, levels, k)
    room = np.minimum(recording.allowed - 1, levels)
    for depth in range(levels):
        late = np.flatnonzero(room == depth)
        if late.size:
            ranks[late] = np.iinfo(np.int64).max
            if depth:
                ranks[late, :depth] = _full_ranks(_places(recording, late), depth, k)
    return ranks


def _places(recording: Recording, index: Integers) -> Recording:
    return Recording(**{field.name: getattr(recording, field.name)[index] for field in fields(recording)})


def _full_ranks(recording: Recording, levels: int, k: int) -> Integers:
    """[P, levels]: where the text's own token at each depth stands among the candidates of a tree of this depth and k.

    0 is the best of all candidates of all levels by survival, ties going to the shallower; the number of candidates
    where the tree does not have the token. Never falls with depth.

    A node that the wide recording did not expand has no children here either. It is one that k' > k rows outranked: its
    chance to be on the text's path is small, and the count of a tree can only be underestimated.
    """
    assert levels <= recording.levels and k <= recording.k, "the recording is not that wide"
    places, full = recording.tokens.shape[0], recording.k
    at = np.arange(places)
    alive = np.zeros((places, full), dtype=bool)  # rows of this level that the small tree expands
    alive[:, 0] = True
    row = np.zeros(places, dtype=np.int64)  # the row below the text's own path; -1: the path was left
    pool: list[Floats] = []
    places_in_pool = np.full((places, levels), -1, dtype=np.int64)
    for level in range(levels):
        allowed = alive[:, :, None] & (np.arange(full) < k)
        survival = np.where(allowed, recording.survival[:, level], -np.inf).astype(np.float32)  # [P, K, K]
        pool.append(survival.reshape(places, -1))
        own = recording.tokens[at, level, row]  # [P, K]
        hit = (own == recording.text[:, level, None]) & allowed[at, row]
        hit &= ((row >= 0) & (recording.text[:, level] >= 0))[:, None]
        child = np.where(hit.any(1), hit.argmax(1), -1)
        flat = np.where(child >= 0, row * full + child, -1)
        places_in_pool[:, level] = np.where(flat >= 0, level * full * full + flat, -1)
        if level + 1 < levels:
            best = np.argsort(-pool[-1], axis=1, kind="stable")[:, :k]  # [P, k] the small tree's frontier
            wide = recording.frontier[:, level]  # [P, K] the recording's
            alive = (wide[:, :, None] == best[:, None]).any(-1)
            alive &= np.isfinite(np.take_along_axis(pool[-1], wide, axis=1)) & _first_of_each(wide)
            below = (wide == flat[:, None]) & alive & (flat >= 0)[:, None]
            row = np.where(below.any(1), below.argmax(1), -1)
    return _ranks(np.concatenate(pool, axis=1), places_in_pool)


def accepted(ranks: Integers, nodes: int) -> Integers:
    """[P] drafted tokens that a tree of this many nodes, the root among them, has accepted at each place."""
    count: Integers = np.logical_and.accumulate(ranks < nodes - 1, axis=1).sum(1)
    return count


def cycles(recording: Recording, accepted_at: Integers, levels: int) -> Cycles:
    """The cycles that a tree of these levels needs for the recorded answers: each begins where the last one ended."""
    tokens = forwards = trees = drafted = taken = 0
    for number in np.unique(recording.answer):
        places = np.flatnonzero(recording.answer == number)
        count, left = accepted_at[places].tolist(), recording.left[places].tolist()
        allowed = recording.allowed[places].tolist()
        place, end = 0, left[0]
        while place < end:
            here = place if place < len(count) else None  # the last token may have no draft
            gain = min(count[here] + 1, end - place) if here is not None else 1
            depth = min(levels, allowed[here] - 1) if here is not None else 0
            forwards += 1
            trees += depth > 0
            drafted += max(depth, 0)
            taken += min(count[here], gain) if here is not None else 0
            tokens += gain
            place += gain
    return Cycles(tokens, forwards, trees, drafted, taken)


def _first_of_each(values: Integers) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """[P, K] whether no earlier entry of the row is the same (a frontier narrower than K is padded with zeros)."""
    same = values[:, :, None] == values[:, None]
    first: np.ndarray[tuple[int, int], np.dtype[np.bool_]] = ~np.tril(same, -1).any(-1)
    return first


def _ranks(pool: Floats, chosen: Integers) -> Integers:
    """[P, levels] the ranks of chosen entries of pool [P, M] by falling value, the earlier first where they tie."""
    size = pool.shape[1]
    ranks = np.full(chosen.shape, size, dtype=np.int64)
    index = np.arange(size)
    for level in range(chosen.shape[1]):
        place = chosen[:, level]
        value = np.where(place >= 0, pool[np.arange(len(pool)), place], np.inf)[:, None]
        before = (pool > value) | ((pool == value) & (index < place[:, None]))
        ranks[:, level] = np.where(place >= 0, before.sum(1), size)
    return ranks
