"""The golden net: two checkouts do the same jobs on one machine; their results are compared.

python tests/golden.py run CHECKOUT WORKDIR [STEP ...]  does the jobs: WORKDIR/digests.json
python tests/golden.py compare BEFORE.json AFTER.json   prints every difference; exit code 1 if any
python tests/golden.py against COMMIT                   a commit and this checkout, run and compared

Training's numbers may differ by 1e-6 of their size, recorded cycles by 2e-4 (the file rounds them),
other fractions by 1e-9. Left out: times and what depends on them (speeds, costs, the tree that
`tune` chooses), memory, commits, hardware, paths. Of trees and cycles we compare only keys that
every version of the files has.

A step reads the files of earlier steps in WORKDIR; `calibrate` must follow `heads`, which removes
the calibrators.
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
CYCLE = """pos_start verify draft_forwards drafted depth nodes accepted bonus_id new_tokens
stop_reason""".split()
NODE = "token parent depth q survival entropy p accepted passenger".split()
ANSWER = """output_ids verify target_forwards draft_forwards draft_forwards_wasted draft_nodes accepted
cycle_tokens cycle_nodes identical identical_to_generate prompt_ids""".split()
DIGESTS = re.compile(r'("(?:key|seal|config\.json|target)": )"(?:sha256:)?[0-9a-f]{16}"')

# Every layout can hold such a head.
PLAIN = {"fc_norm": False, "norm_output": False, "norm_before_residual": False}
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
# Heads with other options, trained on online features.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
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
PUBLISHED = """vanilla sps sps-heuristic sps-svip sps-confidence pld lookahead medusa hydra
eagle eagle2 eagle3 eagle-chain deagle svip ddd opt-tree""".split()
ROWS: list[dict[str, Any]] = [  # every published method, then other options of rows
    *({"method": name} for name in PUBLISHED),
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
ONLINE = {"features.mode": "online", "train.max_steps": 5}
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 1.0}
CUT = {"temperature": 0.7, "top_k": 40, "top_p": 0.9}
SWEEP = {"name": "depth", "vary": "tree.levels", "values": [2, 5], "sampling": [GREEDY]}


class Net:
    """One checkout at work in one directory; `results` has what its step computed, by name."""

    def __init__(self, checkout: Path, work: Path) -> None:
        self.checkout = checkout.resolve()
        self.work = work.resolve()
        self.main = self.work / "run"
        self.results: dict[str, Any] = {}  # of the step that is running

    def call(self, command: str, kind: str, run: Path, *words: str, **options: Any) -> str:
        """Runs a command on a kind of head's recipe, with overrides; returns what it prints."""
        recipe, sizes = KINDS[kind]
        fixed = {
            "config": f"configs/{recipe}.yaml",
            "run": run,
            "target": self.main / "target",
            "data.conversations": [str(self.main / "conversations/train.jsonl")],
            "data.max_length": 160,
            "data.held_out": 0.1,
            **{f"head.{key}": value for key, value in sizes.items()},
        }
        if kind == "eagle3":
            fixed |= {"features.after_blocks": [2, 3, 4], "train.batch_size": 4}
        return self.bare(command, *words, **fixed | options)

    def bare(self, command: str, *words: str, **options: Any) -> str:
        """What `python SCRIPT/main.py ...` prints, without local paths.

        It runs in a fork, which has the libraries already.
        """
        script, *first = command.split()
        call = [f"{script}/main.py", *first, *words]
        for key, value in options.items():
            call.append(f"--{key}={json.dumps(value) if isinstance(value, dict | list) else value}")
        context = multiprocessing.get_context("fork")
        child = context.Process(target=become, args=(self.checkout, call, self.work))
        child.start()
        child.join()
        if child.exitcode:
            errors = (self.work / "errors.txt").read_text()[-4000:]
            raise SystemExit(f"{' '.join(call)}\n{errors}\n{child.exitcode}")
        return self.read(self.work / "output.txt")

    def read(self, path: Path) -> str:
        """A file's text without local paths, and without digests of files that contain some."""
        text = DIGESTS.sub(r'\1""', path.read_text(encoding="utf-8"))
        return text.replace(str(self.work), "WORK").replace(str(self.checkout), "CHECKOUT")

    def prompts(self, file: str, count: int, tokens: int, **more: Any) -> dict[str, Any]:
        path = f"{self.main}/conversations/{file}.jsonl"
        return {"path": path, "num_prompts": count, "max_new_tokens": tokens, **more}

    def remove(self, *names: str) -> None:
        for path in (self.work / name for name in names):
            path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)

    def take_files(self, name: str, directory: Path) -> None:
        """Takes the sha256 of every file below a directory, except those on its origin."""
        for path in sorted(directory.rglob("*")):
            if path.is_dir() or path.name.startswith(("provenance", "recipe", "status")):
                continue
            content = path.read_bytes()
            if path.suffix in (".json", ".jsonl", ".yaml"):
                content = self.read(path).encode()
            if path.suffix in (".bin", ".npz"):
                # torch names its archive after a temporary file, and zlib has versions.
                with zipfile.ZipFile(path) as archive:
                    content = b"".join(archive.read(member) for member in archive.namelist())
            file_name = f"{name}/{path.relative_to(directory)}"
            self.results[file_name] = hashlib.sha256(content).hexdigest()

    def take_table(self, name: str, path: Path) -> None:
        """Takes a JSON file without times: a value per path of three keys, with all below it."""
        self.results |= flat(timeless(json.loads(self.read(path))), name, 3)

    def train(self, name: str, kind: str, run: Path, output: Path, **more: Any) -> None:
        """Trains; takes the files, and the losses of every step."""
        fixed = {"train.max_seconds": "null", "train.log_every": 1, "train.eval_conversations": 16}
        self.call("train", kind, run, output=output, **fixed | more)
        logged_kind = "draft_lm" if kind == "target" else kind
        for record in lines(run / "metrics.jsonl"):
            if record["kind"] == logged_kind:
                values = flat(record, f"{name}/{record['step']}", 1)
                self.results |= {key: values[key] for key in filter(MEASURED.search, values)}
        self.take_files(name, output)


