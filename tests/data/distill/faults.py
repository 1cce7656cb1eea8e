"""A server that is real (`transformers serve`), and a proxy before it that breaks requests as networks and loads do."""

import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

START_SECONDS = 120.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class TargetServer:
    """`transformers serve` with a target, on a port that it keeps when it is started again."""

    def __init__(self, target: Path, home: Path) -> None:
        self.target, self.home, self.port = target, home, free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        (self.home / "hub").mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(self.target), "--device", "cpu"]
        words += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(self.port)]
        settings = {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HOME": str(self.home)}
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(words, env={**os.environ, **settings}, stdout=log, stderr=log)
        until = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError((self.home / "log").read_text(errors="replace")[-2000:])
            time.sleep(0.2)

    def kill(self) -> None:
        """Ends it without a word, as a crash does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


@dataclass
class Script:
    """What becomes of requests: fault(number) names it, and what else was seen of them."""

    fault: Callable[[int], str] = lambda number: "none"
    reply: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # null: the real server's
    count: int = 0
    answered: Counter[str] = field(default_factory=Counter)  # last message -> whole answers that went out
    bodies: list[dict[str, Any]] = field(default_factory=list)
    slow_s: float = 3.0
    under_way: int = 0
    most_under_way: int = 0


class Proxy:
    """A context: requests go on to the server on `port`, or meet the fault that the script has for them."""

    def __init__(self, port: int, script: Script) -> None:
        self.script = script
        handler = type("Handler", (_Handler,), {"port": port, "script": script, "lock": threading.Lock()})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    port: int
    script: Script
    lock: threading.Lock

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        asked = json.loads(body)
        with self.lock:
            number, self.script.count = self.script.count, self.script.count + 1
            self.script.bodies.append(asked)
            self.script.under_way += 1
            self.script.most_under_way = max(self.script.most_under_way, self.script.under_way)
        try:
            self._meet(number, asked, body)
        finally:
            with self.lock:
                self.script.under_way -= 1

    def _meet(self, number: int, asked: dict[str, Any], body: bytes) -> None:
        fault = self.script.fault(number)
        if fault == "long":
            message = "This model's maximum context length is 9 tokens."
            self._send(400, json.dumps({"error": {"message": message}}).encode())
        elif fault == "full":
            self._send(503, json.dumps({"error": {"message": "The request queue is full."}}).encode())
        elif fault.isdecimal():
            self._send(int(fault), json.dumps({"error": {"message": f"planted {fault}"}}).encode())
        elif fault == "cut":
            self._reset()
        else:
            self._pass_on(asked, body, fault)

    def _pass_on(self, asked: dict[str, Any], body: bytes, fault: str) -> None:
        if fault == "slow":
            time.sleep(self.script.slow_s)
        try:
            status, answer = self._answer(asked, body)
        except OSError:  # the server was killed under way
            self._reset()
            return
        if fault == "half":
            self._head(200, len(answer))
            self.wfile.write(answer[: len(answer) // 2])
            self._reset()
        elif fault == "garbled":
            self._send(200, b"<html>a proxy's own page</html>")
        else:
            try:
                self._send(status, answer)
            except OSError:
                return  # whoever asked has gone
            with self.lock:
                self.script.answered[asked["messages"][-1]["content"]] += status == 200

    def _answer(self, asked: dict[str, Any], body: bytes) -> tuple[int, bytes]:
        if self.script.reply is not None:
            return 200, json.dumps(self.script.reply(asked)).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", self.path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise OSError("the server's answer ended early") from error
        finally:
            connection.close()

    def _send(self, status: int, answer: bytes) -> None:
        self._head(status, len(answer))
        self.wfile.write(answer)

    def _head(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(length))
        if status == 429:
            self.send_header("Retry-After", "0.1")
        self.end_headers()

    def _reset(self) -> None:
        """Closes the connection hard, with a reset instead of an end."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing on the terminal."""
