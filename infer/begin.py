"""What a bench finds of an earlier one: its own answers are kept, others are in the way."""

from data.provenance import Stage
from model.errors import UserError
from model.files import read_json, write_json


def begin_bench(stage: Stage, overwrite: bool) -> None:
    """A bench that was killed goes on only under the same inputs."""
    job, records = stage.output / "job.json", stage.output / "records.jsonl"
    same = job.is_file() and read_json(job) == stage.inputs
    if records.is_file() and not same:
        if not overwrite:
            raise UserError(
                f"{records}: holds answers of another recipe, head or target; "
                f"measure anew with --overwrite, or choose another --run"
            )
        records.unlink()
    if not same:
        for left in ("cycles.jsonl", "overhead.json"):
            (stage.output / left).unlink(missing_ok=True)
    write_json(job, stage.inputs)
