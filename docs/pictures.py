"""Draws the pictures of the docs from runs: python docs/pictures.py DEMO NODES ROWS ...

DEMO: the run of make demo; NODES and ROWS: runs whose reports have a row for each number of nodes,
and for each number of training rows (docs/studies.md has their commands). The colours follow the
reader's light or dark scheme.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any

from aerie.configs.read import load_file
from aerie.configs.schema.recipe import Recipe
from aerie.data.tokens import tokenize_for_target
from aerie.infer import SpeculativeDecoder

DOCS = Path(__file__).parent
WIDTH = 600  # a phone shows it at two thirds of its size
STYLE = """
text { fill: #24292f; text-anchor: middle }
.say, .start { text-anchor: start } .end { text-anchor: end }
.say, .tick { fill: #57606a }
.small { font-size: 13px }
rect { fill: #f6f8fa; stroke: #d0d7de }
path { fill: none; stroke: #d0d7de; stroke-width: 1.5 }
.kept rect { fill: #dafbe1; stroke: #1a7f37 } path.kept { stroke: #1a7f37; stroke-width: 2.5 }
.own rect { fill: #fff1e5; stroke: #bc4c00 }
.out text { fill: #6e7781 } .out rect { stroke-dasharray: 4 3 } path.out { stroke-dasharray: 4 3 }
.a { stroke: #c2570c; stroke-width: 2.5 } .b { stroke: #0f766e; stroke-width: 2.5 }
.c { stroke: #5b4fc4; stroke-width: 2.5 }
text.a { fill: #c2570c; stroke: none } text.b { fill: #0f766e; stroke: none }
text.c { fill: #5b4fc4; stroke: none }
circle.a { fill: #c2570c } circle.b { fill: #0f766e } circle.c { fill: #5b4fc4 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .say, .tick { fill: #9198a1 }
rect { fill: #161b22; stroke: #3d444d } path { stroke: #3d444d }
.kept rect { fill: #12261e; stroke: #3fb950 } path.kept { stroke: #3fb950 }
.own rect { fill: #2b1a0e; stroke: #f0883e }
.out text { fill: #9198a1 }
.a { stroke: #f0883e } .b { stroke: #2dd4bf } .c { stroke: #a89bff }
text.a { fill: #f0883e } text.b { fill: #2dd4bf } text.c { fill: #a89bff }
circle.a { fill: #f0883e } circle.b { fill: #2dd4bf } circle.c { fill: #a89bff }
}
"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{escape(words)}</text>\n'


def box(x: float, y: float, width: float, words: str, kind: str = "", height: float = 30) -> str:
    """A box with words in its middle; x, y: its upper left corner."""
    frame = f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="6"/>'
    inside = text(x + width / 2, y + height / 2 + 5, words)
    return f'<g class="{kind}">{frame}{inside}</g>\n'


def line(points: Sequence[tuple[float, float]], kind: str = "") -> str:
    steps = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path class="{kind}" d="M{steps}"/>\n'


def save(name: str, height: float, title: str, body: str) -> None:
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    font = 'font-family="ui-sans-serif,system-ui,sans-serif" font-size="15"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {font}>\n'
    page = f"{head}<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{body}</svg>\n"
    (DOCS / f"{name}.svg").write_text(page, encoding="utf-8")


def shown(token: str) -> str:
    return token.replace("\n", "↵").replace(" ", "·") or "·"


# --- a conversation with its loss mask, slots and the unroll


def draw_slots(demo: Path) -> None:
    recipe = load_file(demo / "recipe.yaml", Recipe, [])
    data, tokenizer, _ = tokenize_for_target(recipe.target, recipe.data)
    row = min(data.train, key=lambda row: len(row.input_ids))
    names = [shown(tokenizer.decode([token])) for token in row.input_ids]
    x, y, body = 12.0, 34.0, text(12, 20, "learnt (green): the answer and its end of turn", "say")
    for name, turn in zip(names, row.turn_ids, strict=True):
        width = 18 + 8.4 * len(name)
        if x + width > WIDTH - 12:
            x, y = 12.0, y + 38
        body += box(x, y, width, name, "kept" if turn else "")
        x += width + 6
    # the first slots that learn: token p + 1 is the answer's first
    first = next(p for p, turn in enumerate(row.turn_ids) if turn) - 1
    columns = range(first - 1, first + 5)
    left, step, top = 128.0, 78.0, y + 84
    body += text(12, top - 26, "slot p, and what the head learns there", "say")
    rows = ["feature of", "token", "unroll 1 learns", "unroll 2 learns", "unroll 3 learns"]
    for number, label in enumerate(rows):
        line_y = top + number * 40
        body += text(12, line_y + 20, label, "start small")
        for column, p in enumerate(columns):
            learns = number > 1 and row.turn_ids[p + number] == row.turn_ids[p + 1] != 0
            kind = ("kept" if learns else "out") if number > 1 else ""
            body += box(left + column * step, line_y, step - 8, names[p + number][:8], kind)
    below = top + 5 * 40 + 14
    body += text(
        12, below + 4, "Unroll 2 reads what unroll 1 put out in place of the feature,", "say"
    )
    body += text(12, below + 24, "as in decoding. A dashed box does not count in the loss.", "say")
    title = "A conversation with its loss mask, the slots of a head and three unrolled steps"
    save("slots", below + 36, title, body)


# --- a draft and what the target kept of it


def draw_draft(demo: Path) -> None:
    tree = {"shape": "dynamic", "levels": 4, "k": 3, "nodes": 14}
    head = demo / "heads/eagle1"
    decoder = SpeculativeDecoder.from_pretrained(demo / "target", head, method="eagle2", tree=tree)
    cycles: list[Any] = []
    question = "Write a short letter to thank a friend."
    decoder.generate(question, do_sample=False, max_new_tokens=96, on_cycle=cycles.append)
    whole = [cycle for cycle in cycles if cycle.verdict.accepted == tree["levels"]]
    # one of words rather than of signs
    drawn = max(whole, key=lambda cycle: len(decoder.tokenizer.decode(cycle.verdict.tokens)))
    depths, parents = drawn.tree.depth.tolist(), drawn.tree.parents.tolist()
    names = [shown(decoder.tokenizer.decode([token])) for token in drawn.tree.tokens.tolist()]
    kept = drawn.verdict.path
    heads = ["last token", *["drafted"] * max(depths), "target’s own"]
    spots = {}
    body = ""
    for depth, words in enumerate(heads):
        x = 12 + depth * (WIDTH - 24 - 80) / (len(heads) - 1)
        body += text(x + 40, 20, words, "tick small") if depth < len(heads) - 1 else ""
        nodes = [node for node in range(len(depths)) if depths[node] == depth]
        nodes.sort(key=lambda node: node not in kept)
        for number, node in enumerate(nodes):
            spots[node] = (x, 40 + 42 * number)
    bonus = (WIDTH - 92.0, spots[kept[-1]][1])
    body += text(WIDTH - 12, 20, heads[-1], "tick end small")
    for node, parent in enumerate(parents):
        if node:
            (x, y), (px, py) = spots[node], spots[parent]
            ends = [(px + 80, py + 15), (x, y + 15)]
            body += line(ends, "kept" if node in kept else "")
    body += line([(spots[kept[-1]][0] + 80, bonus[1] + 15), (bonus[0], bonus[1] + 15)], "a")
    for node, (x, y) in spots.items():
        body += box(x, y, 80, names[node], "kept" if node in kept else "")
    own = shown(decoder.tokenizer.decode([drawn.verdict.bonus]))
    body += box(*bonus, 80, own, "own")
    bottom = 40 + 42 * max(depths.count(depth) for depth in depths) + 20
    told = [
        f"The head guesses {len(names) - 1} tokens. One forward of the target checks them all:",
        f"it keeps {drawn.verdict.accepted} and adds one, as it would have written by itself.",
    ]
    for number, words in enumerate(told):
        body += text(12, bottom + number * 20, words, "say")
    title = f"A draft tree: of {len(names) - 1} guesses the target keeps {drawn.verdict.accepted}"
    save("tree", bottom + 34, f"{title} and adds one", body)


# --- EAGLE-2's expansion and reranking


def draw_expansion(demo: Path) -> None:
    levels, k, kept_nodes = 3, 2, 6
    tree = {"shape": "dynamic", "levels": levels, "k": k, "nodes": 1 + k + k * k * (levels - 1)}
    head = demo / "heads/eagle1"
    decoder = SpeculativeDecoder.from_pretrained(demo / "target", head, method="eagle2", tree=tree)
    cycles: list[Any] = []
    question = "How many minutes are 360 seconds?"
    decoder.generate(question, do_sample=False, max_new_tokens=24, on_cycle=cycles.append)
    whole = [cycle.tree for cycle in cycles if len(cycle.tree) == tree["nodes"]]
    # a first guess of middling confidence: reranking has something to choose
    drafted = min(whole, key=lambda tree: abs(float(tree.survival[1].exp()) - 0.5))
    survival = drafted.survival.exp().tolist()
    confidence = drafted.confidence.exp().tolist()
    best = sorted(range(len(survival)), key=lambda node: -survival[node])[:kept_nodes]
    names = [shown(decoder.tokenizer.decode([token])) for token in drafted.tokens.tolist()]
    depths = drafted.depth.tolist()
    spots: dict[int, tuple[float, float]] = {}
    for depth in range(levels + 1):
        nodes = [node for node in range(len(depths)) if depths[node] == depth]
        for number, node in enumerate(nodes):
            spots[node] = (16 + depth * 150, 44 + (number + 0.5) * 272 / len(nodes) - 24)
    body = "".join(
        text(66 + depth * 150, 22, words, "say small").replace('"say', '"tick')
        for depth, words in enumerate(["last token", "level 1", "level 2", "level 3"])
    )
    for node, parent in enumerate(drafted.parents.tolist()):
        if node:
            (x, y), (px, py) = spots[node], spots[parent]
            points = [(px + 100, py + 24), (x, y + 24)]
            body += line(points, "kept" if node in best else "out")
    for node, (x, y) in spots.items():
        body += box(x, y, 100, "", "kept" if node in best else "out", 48)
        body += text(x + 50, y + 19, names[node])
        if node:
            figures = f"{confidence[node]:.2f} → {survival[node]:.2f}"
            body += text(x + 50, y + 39, figures, "small")
    told = [
        "Below each token: its confidence q → its survival, the product down the path.",
        f"Expansion: the {k} nodes of a level that survive best get {k} children each.",
        f"Reranking: of all candidates the {kept_nodes} that survive best (green) are verified.",
    ]
    for number, words in enumerate(told):
        body += text(12, 346 + number * 20, words, "say small")
    title = "EAGLE-2's expansion and reranking of a real draft, with confidences and survivals"
    save("expansion", 400, title, body)


# --- curves


def axes(
    left: float, top: float, width: float, height: float, title: str
) -> tuple[str, Callable[[float, float], tuple[float, float]]]:
    """The frame of a panel, and its corner: shares of width and height become points."""
    corner = (left, top + height)
    frame = line([(left, top), corner, (left + width, top + height)])
    frame += text(left - 30, top - 12, title, "start")
    return frame, lambda x, y: (left + x * width, top + height - y * height)


def panel(
    left: float,
    title: str,
    xs: Sequence[float],
    curves: Sequence[tuple[str, str, Sequence[float]]],
    ticks: Sequence[float],
) -> str:
    """Curves of (colour, name, values) over xs, which stand at equal distances."""
    body, at = axes(left, 44, 230, 190, title)
    for tick in ticks:
        _, y = at(0, tick / ticks[-1])
        body += text(left - 8, y + 5, f"{tick:g}", "tick end small")
    for number, x in enumerate(xs):
        body += text(at(number / (len(xs) - 1), 0)[0], 254, f"{x:,g}", "tick small")
    for number, (colour, name, values) in enumerate(curves):
        points = [at(n / (len(xs) - 1), value / ticks[-1]) for n, value in enumerate(values)]
        body += line(points, colour)
        for x, y in points:
            body += f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>\n'
        # curves rise to the right: the upper left corner is free
        body += text(left + 12, 60 + 18 * number, name, f"{colour} start small")
    return body


def rows_of(run: Path) -> list[dict[str, Any]]:
    summary = json.loads((run / "report/summary.json").read_text())
    return [row for row in summary["rows"] if row["task"] == "all" and row["temperature"] == 0]


# One H200, D 2048, captured, ms (docs/results.md): vanilla's cycle, its forward, one of 60 nodes,
# and draft and commit of a tree of 60 nodes.
GPU_VANILLA, GPU_ONE, GPU_SIXTY, GPU_REST = 2.46, 2.28, 2.93, 1.49 + 0.31


def draw_nodes(run: Path) -> None:
    drafted = [row for row in rows_of(run) if row["method"] != "vanilla"]
    nodes = [row["tree"]["nodes"] for row in drafted]
    tau = [row["tau"] for row in drafted]
    cpu = [row["speedup"] for row in drafted]
    per_node = (GPU_SIXTY - GPU_ONE) / 59
    gpu = [
        length * GPU_VANILLA / (GPU_REST + GPU_ONE + per_node * (number - 1))
        for length, number in zip(tau, nodes, strict=True)
    ]
    body = panel(44, "tau", nodes, [("a", "EAGLE-1", tau)], range(8))
    speeds = [("c", "GPU, calculated", gpu), ("b", "CPU, measured", cpu)]
    body += panel(344, "speedup over vanilla", nodes, speeds, range(5))
    body += text(
        12,
        286,
        "nodes of the tree (8 levels, k 8). The demo’s target and head, T = 0.",
        "say small",
    )
    body += text(12, 304, "GPU: the same tau at an H200’s costs for a target of 1.1B.", "say small")
    save("nodes", 316, "Tau and speedup against the nodes of a tree, on a CPU and on a GPU", body)


def draw_rows(runs: Sequence[Path]) -> None:
    kinds = {"eagle1": ("a", "EAGLE-1"), "eagle3": ("b", "EAGLE-3"), "block": ("c", "block")}
    taus: dict[str, dict[int, float]] = {kind: {} for kind in kinds}
    for row in (row for run in runs for row in rows_of(run)):
        if row["head_path"]:
            head = Path(row["head_path"])
            taus[head.name][4 * int(head.parent.name.removeprefix("rows-"))] = row["tau"]
    numbers = sorted(taus["eagle1"])
    curves = [
        (*kinds[kind], [by_rows[number] for number in numbers if number in by_rows])
        for kind, by_rows in taus.items()
    ]
    body = panel(44, "tau, embedded target", numbers, curves, range(7))
    seen, eagle1, eagle3 = zip(*taus_of_the_study(), strict=True)
    real = [("a", "EAGLE-1", [*eagle1]), ("b", "EAGLE-3", [*eagle3])]
    body += panel(344, "tau, real-text target", [*seen], real, range(8))
    told = "rows seen in training (axis not to scale); 8 levels, k 10, 60 nodes, T = 0"
    body += text(12, 286, told, "say small")
    save("rows", 298, "Tau against training rows, for EAGLE-1, EAGLE-3 and block heads", body)


def taus_of_the_study() -> Iterator[tuple[int, float, float]]:
    """Rows seen in training, and the mean tau of EAGLE-1 and of EAGLE-3 over seeds."""
    page = Path(__file__).with_name("studies.md").read_text(encoding="utf-8")
    seeds = r"(\d\.\d\d, \d\.\d\d, \d\.\d\d)"
    for seen, *kinds in re.findall(rf"\| ([\d,]+) \([^|]+\) \| {seeds} \| {seeds} \|", page):
        eagle1, eagle3 = (round(mean(map(float, taus.split(", "))), 2) for taus in kinds)
        yield int(seen.replace(",", "")), eagle1, eagle3


# --- from data to a server, as files


def draw_ladder(demo: Path) -> None:
    def size(*patterns: str) -> str:
        count = sum(path.stat().st_size for pattern in patterns for path in demo.glob(pattern))
        return f"{count / 1e6:.1f} MB" if count > 99_999 else f"{count / 1e3:.0f} kB"

    steps = [
        ("your conversations", "chats.jsonl", size("conversations/train.jsonl")),
        ("aerie init", "my.yaml, the recipe", ""),
        ("aerie features", "RUN/features/shard-00000.safetensors, ...", size("features/*")),
        (
            "aerie train",
            "RUN/heads/KIND/model.safetensors, config.json",
            size("heads/eagle1/*.safetensors"),
        ),
        ("aerie calibrate", "RUN/calibration/calibrator.json, *.parquet", size("calibration/*")),
        ("aerie bench", "RUN/bench/records.jsonl", size("bench/records.jsonl")),
        ("aerie tune", "RUN/tune/tuned.yaml", size("tune/*")),
        ("aerie report", "RUN/report/index.html", size("report/index.html")),
        ("aerie convert", "exports/NAME, in the layout of vLLM or SGLang", ""),
        ("vllm serve", "reads exports/NAME and drafts with the head", ""),
    ]
    body = ""
    for number, (command, files, how_large) in enumerate(steps):
        y = 12 + number * 44
        if number:
            body += line([(90, y - 14), (90, y)], "kept")
        body += box(12, y, 156, command, "kept" if number else "")
        body += text(184, y + 20, files, "start small")
        body += text(WIDTH - 12, y + 20, how_large, "tick end small")
    y = 12 + len(steps) * 44 + 8
    body += text(
        12,
        y,
        "aerie run types features to report for you. The sizes are those of make demo.",
        "say small",
    )
    save("ladder", y + 14, "From data to a server: each command and the files that it makes", body)


def main() -> None:
    demo, nodes, *rows = map(Path, sys.argv[1:])
    draw_draft(demo)
    draw_slots(demo)
    draw_expansion(demo)
    draw_ladder(demo)
    draw_nodes(nodes)
    draw_rows(rows)


if __name__ == "__main__":
    main()
