"""Whether a prompt shares a run of words with an evaluation question, by hashes of all runs."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import blake2b

WORD = re.compile(r"\w+")
COMMON_SHARE, COMMON_LEAST = 0.1, 5  # runs in so many of the questions are their instructions, not their content


def words(text: str) -> list[str]:
    """Its words in lower case, without punctuation."""
    return WORD.findall(text.lower())


class Overlap:
    """Hashes of the runs of `size` words of evaluation questions; questions shorter than that count as a whole.

    The same text counts once, and in any order.
    """

    def __init__(self, questions: Iterable[str], size: int) -> None:
        self.size = size
        counts: Counter[bytes] = Counter()
        self.num_questions = 0
        short: set[bytes] = set()
        for question in set(questions):
            self.num_questions += 1
            found = words(question)
            counts.update(set(self._runs(found)))
            if found and len(found) < size:
                short.add(_hash(found))
        least = max(COMMON_LEAST, COMMON_SHARE * self.num_questions)
        self._hashes = {key for key, count in counts.items() if count < least}
        self._short = short

    def __contains__(self, text: str) -> bool:
        """Whether the text has a run in common with a question, or is a short question itself."""
        found = words(text)
        if _hash(found) in self._short:
            return True
        return any(key in self._hashes for key in self._runs(found))

    def _runs(self, found: list[str]) -> Iterator[bytes]:
        for start in range(len(found) - self.size + 1):
            yield _hash(found[start : start + self.size])


def _hash(found: list[str]) -> bytes:
    return blake2b(" ".join(found).encode("utf-8", "replace"), digest_size=8).digest()
