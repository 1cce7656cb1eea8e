"""How much work rows are. An objective turns this into operations and memory (`train --plan`)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Load:
    """Counts of some rows, which decide their costs."""

    tokens: int
    # (query, key) pairs within the rows, causal or not, as torch's FlopCounterMode counts them
    pairs: int
    slots: Sequence[int]  # numbers of supervised slots in unroll step 0, 1, ...
    rows: int = 1

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[Any, Any]], num_steps: int) -> "Load":
        """The load of rows of (input_ids, turn_ids)."""
        lengths = []
        slots = np.zeros(num_steps, dtype=np.int64)
        for input_ids, turn_ids in rows:
            lengths.append(len(input_ids))
            # The tokens of each turn, without the row's first token, which nothing predicts.
            # Unroll step k supervises all of a turn's slots but the last k + 1.
            sizes = np.bincount(np.asarray(turn_ids)[1:])[1:]
            slots += np.clip(sizes[:, None] - 1 - np.arange(num_steps), 0, None).sum(0)
        pairs = sum(length**2 for length in lengths)
        return cls(sum(lengths), pairs, slots.tolist(), len(lengths))


class Work(NamedTuple):
    """The work of a forward pass of some rows."""

    products: int  # for each of the head's matrices: weights times rows that go through it
    attention: int  # operations of attention's two products, with their backward pass
    laws: int  # operations of the LM heads, with their backward pass


class Activations(NamedTuple):
    """What one batch keeps for the backward pass."""

    numbers: int  # numbers that autograd keeps, in the dtype of the forward pass
    law_numbers: int  # float32 numbers: logits, both laws, the loss's results, gradients


class MatrixSizes(NamedTuple):
    """Numbers of weights in a head's matrices, without embeddings."""

    body: int  # all matrices but the next two
    lm_head: int
    path_correction: int  # the matrices with which a block head corrects logits
    fc: int  # part of body
    keys_and_values: int  # part of body

    @classmethod
    def of(cls, head: Any) -> "MatrixSizes":
        sizes = {
            name: parameter.numel()
            for name, parameter in head.named_parameters()
            if parameter.ndim == 2 and "embed" not in name
        }

        # By name, because the same parts have the same names in all heads.
        def of_names(*parts: str) -> int:
            return sum(size for name, size in sizes.items() if any(part in name for part in parts))

        lm_head = of_names("lm_head")
        path_correction = of_names("markov_w")
        body = sum(sizes.values()) - lm_head - path_correction
        return cls(
            body=body,
            lm_head=lm_head,
            path_correction=path_correction,
            fc=sizes.get("fc.weight", 0),
            keys_and_values=of_names("k_proj", "v_proj"),
        )


def attention_width(config: Any) -> int:
    """The width of all query heads together; 0 for a head without attention."""
    heads = getattr(config, "num_attention_heads", None) or 0
    return heads * (getattr(config, "head_dim", None) or 0)


def attention_operations(config: Any, pairs: int) -> int:
    """Operations of attention's two products for these pairs, with their backward pass."""
    return 12 * pairs * attention_width(config) * getattr(config, "num_hidden_layers", 0)


class KeptNumbers(NamedTuple):
    """Numbers per slot that autograd keeps for all decoder layers."""

    kept: int
    recomputed: int  # for one layer, while the backward pass computes it again

    @classmethod
    def of(cls, config: Any, checkpointing: bool) -> "KeptNumbers":
        """With checkpointing, autograd keeps each layer's input, keys and values, and computes the
        rest again."""
        width = config.hidden_size
        kv_width = config.num_key_value_heads * config.head_dim
        # The inputs of norms and matrices, queries, keys, values, and attention's output.
        layer = (
            6 * width + 2 * attention_width(config) + 2 * kv_width + 4 * config.intermediate_size
        )
        # Keys and values stay in any case, because later steps of an unroll read them.
        if checkpointing:
            return cls(config.num_hidden_layers * (width + 2 * kv_width), layer)
        return cls(config.num_hidden_layers * layer, 0)
