"""Which steps a run audits, and that it can be turned off."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest
import torch
from audited_runs import tiny_model, trained

from agentrig.audit import auditor, update
from agentrig.audit import sketch as sketches
from agentrig.audit.record import Call, Row
from agentrig.audit.scores import moved
from agentrig.audit.sketch import Sketch
from agentrig.audit.verdicts import LINKS, UNSEEN, Verdict
from agentrig.errors import RunStopped
from agentrig.plan import Plan, resolve
from agentrig.run import auditing
from agentrig.run.auditing import Auditing, Rebuilt
from agentrig.tasks import Task


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the auditor say what is given: of a whole step, and, where only some links are asked for, `late`."""

    def tell(
        found: Sequence[Verdict] = (), *, late: Sequence[Verdict] = (), seconds: float = 4.0, work: Any = lambda _: None
    ) -> None:
        class Looker:
            def audit(self, step: int, links: object = None, **given: object) -> auditor.Audited:
                work(links)
                return auditor.Audited(step=step, verdicts=list(late if links else found), seconds=seconds)

        monkeypatch.setattr(auditor, "Auditor", lambda *given: Looker())
        monkeypatch.setattr(Rebuilt, "sources", lambda self, **more: None)

    return tell


@pytest.mark.slow
def test_the_auditor_can_be_turned_off(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run = trained(tmp_path, tiny_model(tmp_path), "run.audit=false", "algorithm.steps=1", "run.report_tasks=1")
    assert not (run / "audit").exists()
    assert json.loads((run / "summary.json").read_text())["audited"]["steps"] == []


def test_a_link_whose_model_does_not_fit_is_not_seen_and_the_message_says_what_to_set(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def look() -> Iterator[Verdict]:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB of which 1.50 GiB "
            "is free. Including non-PyTorch memory, this process has 40.90 GiB memory in use."
        )
        yield

    (found,) = auditor._tried("gradient", look())
    assert (found.result, found.detail) == (
        UNSEEN,
        "the device ran out of memory: 2.0 GiB were asked for; of the device's 79.2 GiB, 1.5 GiB are free, this "
        "process holds 40.9 GiB, and other processes hold 36.8 GiB. The run goes on without it; run.audit=false "
        "leaves out all audits",
    )
    (record,) = caplog.records
    assert record.getMessage() == f"the auditor can't look at the link gradient: {found.detail}"
    assert not record.exc_info


def test_the_first_two_steps_are_audited_and_then_as_many_as_two_percent_of_the_time_allow(
    told: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(auditing.time, "monotonic", lambda: clock[0])
    told(work=lambda links: clock.insert(0, clock[0] + (0.0 if links else 4.0)))
    watched = Auditing(tmp_path, Rebuilt(resolve("mini")), first=11)  # a resumed run
    audited, later = [], 0.0
    for step in range(11, 211):
        watched.sketch(step)
        due = watched.due
        clock[0] += 10.0
        before = clock[0]
        watched.end(step, {"step": step, "step_s": 10.0})
        if due:
            audited.append(step)
            later += (clock[0] - before) * (step > 12)
    assert audited[:2] == [11, 12]
    assert 8 <= len(audited) <= 12, audited
    assert 0.015 < later / clock[0] <= 0.02
    assert watched.summary()["steps"] == audited


def test_a_learner_cannot_tell_which_steps_are_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditing, "CHANCE", 0.0)
    audited = Auditing(tmp_path, Rebuilt(resolve("mini")))
    trained = {f"layer-{i}": torch.nn.Parameter(torch.ones(40, 3)) for i in range(9)}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.1)
    followed = []
    for step in (1, 2, 3):
        sketch = audited.sketch(step)  # a learner that clears gradients for a sketch only clears them in each step
        for p in trained.values():
            p.grad = torch.ones_like(p)
        assert sketch.take(trained, optimizer, [("rollout", "call")], 1.0) is None
        optimizer.step()
        sketch.after(trained)
        (update,) = sketch.updates
        assert all(seen["after"] != seen["weights"] for seen in update["tensors"].values())
        followed.append([len(update["tensors"]), len(sketch.kept.get(0, {}))])
    assert followed == [[9, 9], [9, 9], [4, 0]]


