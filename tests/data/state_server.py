"""Stands for vLLM's extract_hidden_states: real states of a tiny target, over HTTP and files."""

import fcntl
import json
import secrets
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

COMPUTING = threading.Lock()  # stand-ins may share a model, which has one hook at a time
ON_THE_SERVER = Path("/srv/of-another-machine/states")


class Handler(BaseHTTPRequestHandler):
    server: "StateStandIn"

    def parse_request(self) -> bool:
        return super().parse_request() and not self.server.is_dead  # else it hangs up

    def do_GET(self) -> None:
        entry = {"id": "its-target", "max_model_len": self.server.room}
        answers = {"/v1/models": {"data": [entry]}, "/version": {"version": "0.32.0"}}
        self.reply(200, json.dumps(answers[self.path]))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "its-target" and body["max_tokens"] == 1
        with self.server.counting:
            self.server.count += 1
            fault = self.server.fault(self.server.count)
        if fault == "die":
            self.server.is_dead = True
            return
        if fault == "hang":
            self.server.stopped.wait()
            return
        if fault == "garbage":
            self.reply(200, "<html>a proxy's page</html>")
        elif fault == "busy":
            self.reply(503, "{}")
        else:
            self.reply(200, json.dumps(self.server.answer(body, fault)))

    def reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


class StateStandIn(ThreadingHTTPServer):
    """A context in which it answers; `fault` says what goes wrong with the n-th request."""

    daemon_threads = True
    request_queue_size = 128  # connections that wait

    def __init__(
        self,
        model: Any,
        ids: tuple[int, ...],
        states: Path,
        room: int = 300,
        fault: Callable[[int], str] = lambda number: "",
        handler: type[Handler] = Handler,
        port: int = 0,
    ) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self.model = model
        self.ids = ids
        self.states = states
        self.room = room
        self.fault = fault
        self.count = 0
        self.is_dead = False
        self.counting = threading.Lock()
        self.stopped = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def __enter__(self) -> "StateStandIn":
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: Any) -> None:
        pass  # its client was killed

    def answer(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        """The reply; a thread writes the file after it, and holds its lock until then."""
        ids = body["prompt"]
        before_norm = list[torch.Tensor]()
        norm = self.model.model.norm
        with COMPUTING, torch.inference_mode():
            hook = norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
            output = self.model(torch.tensor([ids]), output_hidden_states=True)
            hook.remove()
        states = [*output.hidden_states[:-1], before_norm[0]]
        tensors = {
            "hidden_states": torch.stack([states[number][0] for number in self.ids], dim=1),
            "token_ids": torch.tensor(ids[1:] if fault == "other tokens" else ids),
        }
        if fault == "zeros":
            tensors["hidden_states"][-1] = 0.0
        name = f"cmpl-{body['request_id']}-0-{secrets.token_hex(4)}.safetensors"
        self.states.mkdir(parents=True, exist_ok=True)
        lock = (self.states / f"{name}.lock").open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write() -> None:
            time.sleep(0.002)
            if fault != "no file":
                save_file(tensors, self.states / name)
            lock.close()

        threading.Thread(target=write, daemon=True).start()
        token = int(output.logits[0, -1].argmax())
        return {
            "choices": [{"token_ids": [token]}],
            "kv_transfer_params": {"hidden_states_path": str(ON_THE_SERVER / name)},
        }
