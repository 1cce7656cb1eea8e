"""One vLLM server of the target's states, and the folder of files in which it leaves them.

The server runs with extract_hidden_states. A request is a row's token ids. The reply names a file
in a folder that this machine sees, too. The file is whole once its lock is free, and nobody but its
reader removes it.
"""

import fcntl
import itertools
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.configs.schema.data import StateServersConfig
from aerie.model.storage import Lock, digest, explained, first_line

CONNECT_S = 10.0
# HTTP statuses after which the same request may succeed, besides those from 500 on.
TRY_AGAIN = (408, 429)
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
        self._is_over = threading.Event()  # nobody waits for its files any more

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

    def reply(
        self, model: str, input_ids: Sequence[int], folder: StatesFolder, limit_s: float
    ) -> Reply:
        """The states that the server gives for a row, unchecked; limit_s: to wait for its file."""
        deadline = time.monotonic() + limit_s
        body = {
            "model": model,
            "prompt": [*input_ids],
            "max_tokens": 1,
            "temperature": 0,
            "repetition_penalty": 1,  # else vLLM takes the one of generation_config.json
            "detokenize": False,
            "return_token_ids": True,
            "request_id": folder.next_request(),
        }
        answer = self.exchange("POST", "/v1/completions", body)
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
        tensors = folder.read(name, deadline, self._is_over.is_set)
        states = tensors.get("hidden_states")
        token_ids = tensors.get("token_ids")
        if states is None or token_ids is None or token_ids.tolist() != [*input_ids]:
            raise ServerFault("its file holds the states of other tokens")
        return Reply(states, next_token)

    def hang_up(self) -> None:
        """Ends the requests under way in other threads."""
        self._is_over.set()
        for connection in [*self._connections]:
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)


def _error_text(text: str) -> str:
    """The message of a server's error."""
    with suppress(ValueError, LookupError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return " ".join(text.split())[:200]
