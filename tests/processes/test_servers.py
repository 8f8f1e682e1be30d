"""Servers in separate processes: real ones that start, crash, hang and end."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from agentrig.processes.servers import ServerError, ServerProcess, cause_in


def python(code: str, **settings: object) -> ServerProcess:
    return ServerProcess("the test server", [sys.executable, "-c", code], **settings)  # type: ignore[arg-type]


def file_server(port_file: Path) -> ServerProcess:
    code = (
        "import http.server, pathlib\n"
        "made = http.server.HTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler)\n"
        f"pathlib.Path({str(port_file)!r}).write_text(str(made.server_port))\n"
        "made.serve_forever()\n"
    )
    return python(code)


def answers(port_file: Path) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port_file.read_text()}/", timeout=5):
            return True
    except (OSError, urllib.error.URLError):
        return False


def test_a_server_is_waited_for_until_it_answers(tmp_path):
    port_file = tmp_path / "port"
    server = file_server(port_file)
    try:
        server.wait_until(lambda: answers(port_file), 30)
        assert server.exit_status is None
        server.check()
        assert os.getsid(server.pid) == server.pid, "a Ctrl-C in the terminal would reach it"
    finally:
        server.stop()
    assert server.exit_status == -signal.SIGKILL
    assert not answers(port_file)
    server.stop()


def test_the_error_of_a_dead_server_has_its_status_and_last_lines():
    server = python("import sys; print('\\n'.join(f'line {i}' for i in range(40))); sys.exit(3)")
    for _ in range(2):  # the second time after its log is closed
        with pytest.raises(
            ServerError, match=r"the test server has died \(exit status 3\)\n  the end of its output:"
        ) as caught:
            server.wait_until(lambda: False, 30)
        assert str(caught.value).splitlines()[2:] == [f"  line {i}" for i in range(25, 40)]
        server.stop()


def test_another_server_at_the_address_does_not_count_as_the_one_that_died():
    server = python("")
    assert server.wait(30) == 0
    with pytest.raises(ServerError, match="has died"):
        server.wait_until(lambda: True, 30)
    server.stop()


def test_a_server_that_is_not_ready_in_time_is_named():
    server = python("import time; print('loading', flush=True); time.sleep(600)")
    try:
        server.wait_until(lambda: "loading" in server.tail(), 30)
        with pytest.raises(ServerError, match=r"(?s)the test server did not start within 0\.1 s.*loading"):
            server.wait_until(lambda: False, 0.1)
        assert server.wait(0.01) is None
    finally:
        server.stop()


@pytest.mark.parametrize("handler", ["lambda *_: (print('tidied', flush=True), exit(7))", "signal.SIG_IGN"])
def test_a_server_has_a_grace_period_to_end_by_itself(handler):
    server = python(
        f"import signal, time; signal.signal(signal.SIGTERM, {handler}); print('up', flush=True); time.sleep(600)"
    )
    server.wait_until(lambda: "up" in server.tail(), 30)
    stubborn = "SIG_IGN" in handler
    server.stop(grace_s=0.5 if stubborn else 30)
    assert server.exit_status == (-signal.SIGKILL if stubborn else 7)
    assert ("tidied" in server.tail()) is not stubborn
    assert not psutil.pid_exists(server.pid)


@pytest.mark.parametrize("dies", [pytest.param(False, marks=pytest.mark.slow), True], ids=["stopped", "died"])
def test_what_it_has_started_ends_with_it(dies):
    sleeper = "import time; time.sleep(600)"
    server = python(
        f"import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', {sleeper!r}]).pid, flush=True)\n"
        f"time.sleep({0 if dies else 600})"
    )
    while not server.tail():
        server.wait(0.05)
    child = psutil.Process(int(server.tail().split()[-1]))
    if dies:
        assert server.wait(30) == 0
        assert child.is_running()
    server.stop()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_the_log_goes_to_the_given_file_or_nowhere(tmp_path):
    log = tmp_path / "logs" / "server.log"
    for word in ("one", "two"):
        server = python(f"print({word!r})", log=log)
        server.wait(30)
        server.stop()
    assert log.read_text() == "one\ntwo\n"
    before = set(Path(tempfile.gettempdir()).glob("agentrig-server-*"))
    server = python("print('x' * 200_000)")
    server.wait(30)
    assert set(Path(tempfile.gettempdir()).glob("agentrig-server-*")) == before
    assert len(server.tail()) < 70_000
    server.stop()


def test_a_missing_program_is_an_error_with_a_message():
    with pytest.raises(ServerError, match=r"the test server cannot be started: .*no/such/program"):
        ServerProcess("the test server", ["/no/such/program"])


ECHO = """
import os, sys
from agentrig.processes.channel import Channel
channel = Channel.inherited(int(sys.argv[1]))
while True:
    order, descriptor = channel.receive()
    if "exit" in order:
        sys.exit(order["exit"])
    if "fork" in order and os.fork():
        os.kill(os.getpid(), 9)
    if "wait" not in order:
        read = {} if descriptor is None else {"read": os.read(descriptor, 9).decode()}
        channel.send(order | {"word": os.environ["WORD"]} | read)
