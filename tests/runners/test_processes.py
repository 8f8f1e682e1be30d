"""Runner processes: typed failures, deadlines, crashes; nothing is lost and nothing counted twice."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import importlib
import logging
import multiprocessing
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import wrapt
from model_server import ModelServer

from agentrig import AgentFailure, Endpoint, Outcome, processes
from agentrig.endpoints import without_proxy
from agentrig.errors import AgentrigError
from agentrig.pools import Job, Result
from agentrig.processes import forks
from agentrig.processes.shared import CLIENTS, InterpreterChanged, SharedByRollouts, umask
from agentrig.runners import pools
from agentrig.runners.attempt import failure_kind, run_agent
from agentrig.runners.jobs import AgentPlan
from agentrig.runners.loops import RunnerLoop
from agentrig.runners.processes import Pool

Start = Callable[..., Pool]


@pytest.fixture
def start(toy_file: str) -> Iterator[Start]:
    """Start pools that end with the test."""
    pools: list[Pool] = []

    def make(agent: str = "toy", *, config: dict[str, Any] | None = None, **options: Any) -> Pool:
        plan = AgentPlan(name=agent, config=config or {}, files=(toy_file,))
        pool = Pool(plan, **{"n": 1, "threads": 4, "deadline_s": 20.0, "retries": 1, **options})
        pools.append(pool)
        pool.start()
        return pool

    yield make
    for pool in pools:
        pool.close()


def drain(pool: Pool, n: int, *, timeout_s: float = 30.0) -> list[Result]:
    """Return n results, and wait a moment longer, because more of them would be a bug."""
    found: list[Result] = []
    end = time.monotonic() + timeout_s
    while len(found) < n and time.monotonic() < end:
        found += pool.poll(0.1)
    return found + pool.poll(0.1)


def jobs(model: ModelServer, *dos: str, **more: Any) -> list[Job]:
    endpoint = Endpoint(base_url=model.url, model="toy-model", token_ids=True)
    return [Job(id=f"job-{i}", input={"number": i, "do": do, **more}, endpoint=endpoint) for i, do in enumerate(dos)]


def submit(pool: Pool, todo: Sequence[Job]) -> None:
    for job in todo:
        pool.submit(job)


def outcomes(pool: Pool, todo: Sequence[Job], *, timeout_s: float = 50.0) -> list[Outcome]:
    """Return how jobs ended, each once, in their order."""
    submit(pool, todo)
    results = drain(pool, len(todo), timeout_s=timeout_s)
    assert sorted(r.id for r in results) == sorted(job.id for job in todo)
    found = {r.id: r.outcome for r in results}
    return [found[job.id] for job in todo]


def test_each_rollout_returns_once(model: ModelServer, start: Start) -> None:
    pool = start(n=2, threads=4)
    submit(pool, jobs(model, *[""] * 20))
    results = drain(pool, 20)
    assert sorted(r.id for r in results) == sorted(f"job-{i}" for i in range(20))
    for result in results:
        assert result.outcome.answer == "odd"
        assert result.outcome.failure is None
        (call,) = result.trace.llm_calls()
        assert result.trace.nodes(call) == ["write_query"]
        assert bytes(call.attributes["prompt_token_ids"]).decode().startswith(f"Is {result.id[4:]} odd?")
        assert result.trace.rollout_id == result.id
        assert result.duration_s > 0
    assert pool.pending == 0
    assert pool.room == 8
    assert len(set(pool.processes())) == 2


def test_a_proxy_of_the_host_is_not_used_for_the_model_server(model: ModelServer, start: Start) -> None:
    proxy = "http://127.0.0.1:9"  # nothing listens there
    pool = start(environment={"HTTP_PROXY": proxy, "http_proxy": proxy, "NO_PROXY": "example.org", "no_proxy": ""})
    assert [(o.answer, o.failure) for o in outcomes(pool, jobs(model, "", ""))] == [("odd", None)] * 2


@pytest.mark.parametrize(
    ("url", "before", "after"),
    [
        ("http://127.0.0.1:8000/v1", "", "127.0.0.1"),
        ("http://localhost/v1", "a.org, b.org", "a.org,b.org,localhost"),
        ("http://10.1.2.3:80/v1", "10.1.2.3", "10.1.2.3"),
        ("http://[::1]:80/v1", "a.org", "a.org,::1"),
        ("http://10.1.2.3:80/v1", "*", "*"),
        ("http://8.8.8.8/v1", "a.org", "a.org"),
        ("https://models.example.org/v1", "", ""),
    ],
)
def test_only_private_addresses_bypass_the_proxy(
    url: str, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", before)
    without_proxy(url)
    assert os.environ["NO_PROXY"] == before  # there is no proxy
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example.org:3128")
    without_proxy(url)
    assert os.environ["NO_PROXY"] == after
    assert os.environ.get("no_proxy", after) == after


def test_failures_are_typed(model: ModelServer, start: Start) -> None:
    pool = start()
    todo = jobs(model, "raise", "typed", "")
    dead = Endpoint(base_url="http://127.0.0.1:9/v1", model="none")
    todo.append(Job(id="dead", input={"number": 1}, endpoint=dead))
    todo.append(Job(id="503", input={"number": 1, "wish": "[status=503]"}, endpoint=todo[0].endpoint))
    submit(pool, todo)
    results = {r.id: r for r in drain(pool, 5)}
    assert {i: r.outcome.failure for i, r in results.items()} == {
        "job-0": "agent-error",
        "job-1": "no-plan",
        "job-2": None,
        "dead": "llm-error",
        "503": "llm-error",
    }
    assert re.search(
        r"^ValueError: this agent cannot count \(toy_plugin\.py:\d+ in misbehave\)$", results["job-0"].outcome.message
    )
    assert "503" in results["503"].outcome.message
    assert results["job-0"].outcome.answer is None
    assert results["job-0"].trace.spans[0].error == results["job-0"].outcome.message
    assert "503" in next(s.error or "" for s in results["503"].trace.spans if s.name == "openai.chat.completion")
    assert pool.replaced == 0


def test_answers_that_cannot_be_sent_fail_immediately(model: ModelServer, start: Start) -> None:
    pool = start(deadline_s=120.0, threads=2)
    rings = ["ring", "odd-ring", "unsendable-ring"]
    texts = ["surrogate", "halves", ""]
    odd = ["unwritable", "nested", "deep", *rings, "huge", "unsendable", "speechless", "long-kind", *texts]
    # No rollout waits for its deadline, and both threads are alive.
    found = dict(zip(odd, outcomes(pool, jobs(model, *odd), timeout_s=60), strict=True))
    assert {do: outcome.failure for do, outcome in found.items()} == {
        "unwritable": "bad-answer",
        "nested": "bad-answer",
        "deep": "bad-answer",
        "ring": "bad-answer",
        "odd-ring": "bad-answer",
        "unsendable-ring": "agent-error",
        "huge": "bad-answer",
        "unsendable": "agent-error",
        "speechless": "agent-error",
        "long-kind": "agent-error",
        "surrogate": "bad-answer",
        "halves": None,
        "": None,
    }
    assert "answered with Unwritable: OSError: the rows are gone" in found["unwritable"].message
    assert "nested deeper than 254" in found["nested"].message
    assert "its answer contains itself" in found["ring"].message
    assert 'its span "note": attributes contains itself' in found["unsendable-ring"].message
    assert "its answer has 11000002 characters of JSON, 10000000 are allowed" in found["huge"].message
    assert "the rollout's result cannot be sent from its process" in found["unsendable"].message
    assert 'its span "note": attributes["value"]["rows"][1] is of the type function' in found["unsendable"].message
    assert "Speechless: (its message raised RuntimeError)" in found["speechless"].message
    assert "the plan is missing (its kind 'a very long text" in found["long-kind"].message
    assert "no short name" in found["long-kind"].message
    told = r"its answer has a lone surrogate, '\ud800', half of a character: no text has one"
    assert told in found["surrogate"].message
    assert found["halves"].answer == ["whole \U0001f600", "é\u2028"]
    assert pool.replaced == 0


def test_what_a_runner_sends_runs_no_code_in_the_run(model: ModelServer, start: Start, tmp_path: Path) -> None:
    pool = start()
    touches, plain = outcomes(pool, jobs(model, "touches", "", marker=str(tmp_path / "ran")))
    assert not (tmp_path / "ran").exists()
    assert touches.failure == "agent-error"
    assert re.search(r'its span "note": attributes\["value"\] is of the type .*\.Touches', touches.message)
    assert plain.answer == "odd"


def test_plain_data_arrives_as_it_was_returned(model: ModelServer, start: Start) -> None:
    pool = start()
    submit(pool, jobs(model, "plain"))
    (result,) = drain(pool, 1)
    (span,) = [s for s in result.trace.spans if s.name == "note"]
    plain = {"large": 2**80, "small": 5e-324, "text": "\u2028é", "none": [None, True]}
    assert repr(result.outcome.answer[1]) == repr(plain)
    nan = [float("nan"), float("inf"), float("-inf")]  # log-probabilities, for example
    assert repr(span.attributes["value"]) == repr({**plain, "nan": nan})


def test_an_answer_that_is_not_plain_names_its_place_and_the_cure(model: ModelServer, start: Start) -> None:
    pool = start(threads=1)
    odd = ["bytes", "set", "array", "date", "key", "numbers-as-keys", "not-finite", "own-reward"]
    odd += ["anything", "mock", "mock-of-dict", "mock-of-text"]
    found = dict(zip(odd, outcomes(pool, jobs(model, *odd)), strict=True))
    assert {outcome.failure for outcome in found.values()} == {"bad-answer"}
    said = {name: outcome.message.partition("AgentFailure: ")[2] for name, outcome in found.items()}
    said = {name: re.sub(r"[\w.]+\.(Anything|MagicMock)", r"\1", text) for name, text in said.items()}
    assert said == {
        "bytes": 'its answer["rows"][0]["name"] is of the type bytes; return its .decode()',
        "set": 'its answer["found"] is of the type set; return a list of it',
        "array": 'its answer["scores"] is of the type array.array; return its .tolist()',
        "date": "its answer[0] is of the type datetime.date; return its .isoformat()",
        "key": 'its answer["a"] has a key of the type tuple; return text as keys',
        "numbers-as-keys": 'its answer["rows"][0] has a key of the type int; return text as keys',
        "not-finite": 'its answer["rows"][1] is inf, which JSON can\'t hold; return None or text',
        "own-reward": "its own reward is of the type str; return a number",
        "anything": "its answer is of the type Anything; return text, numbers, lists or dicts",
        "mock": "its answer[1] is of the type MagicMock; return text, numbers, lists or dicts",
        "mock-of-dict": 'its answer["rows"] is of the type MagicMock; return text, numbers, lists or dicts',
        "mock-of-text": 'its answer["rows"][0] is of the type MagicMock; return text, numbers, lists or dicts',
    }


@pytest.mark.slow
@pytest.mark.parametrize("what", ["noise", "length", "form", "deep"])
def test_a_hostile_message_costs_its_rollout_only(what: str, model: ModelServer, start: Start) -> None:
    pool = start(threads=2, retries=1, deadline_s=15.0)
    hostile, *others = outcomes(pool, jobs(model, f"writes-{what}", "", "", ""), timeout_s=60)
    assert [o.answer for o in others] == ["odd"] * 3
    kinds = {"noise": "runner-died", "length": "runner-died", "form": "infrastructure", "deep": "infrastructure"}
    assert hostile.failure == kinds[what], hostile
    assert ("sent what no runner sends (b'\\x80\\x05 noise')" in hostile.message) == (what == "noise")


def test_a_temporary_folder_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        (tmp_path / "gone" / "listener").touch()

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    monkeypatch.setattr(forks, "start_server", fails)
    with pytest.raises(AgentrigError, match=r"temporary folder .*/gone is gone; does the agent remove it\?"):
        forks.start_process(multiprocessing.get_context("spawn"), print)
    (tmp_path / "gone").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(AgentrigError, match=r"died 3 times in a row \(NotADirectoryError"):
        forks.start_process(multiprocessing.get_context("spawn"), print)


ONE_ODD = """
import sys
from agentrig import Endpoint
from agentrig.pools import Job
from agentrig.runners.jobs import AgentPlan
from agentrig.runners.processes import Pool
pool = Pool(AgentPlan(name="toy", config={}, files=(sys.argv[1],)), n=1, threads=1, deadline_s=20.0, retries=1)
pool.start()
endpoint = Endpoint(base_url=sys.argv[2], model="toy-model", token_ids=True)
for number, do in enumerate([sys.argv[3], "", "no-call"]):
    pool.submit(Job(id=f"job-{number}", input={"number": number, "do": do}, endpoint=endpoint))
