"""A tree whose form is known beforehand: EAGLE-1's 25 nodes, Medusa's 63, or one rebuilt from a head's calibration."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from infer.calibration.calibrator import Calibrate, unchanged
from infer.choices import Choice
from infer.sampling import Sampler, race
from infer.stop import Level, Stop
from infer.tree import Proposal, Tree, ancestors, draft_ids

if TYPE_CHECKING:
    from infer.shape import Drafter

Children = Literal["best", "sampled", "replaced"]


class StaticTree:
    """Gives every node of the form the child of its rank: the r-th most probable token, or the r-th that was drawn.

    Where the target samples, children are drawn from q under the target's own processors: `sampled` without replacement
    (R3, EAGLE-1), `replaced` with (R4, SpecInfer). `best` ones, and all at temperature 0, are q's most probable tokens
    (R2, R0). A law that the processors leave fewer tokens than a node has children gives it fewer children: the places
    are drafted below and dropped at the end, which is the one synchronisation; no token that was drawn is ever dropped.
    """

    def __init__(
        self, stop: Stop, choices: tuple[Choice, ...], children: Children, calibrate: Calibrate = unchanged
    ) -> None:
        self.stop, self.calibrate = stop, calibrate
        self.choices, self.children = choices, children
        self._forms: dict[tuple[int, torch.device], _Form] = {}

    @property
    def levels(self) -> int:
        return max(map(len, self.choices))

    @property
    def max_nodes(self) -> int:
        return len(self.choices) + 1

    @property
    def draft_slots(self) -> int:
        return len({choice[:-1] for choice in self.choices if len(choice) > 1})

    def grow(self, drafter: "Drafter", root: Tensor, max_levels: int, sampler: Sampler) -> Tree:
        self.stop.begin()
        log_q, forwards = drafter.start(), 1  # [rows, Vd], one row per node that is expanded
        form = self._form(log_q.shape[-1], root.device)
        sampled = self.children != "best" and sampler.decoding.do_sample
        zero = torch.zeros(1, device=root.device)
        tokens, confidences, survivals, above = [root], [zero], [zero], zero
        laws: list[Tensor] = []
        levels = min(len(form.levels), max_levels)
        for depth, level in enumerate(form.levels[:levels], start=1):
            chances, columns = self._children(log_q, level.width, sampler, laws if sampled else None)
            confidence = self.calibrate(chances[level.rows, level.ranks])  # [n]
            survival = above[level.rows] + confidence
            tokens.append(drafter.target_ids(columns[level.rows, level.ranks]))
            confidences.append(confidence)
            survivals.append(survival)
            inner = level.inner
            alive, order = survival[inner].sort(descending=True, stable=True)
            best = inner[order]
            if depth == levels or self.stop.ends(Level(depth, confidence[best], alive, log_q, above, level.rows[best])):
                break
            log_q = drafter.step(tokens[-1][inner], level.rows[inner])
            forwards += 1
            above = survival[inner]
        drafted = _Drafted(torch.cat(tokens), torch.cat(confidences), torch.cat(survivals), len(tokens) - 1, forwards)
        if not sampled:
            return _tree(form, drafted, None)
        rows = torch.cat(laws)
        places = form.law_rows[: drafted.tokens.shape[0]].clamp(max=rows.shape[0] - 1)  # a leaf's law is not read
        rule: Literal["R3", "R4"] = "R3" if self.children == "sampled" else "R4"
        return _survivors(_tree(form, drafted, Proposal(rule, rows[places], draft_ids(drafter.target_ids, rows))))

    def _children(
        self, log_q: Tensor, width: int, sampler: Sampler, laws: list[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """log q and the columns of `width` children of each row [rows, width]; laws, where given, gets q [rows, Vd]."""
        if laws is None:
            chances, columns = log_q.topk(width)
            return chances, columns
        law = sampler.law(log_q)
        laws.append(law)
        if self.children == "replaced":
            columns = law.multinomial(width, replacement=True, generator=sampler.generator)
        else:
            columns = race(law, sampler.generator).topk(width).indices
        return law.gather(-1, columns).log(), columns

    def _form(self, vocab_size: int, device: torch.device) -> "_Form":
        """The form as tensors, without the ranks that a draft vocabulary of this size has no tokens for."""
        key = (vocab_size, device)
        if key not in self._forms:
            self._forms[key] = _make_form([c for c in self.choices if max(c) < vocab_size], device)
        return self._forms[key]


@dataclass(frozen=True)
class _FormLevel:
    """The n nodes of one level."""

    rows: Tensor  # [n] which expanded node of the level above each stands below
    ranks: Tensor  # [n]
    inner: Tensor  # [m] those of them that have children
    width: int  # children to be found per row


@dataclass(frozen=True)
class _Form:
    """What is known of a static tree before anything is drafted."""

    levels: list[_FormLevel]
    parents: Tensor  # [N]
    depth: Tensor  # [N]
    mask: Tensor  # [N, N]
    law_rows: Tensor  # [N] which of the laws, in the order of expansion, a node's children come from; 0 for a leaf


@dataclass(frozen=True)
class _Drafted:
    tokens: Tensor  # [n], n <= N where the stop rule ended growth
    confidence: Tensor
    survival: Tensor
    levels: int
    forwards: int


def _make_form(choices: list[Choice], device: torch.device) -> _Form:
    """The form of choices in level order."""
    nodes: list[Choice] = [(), *choices]
    parents = {choice[:-1] for choice in choices}
    expanded = [node for node in nodes if node in parents]
    place = {node: number for number, node in enumerate(nodes)}
    levels = []
    for depth in range(1, 1 + max(map(len, nodes))):
        here = [node for node in nodes if len(node) == depth]
        above = [node for node in expanded if len(node) == depth - 1]
        levels.append(
            _FormLevel(
                rows=torch.tensor([above.index(node[:-1]) for node in here], device=device),
                ranks=torch.tensor([node[-1] for node in here], device=device),
                inner=torch.tensor([n for n, node in enumerate(here) if node in parents], device=device).long(),
                width=1 + max(node[-1] for node in here),
            )
        )
    above_of = torch.tensor([place[node[:-1]] for node in nodes], device=device)
    return _Form(
        levels=levels,
        parents=above_of,
        depth=torch.tensor([len(node) for node in nodes], device=device),
        mask=ancestors(above_of, len(levels)),
        law_rows=torch.tensor([expanded.index(node) if node in parents else 0 for node in nodes], device=device),
    )


def _tree(form: _Form, drafted: _Drafted, proposal: Proposal | None) -> Tree:
    count = drafted.tokens.shape[0]
    return Tree(
        tokens=drafted.tokens,
        parents=form.parents[:count],
        depth=form.depth[:count],
        mask=form.mask[:count, :count],
        confidence=drafted.confidence,
        survival=drafted.survival,
        levels=drafted.levels,
        draft_forwards=drafted.forwards,
        proposal=proposal,
    )


def _survivors(tree: Tree) -> Tree:
    """The tree without the places that no token was left for (their own or an ancestor's chance is zero)."""
    assert tree.proposal is not None
    kept = (tree.survival > float("-inf")).nonzero()[:, 0]
    if kept.shape[0] == len(tree):
        return tree
    place = torch.zeros_like(tree.parents).scatter_(0, kept, torch.arange(kept.shape[0], device=kept.device))
    return Tree(
        tokens=tree.tokens[kept],
        parents=place[tree.parents[kept]],
        depth=tree.depth[kept],
        mask=tree.mask[kept][:, kept],
        confidence=tree.confidence[kept],
        survival=tree.survival[kept],
        levels=tree.levels,
        draft_forwards=tree.draft_forwards,
        proposal=Proposal(tree.proposal.rule, tree.proposal.laws[kept], tree.proposal.ids),
    )
