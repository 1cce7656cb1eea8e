"""The golden net: two checkouts do the same jobs on one machine, and their results are compared.

python tests/golden.py run CHECKOUT WORKDIR [--only STEP ...]   does the jobs, writes WORKDIR/digests.json
python tests/golden.py compare ONE.json OTHER.json              prints every difference; exit code 1 if there is one
python tests/golden.py against COMMIT                           a commit and this checkout, run and compared

Training's numbers may differ by 1e-6 of their size, recorded cycles by 2e-4 (the file rounds them), other fractions by
1e-9. Left out: times and what depends on them (speeds, costs, the tree that `tune` chooses), memory, commits, hardware,
paths. Of trees and cycles we compare only keys that every version of the files has.

A step reads the files of earlier steps in WORKDIR; `calibrate` must follow `heads`, which removes the calibrators.
"""

import hashlib
import importlib
import json
import math
import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONWARNINGS": "ignore",
}
LIBRARIES = (
    "accelerate",
    "datasets",
    "transformers.models.llama",
    "transformers.generation",
    "matplotlib",
)
TIMED = re.compile(
    "^t_|_ms|ms_|^ms$|seconds|speed|tokens_per_s|memory|commit|hardware|^reference$|^overhead$|^tuning$"
)
MEASURED = re.compile(r"/(loss|grad_norm|held_out)[^/]*$")
TREE = "shape levels k nodes stop children rule".split()  # `timeless` keeps these of a tree
CYCLE = "pos_start verify draft_forwards drafted depth nodes accepted bonus_id new_tokens".split()
NODE = "token parent depth q survival entropy p accepted passenger".split()
COUNTS = "verify target_forwards draft_forwards draft_forwards_wasted draft_nodes accepted".split()
COUNTS += "cycle_tokens cycle_nodes identical identical_to_generate prompt_ids".split()
DIGESTS = re.compile(r'("(?:key|seal|config\.json|target)": )"(?:sha256:)?[0-9a-f]{16}"')

PLAIN = {
    "fc_norm": False,
    "norm_output": False,
    "norm_before_residual": False,
}  # every layout can hold it
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # recipe, changes to its section `head`
    "target": (
        "draft_lm/embedded",
        {"num_hidden_layers": 7, "hidden_size": 48, "intermediate_size": 128},
    ),
    "eagle1": ("embedded", {"intermediate_size": 96, "head_dim": 16}),
    "eagle3": (
        "eagle3/embedded",
        {"intermediate_size": 96, "head_dim": 16, "draft_vocab_size": 400, **PLAIN},
    ),
    "medusa": ("medusa/embedded", {}),
    "hydra": ("hydra/embedded", {}),
    "draft_lm": ("draft_lm/sps-embedded", {"hidden_size": 32, "num_attention_heads": 2}),
}
HEADS = [kind for kind in KINDS if kind != "target"]
VARIANTS: dict[
    str, tuple[str, dict[str, Any]]
] = {  # heads with other options, trained on online features
    "eagle1-lk": ("eagle1", {"train.loss": "lk_hybrid"}),
    "eagle3-packed": ("eagle3", {"train.packing": True, "train.unroll_steps": 3}),
    "medusa-law": ("medusa", {"train.law_weight": 0.5, "train.dropout": 0.1, "head.num_layers": 2}),
    "hydra-prefix": (
        "hydra",
        {"head.prefix_layer": True, "train.accumulation": 2, "train.measure_prompts": 2},
    ),
    "draft_lm-jsd": ("draft_lm", {"train.distill": "jsd"}),
}
LAYOUTS = {"eagle1": ("safeailab", "sglang"), "eagle3": ("safeailab", "sglang", "speculators")}
CALIBRATIONS: dict[str, dict[str, Any]] = {  # report and a bench row read eagle1's
    "eagle1": {"calibrate.tree": {"levels": 4, "k": 4, "nodes": 16}, "calibrate.oracle_levels": 5},
    "draft_lm": {"calibrate.temperature": 1.0},
    "medusa": {"calibrate.nodes": 20, "calibrate.ranks": 5},  # a static tree, rebuilt
}
PUBLISHED = "vanilla sps sps-heuristic sps-svip sps-confidence pld lookahead medusa hydra eagle eagle2 eagle3 eagle-chain"
ROWS: list[dict[str, Any]] = [  # every published method, then other options of rows
    *({"method": name} for name in (*PUBLISHED.split(), "deagle", "svip", "ddd", "opt-tree")),
    *({"method": name, "tree": {"stop": {"h": 0.8}}} for name in ("sps-svip", "svip")),
    {"method": "sps-confidence", "tree": {"stop": {"threshold": 0.1}}},
    {
        "method": "eagle-chain",
        "head": "eagle3",
        "tree": {"stop": {"rule": "confidence", "threshold": 0.1}},
    },
    *({"method": "eagle", "tree": {"children": children}} for children in ("sampled", "best")),
    {"method": "sps", "tree": {"shape": "static", "choices": "eagle1"}},
    {"method": "sps", "tree": {"shape": "dynamic", "levels": 3, "k": 3, "nodes": 10}},
    {"method": "medusa", "tree": {"shape": "chain", "levels": 4}},
    {"method": "eagle2", "tree": {"calibrated": "isotonic"}},
]
GREEDY, SAMPLED, CUT = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
)
SWEEP = {"name": "depth", "vary": "tree.levels", "values": [2, 5], "sampling": [GREEDY]}


