"""Prints what a run's status.json says ('requeue 75'), or 'unknown' where nobody has written it since a file was.

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
    parser.add_argument("--shard")
    arguments, others = parser.parse_known_args()
    run = arguments.run or Path(yaml.safe_load(arguments.config.read_text(encoding="utf-8"))["run"])
    name = "status.json"
    if arguments.shard is not None:
        name = f"status-{others[0]}-{arguments.shard.replace('/', '-of-')}.json"
    path = run / name
    if not path.is_file() or path.stat().st_mtime < arguments.since.stat().st_mtime:
        print("unknown")
        return
    status = json.loads(path.read_text(encoding="utf-8"))
    print(status["state"], status["code"])


if __name__ == "__main__":
    main()
