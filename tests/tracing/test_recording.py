"""The tracer with typical agents: SDKs, plain httpx, graphs, threads; the agents need no change."""

from __future__ import annotations

import asyncio
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypedDict

import httpx
import pytest
from model_server import ModelServer

import agentrig
from agentrig import Span, Trace
from agentrig.adapters import triplet_of
from agentrig.traces import CUT, LLM_CALL, SERVER
from agentrig.tracing.recorder import OUTPUT_LIMIT, Recorder, current, plain
from agentrig.tracing.recording import recording

openai = pytest.importorskip("openai")


def record(agent: Callable[[], Any], *, token_ids: bool = True) -> Trace:
    with recording("r1", token_ids=token_ids) as recorder:
        agent()
    return recorder.trace()


def only_call(trace: Trace) -> Span:
    (call,) = [s for s in trace.spans if s.name == LLM_CALL]
    return call


MESSAGES = [{"role": "user", "content": "Is 3 odd?"}]
PROMPT_IDS = list(b"Is 3 odd?")


@pytest.fixture
def client(model: ModelServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=model.url, api_key="secret-key", max_retries=0) as client:
        yield client


def check_call(call: Span) -> None:
    """Check that a call is recorded completely: ids, log-probabilities, bodies; and the ids only once."""
    attributes = call.attributes
    assert attributes["prompt_token_ids"] == PROMPT_IDS
    assert attributes["response_token_ids"] == list(b"odd")
    assert attributes["response_logprobs"] == [-0.25] * 3
    assert attributes["request"]["messages"] == MESSAGES
    assert attributes["response"]["choices"][0]["message"]["content"] == "odd"
    assert attributes["finish_reason"] == "stop"
    assert "token_ids" not in attributes["response"]["choices"][0]
    assert call.error is None
    assert call.end >= call.start


def test_the_openai_client(model: ModelServer, client: Any) -> None:
    seen: list[Any] = []

    def agent() -> None:
        seen.append(client.chat.completions.create(model="m", messages=MESSAGES, temperature=0.5))

    call = only_call(record(agent))
    check_call(call)
    assert call.attributes["request"]["temperature"] == 0.5
    assert call.attributes["gen_ai.response.id"] == seen[0].id
    (body,) = model.bodies()
    assert (body["return_token_ids"], body["logprobs"], body["temperature"]) == (True, True, 0.5)
    assert seen[0].choices[0].message.content == "odd"
    assert seen[0].choices[0].logprobs is None  # it did not request them and does not have to parse them
    assert "secret-key" not in str(call.attributes)


def test_the_agent_gets_the_fields_that_it_requested(model: ModelServer, client: Any) -> None:
    seen: list[Any] = []

    def agent() -> None:
        extra = {"return_token_ids": True}
        seen.append(client.chat.completions.create(model="m", messages=MESSAGES, logprobs=True, extra_body=extra))

    check_call(only_call(record(agent)))
    assert [t.logprob for t in seen[0].choices[0].logprobs.content] == [-0.25] * 3
    assert seen[0].choices[0].token_ids == list(b"odd")


