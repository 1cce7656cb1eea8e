"""The client against a scripted server: what is tried again, what a row pays for, and what stops the run."""

import asyncio
import socket
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.configs.schema.data import SamplingConfig, ServerConfig
from aerie.data.distill import answer as client
from aerie.data.distill.answer import FILTERED, TOO_LONG_FOR_SERVER, Answer, Request, ServedTarget, Unanswered
from tests.data.distill.faults import Proxy, Script, free_port

pytest.importorskip("openai", reason="needs the extra 'distill' (pip install -e .[distill])")


def completion(asked: dict[str, Any], **choice: Any) -> dict[str, Any]:
    """A chat completion as servers send it."""
    content = f"re: {asked['messages'][-1]['content']}"
    made = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}, **choice}
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [made], "usage": usage}


def request(text: str = "Why?", **sampling: Any) -> Request:
    return Request(({"role": "user", "content": text},), SamplingConfig(max_tokens=9, **sampling), 11)


TOO_LONG_S = 120.0  # requests that go round in circles fail a test and do not hang it


def ask(
    urls: list[str], *requests: Request, has_answered: bool = False, **settings: Any
) -> list[Answer | BaseException]:
    """The requests' answers, or what they ended with; all are under way at once."""

    async def run() -> list[Any]:
        keys = {"concurrency": 2, "retries": 2, "backoff_s": 0.02, "timeout_s": 5.0, **settings}
        served = ServedTarget(ServerConfig(tuple(urls), **keys), "m", "key", has_answered)
        try:
            async with asyncio.timeout(TOO_LONG_S):
                return await asyncio.gather(*(served(each) for each in requests), return_exceptions=True)
        finally:
            await served.close()

    return asyncio.run(run())


def scripted(*faults: str, **keys: Any) -> Script:
    """The first requests meet these faults, the others none."""
    return Script(lambda number: faults[number] if number < len(faults) else "none", completion, **keys)


@pytest.mark.parametrize("fault", ["500", "502", "cut", "half", "garbled", "429", "503"])
def test_a_request_that_meets_a_fault_is_made_again_and_answered(fault: str) -> None:
    with Proxy(0, scripted(fault, fault)) as proxy:
        assert ask([proxy.url], request()) == [Answer("re: Why?", "stop", 3)]
        assert proxy.script.count == 3


def test_a_slow_answer_is_given_up_after_the_timeout() -> None:
    with Proxy(0, scripted("slow", slow_s=1.0)) as proxy:
        assert ask([proxy.url], request(), timeout_s=0.3) == [Answer("re: Why?", "stop", 3)]
        assert proxy.script.count == 2


@pytest.mark.parametrize(("fault", "why"), [("500", "HTTP 500, 3 times"), ("cut", "the connection was cut, 3 times")])
def test_a_request_that_always_breaks_has_failed_in_the_end(fault: str, why: str) -> None:
    with Proxy(0, Script(lambda _: fault)) as proxy:
        [error] = ask([proxy.url], request())
    assert isinstance(error, Unanswered) and (error.status, error.why) == ("failed", why)


@pytest.mark.parametrize("fault", ["408", "429", "502", "503", "504"])
def test_no_row_pays_for_a_server_that_is_busy(fault: str) -> None:
    with Proxy(0, scripted(*[fault] * 4)) as proxy:
        assert ask([proxy.url], request(), retries=0) == [Answer("re: Why?", "stop", 3)]


def poisoned(asked: dict[str, Any]) -> bool:
    return "poison" in asked["messages"][-1]["content"]


@pytest.mark.parametrize("fault", ["408", "502", "503", "504"])
@pytest.mark.parametrize("others", [0, 6])
def test_a_row_for_which_alone_the_server_is_busy_has_failed_in_the_end(fault: str, others: int) -> None:
    """With others, and alone, as in a later sitting."""
    script = Script(lambda number: fault if poisoned(script.bodies[number]) else "none", completion)
    with Proxy(0, script) as proxy:
        error, *good = ask([proxy.url], request("poison"), *(request(str(n)) for n in range(others)), patience_s=3.0)
    assert isinstance(error, Unanswered) and (error.status, error.why) == ("failed", f"HTTP {fault}, 3 times")
    assert [each.content for each in good if isinstance(each, Answer)] == [f"re: {n}" for n in range(others)]


