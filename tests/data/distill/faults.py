"""A server that is real (`transformers serve`), and a proxy before it that breaks requests as networks and loads do."""

import http.client
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class TargetServer:
    """`transformers serve` with a target, on a port that it keeps when it is started again."""

    def __init__(self, target: Path, home: Path) -> None:
        self.target, self.home, self.port = target, home, free_port()

    def start(self) -> None:
        (self.home / "hub").mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(self.target), "--device", "cpu"]
        words += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(self.port)]
        settings = {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HOME": str(self.home)}
        with (self.home / "log").open("ab") as log:
            self.process = subprocess.Popen(words, env={**os.environ, **settings}, stdout=log, stderr=log)
        until = time.monotonic() + 120.0
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError((self.home / "log").read_text(errors="replace")[-2000:])
            time.sleep(0.2)

    def kill(self) -> None:
        """Ends it without a word, as a crash does."""
        self.process.kill()
        self.process.wait()

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def completion(asked: dict[str, Any], content: str | None = None, **choice: Any) -> dict[str, Any]:
    """A chat completion as servers send it."""
    message = {"role": "assistant", "content": content or f"re: {asked['messages'][-1]['content']}"}
    made = {"index": 0, "finish_reason": "stop", "message": message, **choice}
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [made], "usage": usage}


@dataclass
class Script:
    """What becomes of a request: fault(question, how often it was asked before), else reply or the server at `port`."""

    fault: Callable[[str, int], str] = lambda question, tries: ""
    reply: Callable[[dict[str, Any]], dict[str, Any]] | None = completion
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    slow_s: float = 1.0
    under_way: int = 0
    most_under_way: int = 0

    @property
    def asked(self) -> list[str]:
        """The questions of rows so far."""
        questions = [str(body["messages"][-1]["content"]) for body in self.bodies]
        return [question for question in questions if question != "Hi"]


class Proxy:
    """A context: requests go on to the server or its stand-in, or meet the fault that the script has for them."""

    def __init__(self, script: Script) -> None:
        self.script = script
        handler = type("Handler", (_Handler,), {"script": script, "lock": threading.Lock()})
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
    script: Script
    lock: threading.Lock

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        asked, script = json.loads(body), self.script
        question = asked["messages"][-1]["content"]
        with self.lock:
            fault = script.fault(question, sum(each["messages"] == asked["messages"] for each in script.bodies))
            script.bodies.append(asked)
            script.under_way += 1
            script.most_under_way = max(script.most_under_way, script.under_way)
        try:
            self._meet(fault, asked, body)
        except OSError:  # the server was killed under way, or whoever asked has gone
            self._reset()
        finally:
            with self.lock:
                script.under_way -= 1

    def _meet(self, fault: str, asked: dict[str, Any], body: bytes) -> None:
        said = {"long": (400, "This model's maximum context length is 9 tokens."), "full": (503, "The queue is full.")}
        if fault == "slow":
            time.sleep(self.script.slow_s)
        if fault in said or fault.isdecimal():
            status, message = said.get(fault) or (int(fault), f"planted {fault}")
            self._send(status, json.dumps({"error": {"message": message}}).encode())
        elif fault == "cut":
            self._reset()
        elif fault == "half":
            status, answer = self._answer(asked, body)
            self._send(status, answer[: len(answer) // 2], len(answer))
            self._reset()
        else:
            status, answer = self._answer(asked, body)
            self._send(status, b"<html>a proxy's own page</html>" if fault == "garbled" else answer)

    def _answer(self, asked: dict[str, Any], body: bytes) -> tuple[int, bytes]:
        if self.script.reply is not None:
            return 200, json.dumps(self.script.reply(asked)).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.script.port, timeout=60)
        try:
            connection.request("POST", self.path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise OSError("the server's answer ended early") from error
        finally:
            connection.close()

    def _send(self, status: int, answer: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(length or len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _reset(self) -> None:
        """Closes the connection hard, with a reset instead of an end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing on the terminal."""
