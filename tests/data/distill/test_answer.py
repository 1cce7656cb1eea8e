"""The client against a scripted server: which faults are retried, fail a row, or stop the run."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from aerie.configs.errors import UserError, masked
from aerie.configs.schema.data import AnswerSamplingConfig, ServerConfig
from aerie.data.distill import answer
from aerie.data.distill.answer import TOO_LONG, Answer, ServedTarget, Unanswered
from tests.tiny import refused

pytest.importorskip("openai", reason="needs the extra 'distill' (pip install -e .[distill])")

KEY = "sk-madeUpForTheTests0123"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "PAUSE_S", 0.02)


class Scripted(ThreadingHTTPServer):
    """Answers re: QUESTION, or fails by fault(question, tries before); extra: keys of the reply."""

    daemon_threads = True

    def __init__(
        self,
        fault: Callable[[str, int], str] = lambda question, tries: "",
        port: int = 0,
        **extra: Any,
    ) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.fault, self.extra, self.asked, self.bodies = (
            fault,
            extra,
            list[str](),
            list[dict[str, Any]](),
        )
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def __enter__(self) -> "Scripted":
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Scripted

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        fault = self.server.fault(question, self.server.asked.count(question))
        self.server.asked.append(question)
        self.server.bodies.append(body)
        self.close_connection = fault == "cut"
        if fault == "slow":
            time.sleep(0.6)
        status = {"long": 400, "moved": 307}.get(fault, int(fault) if fault.isdecimal() else 200)
        message = {"role": "assistant", "content": f"re: {question}"}
        choice = {"index": 0, "finish_reason": "stop", "message": message, **self.server.extra}
        made: dict[str, Any] = {
            "choices": [choice],
            "prompt_token_ids": [1, 2],
            "usage": {"completion_tokens": 3},
        }
        if fault.startswith("{"):
            choice |= json.loads(fault)
        if status != 200:
            messages = {"long": "maximum context length is 9"}
            made = {"error": {"message": messages.get(fault, f"planted {fault} for {KEY}")}}
        text = b"<html>a proxy's own page</html>"
        if fault != "garbled":
            text = json.dumps(made).encode()
        with suppress(OSError):  # the client may have gone
            if fault != "cut":
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.send_header("Location", f"http://bob:{KEY}@127.0.0.1:9/v1")
                self.end_headers()
                size = 1 if fault == "drip" else len(text)
                for start in range(0, len(text), size):
                    self.wfile.write(text[start : start + size])
                    time.sleep(0.1 * (size == 1))

    def log_message(self, format: str, *arguments: object) -> None:
        """Prints nothing."""


def ask(
    urls: list[str], *questions: str, sampling: dict[str, Any] | None = None, **settings: Any
) -> list[Any]:
    """The answers (as text if nothing else came with them) or failures, of requests at one time."""

    async def run() -> list[Any]:
        config = ServerConfig(tuple(urls), **{"retries": 0, "timeout_s": 5.0, **settings})
        drawn = AnswerSamplingConfig(max_tokens=9, **sampling or {})
        async with asyncio.timeout(60.0), ServedTarget(config, "m", drawn) as served:
            requests = (served([{"role": "user", "content": text}], 11) for text in questions)
            return await asyncio.gather(*requests, return_exceptions=True)

    ends = asyncio.run(run())
    return [
        end.content if end == Answer(getattr(end, "content", ""), "stop") else end for end in ends
    ]


# An overloaded server (429, 503) is asked until it answers.
@pytest.mark.parametrize(
    ("fault", "few"), [("500", 1), ("garbled", 1), ("slow", 1), ("429", 12), ("cut", 1)]
)
def test_request_is_made_again(fault: str, few: int) -> None:
    """A request that meets a fault is made again and answered."""
    with Scripted(
        lambda question, tries: fault if question == "a" and tries < few else ""
    ) as server:
        assert ask([server.url], "a", timeout_s=0.5 if fault == "slow" else 5.0) == ["re: a"]
        assert server.asked.count("a") == few + 1


def test_a_server_that_hangs() -> None:
    """After an error it has one row at a time; the others go to the server that answers."""
    questions = [str(number) for number in range(16)]
    with (
        Scripted(lambda _, tries: "slow" if tries else "503") as wrong,
        Scripted() as right,
    ):
        answers = ask([wrong.url, right.url], *questions, timeout_s=0.5)
        asked_again = len(wrong.asked) - len({*wrong.asked})
    assert answers == [f"re: {question}" for question in questions]
    assert asked_again < len(questions) // 2  # that many, without the rule
    assert len(wrong.asked) > 3


@pytest.mark.parametrize("fault", ["400", "502", "long"])
def test_row_alone_fails(fault: str) -> None:
    """A row that the server alone cannot answer has failed or is skipped."""
    with Scripted(lambda question, _: fault if question == "poison" else "") as server:
        error, good = ask([server.url], "poison", "b")
    assert isinstance(error, Unanswered) and good == "re: b"
    assert (
        (error.status, error.why) == ("skipped", TOO_LONG)
        if fault == "long"
        else error.status == "failed"
    )


@pytest.mark.parametrize("fault", ["503", "cut"])
def test_patience_ends(
    fault: str,
) -> None:
    """No row fails when the server goes down and the run stops when patience is over."""
    asked = set[str]()

    def meet(question: str, _: int) -> str:
        asked.add(question)
        return fault if asked > {"Hi"} else ""

    with Scripted(meet) as server:
        ends = ask([server.url], "a", "b", "c", patience_s=0.5, timeout_s=0.4)
    assert all(isinstance(end, UserError) for end in ends)
    assert "no server has answered for 0.5 s" in str(ends[0])


def test_requests_are_spread() -> None:
    """Requests are spread and a server that is gone is left to the others."""
    first, second = (Scripted(lambda question, _: "slow" if question != "Hi" else "") for _ in "ab")
    with first, second:
        assert ask([first.url, second.url], *"abcdefgh") == [f"re: {text}" for text in "abcdefgh"]
        assert (
            sorted([*first.asked, *second.asked]) == ["Hi", *"abcdefgh"]
            and 4 <= len(first.asked) <= 5
        )
    with Scripted() as server:
        assert ask([first.url, server.url], *"abcd") == [f"re: {text}" for text in "abcd"]
    refused(r"no server has answered for 0\.3 s", ask, [first.url], "a", patience_s=0.3)


def test_rows_outlast_an_outage(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """While a server answers no question at all, rows wait; then they are asked again."""
    with Scripted(lambda *_: "cut" if 1 < len(server.asked) < 12 else "") as server:
        assert ask([server.url], *"abc") == ["re: a", "re: b", "re: c"]
    assert "it is asked again for up to 900 s" in capfd.readouterr().err


@pytest.mark.parametrize("fault", ["401", "long"])
def test_wrong_address_stops(fault: str) -> None:
    """A wrong key address or length stops the run with the fix."""
    with (
        Scripted(lambda *_: fault) as server,
        pytest.raises(UserError, match=r"check distill\.(server|sampling)"),
    ):
        ask([server.url], "a")
    assert server.asked == ["Hi"]


def test_redirect_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that sends elsewhere is refused and no key is told."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with (
        Scripted(lambda *_: "moved") as server,
        pytest.raises(UserError, match="redirects to http://bob:") as caught,
    ):
        ask([server.url], "a")
    assert (
        server.asked == ["Hi"]
        and masked(str(caught.value)).count("http://***@127.0.0.1:9/v1; if you trust") == 1
    )
    with Scripted(lambda question, _: "400" if question == "a" else "") as server:
        (error,) = ask([server.url], "a")
    assert "***" in error.why and masked(f"http://h/v1?key={KEY}: no") == "http://h/v1?key=***: no"
    assert masked("http://me:pa/ss@h:1/v1 and http://h:1/a") == "http://***@h:1/v1 and http://h:1/a"


def test_dripping_and_odd_replies() -> None:
    """A server that drips is cut off, and one odd reply costs its row alone."""
    odd = [
        *({"message": {"content": content}} for content in (5, [1, 2], {"a": 1})),
        {"message": None},
        {"message": 5},
        {"token_ids": 7},
        {"token_ids": ["x"]},
        {"token_ids": [[1]]},
    ]
    with Scripted(
        lambda question, _: question if question[0] == "{" else "drip" if question == "a" else ""
    ) as server:
        start = time.monotonic()
        dripped, *ends, good = ask(
            [server.url], "a", *map(json.dumps, odd), "b", retries=0, timeout_s=0.4
        )
    assert dripped.status == "failed" and good == "re: b" and time.monotonic() - start < 5
    assert [(end.status, "no text" in end.why) for end in ends] == [("skipped", True)] * len(odd)


def test_request_and_answer() -> None:
    """A request says how to sample and an answer brings thinking and ids."""
    message = {
        "role": "assistant",
        "content": "four",
        "reasoning": "2 + 2",
        "reasoning_content": "",
    }
    with Scripted(message=message, token_ids=[7, 3]) as server:
        greedy = ask([server.url], "a", sampling={"temperature": 0.0})
        ask(
            [server.url],
            "a",
            sampling={"top_p": 0.9, "top_k": 4},
            token_ids=True,
            extra_body={"min_p": 0.1},
        )
    assert greedy == [Answer("four", "stop", "2 + 2", (7, 3), (1, 2))]
    drawn = {
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "return_token_ids": True,
        "temperature": 1.0,
        "seed": 11,
    }
    _, first, _, second = server.bodies
    assert (
        first["temperature"] == 0.0 and first["max_tokens"] == 9 and second.items() >= drawn.items()
    )


def test_ids_are_asked_for_once() -> None:
    """`auto`: a server that gives ids is asked for them; others are asked without."""
    rejects = lambda question, tries: "400" if (question, tries) == ("Hi", 0) else ""  # noqa: E731
    for fault, extra, are_asked in (
        (rejects, {}, [True, False, False]),
        (lambda *_: "", {}, [True, False]),
        (lambda *_: "", {"token_ids": [7]}, [True, True]),
    ):
        with Scripted(fault, **extra) as server:
            ask([server.url], "a")
        assert ["return_token_ids" in body for body in server.bodies] == are_asked


@pytest.mark.parametrize("arguments", ['{"a": ', "[" * 5000, '{"a": 1, "a": 2}'])
def test_calls_without_an_object(arguments: str) -> None:
    """A call whose arguments are no object is no answer, unless the server tells its tokens."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    reason = "the arguments of a call are not a JSON object"
    with Scripted(message=message) as server, pytest.raises(UserError, match=reason):
        ask([server.url], "a")
    with Scripted(message=message, token_ids=[7], prompt_token_ids=[1]) as server:
        [answer] = ask([server.url], "a")
    assert answer.tool_calls[0]["function"]["arguments"] == arguments


def test_calls_are_recorded() -> None:
    """A call of a tool is an answer, and the tools go to the server."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}

    async def run() -> Answer:
        config = ServerConfig((server.url,), retries=0)
        async with ServedTarget(config, "m", AnswerSamplingConfig()) as served:
            return await served([{"role": "user", "content": "a"}], 1, [{"type": "function"}])

    with Scripted(message=message, finish_reason="tool_calls") as server:
        answer = asyncio.run(run())
    assert not answer.is_cut and answer.content == ""
    assert answer.tool_calls[0]["function"] == {"name": "add", "arguments": {"a": 2}}
    assert server.bodies[-1]["tools"] == [{"type": "function"}]
