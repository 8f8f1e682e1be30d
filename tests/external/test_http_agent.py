"""The agent `http` against real services: answers by reply and by callback, and a typed failure for each fault."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from rollouts import rollout

from agentrig import Endpoint
from agentrig.agents import Outcome
from agentrig.errors import ConfigError
from agentrig.external import http as exchange
from agentrig.external.checks import check_service
from agentrig.external.config import HttpConfig
from agentrig.external.http import HttpAgent
from agentrig.findings import Finding, Situation
from agentrig.plan import resolve
from agentrig.pools import Job, RunnerSettings
from agentrig.run.guards import unseen_calls
from agentrig.runners.attempt import run_agent
from agentrig.runners.loops import RunnerLoop
from agentrig.secrets import Secret
from agentrig.settings import structure
from agentrig.testing.scripted import LocalServer, QuietHandler, serving

ENDPOINT = Endpoint(
    base_url="http://127.0.0.1:9/v1",
    model="tiny",
    api_key="rollout-key-1",
    sampling={"temperature": 0.7},
    headers={"x-run": "1"},
)
JOB = Job(id="ro-1", input={"question": "2 + 2?"}, endpoint=ENDPOINT, attempt=2)


class Service(LocalServer):
    """A service that does with each request what it is told.

    Attributes:
        does: Called as `does(handler, request)`; the request has the body, and `headers` of the request.
        requests: What it got.
    """

    def __init__(self, does: Callable[[Any, dict[str, Any]], None], port: int = 0) -> None:
        super().__init__(_Handler, port)
        self.does, self.requests = does, []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/solve"


class _Handler(QuietHandler):
    server: Service

    def do_GET(self) -> None:
        self.reply(200, b"up")

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["content-length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append({**sent, "header": headers})
        self.server.does(self, sent)

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()


def says(value: Any, status: int = 200, **headers: str) -> Callable[[Any, dict[str, Any]], None]:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return lambda handler, sent: handler.reply(status, body, headers)


def in_turn(*does: Callable[[Any, dict[str, Any]], None]) -> Callable[[Any, dict[str, Any]], None]:
    return lambda handler, sent: does[min(len(handler.server.requests), len(does)) - 1](handler, sent)


def hang_up(handler: Any, sent: Any) -> None:
    handler.hang_up()


def call_back(sent: dict[str, Any], value: Any, delay_s: float = 0.0) -> list[int]:
    """Post an answer to a rollout's callback, perhaps later; return the statuses, as they come."""
    statuses: list[int] = []

    def post() -> None:
        time.sleep(delay_s)
        headers = {"Authorization": f"Bearer {sent['callback']['key']}"}
        statuses.append(httpx.post(sent["callback"]["url"], json=value, headers=headers, timeout=10).status_code)

    thread = threading.Thread(target=post)
    thread.start()
    if not delay_s:
        thread.join()
    return statuses


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BACKOFF_S", 0.01)


def outcome_of(does: Callable[[Any, dict[str, Any]], None], **keys: Any) -> tuple[Outcome, list[dict[str, Any]]]:
    """Run the rollout as a runner does; return its outcome and what the service got."""
    with serving(Service(does)) as service:
        result = run_agent(HttpAgent(HttpConfig(url=service.address, **keys)), JOB)
        return result.outcome, service.requests


def test_a_service_gets_the_task_and_the_models_address_and_its_reply_is_the_answer() -> None:
    own = {"api_key": Secret("service-key"), "timeout_s": 7.0}
    outcome, requests = outcome_of(says({"answer": {"sql": "SELECT 4"}, "reward": 0.5}), **own)
    assert outcome == Outcome(answer={"sql": "SELECT 4"}, own_reward=0.5)
    (request,) = requests
    assert request["header"]["authorization"] == "Bearer service-key"
    assert request["header"]["idempotency-key"] == "ro-1/2"
    assert request["callback"]["url"].startswith("http://127.0.0.1:")
    del request["header"], request["callback"]
    assert request == {
        "rollout_id": "ro-1", "attempt": 2, "mode": "train", "input": {"question": "2 + 2?"}, "timeout_s": 7.0,
        "base_url": ENDPOINT.base_url, "api_key": "rollout-key-1", "model": "tiny", "sampling": {"temperature": 0.7},
        "headers": {"x-run": "1"},
    }  # fmt: skip
    with serving(Service(says({"answer": 1}))) as service:
        trace = run_agent(HttpAgent(HttpConfig(url=service.address)), JOB).trace
    assert "call the address, with the key, in base_url and api_key of the request that it gets" in unseen_calls(
        [rollout(trace=trace)]
    )