"""


def asked(**first: object) -> ServerProcess:
    return python(ECHO, environment={**os.environ, "WORD": "given"}, first=first)


def test_a_server_gets_its_environment_and_answers_over_its_channel():
    server = asked(a=1)
    read, write = os.pipe()
    os.write(write, b"shared")
    try:
        assert server.receive("start", 30) == {"a": 1, "word": "given"}
        assert server.ask("read", {"b": "ü"}, 30, descriptor=read) == {"b": "ü", "word": "given", "read": "shared"}
        with pytest.raises(ServerError, match=r"^the test server could not dance: it has no legs$"):
            server.ask("dance", {"error": "it has no legs"}, 30)
        assert server.ask("go on", {}, 30) == {"word": "given"}
    finally:
        server.stop()
        os.close(read)
        os.close(write)


def test_a_server_that_a_signal_has_stopped_is_named():
    server = asked(wait=True)
    try:
        server.check()
        os.kill(server.pid, signal.SIGSTOP)
        os.waitpid(server.pid, os.WUNTRACED)
        with pytest.raises(ServerError, match=r"has been stopped by a signal \(SIGSTOP\) and answers nothing$"):
            server.check()
    finally:
        server.stop()


def test_a_server_that_does_not_answer_is_stopped_and_named():
    server = asked(wait=True)
    with pytest.raises(ServerError, match=r"^the test server did not start within 0 s"):
        server.receive("start", 0.3)
    assert server.exit_status == -signal.SIGKILL
    with pytest.raises(ServerError, match=r"is stopped: it cannot dance"):
        server.ask("dance", {}, 1)


@pytest.mark.parametrize(
    ("last", "status"), [({"exit": 3}, "exit status 3"), ({"fork": True, "wait": True}, "killed by SIGKILL")]
)
def test_a_server_that_dies_under_an_order_is_named_with_its_status(last: dict[str, object], status: str):
    server = asked()
    server.receive("start", 30)
    with pytest.raises(ServerError, match=rf"the test server has died, asked to dance \({status}\)"):
        server.ask("dance", last, 30)


def test_the_cause_of_its_end_is_found_above_a_hint_at_it():
    log = (
        "(EngineCore pid=9) ERROR 11-22 10:00:00 [core.py:1135] ValueError: Free memory on device cuda:0 is less\n"
        "(APIServer pid=8) Traceback (most recent call last):\n"
        "(APIServer pid=8) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert cause_in(log) == ": ValueError: Free memory on device cuda:0 is less"
    assert cause_in("INFO all is well\n") == ""


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_log_that_is_no_file_is_named(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "server.log")
    with pytest.raises(ServerError, match=r"cannot be started: its log \S+server\.log cannot be written: (it|Is)"):
        ServerProcess("the server", ["true"], log=tmp_path / "server.log")
