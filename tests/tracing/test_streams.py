"""Streamed replies through the real openai client and a real server: any text, any chunks, any damage."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from byte_server import ByteServer, byte_server
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agentrig import Span
from agentrig.adapters import triplet_of
from agentrig.traces import ABORTED, LLM_CALL
from agentrig.tracing.httpx_tap import CLOSED_EARLY
from agentrig.tracing.recording import recording
from agentrig.tracing.streams import joined

openai = pytest.importorskip("openai")

MESSAGES = [{"role": "user", "content": "?"}]


@pytest.fixture(scope="module")
def served() -> Iterator[ByteServer]:
    with byte_server() as server:
        yield server


@pytest.fixture
def server(served: ByteServer) -> ByteServer:
    served.status, served.headers, served.cut = 200, {}, False
    return served


def event(delta: dict[str, Any] | None = None, *, index: int = 0, **more: Any) -> str:
    """Return a chunk of a completion as JSON."""
    choice = {"index": index, "delta": delta or {}, "finish_reason": None, **more}
    return json.dumps({"id": "c1", "object": "chat.completion.chunk", "model": "m", "choices": [choice]})


def stream_of(*data: str, end: str = "\n\n") -> bytes:
    """Return events as bytes, with this end of an event."""
    return "".join(f"data: {d}{end}" for d in data).encode()


def said(*texts: str) -> list[str]:
    """Return the events of a whole reply with ids."""
    parts = [
        event({"content": t}, token_ids=[i], logprobs={"content": [{"logprob": -0.5}]}) for i, t in enumerate(texts)
    ]
    return [*parts, event(finish_reason="stop"), "[DONE]"]


def ask(server: ByteServer, *, asynchronous: bool = False) -> tuple[Span, list[Any]]:
    """Stream a reply through the client; return the call's span and the deltas that the agent saw."""
    seen: list[Any] = []

    def agent() -> None:
        with openai.OpenAI(base_url=server.url, api_key="x", max_retries=0) as client:
            stream = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            seen.extend(chunk.choices[0].delta for chunk in stream)

    async def async_agent() -> None:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="x", max_retries=0) as client:
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            seen.extend([chunk.choices[0].delta async for chunk in stream])

    with recording("r", token_ids=True, base_url=server.url) as recorder:
        try:
            asyncio.run(async_agent()) if asynchronous else agent()
        except Exception as error:  # an error of the client about unreadable data; this test checks the span
            seen.append(error)
    (call,) = [s for s in recorder.trace().spans if s.name == LLM_CALL]
    return call, seen


def message_of(call: Span) -> dict[str, Any]:
    message: dict[str, Any] = call.attributes["response"]["choices"][0]["message"]
    return message


@pytest.mark.parametrize("asynchronous", [False, True])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), min_size=1, max_size=4),
    end=st.sampled_from(["\n\n", "\r\n\r\n"]),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
)
@example(texts=["é\u2028\u2029", "日本\x85", "😀\x0b\x0c\x1c\x1d\x1e"], end="\r\n\r\n", cuts=list(range(80, 200)))
def test_any_text_in_any_chunks(
    server: ByteServer, asynchronous: bool, texts: Sequence[str], end: str, cuts: Sequence[int]
) -> None:
    raw = stream_of(
        *(json.dumps(json.loads(d), ensure_ascii=False) if d[0] == "{" else d for d in said(*texts)), end=end
    )
    places = sorted({0, len(raw), *(c % len(raw) for c in cuts)})
    server.chunks = [raw[a:b] for a, b in pairwise(places)]
    call, seen = ask(server, asynchronous=asynchronous)
    assert call.error is None
    assert message_of(call)["content"] == "".join(texts) == "".join(d.content or "" for d in seen)
    assert call.attributes["response_token_ids"] == list(range(len(texts)))
    assert call.attributes["response_logprobs"] == [-0.5] * len(texts)
    assert call.attributes["finish_reason"] == "stop"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (stream_of(*said("SEL")[:1]) + b'data: {"choices": [{"ind', "ended inside an event"),
        (stream_of(*said("SEL")[:1]) + b"data: \xff\xfe{\n\n", "not part of a completion"),
        (stream_of(*said("SEL")[:1], "[1, 2]", "[DONE]"), "not part of a completion"),
        (stream_of(*said("SEL")[:1], '{"choices": [7]}', "[DONE]"), "not part of a completion"),
        (stream_of(*said("SEL")[:1], '{"choices": [{"delta": "x"}]}', "[DONE]"), "not part of a completion"),
        (stream_of(*said("SEL")[:1], event({}, logprobs={"content": [3]}), "[DONE]"), "cannot be read"),
        (stream_of(*said("SEL")[:1]), "ended before the completion did"),
        (b"", "ended before the completion did"),
        (stream_of(*said("SEL")[:1], '{"error": {"message": "the engine died"}}'), "the engine died"),
    ],
)
def test_a_bad_event_is_the_spans_error(server: ByteServer, asynchronous: bool, raw: bytes, words: str) -> None:
    server.chunks = [raw]
    call, _ = ask(server, asynchronous=asynchronous)
    assert call.error is not None
    assert words in call.error
    assert triplet_of(call) is None
    if raw:
        assert message_of(call)["content"] == "SEL"  # what came before it is kept


