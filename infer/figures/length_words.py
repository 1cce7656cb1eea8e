"""What `lengths` found, in words: a rule's drafts against constant ones, whichever way it comes out."""

from collections.abc import Mapping, Sequence
from typing import Any

from infer.table import number


def length_words(comparison: Mapping[str, Any]) -> list[str]:
    """Two sentences for each rule as published: against the same mean length, against the best constant measured."""
    found, constants = [], measured_constants(comparison)
    for rule in published_rules(comparison):
        equal, best = rule["equal"], rule["best"]
        mine = f"{rule['name']} drafts {rule['length']:.2f} tokens in a cycle, {_figures(rule)}. "
        if equal is None:
            found.append(mine + "No constant of the sweep is as short or as long.")
        else:
            found.append(
                f"{mine}As many at a constant length, {_between(equal)}: {_figures(equal)}. {_against(rule, equal)}"
            )
        found.append(
            f"The best of {constants} on these prompts, {comparison['best']}: {_figures(best)}. {_against(rule, best)}"
        )
    return found


def length_sentence(comparison: Mapping[str, Any], rule: Mapping[str, Any]) -> str:
    """The verdicts alone, for the page's first words."""
    equal = "it was not measured" if rule["equal"] is None else _verdict(rule["equal"])
    return (
        f"{rule['name']} on the {comparison['head_path'] or comparison['head']} head, T {comparison['temperature']:g}, "
        f"{comparison['prompts']} prompts: drafts of {rule['length']:.2f} tokens on average. Against a constant length "
        f"of the same mean: {equal}. Against the best of {measured_constants(comparison)} on these prompts, "
        f"{comparison['best']}: {_verdict(rule['best'])}."
    )


def measured_constants(comparison: Mapping[str, Any]) -> str:
    """The constant lengths among which the best was looked for: 'gamma 1 to 8', 'gamma 1, 2 and 4'."""
    gammas = [one["gamma"] for one in comparison["constants"]]
    if len(gammas) > 2 and gammas == list(range(gammas[0], gammas[-1] + 1)):
        return f"gamma {gammas[0]} to {gammas[-1]}"
    return f"gamma {', '.join(map(str, gammas[:-1]))} and {gammas[-1]}"


def published_rules(comparison: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rules with their papers' settings; what a sweep makes of them is in the table."""
    return [rule for rule in comparison["rules"] if not rule["variant"]]


def _between(equal: Mapping[str, Any]) -> str:
    shares = round(100 * equal["share"])
    if shares in (0, 100):
        return f"{equal['above' if shares else 'below']} in every cycle"
    return f"{equal['above']} in {shares} % of the cycles, {equal['below']} in the others (interpolated)"


def _figures(one: Mapping[str, Any]) -> str:
    modelled = "" if one["modelled"] is None else f", modelled speedup {one['modelled']:.2f}"
    return f"accept rate {number(one['accept_rate'])}, tau {one['tau']:.2f}{modelled}"


def _against(rule: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The rule's differences from the other, with their intervals."""
    words = f"{rule['name']} against it: "
    words += "" if other["accept_difference"] is None else f"accept rate {other['accept_difference']:+.2f}, "
    tau = f"tau {other['tau_difference']:+.2f} ({_interval(other['tau_ci95'], '+.2f')})"
    if other["speed"] is None:
        return f"{words}{tau}; costs were not measured (tune)."
    return f"{words}{tau}, modelled speed {other['speed']:.3f} times ({_interval(other['speed_ci95'], '.3f')})."


def _verdict(other: Mapping[str, Any]) -> str:
    """Ahead, behind or neither, by the interval of the modelled speed; of tau where nothing was modelled."""
    if other["speed"] is not None:
        bounds, level, pattern, words = other["speed_ci95"], 1.0, ".2f", ("faster", "slower", "not told apart in speed")
        said = f"{other['speed']:.2f} times as modelled"
    else:
        bounds, level, pattern = other["tau_ci95"], 0.0, "+.2f"
        words = ("a larger tau", "a smaller tau", "not told apart in tau")
        said = f"{other['tau_difference']:+.2f}"
    side = 0 if bounds[0] > level else 1 if bounds[1] < level else 2
    return f"{words[side]} ({said}, {_interval(bounds, pattern)})"


def _interval(bounds: Sequence[float], pattern: str) -> str:
    return f"95 % {bounds[0]:{pattern}} to {bounds[1]:{pattern}}"
