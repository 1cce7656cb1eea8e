"""The target's states from vLLM servers, which write them to files (extract_hidden_states).

A request is a row's token ids. The reply names a file in a folder that this machine sees, too. The
file is whole once its lock is free, and nobody but its reader removes it.
"""

import fcntl
import itertools
import json
import math
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from aerie.configs.errors import UserError, rank, warn
from aerie.configs.schema.data import StateServersConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.data.chat import TokenRow
from aerie.data.feature_cache import CachedRow
from aerie.data.progress import run_ahead
from aerie.data.servers import can_run_here, state_ids, states_command
from aerie.model.storage import Lock, digest, explained, first_line
from aerie.model.target import Target, load_shell

PROBE_TOKENS = 32  # of a row that is compared at the start
PROBE_S = 60.0  # to wait for its file, since network file systems may show a new file late
PROBE_ROWS = 8  # whose next tokens are compared, if this machine cannot load the target's blocks
CONNECT_S = 10.0
AWAY_S = 30.0  # until a server that failed is asked again; sooner if no other server answers
LONGEST_PAUSE_S = 30.0
# HTTP statuses after which the same request may succeed, besides those from 500 on.
TRY_AGAIN = (408, 429)
# How far states may be from our own: the difference's root mean square, relative to the state's.
CLOSE = {torch.float64: 1e-3, torch.float32: 1e-3}
CLOSE_IF_NARROW = 0.05
REQUEST = re.compile(r"aerie-(?P<run>[0-9a-f]{8})-(?P<session>[0-9a-f]{8})-")  # in a file's name


# --- the folder of files ------------------------------------------------------------------------


class ServerFault(Exception):
    """A server did not give a row's states; another one, or a later try, may."""


class NoFile(ServerFault):
    """The file that a server has named is not in the folder."""


class NoStates(ServerFault):
    """A server gives answers, but no states."""


class StatesFolder:
    """The files that servers write for this process.

    Each file's name holds the name of its run and of its session, which is one process. A process
    holds its session's lock while it lives, so that the run's next process knows which files nobody
    will read.
    """

    def __init__(self, path: Path, run: Path) -> None:
        with explained(path):
            path.mkdir(parents=True, exist_ok=True)
            self.path = path
            self.run = digest(str(run.absolute()))[:8]
            self.session = secrets.token_hex(4)
            self.numbers = itertools.count()
            self.lock = Lock(self._lock_of(self.session))
            self.lock.acquire()
            self.sweep()

    def next_request(self) -> str:
        return f"aerie-{self.run}-{self.session}-{next(self.numbers)}"

    def close(self) -> None:
        self.sweep(is_over=True)
        self.lock.path.unlink(missing_ok=True)
        self.lock.file.close()

    def sweep(self, is_over: bool = False) -> None:
        """Removes the files of the run's dead sessions; is_over: also those of this session."""
        dead = {self.session: is_over}  # by session: whether its process is gone
        for path in self.path.iterdir():
            match = REQUEST.search(path.name)
            if match is None or match["run"] != self.run:
                continue
            session = match["session"]
            if session not in dead:
                dead[session] = self._is_dead(session)
            if dead[session]:
                path.unlink(missing_ok=True)

    def _lock_of(self, session: str) -> Path:
        return self.path / f".aerie-{self.run}-{session}-lock"

    def _is_dead(self, session: str) -> bool:
        path = self._lock_of(session)
        if not path.exists():
            return True
        with Lock(path) as lock:
            return lock.acquire(wait=False) is True  # not True if the file system has no locks

    def read(self, name: str, deadline: float, is_closed: Callable[[], bool]) -> dict[str, Tensor]:
        """The tensors of a file as soon as it is whole; removes the file and its lock.

        ServerFault if the file cannot be read, or is not whole by the deadline (time.monotonic()).
        """
        path = self.path / name
        lock = self.path / f"{name}.lock"
        try:
            with _patiently(lock, deadline, is_closed).open("rb") as file:
                _lock_shared(file.fileno(), deadline, is_closed)
                return load(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise ServerFault(f"{path} cannot be read ({first_line(error)})") from error
        finally:
            for left in (path, lock):
                with suppress(OSError):
                    left.unlink()


def sweep_states(config: StateServersConfig, run: Path) -> None:
    """Removes what servers wrote for a run after its processes had gone."""
    if Path(config.states).is_dir():
        StatesFolder(Path(config.states), run).close()


def _patiently(path: Path, deadline: float, is_closed: Callable[[], bool]) -> Path:
    """The path, once it exists (network file systems show files late); NoFile by the deadline."""
    pause = 0.001
    while not path.exists():
        if time.monotonic() > deadline or is_closed():
            raise NoFile(f"{path} has not appeared")
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    return path


def _lock_shared(descriptor: int, deadline: float, is_closed: Callable[[], bool]) -> None:
    """Waits until the file's writer has let go of its lock."""
    pause = 0.0005
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline or is_closed():
                raise ServerFault("a file of states was not finished in time") from None
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


# --- one server ---------------------------------------------------------------------------------


class Reply(NamedTuple):
    states: Tensor  # [T, ids, D], in the server's dtype
    next_token: int


class StateServer:
    """A server, how busy it is, and whether it is known to be the right one."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        self.under_way = 0  # requests
        # Until then (time.monotonic()) other servers are asked first; inf while it is checked.
        self.away_until = 0.0
        self.model = ""  # the server's name of its model; "": the server is not checked
        self.fault: ServerFault | None = None  # of the last check
        self.checking = threading.Lock()
        self._connections = set[HTTPConnection]()

    def listing(self) -> dict[str, Any]:
        """What the server says of its first model, and its own version."""
        models = self.exchange("GET", "/v1/models")
        version = self.exchange("GET", "/version")
        with suppress(LookupError, TypeError):
            entry = {**models["data"][0], "version": str(version["version"])}
            if isinstance(entry.get("id"), str):
                return entry
        raise ServerFault("the program that answers is not a vLLM server")

    def exchange(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON of the server's answer.

        ServerFault if another try may succeed; UserError if the server rejects the request.
        """
        parts = urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        try:
            connection = kind(parts.netloc, timeout=min(CONNECT_S, self.timeout_s))
        except HTTPException as error:  # a port that is not a number
            raise UserError(f"{self.url}: {error}; check features.server.urls") from error
        headers = {"Content-Type": "application/json"}
        if os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
        content = None if body is None else json.dumps(body)
        self._connections.add(connection)
        try:
            connection.connect()
            # A request without a body is answered at once; states may take long.
            connection.sock.settimeout(CONNECT_S if body is None else self.timeout_s)
            connection.request(method, parts.path + path, content, headers)
            response = connection.getresponse()
            status = response.status
            text = response.read().decode("utf-8", "replace")
        except (OSError, HTTPException, ValueError) as error:
            raise ServerFault(first_line(error)) from error
        finally:
            self._connections.discard(connection)
            connection.close()
        if status == 200:
            with suppress(ValueError):
                return json.loads(text)
            raise ServerFault("its answer is not JSON")
        said = f"HTTP {status}: {_error_text(text)}"
        if status in TRY_AGAIN or status >= 500:
            raise ServerFault(said)
        raise UserError(f"{self.url}: {said}; check features.server.urls and OPENAI_API_KEY")

    def hang_up(self) -> None:
        """Ends the exchanges under way in other threads."""
        for connection in [*self._connections]:
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)