class Net:
    """One checkout at work in one directory; `found` maps names to what a step computed."""

    def __init__(self, checkout: Path, work: Path) -> None:
        self.checkout, self.work, self.main = (
            checkout.resolve(),
            work.resolve(),
            work.resolve() / "run",
        )
        self.found: dict[str, Any] = {}

    def call(self, command: str, kind: str, run: Path, *words: str, **options: Any) -> str:
        """Runs a command on the recipe of a kind of head; returns what it prints. options: overrides of the recipe."""
        recipe, sizes = KINDS[kind]
        fixed = {"config": f"configs/{recipe}.yaml", "run": run, "target": self.main / "target"}
        fixed |= {
            "data.conversations": [str(self.main / "conversations/train.jsonl")],
            "data.max_length": 160,
        }
        fixed |= {"data.held_out": 0.1, **{f"head.{key}": value for key, value in sizes.items()}}
        fixed |= (
            {"features.after_blocks": [2, 3, 4], "train.batch_size": 4} if kind == "eagle3" else {}
        )
        return self.bare(command, *words, **fixed | options)

    def bare(self, command: str, *words: str, **options: Any) -> str:
        """What `python SCRIPT/main.py ...` prints, without local paths; it runs in a fork with the libraries loaded."""
        script, *first = command.split()
        call = [f"{script}/main.py", *first, *words]
        for key, value in options.items():
            call.append(f"--{key}={json.dumps(value) if isinstance(value, dict | list) else value}")
        child = multiprocessing.get_context("fork").Process(
            target=become, args=(self.checkout, call, self.work)
        )
        child.start()
        child.join()
        if child.exitcode:
            raise SystemExit(
                f"{' '.join(call)}\n{(self.work / 'errors.txt').read_text()[-4000:]}\n{child.exitcode}"
            )
        return self.read(self.work / "output.txt")

    def read(self, path: Path) -> str:
        """A file's text without local paths, and without digests of files that contain some."""
        text = DIGESTS.sub(r'\1""', path.read_text(encoding="utf-8"))
        return text.replace(str(self.work), "WORK").replace(str(self.checkout), "CHECKOUT")

    def prompts(self, file: str, count: int, tokens: int, **more: Any) -> dict[str, Any]:
        path = self.main / "conversations" / f"{file}.jsonl"
        return {"path": str(path), "num_prompts": count, "max_new_tokens": tokens, **more}

    def remove(self, *names: str) -> None:
        for path in (self.work / name for name in names):
            path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)

    def take_files(self, name: str, directory: Path) -> None:
        """Takes the sha256 of every file below a directory, except those on its origin."""
        for path in sorted(directory.rglob("*")):
            if path.is_file() and not path.name.startswith(("provenance", "recipe", "status")):
                content = (
                    self.read(path).encode()
                    if path.suffix in (".json", ".jsonl", ".yaml")
                    else path.read_bytes()
                )
                if path.suffix in (
                    ".bin",
                    ".npz",
                ):  # torch names its archive after a temporary file, zlib has versions
                    with zipfile.ZipFile(path) as archive:
                        content = b"".join(archive.read(member) for member in archive.namelist())
                self.found[f"{name}/{path.relative_to(directory)}"] = hashlib.sha256(
                    content
                ).hexdigest()

    def take_table(self, name: str, path: Path) -> None:
        """Takes a JSON file without times, one value per path of three keys; anything deeper is part of that value."""
        self.found |= flat(timeless(json.loads(self.read(path))), name, 3)

    def train(self, name: str, kind: str, run: Path, output: Path, **more: Any) -> None:
        """Trains; takes files, loss and gradient norm of the first five steps and the last, and held-out figures."""
        fixed = {"train.max_seconds": "null", "train.log_every": 1, "train.eval_conversations": 16}
        self.call("train", kind, run, output=output, **fixed | more)
        records = [
            one
            for one in lines(run / "metrics.jsonl")
            if one["kind"] == kind.replace("target", "draft_lm")
        ]
        for one in records:
            if one["step"] in (1, 2, 3, 4, 5, records[-1]["step"]):
                found = flat(one, f"{name}/{one['step']}", 1)
                self.found |= {
                    place: value for place, value in found.items() if MEASURED.search(place)
                }
        self.take_files(name, output)


