"""The client against a scripted server: what is tried again, what a row pays for, and what stops the run."""

import asyncio
from typing import Any

import pytest

from aerie.configs.errors import UserError
from aerie.configs.schema.data import SamplingConfig, ServerConfig
from aerie.data.distill.answer import TOO_LONG, Answer, ServedTarget, Unanswered
from tests.data.distill.faults import Proxy, completion, free_port


def ask(urls: list[str], *questions: str, sampling: dict[str, Any] | None = None, **settings: Any) -> list[Any]:
    """The answers, as text where nothing else came with it, or what they ended with; all are under way at once."""

    async def run() -> list[Any]:
        config = ServerConfig(tuple(urls), **{"concurrency": 2, "retries": 1, "timeout_s": 5.0, **settings})
        drawn = SamplingConfig(max_tokens=9, **sampling or {})
        async with asyncio.timeout(60.0), ServedTarget(config, "m", drawn) as served:
            room = asyncio.Semaphore(config.concurrency * len(urls))

            async def one(text: str) -> Any:
                async with room:
                    return await served([{"role": "user", "content": text}], 11)

            return await asyncio.gather(*map(one, questions), return_exceptions=True)

    ends = asyncio.run(run())
    return [end.content if end == Answer(getattr(end, "content", ""), "stop", 3) else end for end in ends]


# An answer that cannot be read is asked for twice, and a server with too much to do (429, 503) as often as it takes.
@pytest.mark.parametrize(("fault", "few"), [("500", 3), ("garbled", 1), ("slow", 3), ("429", 12)])
def test_a_request_that_meets_a_fault_is_made_again_and_answered(fault: str, few: int) -> None:
    with Proxy(lambda question, tries: fault if question == "a" and tries < few else "") as proxy:
        assert ask([proxy.url], "a", timeout_s=0.5 if fault == "slow" else 5.0) == ["re: a"]
        assert proxy.asked == ["a"] * (few + 1)


@pytest.mark.parametrize("fault", ["400", "502", "long"])
def test_a_row_that_the_server_alone_cannot_answer_has_failed_or_is_skipped(fault: str) -> None:
    with Proxy(lambda question, _: fault if question == "poison" else "") as proxy:
        error, good = ask([proxy.url], "poison", "b")
    assert isinstance(error, Unanswered) and good == "re: b"
    assert (error.status, error.why) == ("skipped", TOO_LONG) if fault == "long" else error.status == "failed"


@pytest.mark.parametrize("fault", ["503", "cut"])
def test_no_row_fails_when_the_server_goes_down_and_the_run_stops_when_patience_is_over(fault: str) -> None:
    asked = set[str]()

    def meet(question: str, _: int) -> str:
        asked.add(question)
        return fault if asked > {"Hi"} else ""

    with Proxy(meet) as proxy:
        ends = ask([proxy.url], "a", "b", "c", patience_s=0.5, retries=0, timeout_s=0.4)
    assert all(isinstance(end, UserError) for end in ends)
    assert "no server has answered for 0.5 s" in str(ends[0])


def test_a_server_that_is_gone_is_left_to_the_others_and_without_any_the_run_stops() -> None:
    gone = f"http://127.0.0.1:{free_port()}/v1"
    with Proxy() as proxy:
        assert ask([gone, proxy.url], *"abcdefgh") == [f"re: {text}" for text in "abcdefgh"]
    with pytest.raises(UserError, match=r"no server has answered for 0\.3 s"):
        ask([gone], "a", patience_s=0.3)


@pytest.mark.parametrize("fault", ["401", "long"])
def test_a_wrong_key_address_or_length_stops_the_run_with_the_fix(fault: str) -> None:
    with Proxy(lambda *_: fault) as proxy, pytest.raises(UserError, match=r"check distill\.(server|sampling)"):
        ask([proxy.url], "a")
    assert len(proxy.bodies) == 1


def test_requests_are_spread_over_the_servers_within_their_limits() -> None:
    first, second = (Proxy(lambda question, _: "slow" if question != "Hi" else "", slow_s=0.1) for _ in "ab")
    with first, second:
        assert ask([first.url, second.url], *"abcdefghijkl") == [f"re: {text}" for text in "abcdefghijkl"]
    assert sorted(first.asked + second.asked) == list("abcdefghijkl")
    assert all(len(proxy.asked) >= 4 and proxy.most_under_way <= 3 for proxy in (first, second))


def test_a_request_says_how_to_sample_and_an_answer_brings_thinking_and_ids() -> None:
    def reply(asked: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": "four", "reasoning": "2 + 2", "reasoning_content": ""}
        return {**completion(asked, message=message, token_ids=[7, 3]), "prompt_token_ids": [1, 2]}

    with Proxy(reply=reply) as proxy:
        greedy = ask([proxy.url], "a", sampling={"temperature": 0.0})
        ask([proxy.url], "a", sampling={"top_p": 0.9, "top_k": 4}, token_ids=True, extra_body={"min_p": 0.1})
    assert greedy == [Answer("four", "stop", 3, "2 + 2", (7, 3), (1, 2))]
    drawn = {"top_p": 0.9, "top_k": 4, "min_p": 0.1, "return_token_ids": True, "temperature": 1.0, "seed": 11}
    asked = [body for body in proxy.bodies if body["messages"][0]["content"] == "a"]
    assert asked[0]["temperature"] == 0.0 and asked[0]["max_tokens"] == 9 and asked[1].items() >= drawn.items()