@pytest.mark.parametrize(("most", "kept"), [(2, 2), (3, 3), (9, 4)])
def test_weights_before_updates_are_kept_up_to_a_limit_of_bytes(
    most: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    monkeypatch.setattr(sketches, "KEPT", most * 12 if most > 2 else 0)
    optimizer, numbers = torch.optim.AdamW([weight]), dict[int, set[int]]()
    for step in range(1, 60):
        sketch = Sketch(step)
        for number in range(4):
            with torch.no_grad():
                weight.fill_(number)
            sketch.take({"weight": weight}, optimizer, [], 1.0)
        assert len(sketch.kept) == kept
        assert {n: kept["weight"].tolist() for n, kept in sketch.kept.items()} == {n: [n] * 3 for n in sketch.kept}
        assert step != 2 or 3 in sketch.kept
        numbers.setdefault(step, set()).update(sketch.kept)
    assert all(0 in of for of in numbers.values())
    assert set().union(*(of for step, of in numbers.items() if step > 2)) == {0, 1, 2, 3}


def test_two_steps_look_at_each_of_four_updates_if_each_has_time_for_two() -> None:
    sketch = Sketch(1)
    sketch.kept = {number: {} for number in range(4)}
    assert [update._order(sketch, step) for step in (1, 2)] == [[0, 2, 1, 3], [3, 1, 2, 0]]
    sketch.kept = {}
    assert update._order(sketch, 1) == [0]


def test_a_fault_at_the_end_of_a_run_keeps_what_its_last_audit_said(told: Callable[..., None], tmp_path: Path) -> None:
    said = [Verdict(link=name, result="ok", detail="as it was") for name in ("score", "held-out")]
    told(said, late=[Verdict(link="held-out", result="fault", detail="another accuracy", causes="the summary")])
    watched = Auditing(tmp_path, Rebuilt(resolve("mini")))
    watched.end(1, {"step": 1, "step_s": 10.0})
    with pytest.raises(RunStopped, match="another accuracy"):
        watched.finish(1, {"after": 0.5})
    written = json.loads((tmp_path / "audit" / "verdicts-00001.json").read_text())
    assert {v["link"]: v["result"] for v in written["verdicts"]} == {"held-out": "fault", "score": "ok"}
    assert watched.summary()["links"] == 2


REST = dict.fromkeys(("failure", "status", "value", "correct", "own_reward"))
WHY = "the reward gives two scores to one answer: 0.3 and 0.7"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            [("tasks", "ok", "4 groups"), ("text", "ok", "same"), ("score", "not looked at", WHY)],
            "all 2 parts that could be checked agree (tasks, text); not looked at: score (" + WHY + ")",
        ),
        (
            [*((link, "ok", "same") for link in LINKS[:-1]), (LINKS[-1], "not looked at", "no held-out tasks")],
            f"all 8 parts that could be checked agree ({', '.join(LINKS[:-1])}); "
            "not looked at: held-out (no held-out tasks)",
        ),
        ([(link, "ok", "same") for link in LINKS], f"all 9 parts agree ({', '.join(LINKS)})"),
    ],
)
def test_the_line_of_an_audited_step_names_what_could_not_be_compared(
    found: list[Any],
    words: str,
    told: Callable[..., None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    told([Verdict(link=link, result=result, detail=detail) for link, result, detail in found], seconds=12.6)
    with caplog.at_level("INFO"):
        Auditing(tmp_path, Rebuilt(resolve("mini"))).end(1, {"step": 1, "step_s": 10.0})
    assert caplog.messages == [
        "steps 1 and 2 are computed again from their records, which takes a while; later steps seldom are "
        "(run.audit=false leaves it out)",
        f"checked step 1 in 12.6 s: computed again from its records, {words}",
    ]


def test_the_line_of_a_step_with_a_fault_lists_the_parts_that_agree(
    told: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    links = [Verdict(link=link, result="ok", detail="same") for link in LINKS[:-1]]
    told([*links, Verdict(link=LINKS[-1], result="fault", detail="other", causes="the measurement")], seconds=1.0)
    with caplog.at_level("INFO"), pytest.raises(RunStopped, match="other"):
        Auditing(tmp_path, Rebuilt(resolve("mini"))).end(1, {"step": 1, "step_s": 10.0})
    assert caplog.messages[-1].endswith(f", 8 of 9 parts agree ({', '.join(LINKS[:-1])})")


def test_a_reward_that_does_not_end_holds_up_no_audit(toy_plan: Callable[..., Plan]) -> None:
    plan = toy_plan("reward.spin=true", "run.reward_budget_s=0.5")
    row = Row(id="r", task_id="t", group="g", input={}, answer="spin", spans=(), calls=(), **REST)
    task = Task(id="t", input={"number": 1}, private={"parity": "odd", "gold": "gold"})
    start = time.monotonic()
    with closing(Rebuilt(plan)) as rebuilt:
        assert rebuilt.sources().score(task, row).status == "invalid"
        assert time.monotonic() - start < 15


def test_one_process_of_its_own_judges_all_audited_answers(toy_plan: Callable[..., Plan]) -> None:
    row = Row(id="r", task_id="t", group="g", input={}, answer="odd", spans=(), calls=(), **REST)
    task = Task(id="t", input={"number": 1}, private={"parity": "odd", "gold": "gold"})
    with closing(Rebuilt(toy_plan())) as rebuilt:
        assert [rebuilt.score(task, row).value for _ in range(3)] == [1.0] * 3
        assert rebuilt._scorer is not None
        assert rebuilt._scorer._pool is not None
        (pid,) = rebuilt._scorer._pool.processes()
        assert pid != os.getpid()
    assert not psutil.pid_exists(pid)


def test_what_a_script_s_run_was_before_a_resume_is_asked_of_the_script_of_now():
    plan = attrs.evolve(resolve("mini"), resumes="agentrig run --resume {run} script.py")
    before = {**plan.as_dict(), "run": {**plan.as_dict()["run"], "plugins": ["/of/a/process/that/ended.py"]}}
    now = Rebuilt(plan).sources()
    assert now.under(before) is now


def row_of(name: str, task: str, said: str, answer: str) -> Row:
    """Return a rollout with one call."""
    response = {"choices": [{"message": {"content": said}}]}
    call = Call(rollout=name, span="c", request={}, response=response, prompt=(), reply=(), logprobs=None, version=1)
    return Row(id=name, task_id=task, group=task, input={}, answer=answer, spans=(), calls=(call,), **REST)


POEMS = [f"In year {1900 + i} the {bird} of {town} flew far from its home" for i, (bird, town) in enumerate(
    (bird, town) for bird in ("heron", "lark", "swift", "raven") for town in ("Lyon", "Graz", "Oslo", "Bern")
)]  # fmt: skip


@pytest.mark.parametrize(
    ("taken", "form", "n"),
    [
        ([0, *range(15)], "{}", 15),  # the last reply
        ([0, *range(15)], "Answer: {}", 14),
        ([i | 1 for i in range(16)], "{}", 8),  # two at once share a variable: the later one answers with its own
    ],
)
def test_an_answer_that_is_the_reply_of_another_task_is_named(taken: Sequence[int], form: str, n: int) -> None:
    rows = [row_of(f"r{i}", f"t{i}", POEMS[i], form.format(POEMS[taken[i]])) for i in range(16)]
    (found,) = moved(rows)
    assert found.detail.startswith(f"{n} answers are not in the replies of their rollouts, but in those of another ro")
    assert found.causes.startswith("state that rollouts of the agent share")


LABELS = ["lost_card", "card_arrival", "top_up_failed", "exchange_rate", "pin_blocked", "cash_withdrawal"]


@pytest.mark.parametrize(
    ("said", "answers"),
    [
        ([*LABELS, *(f"about {label.replace('_', ' ')}" for label in LABELS)], [*LABELS, *LABELS]),  # the nearest label
        (["yes", "no", "42", "7"] * 3, ["no", "42", "7", "yes"] * 3),  # short
        (POEMS[:12], [f"{own}; {other}" for own, other in pairwise(POEMS[:13])]),  # has its own
        (POEMS[:6] * 2, [POEMS[(i + 1) % 6] for i in range(12)]),  # of two tasks
        (POEMS[:12], POEMS[:9] + POEMS[:3]),  # three are too few
        (POEMS[:12], [f"{POEMS[0]} and then it came back" for _ in range(12)]),  # a default
    ],
)
def test_answers_that_agents_make_of_replies_are_no_fault(said: Sequence[str], answers: Sequence[str]) -> None:
    rows = [row_of(f"r{i}", f"t{i}", *pair) for i, pair in enumerate(zip(said, answers, strict=True))]
    assert not list(moved(rows))
