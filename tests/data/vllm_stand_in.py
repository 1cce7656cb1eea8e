"""Stands for vLLM: a tiny target's answers, or its states. As a script it reads vLLM's options.

python -m tests.data.vllm_stand_in serve TARGET --port PORT [--speculative-config JSON ...]
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.data.state_server import COMPUTING, Handler, StateStandIn

NOWHERE = Path("/nowhere")


class VllmHandler(Handler):
    server: "VllmStandIn"

    def do_POST(self) -> None:
        if not self.path.endswith("/chat/completions"):
            if self.server.ids:
                super().do_POST()
            else:  # as vLLM's own, which has no connector
                self.reply(200, json.dumps({"choices": [{}], "kv_transfer_params": None}))
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.reply(200, json.dumps(self.server.chat(body)))


class VllmStandIn(StateStandIn):
    """A context in which it gives the states of these ids, or answers if there are none."""

    def __init__(
        self, target: Path, ids: tuple[int, ...] = (), states: Path = NOWHERE, port: int = 0
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(target).eval()
        super().__init__(model, ids, states, handler=VllmHandler, port=port)
        self.tokenizer = AutoTokenizer.from_pretrained(target)

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = self.tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        with COMPUTING, torch.inference_mode():
            output = self.model.generate(prompt, max_new_tokens=body["max_tokens"], do_sample=False)
        ids = output[0, prompt.shape[1] :].tolist()
        has_ended = ids[-1] == self.tokenizer.eos_token_id
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        choice = {
            "index": 0,
            "finish_reason": "stop" if has_ended else "length",
            "message": {"role": "assistant", "content": text},
            "token_ids": ids,
        }
        path = str(self.states / "of-an-answer.safetensors")
        return {
            "id": "chat",
            "choices": [choice],
            "prompt_token_ids": prompt[0].tolist(),
            "kv_transfer_params": {"hidden_states_path": path} if self.ids else None,
        }


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("target", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--speculative-config", type=json.loads)
    parser.add_argument("--kv-transfer-config", type=json.loads)
    options, _ = parser.parse_known_args()
    ids, states = [], NOWHERE
    if options.speculative_config:
        draft = options.speculative_config["draft_model_config"]["hf_config"]
        ids = draft["eagle_aux_hidden_state_layer_ids"]
        extra = options.kv_transfer_config["kv_connector_extra_config"]
        states = Path(extra["shared_storage_path"])
    torch.set_num_threads(1)
    VllmStandIn(options.target, (*ids,), states, options.port).serve_forever()


if __name__ == "__main__":
    sys.exit(main())
