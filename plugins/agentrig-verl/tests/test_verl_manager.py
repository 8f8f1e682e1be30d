"""The loop manager's look at its servers; what it does on a real Ray cluster is in test_verl_cluster.py."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from agentrig_verl.manager import answers

from agentrig import Endpoint


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
