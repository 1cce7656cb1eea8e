"""The tuning's pictures, as SVG text: what a target forward costs by its nodes, and a draft's level by its width."""

from typing import Any

from infer.calibration.panels import stacked
from infer.palette import RC, SERIES, themed
from model.errors import UserError

try:
    from matplotlib import rc_context
except ImportError as error:
    raise UserError(f"report: matplotlib cannot be imported ({error}); pip install aerie[report]") from error

NAMES = ("costs",)


def pictures(tuning: dict[str, Any]) -> dict[str, str]:
    """name -> SVG text; the names start with tuning-."""
    with rc_context(RC):
        return {"tuning-costs": cost_curves(tuning["heads"])}


def cost_curves(heads: list[dict[str, Any]]) -> str:
    """v(N) above, and a further draft level by its width below: a line for each head."""
    colours = [SERIES[position % len(SERIES)] for position in range(len(heads))]
    legend = [(str(head["kind"]), colour) for head, colour in zip(heads, colours, strict=True)]
    figure, (verify, draft) = stacked(
        ["v(N): ms of a target forward by nodes with the root", "ms of one more draft level"], legend
    )
    for head, colour in zip(heads, colours, strict=True):
        costs = head["costs_ms"]
        nodes = sorted(costs["verify"], key=int)
        verify.plot(
            [int(n) for n in nodes], [costs["verify"][n] for n in nodes], color=colour, marker="o", markersize=3
        )
        widths = sorted(costs["draft"], key=int)
        draft.plot(
            [int(k) for k in widths], [costs["draft"][k][1] for k in widths], color=colour, marker="o", markersize=3
        )
    for axes in (verify, draft):
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
    draft.set_xlabel("k: expanded nodes of the level")
    return themed(figure, "tuning-costs")
