"""One distillation on disk: RUN/distilled with its prompts and journals, and what is made of them in the end."""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.distill.config import DistillConfig
from data.distill.journal import FOLDER, Journal, forget_others
from data.distill.merge import Summary, all_rows, merge, require_kept
from data.distill.page import render
from data.distill.prompts import Prompt, make_prompts, read_prompts, skip_counts, write_prompts
from data.distill.run import Interview, answer_all
from data.distill.thinking import Thinking
from data.inputs import named_inputs
from data.locks import Lock
from data.provenance import FILE, Stage
from data.share import Share
from model.errors import UserError
from model.files import digest, read_json, write_json, write_text
from model.recipe import as_dict

PROMPTS, RECORD, LOCK = "prompts.jsonl", "prompts.json", ".prompts.lock"


@dataclass(frozen=True)
class Job:
    """A distillation and its identity: what its prompts, its answers and its result are made from (JSON-ready)."""

    directory: Path
    config: DistillConfig
    prompt_inputs: dict[str, Any]
    answer_inputs: dict[str, Any]

    @classmethod
    def of(cls, directory: Path, config: DistillConfig, target: dict[str, Any], questions: Iterable[str]) -> "Job":
        """target is data.inputs.target_inputs', questions are the texts that are held out, wherever they come from.

        How the answers are carried (URLs, concurrency, this process) does not change what they are; whether a
        server is asked for their token ids does.
        """
        section = as_dict(config)
        parts = {name: section[name] for name in ("sources", "ngram", "max_turns", "seed")}
        files = named_inputs([source.path for source in config.sources])
        prompts = {**parts, "files": files, "held_out": digest(sorted(set(questions)))}
        carried = section["server"] or {}
        asked = {"model": carried.get("model"), "extra_body": carried.get("extra_body") or {}}
        asked["token_ids"] = carried.get("token_ids", False)
        answers = {"prompts": digest(prompts), "target": target, "sampling": section["sampling"], "server": asked}
        return cls(directory, config, prompts, answers)

    @property
    def stage(self) -> Stage:
        """The whole stage, its gate included."""
        return Stage("distill", self.directory, {**self.answer_inputs, "gate": as_dict(self.config.gate)})

    def prompts(self, questions: Iterable[str], overwrite: bool) -> list[Prompt]:
        """The input rows, made once and then read; UserError when those that are there are another recipe's.

        overwrite: then theirs are replaced, and answers that were not made from this job's inputs are deleted.
        Jobs that start together do so one after the other: none deletes what another has begun.
        """
        with Lock(self.directory / LOCK) as lock:
            lock.acquire()
            found = self._prompts(questions, overwrite)
            lock.forget()
        return found

    def _prompts(self, questions: Iterable[str], overwrite: bool) -> list[Prompt]:
        record = self.directory / RECORD
        if record.is_file() and (self.directory / PROMPTS).is_file():
            if read_json(record)["inputs_digest"] == digest(self.prompt_inputs):
                if overwrite:
                    forget_others(self.directory, self.answer_inputs)
                return read_prompts(self.directory / PROMPTS)
            if not overwrite:
                raise UserError(
                    f"{self.directory}: holds the prompts of other sources or settings; choose another --run, or "
                    f"replace them, and the answers to them, with --overwrite"
                )
            shutil.rmtree(self.directory / FOLDER, ignore_errors=True)
        made = make_prompts(self.config, questions)
        write_prompts(self.directory / PROMPTS, made)
        facts = {"rows": len(made), "skipped": dict(skip_counts(made))}
        write_json(record, {"inputs_digest": digest(self.prompt_inputs), "inputs": self.prompt_inputs, **facts})
        return made

    def journal(self, shard: Share) -> Journal:
        """The journal of one share, to be opened."""
        return Journal(self.directory, shard, self.answer_inputs)

    def left(self, prompts: Sequence[Prompt], journal: Journal, retry_failed: bool) -> tuple[list[Prompt], int]:
        """The rows of a share that have not ended yet, and how many have; its failed ones may be taken up again.

        The journal is the share's, open, so that no other process ends these rows between this look and the asking.
        """
        places = all_rows(self.directory, self.answer_inputs)
        ended = {place.id for place in places if not (retry_failed and place.is_open)}
        own = [prompt for position, prompt in enumerate(prompts) if position in journal.shard]
        waiting = [prompt for prompt in own if prompt.id not in ended]
        return waiting, len(own) - len(waiting)

    def has_answers(self) -> bool:
        """Whether any row has been answered, in whichever share and sitting."""
        return any(place.status == "done" for place in all_rows(self.directory, self.answer_inputs))

    async def answer(
        self, waiting: Sequence[Prompt], begun: int, interview: Interview, journal: Journal, width: int
    ) -> dict[str, int]:
        """Asks the rows that are left; how many ended as what. What was whole is so again when it is merged anew."""
        if self.stage.is_whole():
            (self.directory / FILE).unlink(missing_ok=True)  # jobs may do so together
        return await answer_all(waiting, interview, journal, width, begun)

    def finish(self, prompts: Sequence[Prompt], thinking: Thinking, title: str) -> Summary:
        """Merges the journals; writes conversations, outcomes, summary and provenance.

        UserError if rows are left; where none is kept, too, behind its summary, and conversations stay as they were.
        """
        stage = self.stage
        summary = merge(self.directory, prompts, self.answer_inputs, self.config.gate, thinking)
        write_json(self.directory / "summary.json", summary.as_dict())
        write_text(self.directory / "summary.html", render(summary, self.config, title, thinking.tokenizer))
        if not summary.kept:
            (self.directory / FILE).unlink(missing_ok=True)  # what was whole had another summary
        require_kept(summary, self.directory)
        stage.finish(summary=summary.as_dict())
        return summary