def test_a_stream_belongs_to_the_span_that_opened_it(model: ModelServer, client: Any) -> None:
    def agent() -> None:
        with agentrig.span("write_query"):
            stream = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        list(stream)

    trace = record(agent)
    assert trace.nodes(only_call(trace)) == ["write_query"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stream_that_is_read_at_once_is_recorded_as_one(model: ModelServer, asynchronous: bool) -> None:
    wish = {"model": "m", "messages": MESSAGES, "stream": True}

    async def ask() -> str:
        async with httpx.AsyncClient() as own:
            return (await own.post(f"{model.url}/chat/completions", json=wish)).text

    def agent() -> None:
        url = f"{model.url}/chat/completions"
        text = asyncio.run(ask()) if asynchronous else httpx.post(url, json=wish).text
        assert text.startswith("data: ")

    check_call(only_call(record(agent)))


def test_a_stream_that_breaks_is_an_error_and_trains_nothing(model: ModelServer, client: Any) -> None:
    def agent() -> None:
        wish = [{"role": "user", "content": "[break=1]"}]
        with pytest.raises(openai.APIError):
            list(client.chat.completions.create(model="m", messages=wish, stream=True))

    call = only_call(record(agent))
    assert call.error is not None
    assert "the stream broke" in call.error
    assert call.attributes["response_token_ids"] == list(b"o")
    assert triplet_of(call) is None


def test_calls_to_another_server_are_unchanged_and_not_trained(model: ModelServer, client: Any) -> None:
    """For example a judge that the agent calls in addition to the trained model."""

    def agent() -> None:
        client.chat.completions.create(model="judge", messages=MESSAGES, logprobs=True)

    for base_url, own in (
        (model.url, True),
        (model.url.replace("127.0.0.1", "localhost"), True),
        ("http://127.0.0.1:9/v1", False),
        ("https://models.example/v1", False),
    ):
        model.requests.clear()
        with recording("r1", token_ids=True, base_url=base_url) as recorder:
            agent()
        call = only_call(recorder.trace())
        (body,) = model.bodies()
        assert body.get("return_token_ids", False) is own
        assert (triplet_of(call) is not None) is own
        assert (SERVER in call.attributes) is not own


def test_plain_httpx_and_its_other_requests(model: ModelServer) -> None:
    def agent() -> None:
        assert httpx.get(f"{model.url}/models").status_code == 200
        reply = httpx.post(
            f"{model.url}/chat/completions", json={"messages": MESSAGES}, headers={"authorization": "Bearer k"}
        )
        assert "token_ids" not in reply.json()["choices"][0]
        assert reply.json()["choices"][0]["message"]["content"] == "odd"

    check_call(only_call(record(agent)))
    assert model.requests[0][1]["authorization"] == "Bearer k"


@pytest.mark.parametrize("body", [b"[1, 2]", b'"text"', b"null", b"7", b"{", iter([b'{"mess', b'ages": []}'])])
def test_a_body_that_is_no_object_reaches_the_server(body: Any) -> None:
    got: list[bytes] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        got.append(request.read())
        return httpx.Response(400, text="write an object")

    url = "http://127.0.0.1:9/v1"
    with (
        httpx.Client(transport=httpx.MockTransport(refuse)) as client,
        recording("r1", token_ids=True, base_url=url, sampling={"temperature": 1.0}) as recorder,
    ):
        assert client.post(f"{url}/chat/completions", content=body).text == "write an object"
    assert got == [body if isinstance(body, bytes) else b'{"messages": []}']
    assert not recorder.trace().llm_calls()


def test_no_field_is_added_if_the_endpoint_has_no_token_ids(model: ModelServer, client: Any) -> None:
    call = only_call(record(lambda: client.chat.completions.create(model="m", messages=MESSAGES), token_ids=False))
    assert not {"return_token_ids", "logprobs"} & set(model.bodies()[0])
    assert "response_token_ids" not in call.attributes
    assert call.attributes["response"]["choices"][0]["message"]["content"] == "odd"


@pytest.mark.parametrize("status", [400, 429, 503])
def test_an_error_status_is_recorded_and_reaches_the_agent(model: ModelServer, client: Any, status: int) -> None:
    def agent() -> None:
        with pytest.raises(openai.APIStatusError):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": f"[status={status}]"}])

    trace = record(agent)
    call = only_call(trace)
    assert call.error is not None
    assert f"HTTP {status}" in call.error
    assert f"asked for {status}" in call.error
    assert trace.llm_calls() == []


def test_an_unreachable_server(model: ModelServer) -> None:
    def agent() -> None:
        with pytest.raises(httpx.ConnectError):
            httpx.post("http://127.0.0.1:9/v1/chat/completions", json={"messages": MESSAGES})

    call = only_call(record(agent))
    assert call.error is not None
    assert call.error.startswith("ConnectError")


def test_a_named_part_of_a_plain_agent(model: ModelServer, client: Any) -> None:
    def ask() -> None:
        client.chat.completions.create(model="m", messages=MESSAGES)

    def agent() -> None:
        with agentrig.span("plan"):
            with agentrig.span("write"):
                ask()
            ask()
        ask()

    trace = record(agent)
    assert [trace.nodes(c) for c in trace.llm_calls()] == [["write", "plan"], ["plan"], []]


def test_a_named_part_that_fails_carries_its_error(model: ModelServer, client: Any) -> None:
    def agent() -> None:
        with pytest.raises(ValueError, match="no"), agentrig.span("plan"):
            raise ValueError("no")
        client.chat.completions.create(model="m", messages=MESSAGES)

    trace = record(agent)
    assert next(s.error for s in trace.spans if s.node == "plan") == "ValueError: no"
    assert trace.nodes(trace.llm_calls()[0]) == []


def test_a_span_outside_of_a_rollout_does_nothing() -> None:
    with agentrig.span("plan"):
        assert current() is None


def test_threads_of_the_agent_are_recorded(model: ModelServer, client: Any) -> None:
    def ask() -> None:
        client.chat.completions.create(model="m", messages=MESSAGES)

    def agent() -> None:
        with agentrig.span("plan"):
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            with ThreadPoolExecutor(2) as threads:
                list(threads.map(lambda _: ask(), range(3)))

    trace = record(agent)
    assert [trace.nodes(c) for c in trace.llm_calls()] == [["plan"]] * 4


def test_calls_in_a_pool_that_outlives_a_rollout_belong_to_the_caller(model: ModelServer, client: Any) -> None:
    def ask() -> None:
        client.chat.completions.create(model="m", messages=MESSAGES)

    with ThreadPoolExecutor(1) as shared:
        first, second = (record(lambda: shared.submit(ask).result()) for _ in range(2))
        shared.submit(ask).result()  # outside of a rollout, in a thread that the first one started
        assert shared.submit(current).result() is None
    assert (len(first.llm_calls()), len(second.llm_calls())) == (1, 1)


def test_concurrent_rollouts_do_not_mix(model: ModelServer, client: Any) -> None:
    def rollout(i: int) -> Trace:
        def agent() -> None:
            for _ in range(3):
                with agentrig.span(f"node-{i}"):
                    client.chat.completions.create(model="m", messages=[{"role": "user", "content": f"number {i}"}])

        return record(agent)

    with ThreadPoolExecutor(8) as threads:
        traces = list(threads.map(rollout, range(8)))
    for i, trace in enumerate(traces):
        assert [trace.nodes(c) for c in trace.llm_calls()] == [[f"node-{i}"]] * 3
        assert {bytes(c.attributes["prompt_token_ids"]).decode() for c in trace.llm_calls()} == {f"number {i}"}


# --- LangGraph -------------------------------------------------------------------------------------


class State(TypedDict):
    question: str
    answer: str
    turns: int


def match(trace: Trace, pattern: str) -> list[str]:
    """Return the nodes of the triplets that the real adapter keeps."""
    from agentrig.plugins.loading import load

    component = load().find("adapter", "agent-match")
    spec: Any = component.spec
    return [t.node for t in spec.build(spec.config(match=pattern))(trace)]


def chat(model: ModelServer, client: httpx.AsyncClient | None = None) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=model.url, api_key="x", model="m", max_retries=0, http_async_client=client)


