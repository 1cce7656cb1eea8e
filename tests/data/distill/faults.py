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
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SAID = {"long": (400, "This model's maximum context length is 9 tokens."), "full": (503, "The queue is full.")}


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
        while self.process.poll() is None and time.monotonic() < until:
            with suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            time.sleep(0.2)
        raise RuntimeError((self.home / "log").read_text(errors="replace")[-2000:])

    def kill(self) -> None:
        """Ends it without a word, as a crash does."""
        self.process.kill()
        self.process.wait()


def completion(asked: dict[str, Any], content: str | None = None, **choice: Any) -> dict[str, Any]:
    """A chat completion as servers send it."""
    message = {"role": "assistant", "content": content or f"re: {asked['messages'][-1]['content']}"}
    made = {"index": 0, "finish_reason": "stop", "message": message, **choice}
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [made], "usage": usage}


class Proxy:
    """A context: a request meets fault(question, tries before it), and goes on to reply, or to the server at port."""

    def __init__(
        self,
        fault: Callable[[str, int], str] = lambda question, tries: "",
        reply: Callable[[dict[str, Any]], dict[str, Any]] = completion,
        port: int = 0,
        slow_s: float = 1.0,
    ) -> None:
        self.fault, self.reply, self.port, self.slow_s = fault, reply, port, slow_s
        self.bodies: list[dict[str, Any]] = []
        self.under_way = self.most_under_way = 0
        handler = type("Handler", (_Handler,), {"proxy": self, "lock": threading.Lock()})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def asked(self) -> list[str]:
        """The questions of rows so far."""
        questions = [str(body["messages"][-1]["content"]) for body in self.bodies]
        return [question for question in questions if question != "Hi"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy
    lock: threading.Lock

    def do_POST(self) -> None:
        body, proxy = self.rfile.read(int(self.headers["Content-Length"])), self.proxy
        asked = json.loads(body)
        with self.lock:
            tries = sum(each["messages"] == asked["messages"] for each in proxy.bodies)
            fault = proxy.fault(asked["messages"][-1]["content"], tries)
            proxy.bodies.append(asked)
            proxy.under_way += 1
            proxy.most_under_way = max(proxy.most_under_way, proxy.under_way)
        try:
            if fault == "slow":
                time.sleep(proxy.slow_s)
            if fault == "cut":
                raise OSError
            if fault in SAID or fault.isdecimal():
                status, message = SAID.get(fault) or (int(fault), f"planted {fault}")
                answer = json.dumps({"error": {"message": message}}).encode()
            else:
                status, answer = self._answer(asked, body)
                answer = b"<html>a proxy's own page</html>" if fault == "garbled" else answer
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer[: len(answer) // 2] if fault == "half" else answer)
            if fault == "half":
                raise OSError
        except OSError:  # planted, or the server was killed under way, or whoever asked has gone: a reset, no end
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
        finally:
            with self.lock:
                proxy.under_way -= 1

    def _answer(self, asked: dict[str, Any], body: bytes) -> tuple[int, bytes]:
        if not self.proxy.port:
            return 200, json.dumps(self.proxy.reply(asked)).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.port, timeout=60)
        try:
            connection.request("POST", self.path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise OSError("the server's answer ended early") from error
        finally:
            connection.close()

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing on the terminal."""
