"""Access to the server, and clients that keep it waiting: a real server process, real sockets."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time

import httpx
import pytest
from doors import Door, problems
from embedded_servers import embedded, health

from agentrig.http_server import ARRIVAL_S, HEAD_LIMIT, Connections

ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/health"),
    ("POST", "/admin/weights"),
    ("GET", "/nothing"),
]
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "name"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(model_dir):
    with embedded(model_dir, slots=4, max_length=64) as running:
        yield running


def send(server, method="POST", path="/v1/chat/completions", *, body=BODY, key=None, **headers):
    line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    given = {"Authorization": f"Bearer {key or server.api_key}", **{k.replace("_", "-"): v for k, v in headers.items()}}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    line.request(
        method,
        path,
        body=content if method == "POST" else None,
        headers={k: v for k, v in given.items() if v is not None},
    )
    answer = line.getresponse()
    text = json.loads(answer.read())
    line.close()
    return answer.status, text.get("error", {}).get("code")


def test_a_packed_body_is_refused_as_such(server):
    assert send(server, Content_Encoding="gzip") == (415, "unsupported_encoding")


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_asks_for_the_key_of_this_server(server, model_dir, method, path):
    for key in ("none", server.api_key[:-1], "", "ü"):
        assert send(server, method, path, Authorization=f"Bearer {key}".encode()) == (401, "invalid_api_key")
    assert send(server, method, path, Authorization=None) == (401, "invalid_api_key")
    assert send(server, method, path, Authorization=server.api_key) == (401, "invalid_api_key")
    assert send(server, method, path)[0] != 401
    assert embedded(model_dir).api_key != server.api_key


def test_weights_have_no_route(server, tmp_path):
    body = {"path": str(tmp_path), "version": 7}
    assert send(server, "POST", "/admin/weights", body=body)[0] == 404
    assert health(server)["version"] == 0


def test_the_key_is_shown_to_no_other_process(server):
    for part in ("cmdline", "environ"):
        with open(f"/proc/{server.pid}/{part}", "rb") as file:
            assert server.api_key.encode() not in file.read()


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_foreign_hosts_and_origins_are_refused(server, method, path):
    for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1.evil.example", "", "[::1", "10.1.2.3"):
        assert send(server, method, path, Host=host) == (403, "foreign_host")
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", f"https://127.0.0.1:{server.port}"):
        assert send(server, method, path, Origin=origin) == (403, "foreign_origin")
    for host in (f"localhost:{server.port}", "127.0.0.1", f"[::1]:{server.port}"):
        assert send(server, method, path, Host=host)[0] in (200, 404)
    assert send(server, method, path, Origin=f"http://127.0.0.1:{server.port}")[0] in (200, 404)


@pytest.mark.slow
def test_a_server_on_all_addresses_takes_addresses_and_its_own_name(model_dir):
    with embedded(model_dir, slots=1, max_length=64, host="0.0.0.0") as server:
        assert send(server, Host="10.1.2.3:80")[0] == send(server, Host=socket.gethostname())[0] == 200
        assert send(server, Host="evil.example") == (403, "foreign_host")
        assert send(server, key="wrong") == (401, "invalid_api_key")


def test_only_json_is_taken(server):
    assert send(server, Content_Type="application/json; charset=utf-8")[0] == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert send(server, Content_Type=kind)[0] == 415


def test_a_body_that_is_too_large_is_refused_at_once(server):
    start = time.monotonic()
    for body in (b" " * (18 << 20), json.dumps({**BODY, "user": "x" * (18 << 20)}).encode()):
        assert send(server, body=body) == (413, "request_too_large")
        assert send(server, body=body, key="wrong") == (401, "invalid_api_key")
    chunks = (b"x" * 65536 for _ in range(288))
    headers = {"Authorization": f"Bearer {server.api_key}"}
    answer = httpx.post(f"{server.base_url}/chat/completions", content=chunks, headers=headers, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert time.monotonic() - start < 20
    assert send(server)[0] == 200


def raw(server, content=b""):
    line = socket.create_connection(("127.0.0.1", server.port), timeout=ARRIVAL_S + 15)
    line.sendall(content)
    return line


def closed(line):
    """Wait until the server has closed a connection; returns what it sent."""
    got = b""
    try:
        while part := line.recv(65536):
            got += part
    except ConnectionResetError:
        pass
    line.close()
    return got


@pytest.mark.slow
def test_the_door_is_closed_to_what_is_no_request(server):
    key = f"Authorization: Bearer {server.api_key}"
    assert problems(Door(port=server.port, path="/v1/chat/completions", header=key)) == []
    assert send(server)[0] == 200


def test_a_head_without_end_is_refused(server):
    line = raw(server, b"GET /health HTTP/1.1\r\nX-Long: ")
    for _ in range(HEAD_LIMIT // 4096 - 1):
        line.sendall(b"x" * 4096)
    line.sendall(b"x" * 4096)
    assert b"431 " in closed(line)
    assert b"431 " in closed(raw(server, b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * (HEAD_LIMIT + 1)))
    assert send(server)[0] == 200


@pytest.mark.slow
def test_incomplete_requests_are_closed(server):
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {server.api_key}\r\n"
    lines = [
        raw(server),
        raw(server, b"POST /v1/chat/comp"),
        raw(server, head.encode()),
        raw(server, head.encode() + b"Content-Length: 1000\r\n\r\n{"),
    ]
    limits = httpx.Limits(keepalive_expiry=None)
    kept = httpx.Client(headers={"Authorization": f"Bearer {server.api_key}"}, limits=limits)
    assert kept.post(f"{server.base_url}/chat/completions", json=BODY).status_code == 200
    (idle,) = kept._transport._pool.connections
    start = time.monotonic()
    while time.monotonic() - start < ARRIVAL_S - 10:  # single bytes do not extend the time limit
        for line in lines[1:]:
            line.sendall(b"x")
        time.sleep(1)
    assert [closed(line)[:12] for line in lines] == [b"", *[b"HTTP/1.1 408"] * 3]
    assert time.monotonic() - start < ARRIVAL_S + 15
    assert kept.post(f"{server.base_url}/chat/completions", json=BODY).status_code == 200
    assert kept._transport._pool.connections == [idle], "an agent's connection stays between its calls"
    kept.close()


class Line:
    """Replaces a connection: only records that it was closed."""

    def __init__(self):
        self.transport, self.ended = self, False

    def abort(self):
        self.ended = True


def test_too_many_connections_close_unauthenticated_ones_first():
    waiting, agent, strangers = Connections(4), Line(), [Line() for _ in range(4)]
    waiting.came(agent)
    waiting.prove(agent)
    for stranger in strangers:
        waiting.came(stranger)
    assert [s.ended for s in strangers] == [True, False, False, False]
    assert not agent.ended
    waiting.gone(strangers[0])
    friends = [Line() for _ in range(4)]
    for friend in friends:
        waiting.prove(friend)
    last = Line()
    waiting.came(last)
    assert strangers[1].ended
    assert not last.ended


def test_agents_can_connect_while_another_client_holds_hundreds_of_connections(server):
    held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(600)]
    try:
        assert send(server)[0] == 200
    finally:
        for line in held:
            line.close()


@pytest.mark.slow
def test_a_server_runs_no_module_of_the_current_folder(model_dir, tmp_path):
    for name in ("uvicorn", "queue", "json", "torch", "uvloop"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    code = (
        "from pathlib import Path\nfrom agentrig.hardware import Cpu\nfrom agentrig.servers import ServerPlan\n"
        "from agentrig_grpo.config import EmbeddedConfig\nfrom agentrig_grpo.server.handle import Embedded\n"
        f"plan = ServerPlan(model=Path({str(model_dir)!r}), name='x', hardware=Cpu())\n"
        "with Embedded(EmbeddedConfig(), plan) as server:\n"
        "    print('ok' if server.ready() else '')\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "ok"
    assert not (tmp_path / "ran").exists()
