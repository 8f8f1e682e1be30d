"""The agent `command` on real programs: what they get, where their answers are read, and how their ends are typed."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from rollouts import rollout

from agentrig import AgentFailure, Endpoint
from agentrig.errors import AgentrigError, ConfigError
from agentrig.external.command import CommandAgent, remove
from agentrig.external.config import CommandConfig
from agentrig.pools import Job
from agentrig.run.guards import unseen_calls
from agentrig.runners.attempt import run_agent
from agentrig.settings import structure
from agentrig.tracing.recording import recording

ENDPOINT = Endpoint(
    base_url="http://127.0.0.1:9/v1", model="m", api_key="key-of-this-rollout", sampling={"temperature": 0.5}
)
INPUT = {"question": 'say "é"', "inner": {"n": 3}}


def run(command: Any, task_input: Mapping[str, Any] = INPUT, **keys: Any) -> Any:
    config = structure(CommandConfig, {"command": command, **keys}, owner="command", section="agent")
    return CommandAgent(config)(task_input, ENDPOINT)


def sh(script: str, **keys: Any) -> Any:
    return run(script, shell=True, **keys)


def failure(script: str, **keys: Any) -> tuple[str, str]:
    with pytest.raises(AgentFailure) as caught:
        sh(script, **keys)
    return caught.value.kind, str(caught.value)


def test_the_input_comes_on_stdin_in_a_file_or_in_variables() -> None:
    assert run("cat") == INPUT
    assert sh('cat "$AGENTRIG_INPUT"', input="file") == INPUT
    assert sh('printf %s "$AGENTRIG_INPUT"', input="environment") == INPUT
    assert run(["wc", "-c"], input="environment") == 0  # nothing waits on stdin
    parts = {"Q": "question", "N": "inner.n", "ALL": ""}
    text = sh('printf "%s|%s|%s" "$Q" "$N" "$ALL"', input_variables=parts, answer="stdout").split("|")
    assert (text[:2], json.loads(text[2])) == (['say "é"', "3"], INPUT)
    assert failure("true", input_variables={"Q": "inner.m"})[0] == "wrong-task"
    with pytest.raises(AgentFailure, match="give it the input on stdin") as caught:
        run("true", {"long": "x" * 200_000}, input="environment")
    assert caught.value.kind == "cannot-start"


def test_variables_have_the_models_address_under_settable_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere/v1")
    env = sh("env", answer="stdout").splitlines()
    assert {
        "OPENAI_BASE_URL=http://127.0.0.1:9/v1",
        "OPENAI_API_KEY=key-of-this-rollout",
        "OPENAI_MODEL=m",
        'AGENTRIG_SAMPLING={"temperature": 0.5}',
    } <= set(env)
    named = {"base_url_variable": "AGL_OPENAI_BASE_URL", "api_key_variable": "AGL_KEY", "model_variable": ""}
    env = sh("env", answer="stdout", variables={"MODE": "fast"}, **named).splitlines()
    assert {"AGL_OPENAI_BASE_URL=http://127.0.0.1:9/v1", "AGL_KEY=key-of-this-rollout", "MODE=fast"} <= set(env)
    assert not [line for line in env if line.startswith("OPENAI_MODEL")]
    for keys, names in (({}, "OPENAI_BASE_URL and OPENAI_API_KEY"), (named, "AGL_OPENAI_BASE_URL and AGL_KEY")):
        config = CommandConfig(command="echo 1", **keys)
        trace = run_agent(CommandAgent(config), Job(id="r1", input=INPUT, endpoint=ENDPOINT)).trace
        for unrecorded, said in ((0, "No call to the model was recorded"), (3, "3 calls to the model's server came")):
            told = unseen_calls([rollout(trace=trace)], unrecorded=unrecorded)
            assert (said in told, f"the address, with the key, in {names} of its environment" in told) == (True, True)


def test_the_answer_is_read_on_stdout_or_in_a_file() -> None:
    assert sh("""echo no; echo '{"a": 1}'; echo bye""") == {"a": 1}
    assert sh("echo one; echo two", answer="stdout") == "one\ntwo"
    assert sh("echo '[1]' > answer.json", answer="file") == [1]
    assert sh("printf yes > a.txt", answer="file", answer_file="a.txt") == "yes"
    for script, keys in (("echo no", {}), ("true", {"answer": "stdout"}), ("true", {"answer": "file"})):
        assert failure(script, **keys)[0] == "no-answer", script
        assert sh(script, answer_required=False, **keys) is None
    wrong = (
        ("ln -s /etc/hostname a.txt", "a link, or is outside"),
        ("mkfifo a.txt", "no regular file"),
        ("mkdir a.txt", "no regular file"),
        ("printf '\\377' > a.txt", "not UTF-8"),
    )
    for script, why in wrong:
        kind, message = failure(script, answer="file", answer_file="a.txt")
        assert (kind, why in message) == ("bad-answer", True), message
    assert failure("printf '{' > answer.json", answer="file")[0] == "bad-answer"
    assert failure("printf '\\377'", answer="stdout")[0] == "bad-answer"
    kind, message = failure("printf '{\"sides\": '; printf '9%.0s' $(seq 6000); echo '}'")
    assert (kind, "a line of its stdout has a whole number of more than 4300 digits" in message) == ("bad-answer", True)
    deep = "printf '%s%s' $(printf '[%.0s' $(seq 20000)) $(printf ']%.0s' $(seq 20000))"
    for script, more in ((deep, {}), (f"{deep} > answer.json", {"answer": "file"})):
        kind, message = failure(script, **more)
        assert (kind, "nested too deep: at most 254" in message) == ("bad-answer", True), message


@pytest.mark.parametrize("place", ["", " > answer.json"], ids=["stdout", "file"])
def test_half_of_a_character_is_no_answer_and_is_not_changed_into_one(place: str) -> None:
    script = rf"""printf '%s' '{{"text": "whole \ud83d\ude00, half \ud800"}}'{place}"""
    config = CommandConfig(command=script, shell=True, answer="file" if place else "json-line")
    outcome = run_agent(CommandAgent(config), Job(id="r1", input=INPUT, endpoint=ENDPOINT)).outcome
    assert (outcome.failure, outcome.answer) == ("bad-answer", None)
    assert r"its answer has a lone surrogate, '\ud800', half of a character: no text has one" in outcome.message


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl on this machine")
def test_the_answer_is_posted_and_the_program_then_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrig.external.running.LINGER_S", 0.2)
    post = """post() { curl -sS "$AGENTRIG_ANSWER_URL" -H "Authorization: Bearer $AGENTRIG_ANSWER_KEY" -d "$@"; }; """
    assert sh(post + """post '{"answer": {"a": 1}}'; sleep 600""", answer="callback").answer == {"a": 1}
    judged = sh(post + """post '{"answer": 1, "reward": 0.5}'""", answer="callback")
    assert (judged.answer, judged.reward) == (1, 0.5)
    assert failure(post + """post '{"failure": "no-plan", "message": "why"}'""", answer="callback") == (
        "no-plan",
        "why",
    )
    wrong_key = """AGENTRIG_ANSWER_KEY=other; post '{"answer": 1}'"""
    for script, kind, why in (
        ("""post '{"answr": 1}'""", "bad-answer", 'an answer has no key "answr"'),
        ("""post '{"answer": NaN}'""", "bad-answer", "the body is not JSON: NaN is no value"),
        (f"""post '{{'; {wrong_key}""", "bad-answer", "the body is not JSON"),
        (r"""post '{"answer": "\ud800"}'""", "bad-answer", "lone surrogate"),
        (wrong_key, "no-answer", "this address asks for its own key"),
        ('curl -sS "$AGENTRIG_ANSWER_URL"', "no-answer", "send POST"),
        ("""post '{"answer": 1}' -H 'Host: elsewhere'""", "no-answer", "the Host header must name this server"),
    ):
        found, message = failure(post + script, answer="callback")
        assert (found, "was refused: " in message, why in message) == (kind, True, True), message
    twice = post + """post '{"answer": 1}'; post '{"answer": 2}' >&2"""
    assert failure(twice, answer="callback")[0] == "answered-twice"
    told = failure(f"{twice}; exit 8", answer="callback")[1]
    assert "with two that differ it fails (answered-twice)" in told, "what the second answer was told"


def test_exit_codes_are_failure_kinds_by_a_table() -> None:
    table = {"22": "llm-error", "3": "answer"}
    kind, message = failure("echo 'no such host' >&2; exit 22", exit_codes=table)
    assert (kind, "exit code 22" in message, "no such host" in message) == ("llm-error", True, True)
    assert failure("exit 23", exit_codes=table)[0] == "agent-error"
    assert sh("echo 1; exit 3", exit_codes=table) == 1
    kind, message = failure("kill -SEGV $$")
    assert (kind, "SIGSEGV" in message) == ("agent-error", True)


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Open so many files that the next ones have numbers above 1,024, as with 200 programs at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("no process may have 2,048 open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for descriptor in opened:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_a_runner_with_more_than_1024_open_files() -> None:
    assert sh("sleep 0.2; echo 1") == 1
    assert failure("sleep 60", time_s=0.3)[0] == "deadline"


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("import nosuchmodule", "exit code 1.*No module named 'nosuchmodule'"),
        ("import os; os.abort()", "exit code -6: killed by SIGABRT"),
    ],
)
def test_a_supervisor_that_fails_is_named_as_the_cause(
    broken: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "supervisor.py").write_text(broken)
    monkeypatch.setattr("agentrig.external.running.SUPERVISOR", tmp_path / "supervisor.py")
    kind, message = failure("echo 1")
    assert kind == "infrastructure"
    assert re.search(said, message, re.S), message


def test_a_fault_of_the_supervisor_leaves_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrig.processes import supervisor

    text = Path(supervisor.__file__).read_text().replace("def _look(self, seconds: float)", "def _look(self)")
    (tmp_path / "supervisor.py").write_text(text)
    monkeypatch.setattr("agentrig.external.running.SUPERVISOR", tmp_path / "supervisor.py")
    kind, message = failure("setsid env -i sleep 987655 & sleep 987655")
    assert (kind, "TypeError" in message) == ("infrastructure", True), message
    assert not [p for p in psutil.process_iter(["cmdline"]) if "987655" in (p.info["cmdline"] or ())]


def test_descendants_are_found_with_and_without_the_kernels_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrig.processes import supervisor

    with subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600 & echo; wait"], stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        tree = {shell.pid, *(p.pid for p in psutil.Process(shell.pid).children())}
        assert len(tree) == 3
        assert tree <= set(supervisor.descendants())
        monkeypatch.setattr("os.path.exists", lambda path: False)
        assert tree <= set(supervisor.descendants())
        for pid in tree:
            os.kill(pid, signal.SIGKILL)


def test_the_trace_has_the_program_and_its_stderr() -> None:
    with recording("r", token_ids=True) as recorder:
        assert sh("echo note >&2; (setsid env -i sleep 600 &) ; echo 1") == 1
        with pytest.raises(AgentFailure):
            sh("head -c 200000 /dev/zero | tr '\\0' x >&2; exit 9")
    first, second = [span for span in recorder.trace().spans if span.name == "program"]
    assert (first.error, first.attributes["exit_code"], first.attributes["stderr"]) == (None, 0, "note\n")
    assert first.attributes["processes_left"] == 1
    assert first.attributes["command"].startswith("sh -c echo note")
    assert second.attributes["exit_code"] == 9
    assert "exit code 9" in (second.error or "")
    assert len(second.attributes["stderr"]) < 21_000


def test_each_rollout_has_a_folder_of_its_own_that_is_removed(tmp_path: Path) -> None:
    (tmp_path / "agent.sh").write_text("pwd; ls; echo spoiled > state; mkdir -p closed/in; chmod 0 closed\n")
    (tmp_path / "state").write_text("fresh")
    keys = {"folder": str(tmp_path), "answer": "stdout"}
    seen = [run("sh ./agent.sh", copy=True, **keys).split() for _ in range(2)]
    assert [rest for _, *rest in seen] == [["agent.sh", "state"]] * 2
    assert seen[0][0] != seen[1][0]
    assert not any(Path(place).exists() for place, *_ in seen)
    assert (tmp_path / "state").read_text() == "fresh"
    place, *rest = run("sh {folder}/agent.sh", **keys).split()
    assert (rest, Path(place).exists()) == ([], False)
    assert run("sh -c 'echo $TMPDIR'", **keys).endswith("/.tmp")


def test_a_folder_that_is_nested_deeply_is_removed() -> None:
    script = "import os; d = 'd' * 100\nfor _ in range(1500): os.mkdir(d); os.chdir(d)\nprint(1)"
    program = CommandAgent(CommandConfig(command=[sys.executable, "-I", "-S", "-c", script]))
    places: list[str] = []
    original = program._run

    def watched(job: Job, folder: Path, *more: Any) -> Any:
        places.append(str(folder))
        return original(job, folder, *more)

    program._run = watched  # type: ignore[method-assign]
    assert program(INPUT, ENDPOINT) == 1
    assert not Path(places[0]).exists()


def test_a_folder_that_cannot_be_removed_is_named_with_the_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = tmp_path / "program"
    (held / "mount").mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "none", str(held / "mount")], capture_output=True).returncode:
        pytest.skip("this user cannot mount a file system")
    try:
        remove(held)
    finally:
        subprocess.run(["umount", str(held / "mount")], check=True)
    assert re.search(r"stays on the disk: rm: .*mount.*: .*busy. Remove \S+/program by hand", caplog.text), caplog.text


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"command": "nosuchprogram --x"}, "there is no program nosuchprogram"),
        ({"command": "true", "folder": "/nosuchfolder"}, "there is no folder /nosuchfolder"),
        ({"command": ""}, "it is empty"),
        ({"command": 3}, "write a text"),
        ({"command": 'sh -c "open'}, "cannot be split"),
        ({"command": "sh {folder}/x"}, "folder is empty"),
        ({"command": ["sh"], "shell": True}, "needs a command that is one text"),
        ({"command": "sh", "copy": True}, "copy = true needs a folder"),
        ({"command": "sh", "exit_codes": {"256": "x"}}, "no exit code of a failure"),
        ({"command": "sh", "exit_codes": {"2": "not a kind"}}, "no failure kind"),
        ({"command": "sh", "variables": {"A-B": "x"}}, "no name of an environment variable"),
        ({"command": "sh", "variables": {"OPENAI_API_KEY": "x"}}, "leave it out of the other variables"),
        ({"command": "sh", "base_url_variable": "OPENAI_API_KEY"}, "base_url_variable and api_key_variable are both"),
        ({"command": "sh", "sandbox": "podman"}, "needs an image"),
        ({"command": "sh", "image": "debian"}, 'sandbox = "none"'),
        ({"command": "sh", "mounts": ["/srv"]}, "mounts are for a sandbox"),
    ],
)
def test_what_cannot_work_is_an_error_before_the_run(keys: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, AgentrigError), match=r"\[agent\]") as caught:
        CommandAgent(structure(CommandConfig, keys, owner="command", section="agent"))
    assert said in str(caught.value)


FORKS = """
import os, sys, time
held = bytearray(b"x" * (60 << 20))
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        time.sleep(600)
time.sleep(2.5)
print(1)
"""


@pytest.mark.slow
def test_memory_that_forked_processes_share_counts_once() -> None:
    program = [sys.executable, "-I", "-S", "-c", FORKS]
    with recording("r", token_ids=True) as recorder:
        assert run([*program, "8"], memory_mb=200) == 1
        with pytest.raises(AgentFailure, match="processes = 20") as caught:
            run([*program, "60"], memory_mb=200, processes=20)
    assert caught.value.kind == "process-limit"
    first = next(span for span in recorder.trace().spans if span.name == "program")
    assert 60 < first.attributes["peak_mb"] < 150