def graph(model: ModelServer, client: httpx.AsyncClient | None = None) -> Any:
    """write (a chain inside the node) → check → write again while `turns` < 2, over a conditional edge."""
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate
    from langgraph.graph import END, START, StateGraph

    llm = chat(model, client)
    chain = ChatPromptTemplate.from_messages([("user", "{question}")]) | llm | StrOutputParser()

    def write_query(state: State) -> dict[str, Any]:
        return {"answer": chain.invoke({"question": state["question"]}), "turns": state["turns"] + 1}

    def check_query(state: State) -> dict[str, Any]:
        return {"answer": state["answer"] + str(llm.invoke("right?").content)}

    async def awrite_query(state: State) -> dict[str, Any]:
        return {"answer": await chain.ainvoke({"question": state["question"]}), "turns": state["turns"] + 1}

    async def acheck_query(state: State) -> dict[str, Any]:
        reply = await llm.ainvoke("right?")
        return {"answer": state["answer"] + str(reply.content)}

    def route(state: State) -> str:
        return END if state["turns"] >= 2 else "write_query"

    builder = StateGraph(State)
    builder.add_node("write_query", awrite_query if client else write_query)
    builder.add_node("check_query", acheck_query if client else check_query)
    builder.add_edge(START, "write_query")
    builder.add_edge("write_query", "check_query")
    builder.add_conditional_edges("check_query", route)
    return builder.compile()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_graph_needs_no_callback(model: ModelServer, asynchronous: bool) -> None:
    start = {"question": "Is 3 odd?", "answer": "", "turns": 0}

    async def run() -> Any:
        async with httpx.AsyncClient() as client:
            return await graph(model, client).ainvoke(start)

    def agent() -> None:
        found = asyncio.run(run()) if asynchronous else graph(model).invoke(start)
        assert found["answer"] == "oddodd"

    trace = record(agent)
    calls = trace.llm_calls()
    assert ["write_query" in trace.nodes(c) for c in calls] == [True, False, True, False]
    assert ["check_query" in trace.nodes(c) for c in calls] == [False, True, False, True]
    assert "RunnableSequence" in trace.nodes(calls[0])
    check_call(calls[0])
    assert match(trace, "write") == ["write_query"] * 2
    assert match(trace, "check") == ["check_query"] * 2
    assert match(trace, "^write_query$|check") == ["write_query", "check_query"] * 2
    assert match(trace, "rewrite") == []
    nodes = [s for s in trace.spans if s.node in ("write_query", "check_query")]
    assert nodes[0].attributes["output"] == {"answer": "odd", "turns": 1}
    assert all(s.error is None for s in trace.spans)
    by_id = {s.id: s for s in trace.spans}
    assert {by_id[s.parent].node for s in nodes if s.parent} == {"LangGraph"}, "not the routing of a conditional edge"
    assert all(s.parent in by_id for s in trace.spans if s.parent)


