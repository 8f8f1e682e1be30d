"""The ledger of complete runs: real agents, servers and adapters; a killed and resumed run; a run with a lost call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from model_server import ModelServer, model_server
from rollouts import rollout, trace_of

from agentrig import Span, Trace
from agentrig.adapters import identified, triplet_of
from agentrig.errors import RunStopped
from agentrig.ledger import Call, Entry, Ledger
from agentrig.plan import resolve
from agentrig.run.resume import resume_plan
from agentrig.run.training import train
from agentrig.traces import ABORTED, LLM_CALL
from agentrig.view.causes.calls import line
from agentrig.view.page import render
from agentrig.view.reading import read_run
from agentrig.view.tables import tables

SUPPORT = Path(__file__).parents[1] / "support"


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [("agent-match", "unmatched-node"), pytest.param("toy-match", "left-out-by-adapter", marks=pytest.mark.slow)],
)
def test_every_call_of_an_agent_with_two_nodes_is_counted_once(
    model: ModelServer, tmp_path: Path, toy_file: str, monkeypatch: pytest.MonkeyPatch, adapter: str, reason: str
) -> None:
    with model_server() as other:
        monkeypatch.setenv("OTHER_SERVER", other.url)
        own = [f"algorithm.endpoint={model.url}", f"run.directory={tmp_path}/runs", "run.name=toy"]
        settings = ["algorithm.steps=2", "algorithm.tasks=12", "adapter.match=write", "run.failure_limit=0.5"]
        plan = resolve(
            "toy",
            overrides=[*own, *settings, "algorithm.report=false", "run.validation_tasks=1", 'run.block=["report"]'],
            uses={"adapter": adapter, "agent": "two-nodes"},
            files=[toy_file, str(SUPPORT / "two_nodes.py")],
        )
        summary = train(plan)
        elsewhere = len(other.requests)
    run = tmp_path / "runs" / "toy"
    # A step has 12 tasks with two rollouts, a write and a check. Every third task also calls another server. Every
    # fourth has two more calls, an error and a reply without token ids. Two rollouts of other tasks fail as a whole.
    dropped = {"call-error": 6, "no-token-ids": 6, "other-server": 8, "failed-rollout": 8, reason: 20}
    for step in lines_of(run):
        assert step["calls"] == {"recorded": 68, "trained": 0, "masked": 0, "handed_over": 20, "dropped": dropped}
        assert step["call_tokens"]["recorded"] == 3 * (20 + 8 + 20)  # "odd", where there are token ids
        assert step["call_tokens"]["handed_over"] == 3 * 20
    assert elsewhere >= 16
    assert summary["calls"]["recorded"] == 136
    assert summary["calls"]["dropped"] == {name: 2 * n for name, n in dropped.items()}
    (found,) = line(read_run(run))
    said = "40 handed over to the algorithm toy-number, which does not say what it did with them"
    assert found.text.startswith(f"136 calls: {said}, 96 left out on purpose: 40 {reason}, 16 ")
    page = render([read_run(run)])
    assert said in page
    assert f"dropped: {reason}" in page
    (calls,) = (table for table in tables(read_run(run)) if table.title == "Calls")
    assert sum(int(n) for _, n, _, _ in calls.rows) == 136


@pytest.mark.slow
def test_a_resumed_run_sums_over_all_its_steps(
    model: ModelServer, toy_plan: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(ConnectionAbortedError):
        train(toy_plan("algorithm.steps=3", "algorithm.cut_after=1"))
    run = tmp_path / "runs" / "toy"
    before = json.loads((run / "summary.json").read_text())
    summary = train(resume_plan(run, overrides=["algorithm.cut_after=0"]), resume=run)
    assert before["calls"]["recorded"] == 12
    assert summary["calls"] == {"recorded": 36, "trained": 0, "masked": 0, "handed_over": 36, "dropped": {}}
    assert summary["call_tokens"]["handed_over"] == 3 * 36


def doubled() -> Trace:
    """Return a trace in which two tracers recorded the same call."""
    trace = trace_of("write_query")
    call = trace.llm_calls()[0]
    twin = Span(
        id="twin", parent="root", name=LLM_CALL, start=0, end=1,
        attributes={**call.attributes, "gen_ai.response.id": "chat-1"},
    )  # fmt: skip
    first = Span(id="first", parent="root", name=LLM_CALL, start=0, end=1, attributes=twin.attributes)
    return Trace(rollout_id="r", spans=(trace.spans[0], first, twin))


def ledger(adapter: Any = lambda trace: []) -> Ledger:
    return Ledger(adapter, adapter_name="mine", algorithm_name="own")


def test_a_call_that_was_recorded_twice_counts_once() -> None:
    trace = doubled()
    kept = triplet_of(trace.llm_calls()[0])
    assert kept is not None
    books = ledger()
    books.record([rollout(trace=trace, triplets=[kept])], step=1)
    found = books.close([Entry(Call("r", "first"), "trained", 1)], step=1)
    assert not found.wrong
    assert (found.calls["trained"], found.calls["dropped"]) == (1, {"duplicate": 1})


def test_triplets_without_a_span_belong_to_calls_with_their_tokens() -> None:
    trace = doubled()
    bare = [attrs.evolve(t, span_id="") for c in trace.llm_calls() if (t := triplet_of(c))]
    assert [t.span_id for t in identified(bare, trace)] == ["first", "twin"]
    strange = attrs.evolve(bare[0], response_ids=(9, 9))
    with pytest.raises(RunStopped, match=r"a triplet belongs to no recorded call.*span \(none\) \(2 tokens\)"):
        ledger().record([rollout(trace=trace, triplets=identified([strange], trace))], step=1)


def test_a_triplet_of_a_failed_call_ends_the_run() -> None:
    trace = trace_of("write_query")
    call = trace.llm_calls()[0]
    kept = triplet_of(call)
    assert kept is not None
    broken = attrs.evolve(trace, spans=[attrs.evolve(s, error="cut off") if s is call else s for s in trace.spans])
    with pytest.raises(RunStopped, match=r"1 x a call gave a triplet that cannot be trained.*\(call-error\)"):
        ledger().record([rollout(trace=broken, triplets=[kept])], step=1)


@pytest.mark.parametrize("failure", [None, "deadline"])
def test_a_call_that_the_agent_ended_is_told_from_one_that_failed(failure: str | None) -> None:
    """The end of a failed rollout ends its open calls: these count as calls of a failed rollout."""
    made = trace_of("write", "check")
    failed, aborted = made.llm_calls()
    errors = {failed.id: ("HTTP 500", {}), aborted.id: ("cut off", {ABORTED: True})}
    spans = [
        attrs.evolve(s, error=errors[s.id][0], attributes=errors[s.id][1]) if s.id in errors else s for s in made.spans
    ]
    made = attrs.evolve(made, spans=spans)
    books = ledger()
    books.record([rollout(None if failure else 1.0, trace=made, failure=failure)], step=1)
    reason = "failed-rollout" if failure else "aborted-call"
    assert books.close((), step=1).calls["dropped"] == {"call-error": 1, reason: 1}


def test_an_entry_without_a_reason_and_one_for_a_call_that_was_not_kept_do_not_close() -> None:
    trace = trace_of("write_query", "check_query")
    kept = triplet_of(trace.llm_calls()[0])
    assert kept is not None
    books = ledger()
    books.record([rollout(trace=trace, triplets=[kept])], step=4)
    entries = [Entry(Call("r", "c0"), "dropped", 1), Entry(Call("r", "c1"), "trained", 1)]
    wrong = books.close(entries, step=4).wrong
    assert wrong.startswith("step 4: the ledger of calls does not close: what the algorithm own did with its 1 call")
    assert "1 x a call was dropped without a reason" in wrong
    assert re.search(r"1 x a call was trained that the adapter did not keep: .*\(left-out-by-adapter\)", wrong)


@pytest.mark.slow
def test_a_whole_run_that_loses_a_call_ends_with_its_name_and_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrig.run.loop import Loop

    real = Loop._samples

    def lost(self: Loop, rollouts: Any) -> Any:
        samples, left_out = real(self, rollouts)
        return samples[1:], left_out

    monkeypatch.setattr(Loop, "_samples", lost)
    small = ["algorithm.tasks_per_step=4", "algorithm.group_size=4", "run.validation_tasks=4", "run.report_tasks=4"]
    own = [f"run.directory={tmp_path}/runs", "run.name=a", "algorithm.steps=3", "hardware.threads=1", "runners.n=1"]
    said = r"step 1: the ledger of calls does not close: .* algorithm grpo did .*\n +1 x a call got lost: .* node w"
    with pytest.raises(RunStopped, match=said):
        train(resolve("mini", overrides=[*own, *small]))
    run = tmp_path / "runs" / "a"
    (step,) = lines_of(run)
    assert step["calls"]["unaccounted"] == 1
    assert not (run / "checkpoints" / "latest").exists()
    assert "1 not accounted for" in (run / "report.html").read_text("utf-8")
