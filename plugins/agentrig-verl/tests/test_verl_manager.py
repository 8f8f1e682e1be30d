"""The loop manager's look at its servers; what it does on a real Ray cluster is in test_verl_cluster.py."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from agentrig_verl.manager import OVERLONG, answers, explained

from agentrig import Endpoint
from agentrig.errors import RunStopped


@pytest.mark.parametrize(("health", "expected"), [(200, True), (404, True), (503, False), (500, False)])
def test_a_server_whose_engine_died_does_not_answer(health: int, expected: bool) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(health if self.path == "/health" else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = Endpoint(base_url=f"http://127.0.0.1:{server.server_port}/v1", model="m")
        assert answers(endpoint) is expected
        server.shutdown()
    assert not answers(endpoint), "nothing listens there any more"


def test_a_run_that_stops_for_want_of_its_server_says_how_to_go_on(tmp_path: Any) -> None:
    session: Any = SimpleNamespace(directory=tmp_path)
    gone = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")
    with (
        pytest.raises(RunStopped, match=rf"too many failed\n.*127\.0\.0\.1:9/v1 does not.*--resume {tmp_path}"),
        explained(session, [gone]),
    ):
        raise RunStopped("too many failed")
    with pytest.raises(RunStopped, match=r"^too many failed$"), explained(session, []):
        raise RunStopped("too many failed")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("This model's maximum context length is 1280 tokens. However, you requested 1300", True),
        ("You passed 1300 input tokens and requested 192 output tokens. However, the model's context length is", True),
        ("The decoder prompt (length 1300) is longer than the maximum model length of 1280", True),
        ("prompt is longer than max_model_len", True),
        ("Connection error.", False),
    ],
)
def test_a_prompt_that_leaves_no_room_is_known_by_its_message(message: str, expected: bool) -> None:
    assert bool(OVERLONG.search(message)) is expected
