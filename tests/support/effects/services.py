"""The keys of the agent `http`, observed with real services."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

from agentrig import Endpoint
from agentrig.external import http as exchange
from agentrig.external.config import HttpConfig
from agentrig.external.http import HttpAgent
from agentrig.pools import Job
from agentrig.runners.attempt import run_agent
from agentrig.secrets import Secret
from agentrig.testing.scripted import LocalServer, QuietHandler, serving
from effects import Elsewhere, Flip, Settings

JOB = Job(id="r", input={"question": "2 + 2?"}, endpoint=Endpoint(base_url="http://127.0.0.1:9/v1", model="tiny"))


class Service(LocalServer):
    """Does with each request what it is told, and keeps what it got.

    Attributes:
        does: Called as `does(handler)`.
        requests: The body of each request, with its headers under `headers`.
        asked: The paths that were asked by GET.
    """

    def __init__(self, does: Callable[[Any], None]) -> None:
        super().__init__(_Handler)
        self.does, self.requests, self.asked = does, [], []

    @property
    def address(self) -> str:
        """The URL."""
        return f"http://127.0.0.1:{self.server_address[1]}/solve"


class _Handler(QuietHandler):
    server: Service

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.reply(b"up")

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append({**sent, "headers": {k.lower(): v for k, v in self.headers.items()}})
        self.server.does(self)

    def reply(self, body: bytes, status: int = 200) -> None:
        """Send a reply."""
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def answers(handler: Any) -> None:
    handler.reply(b'{"answer": 4}')


def slowly(handler: Any) -> None:
    time.sleep(1.0)
    answers(handler)


def at_length(handler: Any) -> None:
    handler.reply(json.dumps({"answer": "x" * (3 << 19)}).encode())


def breaks_off(handler: Any) -> None:
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def played(settings: Settings, does: Callable[[Any], None] = answers) -> tuple[Any, list[dict[str, Any]]]:
    """Run a rollout; return its answer, or its failure's kind after an exclamation mark, and what the service got."""
    keys = dict(settings)
    if isinstance(keys.get("api_key"), str):
        keys["api_key"] = Secret(keys["api_key"])
    exchange.BACKOFF_S = 0.01
    with serving(Service(does)) as service:
        config = HttpConfig(**{**keys, "url": service.address})
        outcome = run_agent(HttpAgent(config), JOB).outcome
    return (outcome.answer if outcome.failure is None else f"!{outcome.failure}"), service.requests


def headers(settings: Settings) -> Any:
    """Return the header names of a request that carry the service's key."""
    found = played({"api_key": "the-key", **settings})[1][0]["headers"]
    return {name: value for name, value in found.items() if "key" in str(value) and "callback" not in name}


def callbacks(settings: Settings) -> Any:
    """Return the host of the address at which a service can call back; None if it is not given one."""
    told = played(settings)[1][0].get("callback")
    return None if told is None else told["url"].split("//")[1].split(":")[0]


def flip(**entry: Any) -> Flip:
    """Return an entry; the address that every service needs is another one with each look."""
    return Flip(beside={"url": "http://127.0.0.1:9/solve"}, **entry)


TABLE: dict[str, Flip | Elsewhere] = {
    "url": Elsewhere(
        "tests/external/test_http_agent.py::test_a_service_that_is_down_is_a_typed_failure_and_one_that_comes_up_is_used",
        "the address is that of a service that the test starts",
    ),
    "api_key": Elsewhere(
        "tests/external/test_http_agent.py::test_a_service_gets_the_task_and_the_models_address_and_its_reply_is_the_answer",
        "a secret has no place in a table of values",
    ),
    "key_header": flip(
        a="Authorization",
        b="X-Own",
        look=headers,
        shows=lambda a, b: a == {"authorization": "Bearer the-key"} and b == {"x-own": "the-key"},
    ),
    "timeout_s": flip(
        a=0.3, b=20.0, look=lambda s: played(s, slowly)[0], shows=lambda a, b: (a, b) == ("!service-timeout", 4)
    ),
    "connect_s": Elsewhere(
        "tests/external/test_http_agent.py::test_the_seconds_of_a_connection_are_connect_s",
        "an address that never answers is not on every machine",
    ),
    "restart_s": Elsewhere(
        "tests/external/test_http_agent.py::test_a_service_that_is_down_is_a_typed_failure_and_one_that_comes_up_is_used",
        "a service must be away",
    ),
    "retries": flip(a=0, b=2, look=lambda s: len(played(s, breaks_off)[1]), shows=lambda a, b: (a, b) == (1, 3)),
    "idempotent": flip(
        a=False, b=True, look=lambda s: len(played(s, breaks_off)[1]), shows=lambda a, b: (a, b) == (1, 3)
    ),
    "reply_mb": flip(
        a=1,
        b=2,
        look=lambda s: played(s, at_length)[0],
        shows=lambda a, b: a == "!reply-too-long" and b == "x" * (3 << 19),
    ),
    "callback": flip(a=False, b=True, look=callbacks, shows=lambda a, b: (a, b) == (None, "127.0.0.1")),
    "callback_host": flip(
        a="127.0.0.1", b="127.0.0.2", look=callbacks, shows=lambda a, b: (a, b) == ("127.0.0.1", "127.0.0.2")
    ),
    "callback_name": flip(
        a="", b="host.example", look=callbacks, shows=lambda a, b: (a, b) == ("127.0.0.1", "host.example")
    ),
    "health": Elsewhere(
        "tests/external/test_http_agent.py::test_the_doctor_reads_the_status", "only the doctor asks that address"
    ),
}
