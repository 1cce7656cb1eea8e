"""Tokenizers are compared by what their ids mean."""

import pytest

from aerie.configs.errors import UserError
from aerie.model.target import require_same_token_ids

TARGET = {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize("draft", [TARGET, {"a": 0, "b": 1}, {**TARGET, "<tool>": 3}])
def test_tokens_that_only_one_side_has_are_no_difference(draft: dict[str, int]) -> None:
    require_same_token_ids(draft, TARGET, 3, "draft", "target")


@pytest.mark.parametrize(
    ("draft", "num_rows", "said"),
    [
        ({"a": 0, "b": 2, "c": 1}, 3, "draft: tokenizer: token 'b' has id 2, in target it has id 1"),
        ({"a": 0, "x": 1, "c": 2}, 3, "draft: tokenizer: token 'x' has id 1, in target that is 'b'"),
        (TARGET, 2, "draft: has 2 token embeddings, and target has tokens beyond them ('c', id 2)"),
    ],
)
def test_an_id_with_two_meanings_and_a_token_without_a_row_are_refused(
    draft: dict[str, int], num_rows: int, said: str
) -> None:
    with pytest.raises(UserError) as refused:
        require_same_token_ids(draft, TARGET, num_rows, "draft", "target")
    assert said in str(refused.value)
