"""How `apo` widens its beam and narrows it, within the budget, and again after a resume."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agentrig_prompts.apo import ApoSearch
from agentrig_prompts.config import ApoConfig
from agentrig_prompts.record import Record
from prompted_model import REFLECTIONS, Model

from agentrig import Endpoint, Outcome, Score, Span, Task, Trace
from agentrig.errors import RunStopped
from agentrig.rollouts import Rollout
from agentrig.testing.scripted import serving
from agentrig.traces import LLM_CALL

SEED = "Answer {question} 0"
REWARDS = {"0": 0.1, "1": 0.3, "2": 0.6, "3": 0.2, "4": 0.9, "5": 0.8}
"""The reward of each prompt, by the number at its end; the scripted model counts on from the number of the seed."""
USAGE = {"usage": {"prompt_tokens": 30, "completion_tokens": 10}}


class Run:
    """A run's session: a rollout's reward is that of the prompt in force.

    Attributes:
        lines: What `end_step` wrote.
        paid: Each rollout: its step, prompt, and task.
        last: The step after which the user asks to end.
    """

    def __init__(self, directory: Path, *, lines: Sequence[Any] = (), last: int = 99) -> None:
        self.directory, self.last, self.prompts, self.seed = directory, last, {"system": SEED}, 0
        self.train_tasks = [Task(id=f"t{i}", input={"question": f"t{i}"}) for i in range(6)]
        self.validation_tasks = [Task(id=f"v{i}", input={"question": f"v{i}"}) for i in range(8)]
        self.lines: list[Any] = list(lines)
        self.first_step, self.stopping, self.solved, self.resumes = len(self.lines) + 1, False, False, "resume"
        self.hardware: Any = None
        self.paid: list[tuple[int, str, str]] = []
        self.notes: list[str] = []
        self.recorded: dict[str, Any] = {}

    def record(self, name: str, value: Any) -> None:
        self.recorded[name] = value

    def rollouts(self, tasks: Sequence[Task], *, on_groups: Any, step: int, **more: Any) -> None:
        number = self.prompts["system"].rsplit(" ", 1)[1]
        call = Span(id="c", parent=None, name=LLM_CALL, start=0, end=0, attributes={"response": USAGE})
        for place, task in enumerate(tasks):
            self.paid.append((step, number, task.id))
            outcome, score = Outcome(answer="a"), Score.ok(REWARDS.get(number, 0.0), feedback="could be better")
            trace = Trace(rollout_id="r", spans=(call,))
            ended = Rollout(
                id="r", task=task, group="g", mode="train", step=step, outcome=outcome, score=score, trace=trace
            )
            on_groups({place: [ended]})

    def report(self, endpoints: Sequence[Endpoint], *, when: str, step: int) -> None:
        """Measure nothing."""

    def note(self, text: str) -> None:
        self.notes.append(text)

    def end_step(self, step: int, *, metrics: Any, time_s: Any) -> None:
        self.lines.append({"step": step, "algorithm": metrics})
        self.stopping = step == self.last

    def save_checkpoint(self, step: int, write: Any) -> None:
        (self.directory / f"step-{step}").mkdir()
        write(self.directory / f"step-{step}")


@pytest.fixture
def model() -> Iterator[Model]:
    """A model whose prompts are numbered: 1, 2, …; the same question again gives the next one."""
    count = 0

    def reflects(asked: str) -> str:
        nonlocal count
        if REFLECTIONS[1] in asked:
            return f"Not good: {re.search(r'[{]question[}] ([0-9]+)', asked)[1]}"  # type: ignore[index]
        count += 1
        return f"```\nAnswer {{question}} {count}\n```"

    with serving(Model()) as server:
        server.reflects = reflects
        yield server


def searched(model: Model, run: Any, **keys: Any) -> tuple[str, ApoSearch]:
    """Return the number of the best prompt, and the search."""
    server = SimpleNamespace(endpoints=[Endpoint(base_url=model.url, model="m")], check=lambda: None)
    run.server = lambda plan: nullcontext(server)
    search = ApoSearch(ApoConfig(**{"max_calls": 500, "patience_s": 0.0, **keys}))
    search.run(run)
    return run.prompts["system"].rsplit(" ", 1)[1], search


@pytest.mark.parametrize(
    ("beam_width", "branch_factor", "attempts", "best"), [(1, 1, [1, 1], "2"), (1, 3, [3, 3], "4"), (2, 2, [2, 4], "4")]
)
def test_each_prompt_of_the_beam_gets_its_branches_and_the_best_go_on(
    model: Model, tmp_path: Path, beam_width: int, branch_factor: int, attempts: list[int], best: str
) -> None:
    run = Run(tmp_path, last=2)
    found, _ = searched(model, run, beam_width=beam_width, branch_factor=branch_factor)
    assert [line["algorithm"]["attempts"] for line in run.lines] == attempts
    assert found == best
    saved = json.loads((tmp_path / "prompts.json").read_text())
    assert saved == {"prompts": {"system": f"Answer {{question}} {best}"}, "validation_reward": REWARDS[best]}
    # Each critique is of a prompt of the beam: in the second step of the best ones of the first.
    critiques = [said for said in model.paid if REFLECTIONS[1] in said]
    of = Counter(re.findall(r"Answer [{]question[}] ([0-9]+)\n", "\n".join(critiques[attempts[0] :])))
    beam = {(1, 1): ["1"], (1, 3): ["2"], (2, 2): ["2", "1"]}[beam_width, branch_factor]
    assert of == dict.fromkeys(beam, branch_factor)


def test_a_prompt_runs_on_more_validation_tasks_only_while_it_is_among_the_better_half(
    model: Model, tmp_path: Path
) -> None:
    run = Run(tmp_path, last=1)
    searched(model, run, beam_width=1, branch_factor=4)
    on = Counter(number for _, number, task in run.paid if task.startswith("v"))
    assert on == {"0": 8, "4": 8, "2": 8, "1": 4, "3": 2}  # in the order of their rewards, but for the seed


@pytest.mark.parametrize(("max_calls", "max_tokens"), [(120, 0), (60, 0), (500, 9000)])
def test_the_budget_is_kept_and_the_end_of_the_search_says_why(
    model: Model, tmp_path: Path, max_calls: int, max_tokens: int
) -> None:
    run = Run(tmp_path)
    _, search = searched(model, run, max_calls=max_calls, max_tokens=max_tokens)
    record, calls = search._record, len(run.paid) + len(model.paid)
    assert record.calls == calls <= max_calls
    assert record.tokens <= max_tokens or not max_tokens
    # What is left is too little for another candidate.
    few = record.tokens + search._each * record.largest > max_tokens if max_tokens else calls + search._each > max_calls
    assert few
    assert len(run.lines) > 1 or max_calls == 60
    assert run.notes == [
        f"the search for prompts ended after {calls} calls: another step may need {search._each} calls, and the budget "
        f"has less; 0 of {len(model.paid) // 2} attempts at a new prompt gave no usable text"
    ]


def test_a_search_that_goes_on_with_more_budget_repeats_its_steps_without_a_call(model: Model, tmp_path: Path) -> None:
    first = Run(tmp_path)
    searched(model, first, max_calls=80)
    asked = len(model.paid)
    assert first.lines[-1]["algorithm"]["attempts"] < 4 * 4  # the budget had no more
    again = Run(tmp_path, lines=first.lines)
    _, search = searched(model, again, max_calls=200)
    assert min(step for step, *_ in again.paid) == len(first.lines) + 1
    assert [line["step"] for line in again.lines] == list(range(1, len(again.lines) + 1))
    assert len(again.lines) > len(first.lines)
    assert search._record.calls == len(first.paid) + len(again.paid) + len(model.paid) <= 200
    assert len(model.paid) > asked


def test_a_prompt_without_a_bad_answer_gets_no_critique(model: Model, tmp_path: Path) -> None:
    run = Run(tmp_path)
    found, _ = searched(model, run, perfect=0.1)
    assert (found, model.paid) == ("0", [])
    assert len(run.paid) == 8 + 6
    assert "all training tasks again gave nothing new" in run.notes[0]


def test_a_reflecting_model_that_is_down_is_named(model: Model, tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match=r"127\.0\.0\.1:9/v1 does not answer.*patience_s.*resume"):
        searched(model, Run(tmp_path), reflection_base_url="http://127.0.0.1:9/v1", reflection_model="big")
    kept = Record(tmp_path)
    assert kept.calls == 0  # nothing has been asked for yet in this process


def test_several_prompts_are_improved_one_at_a_time(model: Model, tmp_path: Path) -> None:
    run = Run(tmp_path, last=2)
    run.prompts = {"system": SEED, "other": "Another {question} 0"}
    searched(model, run)
    asked = " ".join(said for said in model.paid if REFLECTIONS[1] in said)
    assert "Another {question} 0" in asked
    assert SEED in asked
