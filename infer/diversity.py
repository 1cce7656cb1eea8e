"""How varied a set of answers is: distinct n-grams, and how far copying from the context alone would get."""

from collections.abc import Iterable, Sequence


def distinct_ngrams(answers: Iterable[Sequence[int]], size: int = 4) -> tuple[int, int]:
    """(distinct n-grams, all n-grams) pooled over the answers; n-grams do not cross from one answer to the next."""
    seen: set[tuple[int, ...]] = set()
    total = 0
    for answer in answers:
        ngrams = [tuple(answer[start : start + size]) for start in range(len(answer) - size + 1)]
        seen.update(ngrams)
        total += len(ngrams)
    return len(seen), total


def repeats(answer: Sequence[int], size: int = 4) -> list[bool]:
    """For each n-gram of one answer, by where it starts, whether the answer has had it before."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for start in range(len(answer) - size + 1):
        ngram = tuple(answer[start : start + size])
        found.append(ngram in seen)
        seen.add(ngram)
    return found


def repeated_share(answers: Iterable[Sequence[int]], size: int = 4) -> float | None:
    """The share of n-grams that their own answer has had before, pooled over the answers; null without any n-gram.

    Other than `distinct_ngrams` it does not count what two answers share, nor does it grow with their number.
    """
    found = [again for answer in answers for again in repeats(answer, size)]
    return sum(found) / len(found) if found else None


def prompt_lookup_cycles(
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    max_ngram: int = 3,
    num_tokens: int = 10,
    latest: bool = False,
) -> list[int]:
    """New tokens of each cycle that prompt lookup would have needed for this greedy output.

    At T = 0 a draft token is accepted iff it is the output's next token, so the output alone decides and no target
    runs. A cycle's draft is what followed the leftmost (latest: the last) earlier occurrence of the context's final
    n-gram, n = max_ngram down to 1, at most num_tokens, shorter where the context ends. The output's first token
    belongs to the prefill. Source: prompt lookup decoding, with the short continuations that transformers allows.
    """
    context = [*prompt_ids, *output_ids[:1]]
    known: dict[tuple[int, ...], int] = {}  # n-gram -> where its continuation starts
    indexed = 0
    cycles: list[int] = []
    done = 1
    while done < len(output_ids):
        # the context's own final n-gram has no continuation yet and stays out
        for end in range(indexed + 1, len(context)):
            for size in range(1, min(max_ngram, end) + 1):
                ngram = tuple(context[end - size : end])
                if latest or ngram not in known:
                    known[ngram] = end
        indexed = max(indexed, len(context) - 1)
        draft = _draft(context, known, max_ngram, num_tokens)
        rest = output_ids[done:]
        accepted = 0
        while accepted < min(len(draft), len(rest)) and draft[accepted] == rest[accepted]:
            accepted += 1
        new = min(accepted + 1, len(rest))
        context.extend(rest[:new])
        done += new
        cycles.append(new)
    return cycles


def prompt_lookup_tau(
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    max_ngram: int = 3,
    num_tokens: int = 10,
    latest: bool = False,
) -> float:
    """Tau that prompt lookup would reach on this greedy output; 1.0 where nothing was decoded after the prefill."""
    cycles = prompt_lookup_cycles(prompt_ids, output_ids, max_ngram, num_tokens, latest)
    return sum(cycles) / len(cycles) if cycles else 1.0


def pooled_prompt_lookup_tau(pairs: Iterable[tuple[Sequence[int], Sequence[int]]], latest: bool = False) -> float:
    """Tau of prompt lookup over (prompt_ids, output_ids) pairs, pooled over their cycles as every tau here."""
    cycles = [new for prompt, output in pairs for new in prompt_lookup_cycles(prompt, output, latest=latest)]
    return sum(cycles) / len(cycles) if cycles else 1.0


def _draft(context: list[int], known: dict[tuple[int, ...], int], max_ngram: int, num_tokens: int) -> list[int]:
    for size in range(min(max_ngram, len(context)), 0, -1):
        start = known.get(tuple(context[-size:]))
        if start is not None:
            return context[start : start + num_tokens]
    return []
