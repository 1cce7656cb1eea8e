"""Points of sweeps as the report makes them, from made-up answers."""

from typing import Any

from aerie.configs.schema.decode import Method, MethodConfig
from aerie.infer.measure.record import Record, TreeShape, tree_shape
from aerie.infer.measure.statistics import group, row
from tests.infer.made_up import drafted, milliseconds, record


def tree(method: Method, **changes: Any) -> TreeShape:
    """What a record says of a method's tree with these changes."""
    shape = tree_shape(MethodConfig.of(method, **changes))
    assert shape is not None
    return shape


def point(
    sweep: str, key: str, value: Any, method: Method, changes: dict[str, Any] | None = None, **answer: Any
) -> dict[str, Any]:
    """A point of a sweep: one greedy answer of 4 tokens in 2 cycles and 20 ms, where vanilla took 40; tau 2."""
    tokens = answer.pop("tokens", (3, 1))
    values = {"head": "eagle1", "ms": milliseconds(10.0, 30.0), "row": 1, **answer}
    answers: list[Record] = [record(temperature=values.get("temperature", 0.0))]
    answers.append(drafted(tokens, method=method, tree=tree(method, **(changes or {})), **values))
    return {**row(group(answers)[1]), "sweep": sweep, "key": key, "value": value}
