"""The golden net: two checkouts do the same jobs on one machine, and it compares their files.

python tests/golden.py run CHECKOUT WORKDIR      does the jobs, with all files below WORKDIR
python tests/golden.py compare BEFORE AFTER      compares two WORKDIRs; exit code 1 if they differ
python tests/golden.py against COMMIT            runs a commit and this checkout, and compares both

Training's numbers may differ by 1e-6 of their size, recorded cycles by 2e-4 (the file rounds them),
and other fractions by 1e-9. The net does not compare times and what depends on them (speeds, costs,
the tree that `tune` chooses), memory, commits, hardware, paths, and keys that only one version has.
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
from collections.abc import Iterator
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
    "^t_|_ms|ms_|^ms$|seconds|speed|per_s|memory|commit|hardware|^reference$|^overhead$|^tuning$"
    "|^data_wait|^key$|^seal$|^config.json$|^made_of$|^target$|^path$|^run$"
)
TRAINED = re.compile(r"/(loss|grad_norm|held_out)[^/]*$")
# Files that are not compared: records of origins and of how stages ended, files full of times.
OTHERS = re.compile(r"^(provenance|recipe|status|details|stages|\.)")

# Every layout can hold a head with these options.
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
HEADS = ("eagle1", "eagle3", "medusa", "hydra", "draft_lm")
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
CALIBRATIONS: dict[str, dict[str, Any]] = {  # the report and a row of the bench read eagle1's
    "eagle1": {"calibrate.tree": {"levels": 4, "k": 4, "nodes": 16}, "calibrate.oracle_levels": 5},
    "draft_lm": {"calibrate.temperature": 1.0},
    "medusa": {"calibrate.nodes": 20, "calibrate.ranks": 5},  # rebuilds a static tree
}
PUBLISHED = """vanilla sps sps-heuristic sps-svip sps-confidence pld lookahead medusa hydra
eagle eagle2 eagle3 eagle-chain deagle svip ddd opt-tree""".split()
ROWS: list[dict[str, Any]] = [  # every published method, then rows with other options
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
CORPUS = {
    "synthetic.num_conversations": 700,
    "synthetic.num_prompts": 14,
    "synthetic.vocab_size": 600,
}
TARGET = {
    "train.max_steps": 220,
    "train.warmup_steps": 10,
    "train.learning_rate": 0.01,
    "head.max_position_embeddings": 512,
}
CACHED = {"features.mode": "cached", "train.max_steps": 100, "train.warmup_steps": 5}
ONLINE = {"features.mode": "online", "train.max_steps": 5}
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 1.0}
CUT = {"temperature": 0.7, "top_k": 40, "top_p": 0.9}
SWEEP = {"name": "depth", "vary": "tree.levels", "values": [2, 5], "sampling": [GREEDY]}
BENCH = {
    "bench.warmup_prompts": 1,
    "bench.sampling": [GREEDY, SAMPLED, CUT],
    "bench.contexts": [64, 96],
    "bench.cycles": "true",
}
TUNE = {"tune.levels": 3, "tune.k": 2, "tune.grid": "true"}


# ---------------------------------------------------------------------------------------------
# The jobs


def jobs(work: Path) -> Iterator[tuple[str, list[str]]]:
    """(name, command line) of each job. A name with a suffix is the file of what the job prints."""
    main, taps = work / "run", work / "taps"

    def job(command: str, kind: str, run: Path, **options: Any) -> list[str]:
        """The command line of a command with the recipe of a kind of head, and overrides."""
        recipe, sizes = KINDS[kind]
        fixed = {
            "config": f"configs/{recipe}.yaml",
            "run": run,
            "target": main / "target",
            "data.conversations": [str(main / "conversations/train.jsonl")],
            "data.max_length": 160,
            "data.held_out": 0.1,
            **{f"head.{key}": value for key, value in sizes.items()},
        }
        if kind == "eagle3":
            fixed |= {"features.after_blocks": [2, 3, 4], "train.batch_size": 4}
        if command == "train":
            fixed |= {"train.max_seconds": "null", "train.log_every": 1}
            fixed |= {"train.eval_conversations": 16}
        return line(command, **fixed | options)

    def prompts(file: str, count: int, tokens: int, **more: Any) -> dict[str, Any]:
        path = str(main / f"conversations/{file}.jsonl")
        return {"path": path, "num_prompts": count, "max_new_tokens": tokens, **more}

    yield "corpus", job("data synthetic", "eagle1", main, **CORPUS)
    plain = {"plain": None, "limit": 20, "target": main / "tokenizer"}
    yield "masks.txt", job("data show", "eagle1", main, **plain)
    lm = {**TARGET, "target": main / "tokenizer", "output": main / "target"}
    yield "target", job("train", "target", work / "lm", **lm)
    for kind, run in (("eagle1", main), ("eagle3", taps)):
        yield f"features {kind}", job("data features", kind, run, **{"features.mode": "cached"})
    for kind in HEADS:
        run = taps if kind == "eagle3" else main
        yield kind, job("train", kind, run, output=main / "heads" / kind, **CACHED)
    for name, (kind, options) in VARIANTS.items():
        run = work / "variants" / name
        yield name, job("train", kind, run, output=run / "head", **ONLINE, **options)
    for kind in HEADS[:-1]:
        head, target = str(main / "heads" / kind), main / "target"
        yield f"{kind}.txt", line("model inspect", head, json=None, target=target)
        for layout in LAYOUTS.get(kind, ()):
            named = {"to": layout, "target": target, "target-name": "some/target"}
            out = work / "exports" / f"{kind}-{layout}"
            yield f"{kind} for {layout}", line("model convert", head, out=out, **named)
    for kind, more in CALIBRATIONS.items():
        run = main if kind == "eagle1" else work / "calibrate" / kind
        about = {"head": main / "heads" / kind, "calibrate.prompts": prompts("calibration", 6, 24)}
        yield f"calibrate {kind}", job("infer calibrate", kind, run, **about, **more)
    rows = [with_head(row, main / "heads") for row in ROWS]
    sweep = {**SWEEP, "rows": [row for row in rows if row["method"] == "eagle3"]}
    answers = {
        "bench.rows": rows,
        "bench.sweeps": [sweep],
        "bench.prompts": prompts("prompts", 3, 28),
    }
    yield "bench", job("infer bench", "eagle1", main, **BENCH, **answers)
    measured = {
        "tune.measure": prompts("prompts", 2, 16, turns=1),
        "tune.prompts": prompts("calibration", 3, 20, turns=1),
        "head": main / "heads" / "eagle1",
    }
    yield "tune", job("infer tune", "eagle1", main, **TUNE, **measured)
    yield "report", job("infer report", "eagle1", main)


def line(command: str, *words: str, **options: Any) -> list[str]:
    """The command line of SCRIPT/main.py; an option whose value is None is a flag."""
    script, *first = command.split()
    parts = [f"{script}/main.py", *first, *words]
    for key, value in options.items():
        text = json.dumps(value) if isinstance(value, dict | list) else value
        parts.append(f"--{key}" if value is None else f"--{key}={text}")
    return parts


def with_head(row: dict[str, Any], heads: Path) -> dict[str, Any]:
    """A row of the bench with its head's directory, if its method has a head."""
    method = row["method"].split("-")[0]
    if method in ("vanilla", "pld", "lookahead"):
        return row
    usual = "draft_lm" if method == "sps" else method if method in KINDS else "eagle1"
    return {**row, "head": str(heads / row.get("head", usual))}