def corpus(net: Net) -> None:
    net.remove("run")
    sizes = {
        "synthetic.num_conversations": 700,
        "synthetic.num_prompts": 14,
        "synthetic.vocab_size": 600,
    }
    net.call("data synthetic", "eagle1", net.main, **sizes)
    for name in ("conversations", "tokenizer"):
        net.take_files(name, net.main / name)
    words = ("--plain", "--limit", "20")
    net.found["masks"] = net.call(
        "data show", "eagle1", net.main, *words, target=net.main / "tokenizer"
    ).splitlines()


def target(net: Net) -> None:
    net.remove("run/target", "lm")
    more = {"train.max_steps": 220, "train.warmup_steps": 10, "train.learning_rate": 0.01}
    more |= {"target": net.main / "tokenizer", "head.max_position_embeddings": 512}
    net.train("target", "target", net.work / "lm", net.main / "target", **more)


def features(net: Net) -> None:
    """Only the states of the caches: tokens and offsets may be stored elsewhere."""
    import torch
    from safetensors.torch import load_file

    net.remove("run/features", "taps/features")
    for kind, run in (("eagle1", net.main), ("eagle3", net.work / "taps")):
        net.call("data features", kind, run, **{"features.mode": "cached"})
        for shard in sorted((run / "features").glob("shard-*.safetensors")):
            for tensor, states in load_file(shard).items():
                if states.ndim == 2:
                    digest = hashlib.sha256(states.view(torch.uint8).numpy())
                    net.found[f"{kind}/{shard.name}/{tensor}"] = digest.hexdigest()


def heads(net: Net) -> None:
    net.remove(
        "run/heads",
        "run/state",
        "taps/state",
        "variants",
        "run/metrics.jsonl",
        "taps/metrics.jsonl",
    )
    for kind in HEADS:
        more = {"features.mode": "cached", "train.max_steps": 100, "train.warmup_steps": 5}
        net.train(
            kind,
            kind,
            net.work / "taps" if kind == "eagle3" else net.main,
            net.main / "heads" / kind,
            **more,
        )
    for name, (kind, more) in VARIANTS.items():
        run = net.work / "variants" / name
        net.train(
            name,
            kind,
            run,
            run / "head",
            **{"features.mode": "online", "train.max_steps": 5, **more},
        )


def exports(net: Net) -> None:
    net.remove("exports")
    goal = net.main / "target"
    for kind in HEADS[:-1]:
        head = str(net.main / "heads" / kind)
        net.found[f"{kind}/inspect"] = json.loads(
            net.bare("model inspect", head, "--json", target=goal)
        )
        for layout in LAYOUTS.get(kind, ()):
            out = net.work / "exports" / f"{kind}-{layout}"
            net.bare(
                "model convert",
                head,
                **{"to": layout, "target": goal, "target-name": "some/target", "out": out},
            )
            net.take_files(out.name, out)


