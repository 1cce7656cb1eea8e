"""The page's first words: what the figures say, a sentence for each part that was measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from infer.figures.claim import LEAST_SPEED, LEAST_TAU, MOST_WASTE
from infer.figures.length_words import length_sentence, published_rules
from infer.table import is_lossy, label, number

CLOSE = 0.15  # how far a predicted speedup may be off


def reading(summary: Mapping[str, Any], details: Mapping[str, Any]) -> list[str]:
    """The sentences, each true of these figures; the verdict on the outputs stands above them (infer/page.py)."""
    sentences = [*_rows(summary["rows"]), *_calibration(details.get("analysis")), *_tuning(details["tuning"])]
    for claim in details["deagle"]:
        sentences.append(f"DEAGLE’s claim, on the {claimed_on(claim)}: {_kept(claim)}")
    for comparison in details["lengths"]:
        sentences += [length_sentence(comparison, rule) for rule in published_rules(comparison)]
    return sentences


def claimed_on(claim: Mapping[str, Any]) -> str:
    """The head, and by which calibrator its confidence goes, where it goes by one."""
    confidence = f" with {claim['calibrated']} confidence" if claim.get("calibrated") else ""
    return f"{claim['head_path'] or claim['head']} head{confidence}"


def claim_words(claim: Mapping[str, Any]) -> list[str]:
    """The claim's numbers in words, with whether each holds."""
    largest, fixed, vote = claim["largest"], claim["fixed"][-1], claim["vote"][-1]
    words = [
        f"With room for {largest} levels the vote wastes {vote['draft_forwards_wasted']:,} draft forwards, the fixed "
        f"tree {fixed['draft_forwards_wasted']:,}"
        + (f": {claim['waste']:.2f} times as many. " if claim["waste"] is not None else ". ")
        + _holds(claim["waste_holds"], f"at most {MOST_WASTE:g} times as many"),
    ]
    if claim["tau"] is not None:
        words.append(
            f"There it has a tau of {vote['tau']:.2f}: {100 * claim['tau']:.1f} % of the fixed tree’s best over the "
            f"depths (at {claim['tau_best_depth']}). {_holds(claim['tau_holds'], f'at least {100 * LEAST_TAU:g} %')}"
        )
    if claim["modelled"] is not None:
        words.append(
            f"With the costs measured here its cycles are worth a speedup of {vote['modelled']:.2f}: "
            f"{100 * claim['modelled']:.1f} % of its own best over the depths (at {claim['modelled_best_depth']}). "
            f"{_holds(claim['modelled_holds'], f'at least {100 * LEAST_SPEED:g} %')}"
        )
    for wall in claim["wall"]:
        if wall["speed"] is not None:
            tree = f"the {'fixed' if wall['rule'] == 'fixed' else 'voting'} tree of at most {wall['depth']} levels"
            words.append(
                f"By the clock, paired by prompt, it is {wall['speed']:.2f} times as fast as {tree}"
                f"{_between(wall['speed_ci95'])}."
            )
    return words


def _rows(rows: Sequence[dict[str, Any]]) -> list[str]:
    drafting = [row for row in rows if row["status"] == "ok" and row["tree"] is not None]
    found = []
    longest = max((row for row in drafting if row["tau"]), key=lambda row: row["tau"], default=None)
    if longest is not None:
        found.append(
            f"A target forward yields {longest['tau']:.2f} tokens on average with {label(longest, rows)}, the most of "
            "any row; without drafting it yields one."
        )
    fastest = max((row for row in drafting if row["speedup"]), key=lambda row: row["speedup"], default=None)
    if fastest is not None:
        lossy = ", which is NOT lossless" if is_lossy(fastest) else ""
        found.append(
            f"The fastest row, {label(fastest, rows)}, decodes at {fastest['speedup']:.2f} times the speed of the "
            f"target alone{_between(fastest.get('speedup_ci95'))}{lossy}."
        )
    return found