def test_a_row_that_counts_as_the_busy_one_keeps_the_server_for_the_others() -> None:
    """Once the server has answered others since, it is asked on without a wait."""

    async def run() -> tuple[float, int]:
        settings = ServerConfig((proxy.url,), concurrency=1, backoff_s=0.02, retries=0, patience_s=5.0)
        served = ServedTarget(settings, "m", "key")
        [server] = served.servers
        try:
            poison = asyncio.create_task(served(request("poison")))
            while not server.setbacks:
                await asyncio.sleep(0.002)
            await served(request("a"))
            await asyncio.gather(poison, return_exceptions=True)
            return server.down_until, server.setbacks
        finally:
            await served.close()

    script = Script(lambda number: "503" if poisoned(script.bodies[number]) else "none", completion)
    with Proxy(0, script) as proxy:
        assert asyncio.run(run()) == (0.0, 0)


def test_rows_pay_for_no_server_that_is_busy_for_all_nor_for_one_that_asks_to_be_asked_less() -> None:
    with Proxy(0, Script(lambda number: "none" if number == 0 else "503", completion)) as proxy:
        ended = ask([proxy.url], *(request(str(n)) for n in range(4)), concurrency=1, retries=0, patience_s=0.5)
    assert sum(isinstance(each, UserError) for each in ended) == 3
    for fault in ("429", "full"):  # SGLang's own word for too many requests is 503
        script = Script(lambda number, fault=fault: fault if number < 30 and number % 2 else "none", completion)  # type: ignore[misc]
        with Proxy(0, script) as proxy:
            ended = ask([proxy.url], *(request(str(n)) for n in range(20)), retries=0)
        assert all(isinstance(each, Answer) for each in ended)


def test_requests_that_are_refused_together_are_one_setback_and_an_answer_ends_it() -> None:
    gate = threading.Event()

    def reply(asked: dict[str, Any]) -> dict[str, Any]:
        gate.wait(30.0)
        return completion(asked)

    async def run() -> tuple[int, int, float]:
        settings = ServerConfig((proxy.url,), concurrency=12, backoff_s=60.0)  # half a minute's wait at least
        served = ServedTarget(settings, "m", "key")
        [server], clock = served.servers, asyncio.get_running_loop().time
        try:
            asked = [asyncio.create_task(served(request(str(n)))) for n in range(12)]
            while script.count < 12 or server.under_way > 1:
                await asyncio.sleep(0.005)
            setbacks, until = server.setbacks, server.down_until
            gate.set()
            await asyncio.gather(*asked)
            return setbacks, server.setbacks, until - clock()
        finally:
            await served.close()

    script = Script(lambda number: "503" if 0 < number < 12 else "none", reply)
    with Proxy(0, script) as proxy:
        before, after, early_s = asyncio.run(run())
    assert (before, after) == (1, 0) and early_s > 0.0


def test_a_refused_request_fails_at_once_and_one_that_is_too_long_is_skipped() -> None:
    def fault(number: int) -> str:
        return "400" if number == 1 else "none"

    with Proxy(0, Script(fault, completion)) as proxy:
        good, refused = ask([proxy.url], request("a"), request("b"), concurrency=1)
        assert isinstance(good, Answer) and isinstance(refused, Unanswered)
        assert (refused.status, refused.why, proxy.script.count) == ("failed", "HTTP 400: planted 400", 2)
    with Proxy(0, Script(lambda _: "400")) as proxy:
        ended = ask([proxy.url], *(request(str(n)) for n in range(8)))
        assert [type(each) for each in ended].count(UserError) == 1
        assert any("refuses every request: HTTP 400: planted 400" in str(each) for each in ended)


