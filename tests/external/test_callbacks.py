"""Callbacks over real HTTP: the first answer counts, and what is no answer, or has no key, is refused with a reason."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Iterator

import httpx
import pytest

from agentrig.agents import Judged, Outcome
from agentrig.errors import AgentFailure, AgentrigError
from agentrig.external.callbacks import Callback, Listener, read_answer, returned
from agentrig.runners.attempt import ANSWER_LIMIT


@pytest.fixture(scope="module")
def here() -> Iterator[Listener]:
    own = Listener()
    yield own
    own.close()


def post(callback: Callback, value: object, **more: str) -> tuple[int, dict]:
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    headers = {"Authorization": f"Bearer {callback.key}", **more}
    reply = httpx.post(callback.url, content=content, headers=headers, timeout=10)
    return reply.status_code, reply.json()


def test_the_first_answer_counts_the_same_again_is_no_error_and_another_is_refused(here: Listener) -> None:
    with Callback("r1", listener=here) as callback:
        assert callback.arrived is None
        assert post(callback, {"answer": [1, "é"], "reward": 1}) == (200, {"accepted": True})
        assert post(callback, {"answer": [1, "é"], "reward": 1.0}) == (200, {"accepted": True})
        assert callback.repeated == 0
        status, reply = post(callback, {"answer": 2})
        assert (status, callback.repeated) == (409, 1)
        assert "only the first one counts" in reply["error"]
        first = callback.arrived
    assert first is not None
    assert returned(first) == Judged(answer=[1, "é"], reward=1.0)
    # The sender may not know that its answer has arrived, and the rollout has ended meanwhile.
    assert post(callback, {"answer": [1, "é"], "reward": 1.0}) == (200, {"accepted": True})
    assert post(callback, {"answer": 1})[0] == 409
    assert post(callback, {"answer": [1, "é"], "reward": 1.0}, Authorization="Bearer other")[0] == 401
    with Callback("r2", listener=here, one_answer=True) as strict:
        assert post(strict, {"answer": 1})[0] == 200
        status, reply = post(strict, {"answer": 2})
        assert (status, reply["error"].partition("; ")[2]) == (409, "with two that differ it fails (answered-twice)")
    with Callback("r1", listener=here) as again:
        assert post(callback, {"answer": 1})[0] == 401  # another rollout is under way there
    assert post(again, {"answer": 1})[0] == 410


def test_a_packed_answer_is_refused_as_such(here: Listener) -> None:
    with Callback("r1", listener=here) as callback:
        status, reply = post(callback, gzip.compress(b'{"answer": 1}'), **{"Content-Encoding": "gzip"})
        assert (status, "has the Content-Encoding gzip" in reply["error"]) == (415, True)


def test_rollouts_have_keys_of_their_own(here: Listener) -> None:
    with Callback("r1", listener=here) as one, Callback("r1", attempt=2, listener=here) as two:
        assert one.key != two.key
        assert one.key not in one.url + repr(one)
        assert post(one, {"answer": 1}, Authorization=f"Bearer {two.key}")[0] == 401
        assert post(one, {"answer": 1}, Authorization="Basic x")[0] == 401
        assert post(two, {"answer": 2})[0] == 200
        assert one.arrived is None


def test_a_sender_is_told_what_is_wrong_and_may_try_again(here: Listener) -> None:
    with Callback("r1", listener=here) as callback:
        assert post(callback, b"{")[0] == 400
        for body, words in {
            b'"\xff"': "the body is not UTF-8 (byte 1)",
            b"[" * 100_000: "the body is nested too deep",
            b'{"answer": NaN}': "the body is not JSON: NaN is no value of JSON",
            b'{"answer": %b}' % (b"9" * 5000): "the body has a whole number of more than 4300 digits",
        }.items():
            assert post(callback, body) == (400, {"error": words})
        assert post(callback, {"anwser": 1})[1]["error"].startswith(
            'an answer has no key "anwser". Did you mean "answer"?'
        )
        status, reply = post(callback, b'"' + b"x" * (16 << 20) + b'"')
        assert status == 413
        assert "longer than the 16 MiB that this server takes (no setting raises it: a run takes no" in reply["error"]
        assert f"more than {ANSWER_LIMIT:,} characters)" in reply["error"]
        assert "longer than the 16 MiB" in callback.refused
        assert callback.arrived is None
        assert post(callback, {"failure": "no-key", "message": "the search refused"})[0] == 200
        with pytest.raises(AgentFailure, match="the search refused") as failure:
            returned(callback.arrived)  # type: ignore[arg-type]
        assert failure.value.kind == "no-key"


@pytest.mark.parametrize(
    "value",
    [
        *(7, [], {}, {"message": "x"}, {"answer": 1, "failure": "x"}, {"failure": "two words"}, {"failure": 1}),
        *({"reward": True}, {"reward": "1"}, {"answer": 1, "reward": float("inf")}, {"reward": float("nan")}),
    ],
    ids=repr,
)
def test_what_is_no_answer(value: object) -> None:
    with pytest.raises(ValueError, match="an answer is"):
        read_answer(value)
    with pytest.raises(ValueError, match=r"a lone surrogate, '\\ud800'"):
        read_answer({"answer": ["a\ud800"]})


def test_an_answer_may_be_null_or_only_a_reward() -> None:
    assert returned(read_answer({"answer": None})) == Judged()
    assert returned(read_answer({"reward": 0.5})) == Judged(reward=0.5)


def test_an_async_agent_waits_without_its_thread(here: Listener) -> None:
    async def waits() -> Outcome:
        with Callback("r1", listener=here) as callback:
            threading.Timer(0.05, post, (callback, {"answer": "late"})).start()
            async with asyncio.timeout(10):
                return await callback.answer()

    assert asyncio.run(waits()).answer == "late"


def test_a_host_that_is_not_this_machines_is_named() -> None:
    with pytest.raises(AgentrigError, match=r"cannot listen on 192\.0\.2\.1"):
        Listener("192.0.2.1")


def test_the_name_by_which_others_reach_this_host_is_in_the_address() -> None:
    own = Listener(name="host.docker.internal")
    try:
        with Callback("r/1", attempt=3, listener=own) as callback:
            assert callback.url.startswith("http://host.docker.internal:")
            assert callback.url.endswith("/rollouts/r/1/attempts/3/answer")
            here = callback.url.replace("host.docker.internal", "127.0.0.1")
            sent = httpx.post(here, json={"answer": 1}, headers={"Authorization": f"Bearer {callback.key}"}, timeout=10)
            assert sent.status_code == 200
    finally:
        own.close()


def test_a_process_has_one_listener_for_a_host() -> None:
    assert Listener.shared() is Listener.shared()
