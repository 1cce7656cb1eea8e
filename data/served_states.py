"""The target's states from several vLLM servers, each of which is compared with the target first.

A row goes to the server with the fewest requests. One that fails is left alone for a while.
"""

import itertools
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aerie.configs.errors import UserError, rank, warn
from aerie.configs.schema.data import StateServersConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.data.chat import TokenRow
from aerie.data.feature_cache import CachedRow
from aerie.data.progress import run_ahead
from aerie.data.servers import can_run_here, state_ids, states_command
from aerie.data.state_server import (
    NoFile,
    NoStates,
    Reply,
    ServerFault,
    StateServer,
    StatesFolder,
)
from aerie.model.target import Target, load_shell

PROBE_TOKENS = 32  # of a row that is compared at the start
PROBE_S = 60.0  # to wait for its file, since network file systems may show a new file late
PROBE_ROWS = 8  # whose next tokens are compared, if this machine cannot load the target's blocks
AWAY_S = 30.0  # until a server that failed is asked again; sooner if no other server answers
LONGEST_PAUSE_S = 30.0
# How far states may be from our own: the difference's root mean square, relative to the state's.
CLOSE = {torch.float64: 1e-3, torch.float32: 1e-3}
CLOSE_IF_NARROW = 0.05


class Expected(NamedTuple):
    """What the right server gives for some short rows."""

    rows: list[list[int]]
    own: Tensor | None  # [T, S * D], states of the first row by our own forward; None: not made
    how: str  # what is compared, in words


