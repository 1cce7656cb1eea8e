"""Prints what a run's status.json says ('requeue 75'); 'unknown' if the stage wrote none since.

python slurm/state.py --since FILE COMMAND --config RECIPE [--run DIRECTORY] [--shard I/N] [...]
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
    # train/main.py has one command, which has no name.
    stage = next((word for word in others[:1] if not word.startswith("-")), "train")
    index, count = arguments.shard.split("/")
    path = run / ("status.json" if count == "1" else f"status-{stage}-{index}-of-{count}.json")
    if not path.is_file() or path.stat().st_mtime < arguments.since.stat().st_mtime:
        print("unknown")
        return
    status = json.loads(path.read_text(encoding="utf-8"))
    # 'distill 2/8' is of distill; jobs of other stages may write the file, too.
    is_of_stage = status["stage"].split()[0] == stage
    print(f"{status['state']} {status['code']}" if is_of_stage else "unknown")


if __name__ == "__main__":
    main()
