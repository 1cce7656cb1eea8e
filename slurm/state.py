"""Prints what a run's status.json says ('requeue 75'), or 'unknown' where this stage wrote none since FILE.

python slurm/state.py --since FILE COMMAND --config RECIPE [--run DIRECTORY] [--shard I/N] [anything else]
"""

import argparse
import json
from pathlib import Path

import yaml


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--since", type=Path, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--shard", default="1/1")
    arguments, others = parser.parse_known_args()
    run = arguments.run or Path(yaml.safe_load(arguments.config.read_text(encoding="utf-8"))["run"])
    stage = (
        others[0] if others and not others[0].startswith("-") else "train"
    )  # train/main.py has no commands
    index, count = map(int, arguments.shard.split("/"))
    path = run / ("status.json" if count == 1 else f"status-{stage}-{index}-of-{count}.json")
    if not path.is_file() or path.stat().st_mtime < arguments.since.stat().st_mtime:
        print("unknown")
        return
    status = json.loads(path.read_text(encoding="utf-8"))
    is_own = (
        status["stage"].split()[0] == stage
    )  # 'distill 2/8' is of distill; other jobs may write this file too
    print(f"{status['state']} {status['code']}" if is_own else "unknown")


if __name__ == "__main__":
    main()
