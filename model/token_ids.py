"""Whether two LMs mean the same by their token ids. Tokenizers are compared by their vocabulary, never by name."""

from collections.abc import Mapping

from model.errors import UserError

Vocabulary = Mapping[str, int]  # a tokenizer's get_vocab()


def require_same_token_ids(draft: Vocabulary, target: Vocabulary, num_rows: int, draft_name: str, name: str) -> None:
    """UserError unless the draft LM draft_name, with num_rows embeddings, reads token ids as the target `name` does.

    A token that both have must have one id, an id that both use must be one token, and the draft LM must have a row for
    every token of the target. Rows that pad either vocabulary, and added tokens of one side, are no difference.
    """
    tokens = {number: token for token, number in target.items()}
    for token, number in draft.items():
        other = target.get(token, number)
        if other != number or tokens.get(number, token) != token:
            found = f"token {token!r} has id {number}, in {name} "
            found += f"it has id {other}" if other != number else f"that is {tokens[number]!r}"
            raise UserError(
                f"{draft_name}: tokenizer: {found}; a draft LM shares the tokenizer of its target, so choose another"
            )
    missing = [token for token, number in target.items() if number >= num_rows]
    if missing:
        raise UserError(
            f"{draft_name}: has {num_rows:,} token embeddings, and {name} has tokens beyond them ({missing[0]!r}, id "
            f"{target[missing[0]]:,}); choose a draft LM of the same vocabulary"
        )
