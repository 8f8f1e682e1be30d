"""A run's store over HTTP: nothing without the token, everything of Agent Lightning's server with it."""

from __future__ import annotations

import asyncio
import gzip
import logging
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from agentlightning import LLM
from agentrig_lightning.joining import JOIN, address_of, checked_token
from agentrig_lightning.remote import RemoteRunner, StoreAddress, dead
from agentrig_lightning.store import Store
from agentrig_lightning.store_pool import StorePool
from agentrig_lightning.store_server import ServedStore
from click.testing import CliRunner

from agentrig import __version__
from agentrig.cli.entry import main
from agentrig.endpoints import is_loopback
from agentrig.errors import AgentrigError, ConfigError
from agentrig.processes.families import marked
from agentrig.processes.scratch import VARIABLE
from agentrig.secrets import Secret

TOKEN = "a-token-of-this-test-0123"


def made(port: int = 0) -> ServedStore:
    agent = {"name": "toy", "config": {}, "plugins": ["toy_plugin.py"]}
    offer = {"deadline_s": 9.0, "retries": 1, "agent": agent}
    return ServedStore(Store(), address=("127.0.0.1", port), token=TOKEN, silent_s=5.0, offer=offer)


@pytest.fixture
def served() -> Iterator[ServedStore]:
    store = made()
    store.start()
    try:
        yield store
    finally:
        store.stop()


@pytest.fixture
def runner(served: ServedStore) -> Iterator[httpx.Client]:
    """A client with the token."""
    key = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=served.url, headers=key, trust_env=False, timeout=60) as client:
        yield client


def test_every_route_asks_for_the_token(
    served: ServedStore,
    runner: httpx.Client,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    with httpx.Client(base_url=served.url, trust_env=False) as nobody:
        for path in ("/", "/v1/agl/health", "/v1/agl/rollouts", "/docs", "/assets/x.js", "/?token=wrong"):
            assert nobody.get(path).status_code == 401
            assert nobody.get(path, headers={"authorization": "Basic !!"}).status_code == 401
            assert nobody.get(path, headers={"authorization": f"Bearer {TOKEN}x"}).status_code == 401
        for path in ("/v1/traces", JOIN, "/v1/agl/queues/rollouts/dequeue"):
            assert nobody.post(path, json={}).status_code == 401
    assert TOKEN not in caplog.text
    assert runner.get("/v1/agl/health").json() == {"status": "ok"}
    protobuf = {"content-type": "application/x-protobuf"}
    assert runner.post("/v1/traces", content=b"", headers=protobuf).status_code == 200
    offer = runner.post(JOIN, json={"worker": "w"}).json()
    assert (offer["agent"]["name"], offer["deadline_s"], "token" in str(offer)) == ("toy", 9.0, False)
    assert runner.post("/v1/agentrig/report", json={"rollout_id": "x", "result": {}}).status_code == 400
    runner.post("/v1/agentrig/leave", json={"worker": "w"})
    with httpx.Client(base_url=served.url.replace("//", f"//any:{TOKEN}@"), trust_env=False) as upstream:
        assert upstream.get("/v1/agl/statistics").json()["total_rollouts"] == 0
    with httpx.Client(base_url=served.url, follow_redirects=True, trust_env=False) as browser:
        page = browser.get(f"/?token={TOKEN}")
        assert (page.status_code, "token" in str(page.url)) == (200, False)
        script = page.text.partition('src="/assets/')[2].partition('"')[0]
        assert browser.get(f"/assets/{script}").status_code == 200  # the dashboard's own files
        assert browser.get("/v1/agl/rollouts").json()["items"] == []
        assert page.history[0].headers["set-cookie"].endswith("HttpOnly; SameSite=Strict")
    printed = capfd.readouterr()
    assert printed.out + printed.err == ""  # the link was printed before, once


def test_the_schema_of_the_api_writes_nothing_into_the_run_s_terminal(runner: httpx.Client) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        answer = runner.get("/openapi.json")
    assert "/v1/agl/health" in answer.json()["paths"]
    assert [str(each.message) for each in told] == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'"\xff"', "the body is not UTF-8 (byte 1)"),
        (b"[" * 100_000, "the body is nested too deep"),
        (b"9" * 5000, "the body has a whole number of more than 4300 digits"),
        (b'{"a": NaN}', "the body has NaN or an infinity, which JSON can't hold"),
        (b'{"rollouts": [{"input": {"x": -Infinity}}]}', "the body has NaN or an infinity"),
        (b"1e999", "the body has NaN or an infinity"),
    ],
)
def test_what_is_wrong_with_a_body_is_said_in_plain_words(runner: httpx.Client, body: bytes, words: str) -> None:
    for path in (JOIN, "/v1/agl/rollouts", "/v1/agl/spans", "/v1/agl/queues/rollouts/enqueue"):
        answer = runner.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert words in answer.text