def _calibration(analysis: Mapping[str, Any] | None) -> list[str]:
    scores = analysis and analysis.get("calibrator")
    if not scores:
        return []
    before, fits = scores["held_out"]["before"]["ece"], ("temperature", "isotonic")
    after = {fit: scores["held_out"][fit]["ece"] for fit in fits}
    best = min(fits, key=lambda fit: after[fit])
    change = "lowers" if after[best] < before else "does not lower"
    return [
        f"On prompts that it has not seen, the calibrator {change} the expected calibration error: {before:.4f} "
        f"before, {after['temperature']:.4f} with a temperature, {after['isotonic']:.4f} isotonic."
    ]


def _tuning(tuning: Mapping[str, Any] | None) -> list[str]:
    chosen = tuning and next((head for head in tuning["heads"] if head["kind"] == tuning["chosen"]), None)
    if not chosen:
        return []
    assert tuning is not None
    choice, usual = chosen["choice"], chosen["published"]
    found = [
        f"Tuned to this machine: {choice['method']} on the {chosen['kind']} head with {_tree(choice['tree'])}, "
        f"predicted to be {choice['speedup']:.2f} times as fast as the target alone; its published tree "
        f"({_tree(usual['tree'])}): {usual['speedup']:.2f} times."
    ]
    measured = tuning.get("measured")
    ratio = (measured or {}).get("predicted_over_measured") or 0.0
    against = measured["against_published"] if measured else None
    if measured and against and against["chosen_against_it"] is not None:
        found.append(
            f"Measured on other prompts, the choice has {against['chosen_against_it']:.2f} times the speed of the "
            f"published tree{_between(against['chosen_against_it_ci95'])}.{_best_of_grid(measured)} Predicted over "
            f"measured speedup is {number(ratio, 3)}: {'' if abs(ratio - 1) <= CLOSE else 'NOT '}within "
            f"{100 * CLOSE:g} %."
        )
    return found


def _best_of_grid(measured: Mapping[str, Any]) -> str:
    """The choice against the best of the grid, chosen on these very prompts; nothing where no grid was timed."""
    best = measured.get("against_best_of_grid")
    if not best or best["chosen_against_it"] is None:
        return ""
    times = f"{best['chosen_against_it']:.2f} times{_between(best['chosen_against_it_ci95'])}"
    return f" Against the best of a grid it has {times}."


def _kept(claim: Mapping[str, Any]) -> str:
    """Which of the claim's parts hold, at the largest depth."""
    parts = {
        "wasted forwards": claim["waste_holds"],
        "tau": claim["tau_holds"],
        "modelled speed": claim["modelled_holds"],
    }
    groups = {
        "holds for {}": [name for name, held in parts.items() if held],
        "does not hold for {}": [name for name, held in parts.items() if held is False],
        "was not checked for {}": [name for name, held in parts.items() if held is None],
    }
    said = "; ".join(words.format(" and ".join(names)) for words, names in groups.items() if names)
    return (
        f"with room for {claim['largest']} levels it {said} (T {claim['temperature']:g}, {claim['prompts']} prompts)."
    )


def _holds(held: bool | None, limit: str) -> str:
    if held is None:
        return f"There is no ratio to hold against the limit ({limit})."
    return f"The claim, {limit}, {'holds' if held else 'does NOT hold'} here."


def _between(bounds: Sequence[float] | None) -> str:
    """The interval, and on which side of 1 it lies."""
    if not bounds:
        return " (too few prompts for an interval)"
    side = "all above 1" if bounds[0] > 1 else "all below 1" if bounds[1] < 1 else "1 is in it"
    return f" (95 % {bounds[0]:.2f}–{bounds[1]:.2f}, {side})"


def _tree(tree: Mapping[str, Any]) -> str:
    if tree["shape"] == "chain":
        return f"a chain of at most {tree['levels']} tokens"
    if tree["shape"] == "static":
        return "its static tree"
    return f"at most {tree['levels']} levels, k {tree['k']} and {tree['nodes']} nodes"