def test_a_server_that_finds_all_rows_too_long_stops_the_run_and_one_row_is_skipped() -> None:
    with Proxy(0, Script(lambda _: "long")) as proxy:
        ended = ask([proxy.url], *(request(str(n)) for n in range(8)))
    stopped = [str(each) for each in ended if isinstance(each, UserError)]
    assert len(stopped) == 1 and "refuses every request: HTTP 400: This model's maximum context length" in stopped[0]
    assert "lower distill.sampling.max_tokens" in stopped[0]
    with Proxy(0, Script(lambda number: "long" if number else "none", completion)) as proxy:
        good, *others = ask([proxy.url], *(request(str(n)) for n in range(12)), concurrency=1)
    assert isinstance(good, Answer) and {type(each) for each in others} == {Unanswered}
    assert {(each.status, each.why) for each in others if isinstance(each, Unanswered)} == {
        ("skipped", TOO_LONG_FOR_SERVER)
    }


@pytest.mark.parametrize("fault", ["400", "long"])
def test_quick_refusals_do_not_stop_a_server_that_has_others_to_answer(fault: str) -> None:
    slow = Script(lambda number: fault if number < 10 else "slow", completion, slow_s=0.3)
    with Proxy(0, slow) as proxy:
        ended = ask([proxy.url], *(request(str(n)) for n in range(14)), concurrency=14)
    assert [sum(isinstance(each, kind) for each in ended) for kind in (Answer, Unanswered)] == [4, 10]
    again = Script(lambda number: "500" if number == 0 else fault if number < 10 else "none", completion)
    with Proxy(0, again) as proxy:  # the first is not under way while it waits for its second try
        ended = ask([proxy.url], *(request(str(n)) for n in range(10)), concurrency=10, backoff_s=0.4)
    assert sum(isinstance(each, Answer) for each in ended) == 1
    assert not any(isinstance(each, UserError) for each in ended)


def test_a_server_that_has_answered_before_may_refuse_all_that_is_asked_again() -> None:
    with Proxy(0, Script(lambda _: "long")) as proxy:
        ended = ask([proxy.url], *(request(str(n)) for n in range(20)), has_answered=True)
    assert [each.why for each in ended if isinstance(each, Unanswered)] == [TOO_LONG_FOR_SERVER] * 20


@pytest.mark.parametrize("status", ["401", "404"])
def test_a_wrong_key_or_address_stops_the_run_with_the_fix(status: str) -> None:
    with Proxy(0, Script(lambda _: status)) as proxy:
        [error] = ask([proxy.url], request())
        assert isinstance(error, UserError) and proxy.script.count == 1
        assert f"HTTP {status} for model 'm'" in str(error) and "they end in /v1" in str(error)


def test_a_server_that_is_gone_is_left_to_the_others() -> None:
    with Proxy(0, scripted()) as proxy:
        gone = f"http://127.0.0.1:{free_port()}/v1"
        answers = ask([gone, proxy.url], *(request(str(n)) for n in range(8)), retries=0)
    assert [each.content for each in answers if isinstance(each, Answer)] == [f"re: {n}" for n in range(8)]


@pytest.mark.parametrize("reason", ["abort", "error", "tool_calls", None])
def test_an_answer_that_ended_otherwise_than_by_itself_or_its_length_is_asked_for_again(reason: str | None) -> None:
    def reply(asked: dict[str, Any]) -> dict[str, Any]:
        return completion(asked, finish_reason=reason if script.count == 1 else "stop")

    script = Script(reply=reply)
    with Proxy(0, script) as proxy:
        assert ask([proxy.url], request()) == [Answer("re: Why?", "stop", 3)]
    assert script.count == 2
    with Proxy(0, Script(reply=lambda asked: completion(asked, finish_reason=reason))) as proxy:
        [error] = ask([proxy.url], request(), retries=1)
    assert isinstance(error, Unanswered)
    assert (error.status, error.why) == ("failed", f"no usable answer (finish_reason {reason!r}), 2 times")


def test_what_a_content_filter_ended_is_skipped_with_the_reason() -> None:
    with Proxy(0, Script(reply=lambda asked: completion(asked, finish_reason="content_filter"))) as proxy:
        [error] = ask([proxy.url], request())
        assert isinstance(error, Unanswered) and (error.status, error.why) == ("skipped", FILTERED)
        assert proxy.script.count == 1


