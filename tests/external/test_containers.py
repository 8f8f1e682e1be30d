"""Programs in docker and podman: what they reach, their limits, and that no container is left, whatever is killed.

A tool that is not installed, or may not run containers here, is skipped with its message.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest

from agentrig import AgentFailure, Endpoint
from agentrig.errors import AgentrigError
from agentrig.external.command import CommandAgent
from agentrig.external.config import CommandConfig
from agentrig.external.running import Container, run
from agentrig.gateway.process import Gateway
from agentrig.gateway.settings import GatewaySettings
from agentrig.pools import Job
from agentrig.runners.attempt import run_agent
from agentrig.testing.scripted import Reply, scripted_server

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "examples" / "programs"
NOWHERE = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")
IMAGE = "localhost/agentrig-tests"

ASK = """set -eu
body='{{"model": "'$OPENAI_MODEL'", "messages": [{{"role": "user", "content": "?"}}]}}'
said=$(curl -sS "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" -d "$body")
seen=""
for place in {root}/pyproject.toml {programs}/dice.py /etc/shadow; do test -e $place && seen="$seen $place"; done
touch /spoiled 2>/dev/null && seen="$seen /spoiled"
touch {programs}/spoiled 2>/dev/null && seen="$seen {programs}/spoiled"
printf '{{"said": %s, "seen": "%s", "input": %s, "home": "%s"}}' "$said" "$seen" "$(cat)" "$HOME" > answer.json
touch /tmp/scratch
"""


def root_of_image(folder: Path) -> None:
    """Make the smallest system with a shell and curl: busybox, and curl with its libraries."""
    binaries = folder / "bin"
    binaries.mkdir(parents=True)
    shutil.copy(str(shutil.which("busybox")), binaries / "busybox")
    for name in ("sh", "cat", "dd", "head", "printf", "seq", "sleep", "tail", "test", "touch", "tr", "true", "yes"):
        (binaries / name).symlink_to("busybox")
    curl = str(shutil.which("curl"))
    shutil.copy(curl, binaries / "curl")
    for library in re.findall(r"/\S+", subprocess.run(["ldd", curl], capture_output=True, text=True).stdout):
        place = folder / library.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, place)
    for name in ("dev", "etc", "proc", "sys", "tmp"):
        (folder / name).mkdir(exist_ok=True)


@pytest.fixture(scope="module", params=["docker", "podman"])
def tool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of a tool that runs containers here, with the image."""
    tool: str = request.param
    for needed in (tool, "busybox", "curl"):
        if shutil.which(needed) is None:
            pytest.skip(f"there is no {needed} on this machine")
    folder = tmp_path_factory.mktemp("image")
    root_of_image(folder / "root")
    with tarfile.open(folder / "root.tar", "w") as tar:
        tar.add(folder / "root", arcname=".")
    made = subprocess.run([tool, "import", str(folder / "root.tar"), IMAGE], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"{tool} does not work here: {made.stderr.strip()[-300:]}")
    try:
        try:
            CommandAgent(CommandConfig(command="true", sandbox=tool, image=IMAGE))
        except AgentrigError as error:
            pytest.skip(str(error))
        yield tool
        assert containers(tool) == []
    finally:
        subprocess.run([tool, "rmi", "--force", IMAGE], capture_output=True)


