"""Lets vLLM draft with one head after another in this process, and writes what vLLM counted.

VENV/bin/python engine.py TARGET JOB.json RESULTS.jsonl

VENV has vLLM, so this file imports only torch and vllm. The job is {ids: of each prompt, at_once,
max_new_tokens}. Each line of stdin is {speculative: a configuration, is_mended}. The results have a
line for each, in the same order: {alone, together} or {error}.
"""

import contextlib
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm import LLM, SamplingParams
from vllm import _custom_ops as ops
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

CYCLES = "vllm:spec_decode_num_drafts"  # counts the cycles that verified a draft
Prompts = list[list[int]]


def main() -> None:
    target, job_path, results_path = sys.argv[1:]
    with Path(results_path).open("w") as results:
        for line in sys.stdin:
            job = json.loads(Path(job_path).read_text())
            asked = json.loads(line)
            with mended() if asked["is_mended"] else contextlib.nullcontext():
                result = run(target, job, asked["speculative"])
            print(json.dumps(result), file=results, flush=True)


@contextlib.contextmanager
def mended() -> Iterator[None]:
    """Norms the keys of a block head's context layer by layer, which mends a fault of vLLM 0.32.

    vLLM gives a kernel the weights of all layers, but the kernel for CPUs uses only the first's.
    """

    def normalize(self: Any, keys: torch.Tensor) -> torch.Tensor:  # [L, T, heads, head_dim]
        normed = torch.empty_like(keys)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(normed[layer], keys[layer], weight, self._rms_norm_eps)
        return normed

    with patch.object(DFlashQwen3Model, "_normalize_context_k", normalize):
        yield


def run(target: str, job: dict[str, Any], speculative: dict[str, Any]) -> dict[str, Any]:
    """Answers and cycles, first prompt by prompt, then with all prompts at once."""
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
    except Exception as error:  # noqa: BLE001 (any error of vLLM is a result)
        return {"error": str(error)}
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        with contextlib.suppress(Exception):  # an engine that did not start may lack parts
            cleanup_dist_env_and_memory()


def answer(llm: LLM, sampling: SamplingParams, calls: list[Prompts]) -> dict[str, Any]:
    """The new ids of each prompt, and the cycles of each call."""
    ids = []
    cycles = []
    for prompts in calls:
        before = count_cycles(llm)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(requests, sampling, use_tqdm=False)
        ids += [list(output.outputs[0].token_ids) for output in outputs]
        cycles.append(count_cycles(llm) - before)
    return {"ids": ids, "cycles": cycles}


def count_cycles(llm: LLM) -> int:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == CYCLES)


if __name__ == "__main__":
    main()