def test_a_server_that_takes_no_connection_is_down_long_before_an_answer_is_late(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "CONNECT_S", 0.2)
    with socket.socket() as full, ExitStack() as others:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # nobody accepts: the next connections are neither taken nor refused
        for _ in range(3):
            waiting = others.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}/v1"
        started = time.monotonic()
        [error] = ask([url], request(), timeout_s=20.0, patience_s=0.1, retries=0)
    assert isinstance(error, UserError) and time.monotonic() - started < 10.0
    assert f"{url}: cannot be reached" in capsys.readouterr().err


def test_without_any_server_the_run_stops_when_its_patience_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    [error] = ask([url], request(), patience_s=0.3)
    assert isinstance(error, UserError) and f"{url}: no answer for 0.3 s" in str(error)
    assert f"warning: {url}: cannot be reached; it is asked again for up to 0.3 s" in capsys.readouterr().err


def test_requests_are_spread_over_the_servers_within_their_limits() -> None:
    with Proxy(0, Script(lambda _: "slow", completion, slow_s=0.2)) as one, Proxy(0, scripted()) as two:
        assert len(ask([one.url, two.url], *(request(str(n)) for n in range(12)))) == 12
        assert one.script.count >= 2 and two.script.count >= 2
        assert one.script.count + two.script.count == 12
        # a server has sent its answer a moment before it counts the request as over
        assert one.script.most_under_way <= 4 and two.script.most_under_way <= 4


def test_a_request_says_how_to_sample_and_greedy_ones_say_no_more_than_that() -> None:
    with Proxy(0, scripted()) as proxy:
        ask([proxy.url], request(temperature=0.0))
        ask([proxy.url], request(top_p=0.9, top_k=4), token_ids=True, extra_body={"min_p": 0.1})
        greedy, sampled = proxy.script.bodies
    messages = [{"role": "user", "content": "Why?"}]
    assert greedy == {"model": "m", "messages": messages, "temperature": 0.0, "max_tokens": 9}
    extra = {"top_p": 0.9, "seed": 11, "top_k": 4, "min_p": 0.1, "return_token_ids": True}
    assert sampled == {**greedy, "temperature": 1.0, **extra}


def test_token_ids_that_were_asked_for_and_did_not_come_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Proxy(0, scripted()) as proxy:
        found = ask([proxy.url], *(request(str(n)) for n in range(4)), token_ids=True)
        said = capsys.readouterr().err.splitlines()
        ask([proxy.url], request())
    assert [isinstance(each, Answer) for each in found] == [True] * 4
    assert len(said) == 1 and said[0].startswith(f"warning: {proxy.url}: sends no token ids")
    assert "tokenised again from their text" in said[0]
    assert capsys.readouterr().err == ""


def test_answers_of_which_only_some_came_with_token_ids_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    def reply(asked: dict[str, Any]) -> dict[str, Any]:
        ids = {"token_ids": [7, 3]} if asked["messages"][0]["content"] != "2" else {}
        return {**completion(asked, **ids), "prompt_token_ids": [1, 2]}

    with Proxy(0, Script(reply=reply)) as proxy:
        ask([proxy.url], *(request(str(n)) for n in range(4)), token_ids=True)
    assert "warning: 1 of 4 answers came without token ids" in capsys.readouterr().err.splitlines()[-1]


def test_thinking_and_token_ids_are_read_where_servers_put_them(capsys: pytest.CaptureFixture[str]) -> None:
    def reply(asked: dict[str, Any]) -> dict[str, Any]:
        first = asked["messages"][0]["content"]
        keys = {"1": {"reasoning_content": "two and two"}, "3": {"reasoning_content": "", "reasoning": "two and two"}}
        message = {"role": "assistant", "content": "four", **keys.get(first, {"reasoning": "two and two"})}
        made = completion(asked, message=message, token_ids=[7, 8, 3], finish_reason="length")
        return {**made, "prompt_token_ids": [1, 2]}

    with Proxy(0, Script(reply=reply)) as proxy:
        found = ask([proxy.url], request("1"), request("2"), request("3"), token_ids=True)
    assert capsys.readouterr().err == ""
    assert found == [Answer("four", "length", 3, "two and two", (7, 8, 3), (1, 2))] * 3