def run(checkout: Path, work: Path) -> Path:
    """Does each job in a fork, which has the libraries already; returns the directory."""
    os.environ |= ENVIRONMENT  # before the libraries are loaded
    for library in LIBRARIES:
        importlib.import_module(library)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    for name, words in jobs(work):
        started = time.monotonic()
        context = multiprocessing.get_context("fork")
        child = context.Process(target=become, args=(checkout, words, work / name))
        child.start()
        child.join()
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
        if child.exitcode:
            raise SystemExit((work / "errors").read_text()[-4000:])
    return work


def become(checkout: Path, words: list[str], output: Path) -> None:
    """Turns this process into a command of the checkout."""
    for number, path in ((1, output), (2, output.with_name("errors"))):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(checkout)
    sys.argv = words
    sys.path[:1] = [str(checkout / Path(words[0]).parent), str(checkout), str(checkout / "src")]
    runpy.run_path(words[0], run_name="__main__")


# ---------------------------------------------------------------------------------------------
# Comparing


def against(commit: str) -> int:
    """Compares a commit, in its own worktree, with this checkout; returns the exit code."""
    worktree = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        subprocess.run([*worktree, "add", "--detach", str(tree), commit], check=True)
        try:
            before = run(tree, Path(directory) / "before")
            return compare(before, run(ROOT, Path(directory) / "after"))
        finally:
            subprocess.run([*worktree, "remove", "--force", str(tree)], check=True)


