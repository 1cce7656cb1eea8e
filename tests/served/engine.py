"""Has vLLM draft with one head after another in this process, and writes what it counted.

VENV/bin/python engine.py TARGET JOB.json RESULTS.jsonl, with the Python that has vLLM: this file
imports vllm alone. The job: {ids of each prompt, at_once, max_new_tokens}. Each line of stdin is a
speculative configuration; each line of the results, in the same order, is {alone, together} or
{error}.
"""

import contextlib
import gc
import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

CYCLES = "vllm:spec_decode_num_drafts"  # steps of a request that verified a draft
Prompts = list[list[int]]


def main() -> None:
    target, job_path, results_path = sys.argv[1:]
    with Path(results_path).open("w") as results:
        for line in sys.stdin:
            job = json.loads(Path(job_path).read_text())
            print(json.dumps(run(target, job, json.loads(line))), file=results, flush=True)


def run(target: str, job: dict[str, Any], speculative: dict[str, Any]) -> dict[str, Any]:
    """Answers and cycles, prompt by prompt and of all prompts at once."""
    llm = None
    try:
        llm = LLM(
            target,
            dtype="float32",
            enforce_eager=True,
            distributed_executor_backend="uni",
            disable_log_stats=False,
            max_num_seqs=job["at_once"],
            speculative_config=speculative,
        )
        sampling = SamplingParams(
            temperature=0.0, max_tokens=job["max_new_tokens"], detokenize=False
        )
        ids: Prompts = job["ids"]
        return {
            "alone": answer(llm, sampling, [[prompt] for prompt in ids]),
            "together": answer(llm, sampling, [ids]),
        }
    except Exception as error:  # noqa: BLE001 (whatever vLLM raises is the result)
        return {"error": str(error)}
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        with contextlib.suppress(Exception):  # an engine that did not start has left little
            cleanup_dist_env_and_memory()


def answer(llm: LLM, sampling: SamplingParams, calls: list[Prompts]) -> dict[str, Any]:
    """The new ids of each prompt, and the cycles that they took."""
    before = count_cycles(llm)
    ids = []
    for prompts in calls:
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(requests, sampling, use_tqdm=False)
        ids += [list(output.outputs[0].token_ids) for output in outputs]
    return {"ids": ids, "cycles": count_cycles(llm) - before}


def count_cycles(llm: LLM) -> int:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == CYCLES)


if __name__ == "__main__":
    main()