# ---------------------------------------------------------------------------------------------
# The steps


def corpus(net: Net) -> None:
    net.remove("run")
    net.call(
        "data synthetic",
        "eagle1",
        net.main,
        **{"synthetic.num_conversations": 700, "synthetic.num_prompts": 14},
        **{"synthetic.vocab_size": 600},
    )
    for name in ("conversations", "tokenizer"):
        net.take_files(name, net.main / name)
    words = ("--plain", "--limit", "20")
    shown = net.call("data show", "eagle1", net.main, *words, target=net.main / "tokenizer")
    net.results["masks"] = shown.splitlines()


def target(net: Net) -> None:
    net.remove("run/target", "lm")
    more = {
        "train.max_steps": 220,
        "train.warmup_steps": 10,
        "train.learning_rate": 0.01,
        "target": net.main / "tokenizer",
        "head.max_position_embeddings": 512,
    }
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
                    net.results[f"{kind}/{shard.name}/{tensor}"] = digest.hexdigest()


def heads(net: Net) -> None:
    net.remove("run/heads", "run/state", "taps/state", "variants")
    net.remove("run/metrics.jsonl", "taps/metrics.jsonl")
    fixed = {"features.mode": "cached", "train.max_steps": 100, "train.warmup_steps": 5}
    for kind in HEADS:
        run = net.work / "taps" if kind == "eagle3" else net.main
        net.train(kind, kind, run, net.main / "heads" / kind, **fixed)
    for name, (kind, options) in VARIANTS.items():
        run = net.work / "variants" / name
        net.train(name, kind, run, run / "head", **ONLINE, **options)


