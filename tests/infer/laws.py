"""Synthetic laws, and checks of trees that are made from them."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aerie.infer.decode.roles import Drafter
from aerie.infer.decode.sampling import Decoding, Sampler
from aerie.infer.decode.tree import Tree, ancestors

SETTINGS = [(1.0, 1.0), (0.6, 0.8)]  # temperature, top-p
VOCAB = 11
Path = tuple[int, ...]


def sampler(temperature: float, top_p: float, seed: int = 11) -> Sampler:
    return Sampler(
        Decoding(temperature > 0, temperature, 0, top_p, 0.0, 8),
        torch.Generator().manual_seed(seed),
    )


GREEDY = sampler(0.0, 1.0)


class TableDrafter(Drafter):
    """Laws that are a fixed function of the path, so that a tree can be checked by enumeration."""

    def __init__(self, seed: int, sharpness: float = 2.0, mapped: bool = False) -> None:
        """mapped: it has a draft vocabulary, where column c is the target's token 2c + 1."""
        self.seed, self.sharpness = seed, sharpness
        self.ids = 2 * torch.arange(VOCAB) + 1 if mapped else None
        self.rows: list[Path] = []
        self.calls = 0

    def law(self, path: Path) -> Tensor:
        dice = torch.Generator().manual_seed(hash((self.seed, path)) % 2**31)
        return (self.sharpness * torch.randn(VOCAB, generator=dice)).log_softmax(-1)

    def survival(self, path: Path) -> float:
        """The sum of log q down the path."""
        return sum(float(self.law(path[:at])[token]) for at, token in enumerate(path))

    def start(self) -> Tensor:
        self.rows, self.calls = [()], 1
        return self.law(())[None]

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.calls += 1
        self.rows = [
            (*self.rows[p], t) for t, p in zip(tokens.tolist(), parents.tolist(), strict=True)
        ]
        return torch.stack([self.law(path) for path in self.rows])


def tree_of(tokens: list[int], parents: list[int]) -> Tree:
    """A tree of these nodes, each after its parent, with laws of zeros."""
    depth, above, zeros = [0], torch.tensor(parents), torch.zeros(len(parents))
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    levels = max(depth)
    mask = ancestors(above, max(levels, 1))
    return Tree(
        torch.tensor(tokens), above, torch.tensor(depth), mask, zeros, zeros, levels, levels
    )


def node_paths(tree: Tree) -> list[Path]:
    """For each node, the tokens on its path, without the root."""
    names: list[Path] = [()]
    for token, parent in zip(tree.tokens.tolist()[1:], tree.parents.tolist()[1:], strict=True):
        names.append((*names[parent], token))
    return names


def paths(tree: Tree) -> dict[Path, float]:
    """path -> log survival, without the root."""
    return dict(zip(node_paths(tree)[1:], tree.survival.tolist()[1:], strict=True))


def check_connected(tree: Tree) -> None:
    """Every parent is in the tree, earlier and one level above; the mask shows all ancestors."""
    parents = tree.parents[1:]
    assert bool((parents >= 0).all()) and bool((parents < torch.arange(1, len(tree))).all())
    assert bool((tree.depth[1:] == tree.depth[parents] + 1).all())
    walked = torch.eye(len(tree), dtype=torch.bool)
    for node, parent in enumerate(tree.parents.tolist()):
        walked[node] |= walked[parent]
    assert tree.mask.equal(walked)


FREE = "detach empty empty_like flatten item lift_fresh resolve_conj resolve_neg to view".split()


class Counting(TorchDispatchMode):
    """Counts reads from the device, and kernels outside the models' forwards."""

    reads = kernels = inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        self.reads += name in ("item", "_local_scalar_dense", "masked_select", "nonzero")
        self.kernels += not (self.inside or name in FREE or func.is_view)
        return func(*args, **(kwargs or {}))

    def around(self, reads: int, function: Any, *arguments: Any, **keys: Any) -> Any:
        self.inside += 1
        self.reads += reads
        result = function(*arguments, **keys)
        self.inside -= 1
        return result