def test_an_answer_may_come_later_by_callback() -> None:
    def later(handler: Any, sent: dict[str, Any]) -> None:
        handler.reply(202, b"")
        call_back(sent, {"answer": "4"}, 0.1)

    outcome, requests = outcome_of(later, key_header="X-Key", api_key=Secret("service-key"))
    assert outcome == Outcome(answer="4")
    assert requests[0]["header"]["x-key"] == "service-key"


def test_an_answer_twice_is_one_answer() -> None:
    told: list[list[int]] = []
    ended = threading.Event()

    def twice(handler: Any, sent: dict[str, Any]) -> None:
        told.extend(call_back(sent, {"answer": "4"}) for _ in range(2))
        ended.set()
        handler.reply(200, b'{"answer": "5"}')

    outcome, requests = outcome_of(twice)
    assert (outcome, len(requests)) == (Outcome(answer="4"), 1)
    assert ended.wait(60)
    assert told == [[200], [200]]  # the second may come when the rollout has ended


def test_after_a_broken_connection_the_same_request_is_sent_again_with_the_same_key() -> None:
    done: dict[str, int] = {}

    def once(handler: Any, sent: dict[str, Any]) -> None:
        key = handler.headers["idempotency-key"]
        if key not in done:
            done[key] = 1 + len(done)
            handler.hang_up()
        else:
            handler.reply(200, json.dumps({"answer": done[key]}).encode())

    outcome, requests = outcome_of(once)
    assert (outcome, done) == (Outcome(answer=1), {"ro-1/2": 1})
    assert len({json.dumps({**r, "header": r["header"]["idempotency-key"]}) for r in requests}) == 1
    assert len(requests) == 2


def test_an_answer_that_was_called_back_counts_although_the_connection_breaks() -> None:
    def breaks(handler: Any, sent: dict[str, Any]) -> None:
        call_back(sent, {"answer": "4"})
        handler.hang_up()

    outcome, requests = outcome_of(breaks, retries=0)
    assert (outcome, len(requests)) == (Outcome(answer="4"), 1)


def test_a_service_that_knows_no_key_gets_no_request_twice() -> None:
    outcome, requests = outcome_of(hang_up, idempotent=False)
    assert (outcome.failure, len(requests)) == ("service-down", 1)
    assert "it is not sent again, because agent.idempotent is false" in outcome.message
    busy = in_turn(says("busy", 503, **{"retry-after": "0"}), says({"answer": 1}))
    outcome, requests = outcome_of(busy, idempotent=False)
    assert (outcome.answer, len(requests)) == (1, 2), "a service that refused it has not begun"
    outcome, requests = outcome_of(in_turn(says("lost", 502), says({"answer": 1})), idempotent=False)
    assert (outcome.failure, len(requests)) == ("service-error", 1), "behind a proxy it may have begun"


def drip(handler: Any, sent: Any) -> None:
    handler.send_response(200)
    handler.send_header("content-length", "100000")
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" ")
        time.sleep(0.02)


def half(handler: Any, sent: Any) -> None:
    handler.send_response(200)
    handler.send_header("content-length", "100")
    handler.end_headers()
    handler.wfile.write(b'{"answer": ')
    handler.close_connection = True


def huge(handler: Any, sent: Any) -> None:
    handler.send_response(200)
    handler.send_header("content-length", str(50 << 20))
    handler.end_headers()
    for _ in range(50):
        handler.wfile.write(b"x" * (1 << 20))


def nonsense_by_callback(handler: Any, sent: dict[str, Any]) -> None:
    handler.reply(202, b"")
    call_back(sent, {"answr": 1})