def exports(net: Net) -> None:
    net.remove("exports")
    for kind in HEADS[:-1]:
        head = str(net.main / "heads" / kind)
        shown = net.bare("model inspect", head, "--json", target=net.main / "target")
        net.results[f"{kind}/inspect"] = json.loads(shown)
        for layout in LAYOUTS.get(kind, ()):
            out = net.work / "exports" / f"{kind}-{layout}"
            options = {"to": layout, "target": net.main / "target", "out": out}
            net.bare("model convert", head, **options, **{"target-name": "some/target"})
            net.take_files(out.name, out)


def calibrate(net: Net) -> None:
    net.remove("run/calibration", "calibrate")
    prompts = net.prompts("calibration", 6, 24)
    for kind, more in CALIBRATIONS.items():
        run = net.main if kind == "eagle1" else net.work / "calibrate" / kind
        options = {"head": net.main / "heads" / kind, "calibrate.prompts": prompts, **more}
        net.call("infer calibrate", kind, run, **options)
        for name in ("calibration", "calibrator"):
            net.take_table(f"{kind}/{name}", run / "calibration" / f"{name}.json")


def decode(net: Net) -> None:
    """The answers; and of each cycle the tree, what was accepted, and why the draft ended."""
    net.remove("run/bench")
    rows = [with_head(row, net.main / "heads") for row in ROWS]
    options = {
        "bench.rows": rows,
        "bench.warmup_prompts": 1,
        "bench.prompts": net.prompts("prompts", 3, 28),
        "bench.sampling": [GREEDY, SAMPLED, CUT],
        "bench.contexts": [64, 96],
        "bench.sweeps": [{**SWEEP, "rows": [row for row in rows if row["method"] == "eagle3"]}],
        "bench.cycles": "true",
    }
    net.call("infer bench", "eagle1", net.main, **options)
    for record in lines(net.main / "bench" / "records.jsonl"):
        if record["status"] != "ok":
            raise SystemExit(f"{record['method']}: {record['message']}")
        net.results[f"answers/{answer_of(record)}"] = {key: record[key] for key in ANSWER}
    for record in lines(net.main / "bench" / "cycles.jsonl"):
        cycle = {
            **{key: record[key] for key in CYCLE},
            **{key: record["node"][key] for key in NODE},
            **record["level"],
        }
        net.results[f"cycles/{answer_of(record)}/{record['cycle']}"] = cycle


def answer_of(record: dict[str, Any]) -> str:
    """The name of an answer, from its record or one of its cycles."""
    names = "row method temperature top_k top_p task prompt_id turn".split()
    return "/".join(str(record.get(name)) for name in names)


def with_head(row: dict[str, Any], heads: Path) -> dict[str, Any]:
    """A row of the bench with its head's directory, if its method has a head."""
    method = row["method"].split("-")[0]
    if method in ("vanilla", "pld", "lookahead"):
        return row
    usual = "draft_lm" if method == "sps" else method if method in KINDS else "eagle1"
    return {**row, "head": str(heads / row.get("head", usual))}


def tune(net: Net) -> None:
    """The tau of every replayed tree, and of timed ones except the second, which costs choose."""
    net.remove("run/tune")
    options = {
        "tune.levels": 3,
        "tune.k": 2,
        "tune.grid": "true",
        "tune.measure": net.prompts("prompts", 2, 16, turns=1),
        "tune.prompts": net.prompts("calibration", 3, 20, turns=1),
        "head": net.main / "heads" / "eagle1",
    }
    net.call("infer tune", "eagle1", net.main, **options)
    for head in json.loads(net.read(net.main / "tune" / "tune.json"))["heads"]:
        for replayed in (head["published"], *head["trees"]):
            sizes = [replayed["tree"][key] for key in ("levels", "k", "nodes")]
            net.results[f"tau/{sizes}"] = replayed["tau"]
    measured = json.loads(net.read(net.main / "tune" / "measured.json"))
    for number, (name, row) in enumerate(zip(measured["names"], measured["rows"], strict=True)):
        if number != 1:
            net.results[f"tau/{name}"] = row["tau"]


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
    sys.argv = call
    sys.path[:1] = [str(checkout / Path(call[0]).parent), str(checkout), str(checkout / "src")]
    runpy.run_path(call[0], run_name="__main__")