def test_threads_that_share_a_client_keep_their_connections() -> None:
    """Each connection that is closed for being one too many could be the one that another thread has just got."""
    together, opened = threading.Barrier(30), []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            opened.append(self.client_address)

        def do_GET(self) -> None:
            together.wait(30)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

    record(lambda: None)  # the tap is there from now on
    with (
        Server(("127.0.0.1", 0), Handler) as server,
        httpx.Client(timeout=30) as client,
        ThreadPoolExecutor(30) as pool,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        for _ in range(3):
            assert {answer.status_code for answer in pool.map(client.get, [url] * 30)} == {200}
        client.close()
        server.shutdown()
    assert len(opened) == 30


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
def test_a_connection_that_a_call_has_got_does_not_expire(library: str, model: ModelServer) -> None:
    """The pool looks for expired connections once more for another thread, before the call is sent."""
    module = importlib.import_module(library)
    record(lambda: None)  # the tap is there from now on
    with module.Client(limits=module.Limits(keepalive_expiry=0.3), timeout=30) as client:
        client.get(model.url)
        pool, core = client._transport._pool, library.replace("httpx", "httpcore")
        request = importlib.import_module(core).Request("GET", model.url)
        call = importlib.import_module(f"{core}._sync.connection_pool").PoolRequest(request)
        pool._requests.append(call)
        assert pool._assign_requests_to_connections() == []
        connection = call.wait_for_connection()
        assert connection.is_idle(), "it is not the one that was kept"
        time.sleep(0.4)
        assert pool._assign_requests_to_connections() == []
        pool._requests.remove(call)


def test_a_node_that_raises(model: ModelServer) -> None:
    from langgraph.graph import END, START, StateGraph

    def explode(state: State) -> dict[str, Any]:
        chat(model).invoke("first")
        raise ValueError("no such table")

    builder = StateGraph(State)
    builder.add_node("write_query", explode)
    builder.add_edge(START, "write_query")
    builder.add_edge("write_query", END)
    compiled = builder.compile()

    def agent() -> None:
        with pytest.raises(ValueError, match="no such table"):
            compiled.invoke({"question": "?", "answer": "", "turns": 0})
        chat(model).invoke("afterwards")

    trace = record(agent)
    assert next(s.error for s in trace.spans if s.node == "write_query") == "ValueError: no such table"
    assert trace.nodes(trace.llm_calls()[-1]) == []  # later spans are not under the node that ended


def test_parallel_branches_keep_their_own_calls(model: ModelServer) -> None:
    from langgraph.graph import END, START, StateGraph

    class Both(TypedDict, total=False):
        question: str
        left: str
        right: str

    llm = chat(model)

    def side(name: str) -> Callable[[Both], dict[str, Any]]:
        def node(state: Both) -> dict[str, Any]:
            return {name: llm.invoke(f"[sleep=0.05] {name}").content}

        return node

    builder = StateGraph(Both)
    for name in ("left", "right"):
        builder.add_node(f"go_{name}", side(name))
        builder.add_edge(START, f"go_{name}")
        builder.add_edge(f"go_{name}", END)
    compiled = builder.compile()
    trace = record(lambda: compiled.invoke({"question": "?"}))
    for call in trace.llm_calls():
        name = call.attributes["request"]["messages"][-1]["content"].split()[-1]
        assert trace.nodes(call)[0] == f"go_{name}"
    assert len(trace.llm_calls()) == 2


def test_a_tool_is_a_span(model: ModelServer) -> None:
    from langchain_core.tools import tool

    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    trace = record(lambda: add.invoke({"a": 1, "b": 2}))
    (span,) = [s for s in trace.spans if s.name == "tool"]
    assert (span.attributes["tool.name"], span.attributes["output"]) == ("add", 3)


# --- values ----------------------------------------------------------------------------------------


def test_a_span_that_never_ends_is_closed_with_an_error() -> None:
    with recording("r", token_ids=False) as recorder:
        recorder.open("x", None, "chain.chain", {})
    assert next(s.error for s in recorder.trace().spans if s.id == "x") == "never ended"


def test_long_outputs_are_cut_with_a_note() -> None:
    cut = plain({"text": "x" * 2 * OUTPUT_LIMIT})
    assert len(cut) < OUTPUT_LIMIT + 100
    assert cut.endswith(f"(cut from {2 * OUTPUT_LIMIT + 12} characters)")


@pytest.mark.parametrize(
    ("value", "kept"),
    [({"a": (1, 2)}, {"a": [1, 2]}), ({1: "x"}, {"1": "x"}), (b"x", "b'x'"), ({(1, 2): 3}, {"(1, 2)": 3})],
)
def test_anything_becomes_json(value: Any, kept: Any) -> None:
    assert plain(value) == kept


def test_cyclic_values_do_not_break_a_rollout() -> None:
    ring: dict[str, Any] = {}
    ring["me"] = ring
    assert "contains itself" in plain(ring)["me"]


def test_calls_of_a_thread_after_its_rollout_are_refused_and_those_under_way_counted(
    model: ModelServer, client: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "told", False)
    ended, late = threading.Event(), []

    def ask() -> None:
        client.chat.completions.create(model="m", messages=MESSAGES)
        ended.wait(10)
        for _ in range(2):
            try:
                late.append(client.chat.completions.create(model="m", messages=MESSAGES))
            except openai.APIStatusError as error:
                late.append((error.status_code, error.code))

    with recording("r1", token_ids=True, base_url=model.url) as recorder:
        thread = threading.Thread(target=ask)
        thread.start()
        while not recorder.finished():
            time.sleep(0.01)
        recorder.under_way.add(0)  # as a call that goes on
    before = len(model.requests)
    ended.set()
    thread.join()
    trace = recorder.trace()
    assert late == [(410, "rollout_ended")] * 2
    assert len(model.requests) == before
    assert len(trace.llm_calls()) == 1
    assert trace.spans[0].attributes[CUT] == 1
    assert [r.message.count("after its rollout r1 had ended") for r in caplog.records] == [1]