FAULTS = {
    "breaks the connection": (hang_up, {}, "service-down", "broke the connection", 3),
    "breaks it in the middle": (half, {}, "service-down", "broke the connection", 3),
    "fails": (says("Traceback", 500), {}, "service-error", 'answers 500 \'"Traceback"', 1),
    "stays busy": (says("later", 503), {}, "service-error", "3 times", 3),
    "refuses the key": (says("who?", 401), {}, "service-error", "check the key of the service (agent.api_key)", 1),
    "redirects": (
        says("", 307, location="http://example.com/x"), {}, "service-redirect", "moved to http://example.com/x", 1,
    ),
    "sends HTML": (says(b"<html>ok</html>"), {}, "bad-reply", "<html>ok</html>", 1),
    "sends another object": (says({"result": 4}), {}, "bad-reply", 'an answer has no key "result"', 1),
    "sends half of a character": (
        says(rb'{"answer": "\ud800"}'), {}, "bad-reply", r"it has a lone surrogate, '\ud800', half of a character", 1,
    ),
    "sends nothing": (says(b"", 204), {}, "bad-reply", "answers 204", 1),
    "sends broken gzip": (
        says(b"no gzip", **{"content-encoding": "gzip"}), {}, "bad-reply", "cannot be decoded", 1,
    ),
    "sends 50 MB": (huge, {"reply_mb": 1}, "reply-too-long", "more than 1 MiB (agent.reply_mb)", 1),
    "never ends its reply": (drip, {"timeout_s": 0.2}, "service-timeout", "its reply has begun and has not ended", 1),
    "never calls back": (says("", 202), {"timeout_s": 0.2}, "service-timeout", "it has answered 202", 1),
    "calls back nonsense": (
        nonsense_by_callback, {"timeout_s": 0.5}, "service-timeout", 'what it posted was refused: an answer has no', 1,
    ),
    "calls back unasked": (says("", 202), {"callback": False}, "bad-reply", "callbacks are off", 1),
    "fails by itself": (says({"failure": "no-tools", "message": "sold out"}), {}, "no-tools", "sold out", 1),
    "shows the rollout's key": (
        lambda handler, sent: handler.reply(422, json.dumps(sent).encode()), {}, "service-error", "<the rollout's", 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("does", "keys", "kind", "words", "requests"), FAULTS.values(), ids=FAULTS)
def test_each_fault_is_a_typed_failure(does: Any, keys: Any, kind: str, words: str, requests: int) -> None:
    started = time.monotonic()
    outcome, got = outcome_of(does, **keys)
    assert (outcome.failure, outcome.answer) == (kind, None), outcome.message
    assert words in outcome.message
    assert not any(
        key in outcome.message for key in ("rollout-key-1", *(r["callback"]["key"] for r in got if r["callback"]))
    )
    assert len(got) == requests
    assert time.monotonic() - started < 30


def test_a_service_that_is_down_is_a_typed_failure_and_one_that_comes_up_is_used() -> None:
    with serving(Service(says({"answer": 1}))) as service:
        address = service.address
    outcome = run_agent(HttpAgent(HttpConfig(url=address, restart_s=0.5)), JOB).outcome
    assert outcome.failure == "service-down"
    assert f"the service {address} cannot be reached" in outcome.message
    assert "for 0.5 s (agent.restart_s)" in outcome.message


@pytest.mark.slow
def test_a_service_that_restarts_loses_no_rollout(caplog: pytest.LogCaptureFixture) -> None:
    """It is away for longer than the agent has time for a rollout: waiting for it does not count."""
    with serving(Service(says({"answer": 1}))) as first:
        port = first.server_address[1]
    agent, loop, outcomes = HttpAgent(HttpConfig(url=first.address, timeout_s=1.0)), RunnerLoop(), []

    def run(name: str) -> None:
        outcomes.append(run_agent(agent, Job(id=name, input={}, endpoint=ENDPOINT), loop).outcome)

    threads = [threading.Thread(target=run, args=(f"ro-{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 60
    while not caplog.records and time.monotonic() < end:  # the first rollout imports what it needs, in its own time
        time.sleep(0.05)
    time.sleep(1.5)
    second = Service(says({"answer": 2}), port=port)
    with serving(second):
        for thread in threads:
            thread.join(30)
    assert outcomes == [Outcome(answer=2)] * 3
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if "cannot be reached" in line] == said[:1]
    assert "its rollouts wait for it, at most 15 s (agent.restart_s)" in said[0]
    assert len(said) == 2
    assert "is back after" in said[1]


def test_rollouts_of_a_runner_share_a_loop_and_a_slow_one_holds_up_no_other() -> None:
    go = threading.Event()

    def waits(handler: Any, sent: dict[str, Any]) -> None:
        if sent["rollout_id"] == "slow":
            go.wait(20)
        handler.reply(200, json.dumps({"answer": sent["rollout_id"]}).encode())

    loop, outcomes = RunnerLoop(), []
    with serving(Service(waits)) as service:
        agent = HttpAgent(HttpConfig(url=service.address))

        def run(name: str) -> None:
            job = Job(id=name, input={}, endpoint=ENDPOINT)
            outcomes.append(run_agent(agent, job, loop).outcome.answer)

        slow = threading.Thread(target=run, args=("slow",))
        slow.start()
        run("quick")
        assert outcomes == ["quick"]
        go.set()
        slow.join()
    assert outcomes == ["quick", "slow"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "needs url"),
        ({"url": "localhost:80"}, "is no address: write http://"),
        ({"url": "http://me:word@host/x"}, "holds a login"),
        ({"url": "http://host/v1/chat/completions"}, "is a model's address"),
        ({"url": "http://host/x", "health": "up"}, "health = 'up' is no address"),
        ({"url": "http://host/x", "api_key": "sk-1"}, "does not belong into a run file"),
        ({"url": "http://host/x", "retry": 1}, 'has no key "retry". Did you mean "retries"?'),
    ],
)
def test_settings_that_cannot_work_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.").replace("?", r"\?")) as error:
        structure(HttpConfig, keys, owner="http", section="agent")
    assert "sk-1" not in str(error.value)


@pytest.fixture
def doctor(toy_file: str) -> Callable[..., list[Finding]]:
    def look(**keys: Any) -> list[Finding]:
        overrides = ["algorithm.endpoint=http://127.0.0.1:9/v1", *(f"agent.{k}={v}" for k, v in keys.items())]
        plan = resolve("toy", overrides=overrides, uses={"agent": "http"}, files=[toy_file])
        return list(check_service(Situation(hardware=None, plan=plan)))

    return look


def test_the_doctor_asks_the_service(doctor: Callable[..., list[Finding]]) -> None:
    with serving(Service(says(""))) as service:
        address = service.address
        (up,) = doctor(url=address, timeout_s=10, restart_s=5)
        assert (up.result, up.evidence) == ("ok", f"{address} answers 200")
        late = doctor(url=address, timeout_s=600)
        assert [f.result for f in late] == ["ok", "warning"]
        assert "agent.timeout_s + agent.restart_s = 615 is not below runners.deadline_s" in late[1].evidence
    default = HttpConfig(url=address)
    assert default.timeout_s + default.restart_s < RunnerSettings().deadline_s
    (down,) = doctor(url=address, timeout_s=10, restart_s=5)
    assert down.result == "problem"
    assert "does not answer" in down.evidence
    assert "start the service" in down.cure


@pytest.mark.parametrize(
    ("status", "health", "result", "words"),
    [
        (302, "", "problem", "moved to"),
        (403, "", "problem", "agent.api_key"),
        (404, "", "warning", "agent.health"),
        (404, "/up", "problem", "log"),
        (405, "", "ok", ""),
        (500, "", "problem", "log"),
    ],
)
def test_the_doctor_reads_the_status(
    doctor: Callable[..., list[Finding]], monkeypatch: pytest.MonkeyPatch, status: int, health: str, result: str,
    words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(_Handler, "do_GET", lambda self: self.reply(status, b"", {"location": "/elsewhere"}))
    with serving(Service(says(""))) as service:
        more = {"health": service.address + health} if health else {}
        finding = doctor(url=service.address, **more)[0]
    assert (finding.result, words in finding.cure) == (result, True)


@pytest.mark.slow
def test_the_seconds_of_a_connection_are_connect_s() -> None:
    """A machine that takes no connection and refuses none holds a rollout up for `connect_s` seconds."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]  # fill its queue; the next connection gets no answer
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}/solve"
        took = []
        for connect_s in (0.2, 2.0):
            start = time.monotonic()
            outcome = run_agent(HttpAgent(HttpConfig(url=url, connect_s=connect_s, restart_s=0)), JOB).outcome
            took.append(time.monotonic() - start)
            assert outcome.failure == "service-down", outcome.message
        for each in waiting:
            each.close()
    assert took[1] > 1.9
    assert 0.9 < took[1] - took[0] < 2.7  # 1.8; two tries would be 3.6