def test_lines_after_the_end_or_without_an_event_are_ignored(server: ByteServer) -> None:
    server.chunks = [b": keep-alive\n\n", stream_of(*said("odd")), b"data: {"]
    call, seen = ask(server)
    assert "".join(d.content or "" for d in seen) == "odd" == message_of(call)["content"]
    assert call.error is None


def test_an_error_status_of_a_streamed_call(server: ByteServer) -> None:
    server.status, server.chunks = 429, [b'{"error": {"message": "slow down"}}']
    call, seen = ask(server)
    assert isinstance(seen[-1], openai.RateLimitError)
    assert call.error == 'HTTP 429: {"error": {"message": "slow down"}}'


def test_a_compressed_stream(server: ByteServer) -> None:
    server.headers, server.chunks = {"content-encoding": "gzip"}, [gzip.compress(stream_of(*said("odd")))]
    call, seen = ask(server)
    assert call.error is None
    assert message_of(call)["content"] == "odd" == "".join(d.content or "" for d in seen)
    server.chunks = [b"no gzip at all"]
    call, _ = ask(server)
    assert call.error is not None


def tool_call(index: int | None, **fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{**({} if index is None else {"index": index}), **fields}]}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("with_index", [True, False])
def test_streamed_tool_calls_are_put_together(server: ByteServer, asynchronous: bool, with_index: bool) -> None:
    def call_of(index: int, **fields: Any) -> dict[str, Any]:
        return tool_call(index if with_index else None, **fields)

    deltas = [
        {"role": "assistant", "content": None},
        call_of(0, id="call-a", type="function", function={"name": "run_sql", "arguments": ""}),
        call_of(0, function={"arguments": '{"query": "SELECT'}),
        call_of(0, function={"arguments": ' 1\u2028"}'}),
        call_of(1, id="call-b", type="function", function={"name": "stop", "arguments": "{}"}),
    ]
    data = [event(d, token_ids=[i]) for i, d in enumerate(deltas)]
    server.chunks = [stream_of(*data, event(finish_reason="tool_calls"), "[DONE]")]
    call, _ = ask(server, asynchronous=asynchronous)
    assert call.error is None
    assert message_of(call) == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call-a",
                "type": "function",
                "function": {"name": "run_sql", "arguments": '{"query": "SELECT 1\u2028"}'},
            },
            {"id": "call-b", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
        ],
    }
    assert call.attributes["finish_reason"] == "tool_calls"
    assert call.attributes["response_token_ids"] == [0, 1, 2, 3, 4]


