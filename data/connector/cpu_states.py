"""Writes hidden states in vLLM's CPU build, which has no CUDA events and no pinned memory.

A vLLM server imports this file in its own environment, so the file needs only torch and vllm (made
for 0.32). `aerie.data.servers.states_command` writes the command line that names it.
"""

import fcntl
import os

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class Copied:
    """Stands for the CUDA event of a copy that has ended."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuStatesConnector(ExampleHiddenStatesConnector):
    """Copies a finished request's states out of the KV cache; a thread then writes the file."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        if self._kv_cache.is_cuda:
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)  # [blocks]
        offsets = torch.arange(self._block_size)
        slots = (blocks[:, None] * self._block_size + offsets).flatten()  # [blocks * block size]
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        # vLLM took the lock before the client learnt the path; the writing thread frees it.
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(f"{pending.filename}.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        copied = Copied()
        self._req_copy_events[pending.req_id] = copied
        self._executor.submit(self._write_tensors, tensors, copied, pending.filename, lock)
