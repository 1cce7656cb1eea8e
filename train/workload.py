"""How much work rows are. An objective turns it into operations and memory (`train --plan`)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Load:
    """Counts of some rows, which decide the costs."""

    tokens: int
    # of a query and a key in one row, causal or not, as torch's FlopCounterMode counts them
    pairs: int
    slots: Sequence[int]  # supervised after 0, 1, ... unroll steps
    rows: int = 1

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[Any, Any]], num_steps: int) -> "Load":
        """The load of rows of (input_ids, turn_ids)."""
        lengths = []
        slots = np.zeros(num_steps, dtype=np.int64)
        for input_ids, turn_ids in rows:
            lengths.append(len(input_ids))
            # Unroll step k supervises all slots of a turn but its last k + 1.
            # the tokens of each turn, without the row's first token, which nothing predicts
            sizes = np.bincount(np.asarray(turn_ids)[1:])[1:]
            slots += np.clip(sizes[:, None] - 1 - np.arange(num_steps), 0, None).sum(0)
        pairs = sum(length**2 for length in lengths)
        return cls(sum(lengths), pairs, slots.tolist(), len(lengths))


class Work(NamedTuple):
    """The work of a forward pass of some rows."""

    products: int  # weights of the head's matrices times the rows that go through them
    attention: int  # operations of attention's two products, with their backward pass
    laws: int  # operations of the LM heads, with their backward pass


class Activations(NamedTuple):
    """What the backward pass needs of one batch."""

    numbers: int  # that autograd keeps, in the dtype of the forward pass
    law_numbers: int  # in float32: logits, both laws, what the loss makes of them, and gradients


class MatrixSizes(NamedTuple):
    """Numbers of weights of a head's matrices, without embeddings."""

    body: int  # all but the next two
    lm_head: int
    path_correction: int  # of a block head
    fc: int  # in body
    keys_and_values: int  # in body

    @classmethod
    def of(cls, head: Any) -> "MatrixSizes":
        sizes = {
            name: parameter.numel()
            for name, parameter in head.named_parameters()
            if parameter.ndim == 2 and "embed" not in name
        }

        # By name: the same parts have the same names in all heads.
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
    return 12 * pairs * attention_width(config) * getattr(config, "num_hidden_layers", 0)


class KeptNumbers(NamedTuple):
    """Numbers a slot that autograd keeps of all decoder layers."""

    kept: int
    recomputed: int  # of one layer, while the backward pass computes it again

    @classmethod
    def of(cls, config: Any, checkpointing: bool) -> "KeptNumbers":
        """checkpointing: keep each layer's input, keys and values, and compute the rest again."""
        width = config.hidden_size
        kv_width = config.num_key_value_heads * config.head_dim
        # the inputs of its norms and matrices, queries, keys, values, attention's output
        layer = (
            6 * width + 2 * attention_width(config) + 2 * kv_width + 4 * config.intermediate_size
        )
        # Keys and values of an unroll's steps are kept anyway: later steps read them.
        if checkpointing:
            return cls(config.num_hidden_layers * (width + 2 * kv_width), layer)
        return cls(config.num_hidden_layers * layer, 0)