def test_choices_of_one_stream_are_calls_of_their_own(server: ByteServer) -> None:
    data = [
        event({"content": "a", "reasoning_content": "hm"}, index=0, token_ids=[1]),
        event({"content": "x"}, index=1, token_ids=[8]),
        event({"content": "b", "reasoning_content": "m"}, index=0, token_ids=[2], finish_reason="stop"),
        event({"content": "y"}, index=1, token_ids=[9], finish_reason="stop"),
    ]
    server.chunks = [stream_of(*data, "[DONE]")]
    client = openai.OpenAI(base_url=server.url, api_key="x", max_retries=0)
    with recording("r", token_ids=True, base_url=server.url) as recorder, client:
        list(client.chat.completions.create(model="m", messages=MESSAGES, n=2, stream=True))
    calls = [s for s in recorder.trace().spans if s.name == LLM_CALL]
    assert [message_of(call)["content"] for call in calls] == ["ab", "xy"]
    assert message_of(calls[0])["reasoning_content"] == "hmm"
    assert [call.attributes["response_token_ids"] for call in calls] == [[1, 2], [8, 9]]
    assert [call.attributes["request"]["n"] for call in calls] == [1, 1]


@given(text=st.text(), whole=st.booleans())
def test_no_stream_raises(text: str, whole: bool) -> None:
    for stream in (text, f"data: {text}\n\n", f'data: {{"choices": [{{"delta": {json.dumps(text)}}}]}}\n\n'):
        body, error = joined(stream, whole=whole)
        assert body["choices"]
        assert error is None or isinstance(error, str)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "index", "delta", "tool_calls", "function", "content", "id", "error", "logprobs"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(JSON, max_size=4))
def test_no_event_raises(parts: Sequence[Any]) -> None:
    body, error = joined("".join(f"data: {json.dumps(p)}\n\n" for p in parts))
    assert body["choices"]
    assert error is not None  # none of them finishes


def test_a_stream_left_early_is_no_error(server: ByteServer) -> None:
    head, cut = stream_of(*said("SEL", "ECT")[:1]), b'data: {"choices": ['
    server.chunks = [head + cut, b"x" * 100_000]
    with recording("r", token_ids=True, base_url=server.url) as recorder:
        client = openai.OpenAI(base_url=server.url, api_key="x", max_retries=0)
        with client, client.chat.completions.create(model="m", messages=MESSAGES, stream=True) as stream:
            assert next(iter(stream)).choices[0].delta.content == "SEL"
    (call,) = recorder.trace().llm_calls()
    assert message_of(call)["content"] == "SEL"


@pytest.mark.parametrize("ids", [True, False])
def test_a_stream_left_before_its_token_ids_is_an_error_of_the_agent(server: ByteServer, ids: bool) -> None:
    server.chunks = [stream_of(event({"content": "SEL"})), b"x" * 100_000]
    with recording("r", token_ids=ids, base_url=server.url) as recorder:
        client = openai.OpenAI(base_url=server.url, api_key="x", max_retries=0)
        with client, client.chat.completions.create(model="m", messages=MESSAGES, stream=True) as stream:
            next(iter(stream))
    (call,) = [span for span in recorder.trace().spans if span.name == LLM_CALL]
    assert call.error == (CLOSED_EARLY if ids else None)  # a run that only measures needs no ids
    assert call.attributes.get(ABORTED) is (True if ids else None)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("cancels", [True, False])
def test_a_call_that_the_agent_cancels_is_told_from_one_that_the_server_breaks(
    server: ByteServer, stream: bool, cancels: bool
) -> None:
    server.chunks, server.cut = [stream_of(event({"content": "SEL"}))[:40]], True
    server.pause_s = 3.0 if cancels else 0.0

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="x", max_retries=0) as client:
            reply = await client.chat.completions.create(model="m", messages=MESSAGES, stream=stream)
            if stream:
                async for _ in reply:
                    pass

    async def cancelled() -> None:
        asking = asyncio.create_task(ask())
        while cancels and not server.posts:
            await asyncio.sleep(0.01)
        _, under_way = await asyncio.wait([asking], timeout=0.1 if cancels else None)
        assert [each.cancel() for each in under_way] == [True] * cancels
        await asyncio.wait([asking])

    with recording("r", token_ids=True, base_url=server.url) as recorder:
        asyncio.run(cancelled())
    (call,) = [span for span in recorder.trace().spans if span.name == LLM_CALL]
    assert call.error
    assert call.attributes.get(ABORTED) is (True if cancels else None)