@pytest.mark.parametrize("body", [b"", b"\x80\x05", b"[" * 100_000, b"3", b'{"worker": 1}', b'{"worker": "w"}'])
def test_a_message_that_no_runner_sends_is_refused(body: bytes, runner: httpx.Client) -> None:
    assert runner.post("/v1/agentrig/report", content=body).status_code == 400
    result = {"worker": "w", "rollout_id": "x", "attempt_id": "y", "result": '{"outcome": [], "spans": {}}'}
    assert runner.post("/v1/agentrig/report", json=result).status_code == 400


def test_what_agent_lightnings_server_would_answer_badly_is_refused_in_words(
    served: ServedStore, runner: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {"rollouts": [{"input": "x" * 40_000_000}]}
    refused = runner.post("/v1/agl/queues/rollouts/enqueue", json=large)
    assert (refused.status_code, refused.json()) == (
        413,
        {"error": "the body is longer than the 8 MiB that this server takes"},
    )
    wrong = runner.post("/v1/agl/spans", json={"spans": ["x" * 10_000_000]})
    assert (wrong.status_code, len(wrong.content) < 5000) == (422, True)
    assert wrong.json()["detail"][0]["loc"][0] == "body"

    async def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of the store")

    monkeypatch.setattr(served._store, "query_workers", fails)
    failed = runner.get("/v1/agl/workers")
    assert (failed.status_code, failed.json()) == (500, {"detail": "Internal server error"})


@pytest.mark.parametrize("status", ["succeeded", "failed", "cancelled", "running", "requeuing"])
def test_a_client_cannot_take_a_rollout_from_the_run(served: ServedStore, runner: httpx.Client, status: str) -> None:
    rollout = asyncio.run(served._store.enqueue_rollout(input={"n": 1}))
    refused = runner.post(f"/v1/agl/rollouts/{rollout.rollout_id}", json={"status": status})
    assert (refused.status_code, "report the end of an attempt" in refused.text) == (400, True)
    assert runner.post(f"/v1/agl/rollouts/{rollout.rollout_id}", json={"metadata": {"a": 1}}).status_code == 200
    # The name of the run's own runner does not hide who has it.
    taken = runner.post("/v1/agl/queues/rollouts/dequeue", json={"limit": 1, "worker_id": "agentrig"}).json()
    assert (
        [r["rollout_id"] for r in taken]
        == [rollout.rollout_id]
        == [lease.rollout_id for lease in served._store.leases.held_by("agentrig")]
    )


def test_a_request_of_spans_has_a_limit_that_holds_for_what_gzip_packs_too(runner: httpx.Client) -> None:
    kind = {"content-type": "application/x-protobuf"}
    packed = {**kind, "content-encoding": "gzip"}
    for content, headers, status, words in (
        (b"x" * (65 << 20), kind, 413, "the body is longer than the 64 MiB that this server takes"),
        (gzip.compress(b"x" * (300 << 20), 1), packed, 413, "the body is longer than the 64 MiB that this server"),
        (b"no gzip", packed, 400, "the body is not gzip, as its Content-Encoding says"),
        (gzip.compress(b"")[:-1], packed, 400, "the body is cut short"),
        (gzip.compress(b"x\0"), packed, 200, ""),
    ):
        answer = runner.post("/v1/traces", content=content, headers=headers)
        assert (answer.status_code, words in answer.text) == (status, True), answer.text[:300]


def test_what_the_store_does_not_have_is_said_in_a_line(
    runner: httpx.Client,
    served: ServedStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    nothing = runner.get("/v1/agl/rollouts/nosuch")
    assert (nothing.status_code, nothing.json()["detail"]) == (404, "there is nothing at /v1/agl/rollouts/nosuch")
    refused = runner.post("/v1/agl/rollouts/ro-x/attempts/at-x", json={"status": "succeeded"})
    assert (refused.status_code, "Rollout ro-x not found" in refused.text) == (400, True)

    async def fails(*_: object) -> None:
        raise RuntimeError("a fault of the store")

    monkeypatch.setattr("agentlightning.store.client_server.handle_otlp_export", fails)
    assert runner.post("/v1/traces", content=b"").status_code == 500
    until = time.monotonic() + 10.0
    while len(caplog.records) < 2 and time.monotonic() < until:
        time.sleep(0.01)  # the answer goes out before it is told
    assert [record.getMessage() for record in caplog.records] == [
        "a request to /v1/agl/rollouts/ro-x/attempts/at-x is refused: ValueError: Rollout ro-x not found",
        "a request to /v1/traces failed: RuntimeError: a fault of the store",
    ]
    assert not any(record.exc_info for record in caplog.records)


def test_rollouts_that_the_run_did_not_ask_for_are_named(
    served: ServedStore, runner: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    for count in (1, 2):
        rollouts = {"rollouts": [{"input": {"n": n}} for n in range(count)]}
        assert runner.post("/v1/agl/queues/rollouts/enqueue", json=rollouts).status_code == 201
    assert runner.post("/v1/agl/rollouts", json={"input": {"n": 9}}).status_code == 201
    (warning,) = served.warnings
    assert "4 rollouts were put into the run's store from 127.0.0.1, with the run's token" in warning
    assert "has been put into the run's store from 127.0.0.1" in caplog.text


def test_a_runner_of_another_version_is_named(
    served: ServedStore, runner: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    runner.post(JOIN, json={"worker": "agentrig-host-1", "version": __version__})
    assert served.warnings == []
    for _ in range(2):
        runner.post(JOIN, json={"worker": "agentrig-host-2", "version": "0.1.9"})
    runner.post(JOIN, json={"worker": "agentrig-host-3"})
    for worker in ("1", "2", "3"):
        runner.post("/v1/agentrig/leave", json={"worker": f"agentrig-host-{worker}"})
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == served.warnings
    assert said == [
        f"the runner agentrig-host-2 has agentrig 0.1.9, this run {__version__}: use the same version",
        f"the runner agentrig-host-3 has agentrig of an unknown version, this run {__version__}: use the same version",
    ]


def test_an_address_in_use_is_named(served: ServedStore) -> None:
    port = int(served.url.rpartition(":")[2])
    with pytest.raises(AgentrigError, match=rf"cannot listen on 127.0.0.1:{port} \(runners.store\): Address already"):
        made(port).start()


def test_a_dead_server_ends_the_run(served: ServedStore) -> None:
    served.check()
    served._server.stop()  # type: ignore[union-attr]
    with pytest.raises(AgentrigError, match="has died"):
        served.check()
    served._server = None


@pytest.mark.parametrize(
    ("text", "host", "port"), [("4747", "127.0.0.1", 4747), ("0.0.0.0:1", "0.0.0.0", 1), ("[::1]:2", "::1", 2)]
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert address_of(text) == (host, port)
    assert [is_loopback(h) for h in ("http://127.3.0.1:1/v1", "localhost", "http://10.0.0.1", "name")] == [
        True, True, False, False,
    ]  # fmt: skip


def test_what_is_no_address_or_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGL_STORE_TOKEN", raising=False)
    for text in ("somewhere", "http://127.0.0.1:4747"):
        with pytest.raises(ConfigError, match="is no address: write HOST:PORT"):
            address_of(text)
    with pytest.raises(ConfigError, match=r"80801 is no port, write one of 1 to 65535$"):
        address_of("127.0.0.1:80801")
    for token in ("secret-one\nsecret-two", "secret one", "sécret"):
        with pytest.raises(ConfigError, match="token has several lines") as caught:
            StoreAddress.read("http://127.0.0.1:1", token)
        assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="shorter than 16"):
        checked_token(Secret("short"))
    with pytest.raises(ConfigError, match="set AGL_STORE_TOKEN"):
        StoreAddress.read("http://127.0.0.1:1", None)
    with pytest.raises(ConfigError, match=r"^--store 127.0.0.1:1/ is no address"):
        StoreAddress.read("127.0.0.1:1/?token=abc", "t")
    linked = StoreAddress.read("http://10.0.0.1:1/?token=abc", None)
    assert (linked.url, linked.token) == ("http://10.0.0.1:1", "abc")
    address = StoreAddress.read("http://any:a%20b@10.0.0.1:1/", None)
    assert (address.url, address.token, "a%20b" in repr(address)) == ("http://10.0.0.1:1", "a%20b", False)
    assert len({checked_token(None) for _ in range(3)}) == 3


def test_a_store_that_is_asked_by_tls_says_how_its_address_is_written() -> None:
    said = [str(dead(StoreAddress(f"{s}://127.0.0.1:4747", TOKEN), "timeout")) for s in ("http", "https")]
    assert said[0].endswith("timeout. Is the run still going?")
    assert said[1].endswith("timeout. A run's store has no TLS: write http://127.0.0.1:4747")


def test_an_empty_token_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "token.txt"
    file.write_text("\n")
    result = CliRunner().invoke(main, ["runner", "--store", "http://127.0.0.1:1", "--token-file", str(file)])
    assert (result.exit_code, f"--token-file {file} is empty: write the token" in result.stderr) == (1, True)


def test_a_model_on_loopback_is_refused_on_another_machine() -> None:
    from agentrig import Endpoint
    from agentrig.pools import Job

    job = Job(id="r", input={}, endpoint=Endpoint(base_url="http://127.0.0.1:8000/v1", model="m"))
    there = RemoteRunner(StoreAddress("http://10.0.0.1:4747", TOKEN), None, "w")  # type: ignore[arg-type]
    with pytest.raises(AgentrigError, match=r"server\.host=0\.0\.0\.0"):
        there._reachable(job)
    assert RemoteRunner(StoreAddress("http://127.0.0.1:1", TOKEN), None, "w")._reachable(job) is job  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_runner_says_that_its_store_is_dead(served: ServedStore, toy_file: str) -> None:
    words = [sys.executable, "-m", "agentrig", "runner", "--plugin", toy_file, "-n", "1", "--store"]
    environment = {"AGL_STORE_TOKEN": TOKEN, "PATH": "/usr/bin:/bin"}
    refused = subprocess.run(
        [*words, f"http://x:wrong-token@{served.url[7:]}"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (refused.returncode, "refuses the token" in refused.stderr) == (1, True), refused.stderr
    with subprocess.Popen([*words, served.url], env=environment, stderr=subprocess.PIPE, text=True) as runner:
        assert runner.stderr is not None
        assert "joined the run" in runner.stderr.readline()
        served._server.stop()  # type: ignore[union-attr]
        served._server = None
        said = runner.communicate(timeout=60)[1]
    assert runner.returncode == 1
    assert f"the store at {served.url} does not answer" in said
    assert TOKEN not in said


@pytest.mark.slow
def test_a_killed_runner_leaves_no_temporary_files(served: ServedStore, toy_file: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "agentrig", "runner", "--plugin", toy_file, "-n", "1", "--store", served.url]
    environment = {"AGL_STORE_TOKEN": TOKEN, "PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as runner:
        assert runner.stderr is not None
        assert "joined the run" in runner.stderr.readline()
        (folder,) = tmp_path.iterdir()
        end = time.monotonic() + 60
        # Two processes of Python's own, a runner, and its guard, which removes the folder.
        while len(marked(VARIABLE, str(folder))) < 4 and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(1)
        runner.kill()
    assert folder.name.startswith("agentrig-")
    while folder.exists() and time.monotonic() < end + 30:
        time.sleep(0.2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", [False, True])
def test_an_algorithm_that_stores_no_resources_is_told_once(given: bool, caplog: pytest.LogCaptureFixture) -> None:
    pool = SimpleNamespace(room=4, deadline_s=9.0, pending=0, n=1, jobs=[], wake=lambda: None, poll=lambda wait_s: [])
    pool.submit = pool.jobs.append

    async def play() -> None:
        store = Store()
        if given:
            await store.add_resources({"llm": LLM(endpoint="http://127.0.0.1:9/v1", model="m")})
        for _ in range(2):
            await store.enqueue_rollout(input={"n": 1}, mode="train")
        playing = StorePool(pool, store)
        await playing._turn(0.0)
        playing._loop.close()

    asyncio.run(play())
    assert len(pool.jobs) == 2
    assert caplog.text.count("the algorithm has put no resources into the store") == (not given)