found = {}
while len(found) < 3:
    found |= {r.id: r.outcome.failure for r in pool.poll(0.1)}
print(*(found[f"job-{number}"] for number in range(3)))
pool.close()
"""


@pytest.mark.slow
def test_an_agent_that_writes_to_all_descriptors_is_one_typed_failure(model: ModelServer, toy_file: str) -> None:
    """The pipes of multiprocessing's own processes are among them: their tracebacks would fill the terminal."""
    words = [sys.executable, "-c", ONE_ODD, toy_file, model.url, "writes-everywhere"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["runner-died", "None", "None"], done
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 6, done.stderr


def test_a_fork_that_comes_back_from_the_agent_is_ended_and_told(model: ModelServer, toy_file: str) -> None:
    words = [sys.executable, "-c", ONE_ODD, toy_file, model.url, "forks"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["None"] * 3, done
    assert re.match(r"agentrig: the agent forked \(.*toy_plugin\.py:\d+ in misbehave\), and the child", done.stderr), (
        done
    )
    assert done.stderr.count("\n") == 1


def test_a_stuck_rollout_ends_at_its_deadline_and_the_others_continue(model: ModelServer, start: Start) -> None:
    pool = start(deadline_s=3.0, retries=0)
    pool.poll(0.1)
    (first,) = pool.processes()
    found = outcomes(pool, jobs(model, "hang", "", "", "hang", "", ""), timeout_s=20)
    assert [o.failure for o in found] == ["deadline", None, None, "deadline", None, None]
    assert "past its deadline of 3 s (runners.deadline_s) and its runner was killed" in found[0].message
    assert first not in pool.processes()
    assert pool.replaced >= 1


@pytest.mark.parametrize(
    ("do", "said"),
    [
        ("limits-files", "set the limit RLIMIT_NOFILE (ulimit -n) from"),
        ("clears-modules", "removed all modules from sys.modules"),
        ("makes-pipes-odd", ""),
    ],
)
def test_what_an_agent_breaks_in_its_runner_is_whole_again_for_the_next_rollout(
    do: str, said: str, model: ModelServer, start: Start
) -> None:
    pool = start(threads=1, retries=0)
    first, *others = outcomes(pool, jobs(model, do, "", ""))
    assert [o.answer for o in others] == ["odd"] * 2
    assert pool.replaced == 0
    assert (f"the agent toy {said}" in first.message) == bool(said)


def test_where_an_agent_leaves_its_runner_is_not_where_the_next_rollout_begins(
    model: ModelServer, start: Start
) -> None:
    """A rollout whose agent calls `os.chdir` or clears `os.environ` moved those after it, and nobody said so."""
    pool = start(threads=1, retries=0)
    answers = [o.answer for o in outcomes(pool, jobs(model, "where", "moves", "where", "moves-back", "where"))]
    assert answers == [[os.getcwd(), umask(), True] if i % 2 == 0 else "odd" for i in range(5)]
    assert pool.replaced == 0


@pytest.mark.parametrize(
    ("do", "said", "threads"),
    [
        ("replaces", "replaced json.loads of the interpreter: the rollouts of", 4),
        ("replaces", "", 1),
        ("moves", r"changed the current directory to / and removed \w+ and \d+ more variables from os.environ", 4),
        ("moves-back", r"changed the current directory to / \(contextlib.chdir does so for all threads, too\): the", 4),
    ],
)
def test_what_an_agent_changes_for_all_changes_no_answer_of_its_siblings(
    do: str, said: str, threads: int, model: ModelServer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """`json.loads = lambda text: {}`: rollouts beside it and after it read empty answers of the model."""
    pool = start(threads=threads)
    first, *others = outcomes(pool, jobs(model, do, "slow", "slow", "", "slow", ""))
    assert [o.answer for o in others] == ["odd"] * 5
    if threads == 1:  # it is alone in its process: the next rollout begins with what there was
        assert pool.replaced == 0
        return
    assert re.search(rf"died \(exit code 1\): a rollout in it {said}", caplog.text)
    assert "runners.threads=1, or a program" in caplog.text
    if do != "replaces":  # it is put back, and nobody was beside it the second time
        assert first.answer == "odd"
        return
    assert first.failure == "agent-error"
    assert first.message.startswith("the agent replaced json.loads of the interpreter, and it is put back")
    assert "runners.threads=1, or a program" in first.message


def test_what_one_of_several_rollouts_replaces_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = [
        (getattr(importlib.import_module(module), kind), "create")
        for module, kinds in CLIENTS.items()
        if ".resources." in module
        for kind in kinds
    ]
    assert len(clients) == 6
    shared = SharedByRollouts(several=True)
    assert shared.end(shared.begin()) == ("", [])
    owners = [(httpx.Client, "send"), (time, "time"), (random, "random"), (builtins, "open"), *clients]
    for owner, name in (*owners, (processes.shared, "current_folder"), (processes.shared, "_instruments")):
        first, turn = shared.begin(), shared.begin()
        monkeypatch.setattr(owner, name, lambda *_: {})
        with pytest.raises(InterpreterChanged, match=rf"^replaced ([\w.]+\.)?{name} of the interpreter$"):
            shared.end(turn)
        assert (shared.end(first), first.beside, turn.beside) == (("", []), True, True)


TRACER = """
import wrapt

class Wrapper:  # an object, as OpenInference has it
    def __call__(self, wrapped, instance, args, kwargs):
        return wrapped(*args, **kwargs)

def instrument(owner, name):
    wrapt.wrap_function_wrapper(owner, name, Wrapper())

def uninstrument(owner, name):
    setattr(owner, name, vars(owner)[name].__wrapped__)
"""


def test_a_library_that_records_calls_may_wrap_a_client_and_unwrap_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "recording_library.py").write_text(TRACER)
    monkeypatch.syspath_prepend(folder)
    library = importlib.import_module("recording_library")
    messages = importlib.import_module("anthropic.resources.messages").Messages
    monkeypatch.setattr(messages, "create", messages.create)  # whatever fails here, the class is whole again
    shared = SharedByRollouts(several=True)
    for do in (library.instrument, library.instrument, library.uninstrument, library.uninstrument, library.instrument):
        do(messages, "create")
        assert [shared.end(turn) for turn in (shared.begin(), shared.begin())] == [("", [])] * 2
    wrapt.wrap_function_wrapper(messages, "create", lambda wrapped, *_: {})
    with pytest.raises(InterpreterChanged, match=r"^replaced [\w.]+\.Messages\.create of the interpreter$"):
        shared.end([shared.begin(), shared.begin()][0])


def test_a_client_that_is_imported_and_changed_in_one_rollout_ends_its_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "openai.resources.responses"
    module = importlib.import_module(name)
    for change in (False, True):
        monkeypatch.delitem(sys.modules, name)
        shared = SharedByRollouts(several=True)
        turn = shared.begin()
        monkeypatch.setitem(sys.modules, name, module)
        if change:
            monkeypatch.setattr(module.Responses, "create", lambda *_: {})
        said = f"replaced {name}.Responses.create of the interpreter" if change else ""
        assert shared.end(turn) == (said, [])
        assert shared.lasting == said


def test_directory_variables_and_umask_are_put_back_and_each_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(home)
    for name in ("GONE", "SET", "ADDED"):
        monkeypatch.setenv(name, "1")
    del os.environ["ADDED"]
    before, shared = umask(), SharedByRollouts(several=True)
    did = [f"changed the current directory to {elsewhere}", "removed GONE from os.environ"]
    mask = f"changed the umask from {before:03o} to {before ^ 0o007:03o}"
    for beside, told in ((False, [*did, mask]), (False, []), (True, [])):
        turns = [shared.begin() for _ in range(1 + beside)]
        os.chdir(elsewhere)
        os.umask(before ^ 0o007)
        os.environ.update(SET="2", ADDED="3")
        del os.environ["GONE"]
        if beside:
            with pytest.raises(InterpreterChanged, match=f"^{' and '.join(did)} "):
                shared.end(turns[0])
            assert shared.end(turns[1]) == ("", [])  # only the umask: that loses no rollout
        else:
            assert shared.end(turns[0]) == ("", told)
        assert (Path.cwd(), umask(), *map(os.getenv, ("GONE", "SET", "ADDED"))) == (home, before, "1", "2", "3")
    os.chdir(elsewhere)
    home.rmdir()
    shared.end(shared.begin())
    assert shared.lasting == f"{did[0]}, and {home} is gone (No such file or directory)"


def test_a_rollout_that_holds_the_interpreter_is_told_from_a_slow_one(
    model: ModelServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "ANSWER_S", 1.0)
    messages = []
    for do in ("holds", "hang"):
        pool = start(deadline_s=2.0, retries=0, threads=1)
        late, after = outcomes(pool, jobs(model, do, ""))
        assert (late.failure, after.answer) == ("deadline", "odd")
        messages.append(late.message)
    assert messages[0] == messages[1] + pools.HELD


@pytest.mark.slow
def test_other_rollouts_of_a_killed_runner_do_not_count_as_lost(model: ModelServer, start: Start) -> None:
    pool = start(deadline_s=3.0, retries=0, threads=2)
    # Slow ones are running whenever a hanging one is killed; without retries, counting them as lost would fail them.
    found = outcomes(pool, jobs(model, "hang", "slow", "slow", "hang", "slow", "slow"))
    assert [bool(o.failure) for o in found] == [True, False, False, True, False, False]


def test_a_runner_that_is_killed_is_replaced_and_its_rollouts_run_again(
    model: ModelServer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    pool = start(n=1)
    submit(pool, jobs(model, *["slow"] * 6))
    while pool.pending and not model.requests and not any(w.jobs for w in pool._workers):
        pool.poll(0.05)
    (first,) = pool.processes()
    os.kill(first, signal.SIGKILL)
    results = drain(pool, 6)
    assert sorted(r.id for r in results) == [f"job-{i}" for i in range(6)]
    assert {r.outcome.failure for r in results} == {None}
    assert first not in pool.processes()
    assert pool.replaced == 1
    assert f"runner {first} died (killed by SIGKILL); 4 rollouts start again, 0 failed" in caplog.text
    assert "get new samples, so the seed will not repeat this run" in caplog.text


@pytest.mark.slow
def test_an_agent_that_kills_its_process_is_a_failure_after_its_retries(
    model: ModelServer, start: Start, tmp_path: Path
) -> None:
    pool = start(threads=1, retries=1)
    found = outcomes(pool, jobs(model, "", "die", "", "die-once", "", marker=str(tmp_path)))
    assert [o.failure for o in found] == [None, "runner-died", None, None, None]
    assert found[1].message == "the runner process died (killed by SIGKILL), 2 times"
    assert (tmp_path / "seen-3").exists()
    assert pool.replaced == 3


@pytest.mark.slow
@pytest.mark.parametrize("do", ["closes", "closes-and-opens"])
def test_a_runner_whose_connection_an_agent_closes_is_dead_at_once(
    do: str, model: ModelServer, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    pool = start(threads=4, deadline_s=60.0)
    closes, *others = outcomes(pool, jobs(model, do, "slower", "slower", "slower", marker=str(tmp_path)))
    assert [o.answer for o in others] == ["odd"] * 3
    assert closes.failure == "runner-died"
    assert (tmp_path / "file").read_bytes() == b""  # no result was written into what has its number now
    assert re.search(r"died \(exit code [01]\); 4 rollouts start again, 0 failed", caplog.text)


@pytest.mark.slow
def test_the_siblings_of_a_rollout_that_stops_its_runner_start_again(model: ModelServer, start: Start) -> None:
    pool = start(threads=4, deadline_s=4.0)
    stops, *others = outcomes(pool, jobs(model, "stops", "slow", "slow", "slow"))
    assert [o.answer for o in others] == ["odd"] * 3
    assert (stops.failure, stops.message) == ("runner-died", "the runner process was stopped by a signal, 2 times")


@pytest.mark.slow
def test_the_siblings_of_a_rollout_that_keeps_the_interpreter_are_not_called_late(
    model: ModelServer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """All of them ran past their deadline, and each was called late."""
    pool = start(threads=4, deadline_s=2.0)
    first, holds, last = outcomes(pool, jobs(model, "slow", "holds", "slow"))
    assert (first.answer, holds.failure, last.answer) == ("odd", "deadline", "odd")
    held = "with 3 rollouts is killed: it could run nothing, because native code kept Python's interpreter"
    assert held in caplog.text


@pytest.mark.slow
def test_without_retries_all_are_named_as_suspects(model: ModelServer, start: Start) -> None:
    pool = start(threads=4, deadline_s=2.0, retries=0)
    said = {o.message for o in outcomes(pool, jobs(model, "stops", "slow"))}
    suspects = "2 rollouts were under way in it, and which of them did it is not known"
    assert said == {f"the runner process was stopped by a signal; {suspects}"}


def sleeping(word: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", word]]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "hang", "die"])
def test_nothing_is_left_of_an_agent_whose_processes_leave_its_family(
    how: str, model: ModelServer, start: Start
) -> None:
    """Each has a session of its own, no variables and no parent: only an adopted process can be found."""
    word = f"98{os.getpid()}"
    pool = start(threads=1, retries=0, deadline_s=4.0)
    submit(pool, jobs(model, *["daemon-" if how == "close" else f"daemon-{how}"] * 2, sleep=word))
    found: list[Result] = []
    while how != "die" and not sleeping(word):
        found += pool.poll(0.05)
    kinds = [r.outcome.failure for r in found + drain(pool, 2 - len(found))]
    assert kinds == [{"close": None, "hang": "deadline", "die": "runner-died"}[how]] * 2
    pool.close()
    left = sleeping(word)
    for process in left:
        process.kill()
    assert left == []


def test_processes_that_nobody_waits_for_do_not_pile_up(model: ModelServer, start: Start) -> None:
    pool = start(threads=1)
    assert [o.failure for o in outcomes(pool, jobs(model, *["daemon-"] * 5, sleep="0.01"))] == [None] * 5
    (runner,) = pool.processes()
    time.sleep(0.5)
    family = [psutil.Process(runner), *psutil.Process(runner).parents()[:1]]
    children = {p for each in family for p in each.children() if p.name() == "sleep"}
    assert [p.status() for p in children] == []


def test_an_agent_whose_build_calls_exit_is_told_so(start: Start) -> None:
    """It was sent to `agentrig dev`, which said the same."""
    pool = start("toy-broken", config={"how": "exit"})
    said = r"it called os\._exit\(0\), .*; raise an error instead \(toy_plugin\.py:\d+ in build_broken\)"
    with pytest.raises(AgentrigError, match=said):
        drain(pool, 1, timeout_s=30)


def test_a_runner_that_has_no_memory_for_threads_says_so(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    pool = start("toy-broken", config={"how": "threads"})
    with pytest.raises(AgentrigError, match=r"no runner can start: this .* memory"):
        drain(pool, 1, timeout_s=30)
    assert "Traceback" not in capfd.readouterr().err


def test_an_agent_whose_build_hangs_is_reported(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentrig.runners.pools.READY_S", 1.0)
    monkeypatch.setattr("agentrig.runners.pools.SLOW_S", 0.3)
    monkeypatch.setattr("agentrig.runners.pools._told_slow", set())
    caplog.set_level(logging.INFO, "agentrig.runners")
    for _ in range(2):
        pool = start("toy-broken", config={"how": "hang"})
        with pytest.raises(AgentrigError, match="the agent toy-broken has not been built after 1 s"):
            drain(pool, 1, timeout_s=20)
    said = [r for r in caplog.records if "the agent toy-broken is still being built after 0.3 s" in r.getMessage()]
    assert [r.levelname for r in said] == ["INFO"]


def test_a_module_to_preload_that_is_not_installed_is_named(toy_file: str, caplog: pytest.LogCaptureFixture) -> None:
    plan = AgentPlan(name="toy", config={}, files=(toy_file,))
    Pool(plan, n=0, threads=1, deadline_s=20.0, retries=0, preload=("json", "no_such_module_x.y")).close()
    (said,) = caplog.records
    assert said.message == "the agent toy has the module no_such_module_x.y in its `preload`, and it is not installed"


@pytest.mark.slow
def test_the_first_runner_shows_early_whether_the_agent_can_be_built(model: ModelServer, toy_file: str) -> None:
    """It stays: `start` adds the others."""

    def pool(agent: str, **config: Any) -> Pool:
        plan = AgentPlan(name=agent, config=config, files=(toy_file,))
        return Pool(plan, n=2, threads=2, deadline_s=20.0, retries=1)

    with contextlib.closing(pool("toy")) as sound:
        assert sound.build_first(60.0)
        (first,) = sound.processes()
        sound.start()
        assert sound.processes()[0] == first
        assert len(sound.processes()) == 2
        assert len(outcomes(sound, jobs(model, "", ""))) == 2
    for how, said in (
        ("raise", r"its prompts are missing \(toy_plugin\.py:\d+ in build_broken\)"),
        ("die", "exit code 7"),
    ):
        with contextlib.closing(pool("toy-broken", how=how)) as broken, pytest.raises(AgentrigError, match=said):
            broken.build_first(60.0)
    with contextlib.closing(pool("toy-broken", how="hang")) as slow:
        start = time.monotonic()
        assert not slow.build_first(1.0)
        assert time.monotonic() - start < 20


def test_an_async_agent_may_share_one_client_among_its_rollouts(model: ModelServer, start: Start) -> None:
    pool = start("toy-shared", threads=4)
    submit(pool, jobs(model, *[""] * 24))
    results = drain(pool, 24)
    assert [r.outcome.message for r in results if r.outcome.failure] == []
    assert {tuple(r.trace.nodes(r.trace.llm_calls()[0])) for r in results} == {("write_query",)}
    prompts = {r.id: bytes(r.trace.llm_calls()[0].attributes["prompt_token_ids"]).decode() for r in results}
    assert prompts == {f"job-{i}": f"Is {i} odd?" for i in range(24)}


def test_what_blocks_the_event_loop_of_a_runner_is_named(
    model: ModelServer, start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`time.sleep` in an async agent: its siblings' calls timed out, which looked like a fault of the server."""
    monkeypatch.setattr(pools, "_told_blocked", set())
    pool = start("toy-shared", threads=2, deadline_s=6.0)
    late, *others = outcomes(pool, jobs(model, "hang", "", ""))
    assert [o.answer for o in others] == ["odd"] * 2
    place, cure = r"toy_plugin\.py:\d+ in misbehave", "`await asyncio.to_thread"
    assert late.failure == "deadline"
    assert re.search(rf"; meanwhile {place} blocked the event loop, which all .* {cure}", late.message)
    (said,) = [text for text in caplog.messages if "blocks the event loop" in text]
    assert re.match(rf"the agent toy-shared blocks the event loop at {place}, which all .* {cure}", said)


def test_a_timeout_while_the_event_loop_was_blocked_does_not_blame_the_model() -> None:
    places: list[str] = []
    loop, client = RunnerLoop(places.append, tick_s=0.1), httpx.AsyncClient(timeout=0.2)
    outcomes = queue.SimpleQueue[Outcome]()

    async def blocks(task_input: Any, endpoint: Endpoint) -> Any:
        while not places:
            time.sleep(0.01)

    async def waits(task_input: Any, endpoint: Endpoint) -> Any:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            call = asyncio.create_task(client.get(f"http://127.0.0.1:{silent.getsockname()[1]}"))
            await asyncio.sleep(0.05)
            threading.Thread(target=lambda: outcomes.put(run(blocks, loop).outcome), daemon=True).start()
            await call

    outcome = run(waits, loop).outcome
    assert outcome.failure == "agent-error"
    assert re.match(
        r"(Read|Connect)Timeout.*; meanwhile test_processes\.py:\d+ in blocks blocked the event", outcome.message
    )
    assert outcomes.get(timeout=20).failure is None
    later = run(waits, loop).outcome  # nothing blocks it any more
    assert (later.failure, "blocked" in later.message) == ("llm-error", False)


def test_wake_ends_a_wait(start: Start) -> None:
    pool = start()
    drain(pool, 0)
    pool.wake()
    pool.wake()
    before = time.monotonic()
    pool.poll(5)
    assert time.monotonic() - before < 4


# --- one rollout, in this process ------------------------------------------------------------------


@pytest.fixture(scope="module")
def loop() -> RunnerLoop:
    return RunnerLoop()


ENDPOINT = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")


def run(agent: Any, loop: RunnerLoop | None = None) -> Result:
    return run_agent(agent, Job(id="r", input={"a": 1}, endpoint=ENDPOINT), loop)


def test_agents_may_be_coroutines_or_objects(loop: RunnerLoop) -> None:
    async def answer(task_input: Any, endpoint: Endpoint) -> Any:
        await asyncio.sleep(0)
        return {"doubled": 2 * task_input["a"]}

    class Agent:
        async def __call__(self, task_input: Any, endpoint: Endpoint) -> Any:
            return [endpoint.model]

    assert run(answer).outcome.answer == run(answer, loop).outcome.answer == {"doubled": 2}
    assert run(Agent()).outcome.answer == ["m"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("x"), "agent-error"),
        (httpx.ReadTimeout("x"), "llm-error"),
        (AgentFailure("x"), "agent-error"),
        (AgentFailure("x", kind="no-plan"), "no-plan"),
    ],
)
def test_kinds_of_failure(error: Exception, kind: str) -> None:
    assert failure_kind(error) == kind
    outer = RuntimeError("the chain failed")
    outer.__cause__ = error
    assert failure_kind(outer) == kind


def test_failures_that_an_agent_states_wrongly_are_named() -> None:
    class Leaves(Exception):
        def __str__(self) -> str:
            sys.exit(3)

    def agent(task_input: Any, endpoint: Endpoint) -> Any:
        raise task_input["a"]

    def outcome(error: Exception) -> Outcome:
        return run_agent(agent, Job(id="r", input={"a": error}, endpoint=ENDPOINT)).outcome

    left, unkind = outcome(Leaves()), outcome(AgentFailure(None, kind=None))  # type: ignore[arg-type]
    assert re.match(r"Leaves: \(its message raised SystemExit\) \(test_processes\.py:\d+ in agent\)", left.message)
    assert (left.failure, unkind.failure) == ("agent-error", "agent-error")
    assert "its kind '<NoneType>' is no short name" in unkind.message


@pytest.mark.parametrize(("hide", "kind"), [(False, "llm-error"), (True, "agent-error")])
def test_the_cause_counts_unless_it_is_hidden_on_purpose(hide: bool, kind: str) -> None:
    def agent(task_input: Any, endpoint: Endpoint) -> Any:
        try:
            raise httpx.ReadTimeout("x")
        except httpx.ReadTimeout:
            if hide:
                raise ValueError("no answer") from None
            raise ValueError("no answer")  # noqa: B904  (what is tested)

    assert run(agent).outcome.failure == kind


def test_an_agent_that_exits_is_a_failure_of_its_rollout_alone(loop: RunnerLoop) -> None:
    async def coroutine(task_input: Any, endpoint: Endpoint) -> Any:
        raise SystemExit(3)

    def cancelled(task_input: Any, endpoint: Endpoint) -> Any:
        raise asyncio.CancelledError("3")

    async def interrupted(task_input: Any, endpoint: Endpoint) -> Any:
        raise KeyboardInterrupt("3")

    async def of_a_task(task_input: Any, endpoint: Endpoint) -> Any:
        await asyncio.create_task(coroutine(task_input, endpoint))

    async def stopped(task_input: Any, endpoint: Endpoint) -> Any:
        asyncio.get_running_loop().stop()

    async def waits(task_input: Any, endpoint: Endpoint) -> Any:
        await going.wait()
        return "odd"

    going, other = asyncio.Event(), queue.SimpleQueue[Result]()
    threading.Thread(target=lambda: other.put(run(waits, loop)), daemon=True).start()
    for agent in (coroutine, lambda task_input, endpoint: sys.exit(3), cancelled, interrupted, of_a_task):
        outcome = run(agent, loop).outcome
        assert outcome.failure == "agent-error"
        assert "3" in outcome.message
    outcome = run(stopped, loop).outcome
    said = "RuntimeError: it stopped the event loop that the rollouts of a runner share; return an answer instead"
    assert outcome.failure == "agent-error"
    assert outcome.message.startswith(f"{said} (test_processes.py:"), outcome.message
    loop.loop.call_soon_threadsafe(going.set)
    assert other.get(timeout=20).outcome.answer == "odd"  # it did not even notice


def test_a_script_without_a_main_guard_is_told_what_to_write(tmp_path: Path, toy_file: str) -> None:
    """Its runners import it, and would start runs of their own; a command, too, that a script calls."""
    script = tmp_path / "no_guard.py"
    script.write_text(
        "from agentrig.processes.ends import no_silent_end\n"
        "from agentrig.runners.jobs import AgentPlan\n"
        "from agentrig.runners.processes import Pool\n"
        f"plan = AgentPlan(name='toy', config={{}}, files=({toy_file!r},))\n"
        "with no_silent_end():\n"
        "    Pool(plan, n=1, threads=1, deadline_s=20.0, retries=0).build_first(60.0)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert f"AgentrigError: {script} starts a run whenever it is imported" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.rstrip().endswith('if __name__ == "__main__":')


def test_a_script_is_imported_with_the_variables_that_its_agent_gets(tmp_path: Path, toy_file: str) -> None:
    """What it reads at its top must not be another value in the runners."""
    script, seen = tmp_path / "guarded.py", tmp_path / "seen"
    script.write_text(
        "import os\n"
        f"with open({str(seen)!r}, 'a') as file:\n"
        "    print(__name__, os.environ.get('MY_DIR'), os.environ.get('MY_KEY'), file=file)\n"
        "from agentrig.runners.jobs import AgentPlan\n"
        "from agentrig.runners.processes import Pool\n"
        "if __name__ == '__main__':\n"
        f"    plan = AgentPlan(name='toy', config={{}}, files=({toy_file!r},), environment=('MY_DIR',))\n"
        "    pool = Pool(plan, n=1, threads=1, deadline_s=20.0, retries=0)\n"
        "    pool.build_first(60.0)\n"
        "    pool.close()\n"
    )
    environment = {**os.environ, "MY_DIR": "here", "MY_KEY": "secret"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert seen.read_text() == "__main__ here secret\n__mp_main__ here None\n"