def calibrate(net: Net) -> None:
    net.remove("run/calibration", "calibrate")
    prompts = net.prompts("calibration", 6, 24)
    for kind, more in CALIBRATIONS.items():
        run = net.main if kind == "eagle1" else net.work / "calibrate" / kind
        net.call(
            "infer calibrate",
            kind,
            run,
            head=net.main / "heads" / kind,
            **{"calibrate.prompts": prompts, **more},
        )
        for name in ("calibration", "calibrator"):
            net.take_table(f"{kind}/{name}", run / "calibration" / f"{name}.json")


def decode(net: Net) -> None:
    """The answers, then the cycles of a smaller bench: their trees, what was accepted, and why each draft ended."""
    net.remove("run/bench", "cycles")
    rows = []
    for row in ROWS:
        first = row["method"].split("-")[0]
        kind = row.get("head") or {"sps": "draft_lm"}.get(
            first, first if first in KINDS else "eagle1"
        )
        has_none = first in ("vanilla", "pld", "lookahead")
        rows.append(row if has_none else {**row, "head": str(net.main / "heads" / kind)})
    sweeps = [{**SWEEP, "rows": [row for row in rows if row["method"] == "eagle3"]}]
    asked = {
        "bench.rows": rows,
        "bench.warmup_prompts": 1,
        "bench.prompts": net.prompts("prompts", 3, 28),
    }
    more = {
        "bench.sampling": [GREEDY, SAMPLED, CUT],
        "bench.contexts": [64, 96],
        "bench.sweeps": sweeps,
    }
    net.call("infer bench", "eagle1", net.main, **asked | more)
    for one in lines(net.main / "bench" / "records.jsonl"):
        if one["status"] != "ok":
            raise SystemExit(f"{one['method']}: {one['message']}")
        sampling = f"T {one['temperature']:g}, {one['top_k']}, {one['top_p']:g}"
        place = f"answers/{one['row']} {one['method']}/{sampling}/{one['prompt_id']}/{one['turn']}"
        net.found |= {
            f"{place}/ids": one["output_ids"],
            f"{place}/counts": {key: one[key] for key in COUNTS},
        }
    more = {
        "bench.prompts": net.prompts("prompts", 1, 16, turns=1),
        "bench.sampling": [GREEDY, SAMPLED],
    }
    net.call(
        "infer bench", "eagle1", net.work / "cycles", **asked | more | {"bench.cycles": "true"}
    )
    for one in lines(net.work / "cycles" / "bench" / "cycles.jsonl"):
        place = f"cycles/{one['row']} {one['method']}/T {one['temperature']:g}/{one['prompt_id']}"
        cycle = (
            {key: one[key] for key in CYCLE}
            | {key: one["node"][key] for key in NODE}
            | one["level"]
        )
        net.found.setdefault(place, []).append({**cycle, "stop_reason": one["stop_reason"]})


def tune(net: Net) -> None:
    """The tau of every replayed tree, and of timed ones except the second, which costs choose."""
    net.remove("run/tune")
    more = {
        "tune.levels": 3,
        "tune.k": 2,
        "tune.grid": "true",
        "tune.measure": net.prompts("prompts", 2, 16, turns=1),
    }
    more |= {
        "head": net.main / "heads" / "eagle1",
        "tune.prompts": net.prompts("calibration", 3, 20, turns=1),
    }
    net.call("infer tune", "eagle1", net.main, **more)
    tuned, measured = (
        json.loads(net.read(net.main / "tune" / f"{name}.json")) for name in ("tune", "measured")
    )
    for head in tuned["heads"]:
        for one in (head["published"], *head["trees"]):
            net.found[f"tau/{[one['tree'][key] for key in ('levels', 'k', 'nodes')]}"] = one["tau"]
    for number, (row, one) in enumerate(zip(measured["names"], measured["rows"], strict=True)):
        net.found |= {f"tau/{row}": one["tau"]} if number != 1 else {}


def report(net: Net) -> None:
    net.remove("run/report")
    net.call("infer report", "eagle1", net.main)
    net.take_table("summary", net.main / "report" / "summary.json")