class ServedStates:
    """Asks the target's servers for states; leaving the context ends the requests under way."""

    def __init__(
        self,
        config: StateServersConfig,
        target: TargetConfig,
        after_blocks: tuple[int, ...],
        rows: Sequence[TokenRow],
        run: Path,
    ) -> None:
        """rows: all that will be asked for; run: the directory for which the states are made."""
        self.config = config
        self.shell = load_shell(target)
        self.after_blocks = after_blocks
        self.longest = max(len(row.input_ids) for row in rows)
        self.ids = state_ids(target, after_blocks, self.shell.config.num_hidden_layers)
        self.expected = self._expect([[*row.input_ids[:PROBE_TOKENS]] for row in rows[:PROBE_ROWS]])
        self.servers = [StateServer(url, config.timeout_s) for url in dict.fromkeys(config.urls)]
        self.versions = set[str]()
        self.seconds = 0.0  # of forwards in this process
        self._choosing = threading.Lock()
        self._closing = threading.Event()
        self.run = run
        self.workers = config.concurrency * len(self.servers)
        self.pool = ThreadPoolExecutor(self.workers, thread_name_prefix="states")

    def __enter__(self) -> "ServedStates":
        self.folder = StatesFolder(Path(self.config.states), self.run)
        try:
            self._check_all()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._choosing:
            self._closing.set()
        for server in self.servers:
            server.hang_up()
        self.pool.shutdown(cancel_futures=True)
        self.folder.close()

    # --- what a cache needs of a source of states

    @property
    def hidden_size(self) -> int:
        return self.shell.hidden_size

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of the servers, for the record of a shard."""
        dtype = str(self.shell.dtype).removeprefix("torch.")
        return {"server": {"vllm": sorted(self.versions), "dtype": dtype, "state_ids": [*self.ids]}}

    def fingerprint(self) -> str:
        return self.shell.fingerprint()

    def logits(self, last_hidden: Tensor) -> Tensor:
        return self.shell.vocab.logits(last_hidden)

    def states(self, batches: Iterable[Sequence[TokenRow]]) -> Iterator[Tensor]:
        """States [N, S * D] of each batch's tokens: last_hidden, then the taps."""
        # Twice as many batches as workers, so that a slow row leaves no worker idle.
        return run_ahead(self.pool, self._of_batch, batches, 2 * self.workers)

    def _of_batch(self, rows: Sequence[TokenRow]) -> Tensor:
        return torch.cat([self.of_row(row.input_ids) for row in rows])

    def of_row(self, input_ids: Sequence[int]) -> Tensor:
        """States [T, S * D] of a row's tokens."""
        return self._arranged(self._fetch(input_ids).states)

    @torch.inference_mode()
    def _arranged(self, states: Tensor) -> Tensor:
        """[T, ids, D] as servers give them -> [T, S * D]: last_hidden, then the taps."""
        taps = [self.ids.index(tap) for tap in self.after_blocks]
        last_hidden = self.shell.norm(states[:, -1])  # [T, D]
        return torch.cat([last_hidden, states[:, taps].flatten(1)], dim=-1)

    # --- a row's states from one of the servers

    def _fetch(self, input_ids: Sequence[int]) -> Reply:
        attempts = 0
        failed = set[StateServer]()
        while True:
            attempts += 1
            with self._turn(failed) as server:
                try:
                    return self._ask(server, server.model or self._check(server), input_ids)
                except ServerFault as fault:
                    failed.add(server)
                    if not self._closing.is_set():
                        self._leave(server, fault, attempts)
            if self._closing.wait(self._pause(attempts)):
                raise UserError(f"{server.url}: is not asked again, since the stage is ending")

    @contextmanager
    def _turn(self, failed: set[StateServer]) -> Iterator[StateServer]:
        """The server with the fewest requests, of those that answer and did not fail this row.

        While one server answers, no row waits for one that failed: a thread checks that one.
        """
        now = time.monotonic()

        def rank_of(server: StateServer) -> tuple[bool, float, bool, int]:
            seconds = max(server.away_until - now, 0.0)
            return not server.model, seconds, server in failed, server.under_way

        with self._choosing:
            server = min(self.servers, key=rank_of)
            server.under_way += 1
            for other in self.servers:
                is_due = other.away_until <= now and not (other.model or other.checking.locked())
                if server.model and is_due and not self._closing.is_set():
                    other.away_until = math.inf
                    self.pool.submit(self._look_again, other)
        try:
            yield server
        finally:
            with self._choosing:
                server.under_way -= 1

    def _look_again(self, server: StateServer) -> None:
        """Checks a server that failed; rows go to it again if it gives the target's states."""
        try:
            self._check(server)
        except ServerFault:
            server.away_until = time.monotonic() + AWAY_S
        except UserError as error:  # another model runs there now, so nobody asks it again
            warn(str(error))

    def _leave(self, server: StateServer, fault: ServerFault, attempts: int) -> None:
        """Leaves a server that failed alone for a while; UserError after the last attempt."""
        others = [other for other in self.servers if other is not server]
        one_answers = any(other.model for other in others)
        # While one answers, each of the others may fail once without ending the stage.
        if attempts > self.config.retries + (len(others) if one_answers else 0):
            raise UserError(
                f"{server.url}: {fault} (attempts: {attempts:,}); once a server answers, run the "
                f"same command again, which goes on; start a server with: {self.command(server)}"
            ) from fault
        now = time.monotonic()
        with self._choosing:
            is_news = server.away_until <= now
            server.away_until = now + AWAY_S
            server.model = ""  # another server may be started there
        if is_news:
            warn(f"{server.url}: {fault}; its rows are asked for again")

    def _pause(self, attempts: int) -> float:
        """Seconds before the next attempt: none while another server answers."""
        now = time.monotonic()
        if any(server.away_until <= now for server in self.servers):
            return 0.0
        return min(2.0 ** (attempts - 1), LONGEST_PAUSE_S)

    def _ask(self, server: StateServer, model: str, input_ids: Sequence[int]) -> Reply:
        """A row's states from this server; ServerFault if they are not what its ids ask for."""
        reply = server.reply(model, input_ids, self.folder, self.config.timeout_s)
        shape = (len(input_ids), len(self.ids), self.hidden_size)
        states = reply.states
        if states.shape != shape or states.dtype != self.shell.dtype:
            found = f"{states.dtype} {[*states.shape]}".removeprefix("torch.")
            raise ServerFault(f"it gave other states than before ({found})")
        if not states.isfinite().all():
            raise ServerFault("it gave states that are not finite")
        # An embedding (id 0) may be zero.
        if not states[:, int(self.ids[0] == 0) :].any(-1).all():
            raise ServerFault("it gave states of zeros")
        return reply

    # --- whether servers are the right ones

    def command(self, server: StateServer) -> str:
        return states_command(
            self.shell.recipe, self.after_blocks, self.config.states, self.longest, url=server.url
        )

    def _wrong(self, server: StateServer, why: str) -> str:
        return f"{server.url}: {why}; restart it with: {self.command(server)}"

    def _expect(self, rows: list[list[int]]) -> Expected:
        if not can_run_here(self.shell.recipe):
            how = f"the target's embedding and next tokens ({len(rows)} rows)"
            return Expected(rows, None, how)
        target = Target.load(self.shell.recipe)
        output = target.features(torch.tensor(rows[:1]), self.after_blocks)
        parts = [part[0] for part in (output.last_hidden, output.taps) if part is not None]
        how = f"our own forward of {len(rows[0])} tokens"
        return Expected(rows[:1], torch.cat(parts, dim=-1), how)

    def _check_all(self) -> None:
        """UserError if a server is wrong or none answers; a warning if some do not answer."""
        for attempts in itertools.count(1):
            faults = list[tuple[StateServer, ServerFault]]()
            for server in self.servers:
                try:
                    self._check(server)
                except ServerFault as fault:
                    faults.append((server, fault))
            one_answers = len(faults) < len(self.servers)
            for server, failure in faults:
                self._leave(server, failure, 0 if one_answers else attempts)
            if one_answers:
                return
            time.sleep(self._pause(attempts))

    def _check(self, server: StateServer) -> str:
        """The server's model; UserError if its states are not the target's, ServerFault if none.

        One thread checks a server; threads that wait for that take over its outcome.
        """
        fault = server.fault
        with server.checking:
            if server.model:
                return server.model
            if server.fault is not None and server.fault is not fault:
                raise server.fault
            try:
                server.model = self._look(server)
            except ServerFault as error:
                server.fault = error
                raise
            server.away_until = 0.0
            return server.model

    def _look(self, server: StateServer) -> str:
        entry = server.listing()
        room = entry.get("max_model_len")
        if isinstance(room, int) and self.longest + 1 > room:
            raise UserError(
                f"{server.url}: has room for {room:,} tokens (max_model_len), but the longest "
                f"row needs {self.longest + 1:,}; lower data.max_length to {room - 1:,}, or "
                f"restart it with: {self.command(server)}"
            )
        model: str = entry["id"]
        try:
            rows = self.expected.rows
            replies = [server.reply(model, row, self.folder, PROBE_S) for row in rows]
        except NoFile as fault:
            raise UserError(
                f"{server.url}: {fault}; features.server.states must name the folder to which "
                "the server writes (shared_storage_path), as this machine sees it"
            ) from fault
        except NoStates as fault:
            raise UserError(self._wrong(server, str(fault))) from fault
        why = self._difference(replies)
        if why is not None:
            raise UserError(self._wrong(server, why))
        self.versions.add(entry["version"])
        if rank() == 0:
            print(
                f"states: {server.url} runs vLLM {entry['version']} with {model}; "
                f"its states agree with {self.expected.how}",
                flush=True,
            )
        return model

    def _difference(self, replies: Sequence[Reply]) -> str | None:
        """Why these are not the target's states, or None."""
        states = replies[0].states
        dtype = self.shell.dtype
        wanted = f"[0, ..., {self.ids[-1]}]" if len(self.ids) > 8 else str([*self.ids])
        if states.dtype != dtype:
            names = [str(name).removeprefix("torch.") for name in (states.dtype, dtype)]
            return f"computes in {names[0]}, but the target has {names[1]}"
        if states.ndim == 3 and len(states) != len(self.expected.rows[0]):
            return f"gives states of {len(states)} of {len(self.expected.rows[0])} tokens"
        if states.ndim != 3 or states.shape[2] != self.hidden_size:
            return f"serves another model (states {[*states.shape]}, not of {self.hidden_size})"
        if states.shape[1] != len(self.ids):
            return f"gives {states.shape[1]} states per token, but {wanted} are needed"
        if self.expected.own is not None:
            return self._difference_from_own(states, self.expected.own)
        return self._difference_in_law(replies)

    def _difference_from_own(self, states: Tensor, own: Tensor) -> str | None:
        width = self.hidden_size
        ours = own.float().unflatten(-1, (-1, width))  # [T, S, D]
        theirs = self._arranged(states).float().unflatten(-1, (-1, width))  # [T, S, D]
        squares = (theirs - ours).square().mean((0, 2)) / ours.square().mean((0, 2))  # [S]
        names = ["final norm", *(f"{tap} blocks" for tap in self.after_blocks)]
        limit = CLOSE.get(self.shell.dtype, CLOSE_IF_NARROW)
        for name, error in zip(names, squares.sqrt().tolist(), strict=True):
            if not error <= limit:
                return (
                    f"its states after {name} differ by {error:.2g} from our own forward's, "
                    "so it serves another model, or other state ids"
                )
        return None

    def _difference_in_law(self, replies: Sequence[Reply]) -> str | None:
        """The same difference, judged by the embedding and by each row's next token."""
        limit = CLOSE.get(self.shell.dtype, CLOSE_IF_NARROW)
        for row, reply in zip(self.expected.rows, replies, strict=True):
            ours = self.shell.vocab.embedding[row].float()  # [T, D]
            theirs = reply.states[:, 0].float()  # [T, D]
            # Some targets scale their embedding by a factor of the configuration.
            factor = (ours * theirs).sum() / ours.square().sum()
            error = (theirs - factor * ours).square().mean().sqrt() / theirs.square().mean().sqrt()
            if not error <= limit:
                return f"its states after 0 blocks are not the target's embedding ({error:.2g})"
            last_hidden = self._arranged(reply.states)[-1, : self.hidden_size]  # [D]
            logits = self.logits(last_hidden).float()  # [V]
            if not logits.max() - logits[reply.next_token] <= limit * logits.std():
                return (
                    f"its next token is {reply.next_token}, but the target's norm and LM head make "
                    f"{int(logits.argmax())} of its last state, so it serves another model"
                )
        return None


# --- rows for online training -------------------------------------------------------------------


class ServedRows(Sequence[CachedRow]):
    """Rows whose states come from servers whenever they are read."""

    def __init__(self, rows: Sequence[TokenRow], source: ServedStates, dtype: torch.dtype) -> None:
        """dtype: of the states that training reads."""
        self.rows = rows
        self.source = source
        self.dtype = dtype

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return ServedRows(self.rows[position], self.source, self.dtype)
        return self.at([position])[0]

    def at(self, positions: Sequence[int]) -> list[CachedRow]:
        """Several rows, which are all asked for at once."""
        rows = [self.rows[position] for position in positions]
        states = self.source.states([row] for row in rows)
        return [self._cached(*pair) for pair in zip(rows, states, strict=True)]

    def _cached(self, row: TokenRow, states: Tensor) -> CachedRow:
        states = states.to(self.dtype)  # [T, S * D]
        last_hidden, taps = states.tensor_split([self.source.hidden_size], dim=-1)
        return CachedRow(
            input_ids=torch.tensor(row.input_ids),
            turn_ids=torch.tensor(row.turn_ids, dtype=torch.int32),
            last_hidden=last_hidden,
            taps=taps if self.source.after_blocks else None,
        )
