"""The server ends with its run or when the run stops it, whatever it is doing, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from agentrig_grpo.server.handle import ServerError
from embedded_servers import embedded

STUCK = """
import ctypes, os, pathlib, sys, threading, time

def hold():
    here = pathlib.Path(__file__).parent
    while not (here / "now").exists():
        time.sleep(0.05)
    (here / "held").touch()
    ctypes.PyDLL(None).sleep(1000)  # in C, with the interpreter's lock held: no Python code runs from here on

if sys.argv[:1] == ["-m"]:
    threading.Thread(target=hold, daemon=True).start()
"""
PARENT = """
import sys, time
from pathlib import Path
from agentrig.hardware import Cpu
from agentrig.servers import ServerPlan
from agentrig_grpo.config import EmbeddedConfig
from agentrig_grpo.server.handle import Embedded
server = Embedded(EmbeddedConfig(batch=1), ServerPlan(model=Path(sys.argv[1]), name="x", hardware=Cpu())).__enter__()
server.ready()
print(server.pid, flush=True)
time.sleep(600)
"""


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ended(pid, within_s=20):
    deadline = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


def hold(folder):
    (folder / "now").touch()
    deadline = time.monotonic() + 30
    while not (folder / "held").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (folder / "held").exists()
    time.sleep(0.2)


@pytest.fixture
def stuck(tmp_path):
    """Return a folder with which a test can make a server's interpreter hang."""
    folder = tmp_path / "stuck"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(STUCK)
    return folder


def started(model_dir, **environment):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(model_dir)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def kill(parent):
    parent.kill()
    parent.wait()
    parent.stdout.close()


@pytest.mark.parametrize("halted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_server_ends_with_its_parent(model_dir, stuck, halted):
    parent, server = started(model_dir, PYTHONPATH=str(stuck))
    if halted:
        hold(stuck)
    assert alive(server)
    kill(parent)
    assert ended(server)


@pytest.mark.slow
def test_a_server_whose_interpreter_hangs_can_be_stopped(model_dir, stuck, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(stuck))
    server = embedded(model_dir, slots=1).__enter__()
    server.ready()
    hold(stuck)
    with pytest.raises(ServerError, match="did not take the weights of version 1 within 1 s"):
        server.take({}, 1, timeout_s=1)
    assert server._process.exit_status == -signal.SIGKILL


@pytest.mark.slow
def test_nothing_is_left_after_a_kill_of_all(model_dir, tmp_path):
    own = tmp_path / "tmp"
    own.mkdir()
    before = set(os.listdir("/dev/shm"))
    parent, server = started(model_dir, TMPDIR=str(own))
    os.kill(server, signal.SIGKILL)
    kill(parent)
    assert ended(server)
    assert list(own.iterdir()) == []
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "agentrig" in name]


@pytest.mark.slow
def test_a_port_that_is_taken_is_named_without_a_traceback(model_dir, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = embedded(model_dir, slots=1, port=port, log=tmp_path / "server.log").__enter__()
        with pytest.raises(ServerError, match=rf"can't listen on 127.0.0.1:{port}: Address already.*server.port"):
            server.ready()
        with pytest.raises(ServerError, match="can't listen on"):
            server.check()  # not its exit status, which is that of its end
    assert "Traceback" not in (tmp_path / "server.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("host", ["999.1.1.1", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_named(model_dir, tmp_path, host):
    server = embedded(model_dir, slots=1, host=host, log=tmp_path / "server.log").__enter__()
    with pytest.raises(ServerError, match=rf"can't listen on {host}:0: .*; server.host must be an address of this"):
        server.ready()