def containers(tool: str) -> list[str]:
    """Return the containers that there are, also those that have ended."""
    words = [tool, "ps", "--all", "--filter", "name=agentrig-", "--format", "{{.Names}}"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


def running(word: str) -> list[psutil.Process]:
    """Return the processes with a word on their command line."""
    return [p for p in psutil.process_iter(["cmdline"]) if word in (p.info["cmdline"] or ())]


def agent(tool: str, script: str, **keys: Any) -> CommandAgent:
    return CommandAgent(CommandConfig(command=script, shell=True, sandbox=tool, image=IMAGE, **keys))


def until(done: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.slow
def test_the_model_is_reached_and_the_rest_of_the_machine_is_not(tool: str) -> None:
    script = ASK.format(root=ROOT, programs=PROGRAMS)
    program = agent(tool, script, folder=str(PROGRAMS), answer="file")
    with scripted_server(Reply(text="hello")) as server, Gateway(GatewaySettings()) as gateway:
        endpoint = attrs.evolve(server.endpoint(temperature=0.5), gateway=gateway.address)
        found = run_agent(program, Job(id="c", input={"question": "q"}, endpoint=endpoint))
    answer = found.outcome.answer
    assert answer is not None, found.outcome
    assert answer["said"]["choices"][0]["message"]["content"] == "hello"
    assert answer["seen"].split() == [f"{PROGRAMS}/dice.py"]
    assert answer["input"] == {"question": "q"}
    (call,) = found.trace.llm_calls()
    assert call.attributes["response_token_ids"] == list(b"hello")
    (span,) = [s for s in found.trace.spans if s.name == "program"]
    assert span.attributes["exit_code"] == 0
    assert "processes_left" not in span.attributes
    assert not Path(answer["home"]).exists()
    assert containers(tool) == []


LIMITS = {
    "deadline": ("sleep 987653", {"time_s": 4}),
    "memory-limit": ("head -c 300000000 /dev/zero | tail", {"memory_mb": 64}),
    "process-limit": ("for n in $(seq 40); do sleep 987653 & done; sleep 987653", {"processes": 20}),
    "disk-limit": ("for n in $(seq 20); do dd if=/dev/zero of=f$n bs=1000000 count=4; done; sleep 9", {"disk_mb": 20}),
    "output-limit": ("yes", {"output_mb": 2}),
    "agent-error": ("echo no >&2; exit 9", {}),
    "no-answer": ("true", {}),
    "answer": ("(sleep 987653 &); echo 1", {}),
}


@pytest.mark.slow
def test_limits_are_typed_failures_and_all_ends(tool: str) -> None:
    found: dict[str, Any] = {}

    def play(name: str, script: str, keys: dict[str, Any]) -> None:
        try:
            found[name] = agent(tool, script, **{"time_s": 100, **keys})({}, NOWHERE)
        except AgentFailure as failure:
            found[name] = (failure.kind, str(failure))

    threads = [threading.Thread(target=play, args=(name, *given)) for name, given in LIMITS.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.pop("answer") == 1
    expected = {name: name for name in found}
    if tool == "podman" and found["memory-limit"][0] == "agent-error":
        # With cgroup v1, podman 4.3 does not learn why the kernel has ended a process.
        assert "exit code 137" in found["memory-limit"][1]
        expected["memory-limit"] = "agent-error"
    assert {name: kind for name, (kind, _) in found.items()} == expected, found
    assert "exit code 9; the end of its stderr: no" in found["agent-error"][1]
    assert containers(tool) == []
    assert running("987653") == []


KILLED = """
import sys
from agentrig import Endpoint
from agentrig.external.command import CommandAgent
from agentrig.external.config import CommandConfig
from agentrig.external.running import Container, run
config = CommandConfig(command="sleep 987652", sandbox=sys.argv[1], image=sys.argv[2], time_s=300)
CommandAgent(config)({}, Endpoint(base_url="http://127.0.0.1:9/v1", model="m"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("also", ["", "the supervisor", "all its descendants"])
def test_no_container_outlives_agentrig_when_it_is_killed(tool: str, also: str) -> None:
    process = psutil.Popen([sys.executable, "-c", KILLED, tool, IMAGE])

    def runs() -> bool:
        assert process.poll() is None
        return any(p.name() == "sleep" for p in running("987652"))

    until(runs)
    family = process.children(recursive=also == "all its descendants") if also else []
    for each in [process, *family]:
        each.kill()
    process.wait()
    until(lambda: not containers(tool))
    assert running("987652") == []


@pytest.mark.slow
def test_an_image_that_is_not_there_is_named(tool: str) -> None:
    with pytest.raises(AgentrigError, match=rf'sandbox = "{tool}" does not work: .*nosuchimage') as caught:
        CommandAgent(CommandConfig(command="true", sandbox=tool, image="nosuchimage"))
    assert f"{tool} pull nosuchimage" in str(caught.value)


@pytest.mark.parametrize(
    ("said", "cure"),
    [
        ("crun: setrlimit `RLIMIT_NOFILE`: Operation not permitted", "set default_ulimits ="),
        ("crun: cgroups in hybrid mode not supported", 'set runtime = "runc"'),
        ("container-init binary not found on the host", "apt-get install catatonit"),
        ("Cannot connect to the Docker daemon at unix:///x", "systemctl start docker"),
    ],
)
def test_a_tool_that_runs_no_containers_here_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, cure: str
) -> None:
    """A script fails as podman does on such machines; what it was asked is what rollouts ask."""
    script = tmp_path / "podman"
    asked = f'[ "$1" = image ] && exit 0; echo "$@" > {tmp_path}/asked'
    script.write_text(f"#!/bin/sh\n{asked}\necho {said!r} >&2\nexit 126\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(AgentrigError, match=r'sandbox = "podman" does not work') as caught:
        CommandAgent(CommandConfig(command="true", sandbox="podman", image="i", memory_mb=64, processes=7))
    assert (said in str(caught.value), cure in str(caught.value)) == (True, True)
    assert {"--init", "--read-only", "64m", "56", "host"} <= set((tmp_path / "asked").read_text().split())


@pytest.mark.parametrize(("said", "exceeded"), [("true", "memory"), ("false", "")])
def test_why_a_container_failed_is_asked_before_it_is_removed(tmp_path: Path, said: str, exceeded: str) -> None:
    """Other commands stand for those of docker; the one that removes leaves a process with its stdout open."""
    removed = tmp_path / "removed"
    container = Container(
        id_file=str(tmp_path / "id"),
        remove=["sh", "-c", f"sleep 30 & touch {removed}"],
        out_of_memory=["sh", "-c", f"test ! -e {removed} && echo {said}"],
    )
    limits = CommandConfig(command="x", memory_mb=64)
    words = ["sh", "-c", "exit 3"]
    ended = run(words, container=container, folder=tmp_path, environment=dict(os.environ), stdin=b"", limits=limits)
    assert (ended.status, ended.exceeded, removed.exists()) == (3, exceeded, True)
    assert ended.seconds < 20