def _error_text(text: str) -> str:
    """The message of a server's error."""
    with suppress(ValueError, LookupError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return " ".join(text.split())[:200]


# --- all servers --------------------------------------------------------------------------------


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
        if self._closing.is_set():
            raise UserError(
                f"{server.url}: is not asked again, since the stage is ending"
            ) from fault
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
        reply = self._raw(server, model, input_ids, self.config.timeout_s)
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

    def _raw(
        self, server: StateServer, model: str, input_ids: Sequence[int], limit_s: float
    ) -> Reply:
        """The states that this server gives for a row, unchecked; limit_s: to wait for its file."""
        deadline = time.monotonic() + limit_s
        body = {
            "model": model,
            "prompt": [*input_ids],
            "max_tokens": 1,
            "temperature": 0,
            "repetition_penalty": 1,  # else vLLM takes the one of generation_config.json
            "detokenize": False,
            "return_token_ids": True,
            "request_id": self.folder.next_request(),
        }
        answer = server.exchange("POST", "/v1/completions", body)
        if isinstance(answer, dict) and answer.get("kv_transfer_params") is None:
            raise NoStates("gives answers, but no states")
        try:
            path = answer["kv_transfer_params"]["hidden_states_path"]
            (next_token,) = map(int, answer["choices"][0]["token_ids"])
            # The server may know the folder by another path; the file lies directly in it.
            name = PurePosixPath(path).name
        except (LookupError, TypeError, ValueError) as error:
            raise ServerFault("its answer names no file of states") from error
        if REQUEST.search(name) is None:
            raise ServerFault(f"its answer names {name}, which is not a file of this request")
        tensors = self.folder.read(name, deadline, self._closing.is_set)
        states = tensors.get("hidden_states")
        token_ids = tensors.get("token_ids")
        if states is None or token_ids is None or token_ids.tolist() != [*input_ids]:
            raise ServerFault("its file holds the states of other tokens")
        return Reply(states, next_token)

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
            replies = [self._raw(server, model, row, PROBE_S) for row in rows]
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
            return self._difference_from_own(states)
        return self._difference_in_law(replies)

    def _difference_from_own(self, states: Tensor) -> str | None:
        assert self.expected.own is not None
        width = self.hidden_size
        ours = self.expected.own.float().unflatten(-1, (-1, width))  # [T, S, D]
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
