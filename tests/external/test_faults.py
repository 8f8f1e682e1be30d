"""What a program can do wrong: each fault is a typed failure of its own rollout, and nothing of it is left.

All faults run at once, in the threads of one runner process, beside rollouts with no fault.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest

from agentrig.gateway.process import Gateway
from agentrig.gateway.settings import GatewaySettings
from agentrig.pools import Job, Result
from agentrig.testing.agent import AgentSubject
from agentrig.testing.scripted import Reply, scripted_server
from agentrig.traces import LLM_CALL

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl on this machine")

GOOD = 3
TIME_S = 8.0
"""Time limit of each program; only those that never end need it."""

MARKED = "sleep 987654"


def reply(body: Mapping[str, Any]) -> Reply:
    """Answer at once, or in a stream that lasts longer than the tests."""
    wish = body["messages"][-1]["content"]
    return Reply(text="x" * 100_000, pause_s=0.05) if wish == "[long]" else Reply(text="fine")


@attrs.frozen
class Played:
    """Results by what the program did, in the order in which they came; the requests that reached the model."""

    results: Mapping[str, Result]
    asked: Sequence[str]
    place: Path

    def failure(self, do: str) -> tuple[str | None, str]:
        outcome = self.results[do].outcome
        return outcome.failure, outcome.message


DOS = (
    "never-answers", "answers-twice", "writes-for-ever", "streams-for-ever", "sends-much", "breaks-off", "forks",
    "fills-disk", "fills-memory", "leaves-key",
)  # fmt: skip


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    place = tmp_path_factory.mktemp("place")
    script = Path(__file__).with_name("faulty.sh")
    settings = {
        "command": ["bash", str(script)],
        "variables": {"PLACE": str(place)},
        "exit_codes": {"22": "llm-error"},
        "time_s": TIME_S,
        "memory_mb": 200,
        "output_mb": 2,
        "disk_mb": 5,
        "processes": 20,
    }
    file = str(Path(__file__).parents[1] / "support" / "faulty_plugin.py")
    subject = AgentSubject(kind="agent", given=file, settings=settings, deadline_s=60)
    with (
        scripted_server(reply) as server,
        Gateway(GatewaySettings()) as gateway,
        closing(subject),
    ):
        pool = subject.started(threads=len(DOS) + GOOD + 1)
        endpoint = attrs.evolve(server.endpoint(temperature=0.5), gateway=gateway.address)

        def submit(do: str, name: str = "") -> None:
            pool.submit(Job(id=name or do, input={"do": do}, endpoint=endpoint))

        results: dict[str, Result] = {}

        def poll() -> None:
            results.update({result.id: result for result in pool.poll(0.2)})

        for do in DOS:
            submit(do)
        for i in range(GOOD):
            submit("good", f"good-{i}")
        end = time.monotonic() + 50
        while not (place / "key").exists():
            poll()
            assert time.monotonic() < end
        submit("steals")
        while "steals" not in results:
            poll()
            assert time.monotonic() < end
        (place / "stolen").touch()
        while "leaves-key" not in results:
            poll()
            assert time.monotonic() < end
        submit("calls-late")
        while pool.pending:
            poll()
            assert time.monotonic() < end
        assert pool.replaced == 0
        yield Played(results, [body["messages"][-1]["content"] for body in server.bodies()], place)


@pytest.mark.slow
def test_rollouts_beside_it_are_answered_before_it_ends(played: Played) -> None:
    good = [f"good-{i}" for i in range(GOOD)]
    assert [played.results[name].outcome.answer for name in good] == ["good"] * GOOD
    order = list(played.results)
    assert max(order.index(name) for name in good) < order.index("never-answers")
    assert all(played.results[name].duration_s < TIME_S for name in good)
    calls = [s for name in good for s in played.results[name].trace.llm_calls()]
    assert [s.attributes["response_token_ids"] for s in calls] == [list(b"fine")] * GOOD


FAILURES = {
    "never-answers": ("deadline", "longer than time_s = 8"),
    "answers-twice": ("answered-twice", ""),
    "writes-for-ever": ("output-limit", "output_mb = 2"),
    "streams-for-ever": ("deadline", ""),
    "sends-much": ("llm-error", "body_mb"),
    "breaks-off": ("llm-error", ""),
    "forks": ("process-limit", "processes = 20"),
    "fills-disk": ("disk-limit", "disk_mb = 5"),
    "fills-memory": ("memory-limit", "memory_mb = 200"),
    "steals": ("llm-error", "not the one of this rollout"),
    "calls-late": ("llm-error", "has ended"),
}
"""What a program does to the kind of its failure, and what its message says."""


@pytest.mark.parametrize("do", FAILURES)
def test_each_fault_is_a_typed_failure(played: Played, do: str) -> None:
    kind, message = played.failure(do)
    assert (kind, FAILURES[do][1] in message) == (FAILURES[do][0], True), message


def test_calls_that_were_cut_short_are_never_trained(played: Played) -> None:
    for do, error in (("streams-for-ever", ""), ("breaks-off", "broken the connection")):
        trace = played.results[do].trace
        (call,) = [s for s in trace.spans if s.name == LLM_CALL]
        assert call.error is not None
        assert error in call.error
        assert trace.llm_calls() == []


def test_calls_with_another_rollouts_key_and_after_the_end_reach_no_model(played: Played) -> None:
    assert not {"stolen", "late"} & set(played.asked)
    assert played.results["leaves-key"].outcome.answer == "good"
    assert len(played.results["leaves-key"].trace.llm_calls()) == 1


def test_nothing_is_left_running_and_no_key_is_kept(played: Played) -> None:
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        assert MARKED not in line
        assert "faulty.sh" not in line
    key = (played.place / "key").read_text().strip()
    assert key.startswith("agentrig-")
    assert key not in repr([(r.outcome, r.trace.spans) for r in played.results.values()])
