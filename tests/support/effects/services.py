"""The keys of the agent `http`, observed with real services."""

from __future__ import annotations

import json
from typing import Any

from agentrig import Endpoint
from agentrig.external.config import HttpConfig
from agentrig.external.http import HttpAgent
from agentrig.pools import Job
from agentrig.runners.attempt import run_agent
from agentrig.testing.scripted import LocalServer, QuietHandler, serving
from effects import Elsewhere, Flip, Settings, shown_by

JOB = Job(id="r", input={"question": "2 + 2?"}, endpoint=Endpoint(base_url="http://127.0.0.1:9/v1", model="tiny"))


class Service(LocalServer):
    """Answers 4, and keeps the body of each request."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.requests: list[dict[str, Any]] = []


class _Handler(QuietHandler):
    server: Service

    def do_POST(self) -> None:
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.reply(200, {"answer": 4})


def callbacks(settings: Settings) -> str:
    """Return the host of the address at which a service can call back."""
    with serving(Service()) as service:
        address = f"http://127.0.0.1:{service.server_address[1]}/solve"
        run_agent(HttpAgent(HttpConfig(**{**settings, "url": address})), JOB)
    return str(service.requests[0]["callback"]["url"]).split("//")[1].split(":")[0]


def flip(**entry: Any) -> Flip:
    """Return an entry; the address that every service needs is another one with each look."""
    return Flip(beside={"url": "http://127.0.0.1:9/solve"}, **entry)


TESTS = {
    "test_a_service_that_is_down_is_a_typed_failure_and_one_that_comes_up_is_used": ("url", "restart_s"),
    "test_a_service_gets_the_task_and_the_models_address_and_its_reply_is_the_answer": ("api_key",),
    "test_an_answer_may_come_later_by_callback": ("key_header",),
    "test_each_fault_is_a_typed_failure": ("timeout_s", "reply_mb", "callback"),
    "test_the_seconds_of_a_connection_are_connect_s": ("connect_s",),
    "test_an_answer_that_was_called_back_counts_although_the_connection_breaks": ("retries",),
    "test_a_service_that_knows_no_key_gets_no_request_twice": ("idempotent",),
    "test_the_doctor_reads_the_status": ("health",),
}

TABLE: dict[str, Flip | Elsewhere] = {
    **shown_by("tests/external/test_http_agent.py", TESTS),
    "callback_host": flip(
        a="127.0.0.1", b="127.0.0.2", look=callbacks, shows=lambda a, b: (a, b) == ("127.0.0.1", "127.0.0.2")
    ),
    "callback_name": flip(
        a="", b="host.example", look=callbacks, shows=lambda a, b: (a, b) == ("127.0.0.1", "host.example")
    ),
}