STEPS = {
    step.__name__: step
    for step in (corpus, target, features, heads, exports, calibrate, decode, tune, report)
}


def become(checkout: Path, call: list[str], work: Path) -> None:
    """Turns this process into a command of the checkout."""
    for number, name in ((1, "output.txt"), (2, "errors.txt")):
        os.dup2(os.open(work / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(checkout)
    sys.argv, sys.path[:1] = (
        call,
        [str(checkout / Path(call[0]).parent), str(checkout), str(checkout / "src")],
    )
    runpy.run_path(call[0], run_name="__main__")


def run(checkout: Path, work: Path, only: list[str] | None = None) -> dict[str, Any]:
    """Does the steps, and writes what they found to WORKDIR/digests.json."""
    os.environ |= ENVIRONMENT  # before the libraries are loaded
    for library in LIBRARIES:
        importlib.import_module(library)
    work.mkdir(parents=True, exist_ok=True)
    net, path = Net(checkout, work), work / "digests.json"
    found: dict[str, Any] = json.loads(path.read_text()) if only and path.is_file() else {}
    for name in only or STEPS:
        started, net.found = time.monotonic(), {}
        STEPS[name](net)
        found = {key: value for key, value in found.items() if not key.startswith(f"{name}/")}
        found |= {f"{name}/{key}": value for key, value in net.found.items()}
        path.write_text(json.dumps(found, indent=0), encoding="utf-8")
        print(
            f"{name}: {len(net.found):,} values in {time.monotonic() - started:.0f} s", flush=True
        )
    return found


def against(commit: str) -> int:
    """Compares a commit, in a worktree of its own, with this checkout."""
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "tree"
        subprocess.run(
            ["git", "worktree", "add", "--detach", str(tree), commit], cwd=ROOT, check=True
        )
        try:
            return compare(run(tree, Path(place) / "before"), run(ROOT, Path(place) / "after"))
        finally:
            subprocess.run(
                ["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True
            )


def compare(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Prints every value that differs; returns the exit code."""
    names = sorted(one.keys() | other.keys())
    different = [
        name
        for name in names
        if not alike(name, one.get(name, "missing"), other.get(name, "missing"))
    ]
    for name in different:
        print(
            name,
            *(f"  {json.dumps(found.get(name, 'missing')):.300}" for found in (one, other)),
            sep="\n",
        )
    print(f"{len(different):,} of {len(names):,} values differ")
    return 1 if different or not names else 0


def alike(name: str, one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(name, one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, [name] * len(one), one, other))
    if not (isinstance(one, float) and isinstance(other, float)):
        return bool(one == other)
    rounded = name.startswith("decode/cycles/")
    size, of_nothing = (2e-4, 2e-4) if rounded else (1e-6 if MEASURED.search(name) else 1e-9, 0.0)
    return math.isclose(one, other, rel_tol=size, abs_tol=of_nothing)


def timeless(value: Any) -> Any:
    """A JSON value without keys of times, or of anything else that depends on the machine and not on the code."""
    if isinstance(value, dict):
        if "shape" in value and "levels" in value:  # a tree
            value = {
                key: item["rule"] if key == "stop" else item
                for key, item in value.items()
                if key in TREE
            }
        return {key: timeless(item) for key, item in value.items() if not TIMED.search(key)}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def flat(value: Any, name: str, depth: int) -> dict[str, Any]:
    """The values of a JSON table, named by the keys that lead to them."""
    if depth == 0 or not isinstance(value, dict | list):
        return {name: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return {
        place: item
        for key, inner in pairs
        for place, item in flat(inner, f"{name}/{key}", depth - 1).items()
    }


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(words: list[str]) -> int:
    if words[:1] == ["run"] and len(words) >= 3:
        return (
            0
            if run(Path(words[1]), Path(words[2]), [name for name in words[3:] if name != "--only"])
            else 1
        )
    if words[:1] == ["compare"] and len(words) == 3:
        one, other = (json.loads(Path(name).read_text(encoding="utf-8")) for name in words[1:])
        return compare(one, other)
    if words[:1] == ["against"] and len(words) == 2:
        return against(words[1])
    raise SystemExit(__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