def compare(before: Path, after: Path) -> int:
    """Prints every value that differs; returns the exit code."""
    found = [*differences("", contents(before), contents(after))]
    print(*found, f"{len(found):,} values differ", sep="\n")
    return 1 if found else 0


def contents(work: Path) -> dict[str, Any]:
    """The content of each file that is compared."""
    found = {}
    for path in sorted(work.rglob("*")):
        if path.is_file() and path.suffix and not OTHERS.search(path.name):
            found[str(path.relative_to(work))] = content(path, str(work))
    return found


def content(path: Path, work: str) -> Any:
    """A file's values, its text without local paths, or a digest; None: it is not compared."""
    match path.suffix:
        case ".bin" | ".npz":  # the archive's own bytes vary with torch's file names and with zlib
            with zipfile.ZipFile(path) as archive:
                members = b"".join(archive.read(member) for member in archive.namelist())
            return hashlib.sha256(members).hexdigest()
        case ".safetensors":
            return hashlib.sha256(path.read_bytes()).hexdigest()
        case ".json" | ".jsonl" | ".txt" | ".jinja" | ".yaml":
            text = path.read_text(encoding="utf-8").replace(work, "WORK")
        case _:
            return None
    if path.name in ("tune.json", "measured.json"):
        return taus(json.loads(text))
    if path.suffix == ".json":
        return json.loads(text)
    return [*map(json.loads, text.splitlines())] if path.suffix == ".jsonl" else text


def taus(tuning: dict[str, Any]) -> dict[str, float]:
    """The tau of every replayed or timed tree. Costs, which vary, choose among these trees."""
    names = tuning.get("names", ())
    found = dict(zip(names, (row["tau"] for row in tuning.get("rows", ())), strict=True))
    for head in tuning.get("heads", ()):
        for replayed in (head["published"], *head["trees"]):
            found[str(replayed["tree"])] = replayed["tau"]
    return found


def differences(name: str, before: Any, after: Any) -> Iterator[str]:
    """Yields a line for each value that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        alone = before.keys() ^ after.keys() if not name else ()
        yield from (f"{key}: only one has it" for key in sorted(alone))
        for key in sorted(before.keys() & after.keys()):
            if not TIMED.search(key):
                yield from differences(f"{name}/{key}", before[key], after[key])
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(f"{name}/{number}", *pair)
    elif before != after and not are_close(name, before, after):
        yield f"{name}\n  {before!s:.300}\n  {after!s:.300}"


def are_close(name: str, before: Any, after: Any) -> bool:
    if not (isinstance(before, float) and isinstance(after, float)):
        return False
    if "cycles.jsonl/" in name:  # this file rounds its numbers
        return math.isclose(before, after, rel_tol=2e-4, abs_tol=2e-4)
    return math.isclose(before, after, rel_tol=1e-6 if TRAINED.search(name) else 1e-9)


def main(words: list[str]) -> int:
    match words:
        case ["run", checkout, work]:
            run(Path(checkout).resolve(), Path(work).resolve())
            return 0
        case ["compare", before, after]:
            return compare(Path(before).resolve(), Path(after).resolve())
        case ["against", commit]:
            return against(commit)
    raise SystemExit(__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
