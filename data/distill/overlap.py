"""Whether a prompt shares a run of words with an evaluation question, by hashes of all runs."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import blake2b

# Scripts that set no blanks between words: Thai, Lao, Burmese, Khmer, kana and Chinese characters.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
CHARACTER = re.compile(f"[{UNSPACED}]")
COMMON_SHARE, COMMON_LEAST = 0.1, 5  # runs in so many of the questions are their instructions, not their content
LEAST_WORDS = 3  # questions of fewer words ("Go on.") are looked for as the whole text only
CHARACTERS_OF_A_WORD = 2  # in a script without blanks, as Chinese words mostly have


def words(text: str) -> list[str]:
    """Its words in lower case, without punctuation; where a script sets no blanks, each character is one."""
    return WORD.findall(text.lower())


class Overlap:
    """Hashes of the runs of `size` words of evaluation questions, but for runs that many of them share.

    A question that has no such run of its own (it is shorter, or all its runs are shared) counts as a run of its own
    length, so that sentences before and behind it do not hide it. A question that is named twice counts once.
    """

    def __init__(self, questions: Iterable[str], size: int) -> None:
        self.size = size
        asked = [list(found) for found in dict.fromkeys(tuple(words(question)) for question in questions)]
        counts = Counter(key for found in asked for key in set(_runs(found, size)))
        least = max(COMMON_LEAST, COMMON_SHARE * len(asked))
        self._hashes: dict[int, set[bytes]] = {size: {key for key, count in counts.items() if count < least}}
        self._whole = {_hash(found) for found in asked if found}
        for found in asked:
            if _num_words(found) >= LEAST_WORDS and self._hashes[size].isdisjoint(_runs(found, size)):
                self._hashes.setdefault(len(found), set()).add(_hash(found))

    def __contains__(self, text: str) -> bool:
        """Whether the text has a run in common with a question, or has a whole question in it."""
        found = words(text)
        if _hash(found) in self._whole:
            return True
        return any(key in hashes for size, hashes in self._hashes.items() for key in _runs(found, size))


def _num_words(found: list[str]) -> float:
    """How many words these are, those of scripts without blanks estimated."""
    return sum(1.0 / CHARACTERS_OF_A_WORD if CHARACTER.match(word) else 1.0 for word in found)


def _runs(found: list[str], size: int) -> Iterator[bytes]:
    for start in range(len(found) - size + 1):
        yield _hash(found[start : start + size])


def _hash(found: list[str]) -> bytes:
    return blake2b(" ".join(found).encode("utf-8", "replace"), digest_size=8).digest()