def run(checkout: Path, work: Path, steps: list[str]) -> dict[str, Any]:
    """Does the steps (none: all), and writes their results to WORKDIR/digests.json."""
    os.environ |= ENVIRONMENT  # before the libraries are loaded
    for library in LIBRARIES:
        importlib.import_module(library)
    work.mkdir(parents=True, exist_ok=True)
    path = work / "digests.json"
    net = Net(checkout, work)
    results: dict[str, Any] = json.loads(path.read_text()) if steps and path.is_file() else {}
    for name in steps or STEPS:
        started = time.monotonic()
        net.results = {}
        STEPS[name](net)
        results[name] = net.results
        path.write_text(json.dumps(results, indent=0), encoding="utf-8")
        seconds = time.monotonic() - started
        print(f"{name}: {len(net.results):,} values in {seconds:.0f} s", flush=True)
    return results


# ---------------------------------------------------------------------------------------------
# Comparing


def against(commit: str) -> int:
    """Compares a commit, in a worktree of its own, with this checkout."""
    worktree = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        subprocess.run([*worktree, "add", "--detach", str(tree), commit], check=True)
        try:
            before = run(tree, Path(directory) / "before", [])
            return compare(before, run(ROOT, Path(directory) / "after", []))
        finally:
            subprocess.run([*worktree, "remove", "--force", str(tree)], check=True)


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Prints every value that differs; returns the exit code."""
    pair = [flat(results, "", 2) for results in (before, after)]
    names = sorted({*pair[0], *pair[1]})
    num_different = 0
    for name in names:
        values = [results.get(name, "missing") for results in pair]
        if not alike(name, *values):
            num_different += 1
            print(name, *(f"  {json.dumps(value):.300}" for value in values), sep="\n")
    print(f"{num_different:,} of {len(names):,} values differ")
    return 1 if num_different or not names else 0


def alike(name: str, before: Any, after: Any) -> bool:
    if isinstance(before, dict) and isinstance(after, dict):
        same_keys = before.keys() == after.keys()
        return same_keys and all(alike(name, before[key], after[key]) for key in before)
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(alike, [name] * len(before), before, after))
    if not (isinstance(before, float) and isinstance(after, float)):
        return bool(before == after)
    if name.startswith("/decode/cycles/"):  # the file rounds them
        return math.isclose(before, after, rel_tol=2e-4, abs_tol=2e-4)
    return math.isclose(before, after, rel_tol=1e-6 if MEASURED.search(name) else 1e-9)


def timeless(value: Any) -> Any:
    """A JSON value without keys of times, and of what else depends on the machine."""
    if isinstance(value, list):
        return [timeless(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "shape" in value and "levels" in value:  # a tree
        value = {key: item for key, item in value.items() if key in TREE}
        if "stop" in value:
            value["stop"] = value["stop"]["rule"]
    return {key: timeless(item) for key, item in value.items() if not TIMED.search(key)}


def flat(value: Any, name: str, depth: int) -> dict[str, Any]:
    """The values of a JSON table, named by the keys that lead to them."""
    if depth == 0 or not isinstance(value, dict | list):
        return {name: value}
    values: dict[str, Any] = {}
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        values |= flat(inner, f"{name}/{key}", depth - 1)
    return values


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(words: list[str]) -> int:
    match words:
        case ["run", checkout, work, *steps]:
            run(Path(checkout), Path(work), steps)
            return 0
        case ["compare", *files] if len(files) == 2:
            return compare(*(json.loads(Path(file).read_text("utf-8")) for file in files))
        case ["against", commit]:
            return against(commit)
    raise SystemExit(__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
