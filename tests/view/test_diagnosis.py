"""Runs that were made to fail or stall, each in another way: the diagnosis names the planted cause first."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from quick import quick_first

from agentrig import Outcome
from agentrig.audit.scores import EXCHANGED
from agentrig.audit.verdicts import LINKS, TWO_SCORES
from agentrig.cli.entry import main
from agentrig.errors import AgentrigError, RunStopped
from agentrig.plan import resolve
from agentrig.processes.locks import Lock
from agentrig.rollouts import Rollout
from agentrig.run.directory import RunDirectory
from agentrig.run.guards import FORM_ONLY, NO_SIGNAL, ONE_FORM
from agentrig.run.training import train
from agentrig.testing.run_directory import rollout_of, trace_of, write_run
from agentrig.testing.scripted import ScriptedServer, scripted_server
from agentrig.text import alike
from agentrig.traces import LLM_CALL, Span
from agentrig.view.causes import evidence, outcome, rollouts, trend, weights
from agentrig.view.causes.evidence import Evidence, StepFacts
from agentrig.view.causes.finding import Finding
from agentrig.view.diagnosis import FADED, IT_ENDED, NOT_YET, UNMEASURED, UNREADABLE, diagnose, ending, verdict, words
from agentrig.view.reading import read_run, rollout_rows
from agentrig.view.terminal import run_ending, run_error

SUPPORT = Path(__file__).parents[1] / "support"
ROLLOUTS = 8 * 48
"""Training rollouts of a whole toy run."""


def learner(body: Mapping[str, Any], number: int) -> str:
    """Answer as a model that learns: right in 40% of the cases at first, and in 90% at the end."""
    return says(body, random.Random(number).random() < 0.4 + 0.5 * min(1.0, number / ROLLOUTS))


def memory(body: Mapping[str, Any], number: int) -> str:
    """Answer training tasks, whose numbers are below 100, right in 3 of 4 cases, and no others."""
    return says(body, int(re.findall(r"\d+", body["messages"][-1]["content"])[0]) < 100 and number % 4 != 0)


def guesser(body: Mapping[str, Any], number: int) -> str:
    return says(body, random.Random(number).random() < 0.5)


def says(body: Mapping[str, Any], right: bool) -> str:
    asked = re.search(r"\d+", body["messages"][-1]["content"])
    assert asked is not None
    return "odd" if (int(asked[0]) % 2 == 1) == right else "even"


@pytest.fixture(scope="module")
def served() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


def toy_run(place: Path, server: ScriptedServer, *words: str, model: Any = learner, **uses: str) -> Path:
    """Run the recipe `toy` with a scripted model, and return the directory; an error is kept in it."""
    server.requests.clear()
    server.script = lambda body: model(body, len(server.requests) - 1)
    own = [f"algorithm.endpoint={server.url}", f"run.directory={place}", "run.name=toy", 'run.block=["report"]']
    own += ["algorithm.steps=8", "algorithm.tasks=12", "algorithm.group=4", "run.validation_tasks=1"]
    files = [str(SUPPORT / "toy_plugin.py"), str(SUPPORT / "planted_plugin.py")]
    try:
        train(resolve("toy", overrides=[*own, *words], uses=uses, files=files))
    except AgentrigError:
        assert (place / "toy" / "error.json").is_file()
    return place / "toy"


PLANTED: Mapping[str, tuple[str, list[str], dict[str, Any]]] = {
    "the adapter matches nothing": ("unmatched-calls", ["adapter.match=check"], {}),
    "the adapter matches two thirds of the tasks": ("unmatched-calls", ["adapter.match=write"], {"agent": "two-names"}),
    "the adapter returns calls twice": ("lost-calls", [], {"adapter": "twice"}),
    "the server returns no token ids": ("no-token-ids", ["algorithm.token_ids=false"], {}),
    "the agent asks nobody": ("calls-not-recorded", ['tasks.do=["no-call"]'], {}),
    "the agent asks nobody in a third of the tasks": ("calls-not-recorded", ['tasks.do=["no-call","",""]'], {}),
    "the agent samples on its own": ("other-sampling", ['tasks.do=["cold"]'], {}),
    "the agent sends a seed": ("other-sampling", ['tasks.do=["seeded"]'], {}),
    "the agent raises": ("failures", ['tasks.do=["raise"]'], {}),
    "the agent raises in a third of the tasks": ("failures", ['tasks.do=["raise","",""]', "run.failure_limit=0.5"], {}),
    "the agent hangs": (
        "failures",
        ['tasks.do=["hang","","",""]', "run.failure_limit=0.5", "runners.deadline_s=3", "algorithm.steps=1",
         "algorithm.group=2", "algorithm.report=false"],
        {},
    ),
    "the model's server is not there": (
        "failures",
        ["algorithm.endpoint=http://127.0.0.1:9/v1", "algorithm.report=false"],
        {},
    ),
    "the reward judges nothing": ("failures", ["reward.invalid=true", "algorithm.report=false"], {}),
    "the reward pays nothing": ("tasks-too-hard", ["reward.right=0"], {}),
    "the reward pays everything": ("tasks-too-easy", ["reward.wrong=1"], {}),
    "the reward draws lots": ("reward-contradicts-itself", [], {"reward": "draws-lots"}),
    "the reward draws lots, and nothing is measured": (
        "reward-contradicts-itself",
        ["algorithm.report=false"],
        {"reward": "draws-lots"},
    ),
    "the reward is a constant": ("constant-reward", ["reward.right=0.5", "reward.wrong=0.5"], {}),
    "no weight changes": ("weights-unchanged", ["algorithm.change=0"], {}),
    "the gradient is not finite": ("diverged", ["algorithm.figures={grad_norm=nan}"], {}),
}  # fmt: skip
"""What was planted to the cause that must be named first, overrides, and components."""
QUICK = ("the adapter matches nothing", "the agent sends a seed", "the reward draws lots")
"""The others run when asked for; test_recorded_runs.py reads recorded runs."""


@pytest.mark.parametrize("planted", quick_first(PLANTED, QUICK))
def test_the_planted_cause_is_named_first(tmp_path: Path, served: ScriptedServer, planted: str) -> None:
    cause, words, uses = PLANTED[planted]
    found = diagnose(toy_run(tmp_path, served, *words, **uses))
    assert [f.cause for f in found.problems][:1] == [cause], found
    first = found.problems[0]
    assert first.count
    assert first.since is not None
    assert first.settings or cause == "failures"
    assert first.advice


def test_failures_that_are_few_are_told_with_kind_and_example(tmp_path: Path) -> None:
    found = diagnose(write_run(tmp_path / "run", steps=20))
    assert "failures" not in [problem.cause for problem in found.problems]
    (told,) = (line for line in str(found).splitlines() if "training rollouts failed" in line)
    assert re.fullmatch(
        r"- \d+ of \S+ training rollouts failed \(.*\) and were not trained on: \d+ .*; for example: .+", told
    )


@pytest.mark.slow
def test_a_run_that_memorised_is_not_told_to_go_on(tmp_path: Path, served: ScriptedServer) -> None:
    said = str(diagnose(toy_run(tmp_path, served, "algorithm.steps=3", "run.report_tasks=24", model=memory)))
    assert "1. memorised: " in said
    assert re.search(r": 7\d% of the training rollouts of the last step are right, and 0 of 24 held-out tasks", said)
    assert "More steps do not help" in said
    assert "steps are few" not in said
    assert "more steps" not in said


@pytest.mark.parametrize(
    ("error", "cause", "text", "level"),
    [
        ("KeyboardInterrupt", "", "1 of 1 times; the run ended before the next check", "ok"),
        ("RunStopped", "audit", "1 of 1 times; the run ended before the next check", "ok"),
        ("RunStopped", "weights-not-arriving", "1 of 2 times", "warn"),
    ],
)
def test_a_proof_that_was_not_reached_is_no_fault(
    ended_run: Callable[..., Path], error: str, cause: str, text: str, level: str
) -> None:
    run = ended_run("algorithm.steps=1", "run.validation_tasks=1")
    summary = json.loads((run / "summary.json").read_text())
    told = {"on": True, "proofs": 2, "arrived": 1}
    (run / "summary.json").write_text(json.dumps({**summary, "complete": False, "delivery": told}))
    (run / "error.json").write_text(json.dumps({"error": error, "message": "ended at once", "cause": cause}))
    (found,) = weights.delivery(Evidence.of(read_run(run)))
    assert (found.level, found.text) == (level, f"the model's server answered with the new weights {text}")


def test_the_settings_of_a_fault_that_the_auditor_found_are_those_of_its_link(ended_run: Callable[..., Path]) -> None:
    run = ended_run("algorithm.steps=1", "run.validation_tasks=1")
    cases = (
        ("score", "the reward", ["reward.use"]),
        ("tasks tasks held-out", "the reward", ["tasks.use", "reward.use"]),
        ("tasks", "an agent (agent.use), a runner (runners.use)", ["agent.use", "runners.use"]),
        ("score held-out", EXCHANGED, ["agent.use"]),
    )
    for links, causes, keys in cases:
        faults = "\n".join(f"  {link}: 2 differ.\n    Likely causes: {causes}" for link in links.split())
        told = {"error": "RunStopped", "message": f"step 1: a fault:\n{faults}\n  See it again", "cause": "audit"}
        (run / "error.json").write_text(json.dumps(told))
        (problem,) = outcome.ended(Evidence.of(read_run(run)))
        assert list(problem.settings) == keys
    assert set(LINKS) == set(outcome.AUDITED)


def test_a_fault_after_a_resume_is_of_its_own_step_and_names_its_own_settings(ended_run: Callable[..., Path]) -> None:
    run = ended_run("algorithm.steps=1", "run.validation_tasks=1")
    drawn = "tasks: step 2 trained on a, which algorithm.task_sampling=uniform does not draw then, instead of b"
    again = "tasks: up to step 2, task a was drawn 2 times"
    message = f"step 2: the audit found what is not as stated:\n  {drawn}.\n  {again}.\n  See it again: run.toml"
    summary = json.loads((run / "summary.json").read_text())
    seen = {"links": 9, "of": 9, "steps": [1]}
    (run / "summary.json").write_text(json.dumps({**summary, "audited": seen}))
    (run / "error.json").write_text(json.dumps({"error": "RunStopped", "message": message, "cause": "audit"}))
    (problem,) = outcome.ended(Evidence.of(read_run(run)))
    assert (problem.since, problem.of, list(problem.settings)) == (2, 2, ["algorithm.task_sampling"])
    assert weights.links_audited(read_run(run)) == "the auditor recomputed 9 of 9 parts of steps 1, 2"
    faults = ["tasks: step 2 trained on a", "tasks: another one", "score: 2 differ"]
    (run / "summary.json").write_text(json.dumps({**summary, "audited": {**seen, "faults": faults}}))
    said = "the auditor recomputed 9 of 9 parts of steps 1, 2, and 7 of 9 parts agree: not tasks, score"
    assert weights.links_audited(read_run(run)) == said
    calls = {"distribution": [16, 48], "score": [24, 24], "gradient": [20, 48]}
    own = "sampled with settings of the agent's own, or by other weights"
    counted = {**seen, "calls": calls, "sampled_otherwise": 30}
    (run / "summary.json").write_text(json.dumps({**summary, "audited": counted}))
    assert weights.links_audited(read_run(run)).endswith(
        f"; distribution of 16 of 48 calls (2 left out to save time, 30 {own})"
        "; gradient of 20 of 48 calls (28 left out to save time)"
    )


def test_a_reward_that_pays_wrong_answers_says_so_everywhere(
    tmp_path: Path, served: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    run = toy_run(tmp_path, served, reward="pays-odd", model=guesser)
    assert caplog.text.count("although it says correct=False, for example") == 1, "once"
    found = diagnose(run)
    assert 'got the full reward, 1, although the reward says correct=False, for example "odd" to task' in str(found)
    assert "learning rate" not in str(found)
    result = CliRunner().invoke(main, ["why", str(run)])
    assert (result.exit_code, "1. reward-exploited: " in result.output) == (1, True)


@pytest.mark.parametrize(("message", "example"), [(None, "the judge is out"), ("HTTP 500", "HTTP 500")])
def test_an_example_of_a_failed_rollout_is_in_words(
    monkeypatch: pytest.MonkeyPatch, message: str | None, example: str
) -> None:
    row = dict.fromkeys(evidence.COLUMNS) | {"failure": "reward-invalid", "message": message}
    row["details"] = json.dumps({"reason": "the judge is out", "gold": "SELECT 1"})
    monkeypatch.setattr(evidence, "rollout_rows", lambda *given, **more: [row])
    file: Any = SimpleNamespace(step=1)
    facts = evidence.facts_of(file)
    assert list(facts.examples.values()) == [example]
    assert list(facts.reasons_of_failures.values()) == [1]


def failed(messages: Sequence[str], kind: str = "reward-invalid") -> Finding:
    """Return what is found of a step with failures of these reasons, and as many rollouts that did not fail."""
    reasons = [(kind, alike(message)) for message in messages]
    facts = StepFacts(
        step=1,
        rollouts=2 * len(messages),
        failures={kind: len(messages)},
        reasons_of_failures=Counter(reasons),
        examples=dict(zip(reasons, messages, strict=True)),
    )
    run = SimpleNamespace(steps=[], running=False, directory=Path("run"))
    given: Any = SimpleNamespace(steps=[facts], run=run, total=lambda name: getattr(facts, name))
    (found,) = rollouts.failures(given)
    return found


def test_failures_of_a_reward_are_told_by_cause() -> None:
    raised = [f"the reward raised KeyError: 'a{i}' (mine.py:7 in reward)" for i in range(9)]
    late = ["the reward ran past its budget of 3 s"] * 5
    none = ["the reward returned None"] * 3
    found = failed([*raised, *late, *none, "the reward returned 'x' (mine.py:8 in reward)"])
    assert found.text.endswith(f"; most often (of 4 causes): 9 x {raised[-1]}; 5 x {late[0]}; 3 x {none[0]}"), (
        found.text
    )
    assert found.settings == ("reward.use", "run.reward_budget_s")
    mend, wait, other = found.advice.splitlines()
    assert mend == "The reward raised: mend its code at mine.py:7 in reward; agentrig validate checks it."
    assert wait.startswith("Give the reward more time")
    assert other.startswith("The reward gave no score")
    assert "time" not in failed(raised).advice
    assert failed(late).settings == ("run.reward_budget_s",)
    assert failed(late).text.endswith(f"; for example: {late[0]}")


def test_a_deadline_names_the_setting_that_set_it() -> None:
    own = "AgentFailure: the program ran longer than time_s = 4, and was ended"
    assert failed([own] * 3 + ["the deadline"], "deadline").settings == ("agent.time_s",)
    assert failed([own] + ["the deadline"] * 2, "deadline").settings == ("runners.deadline_s",)


@pytest.mark.parametrize("tasks", [1, 8], ids=["of one task", "of half of the tasks"])
@pytest.mark.parametrize(
    ("reason", "cause", "said"),
    [("aborted-call", "aborted-calls", "the agent ended them"), ("call-error", "call-errors", "calls failed")],
)
def test_calls_without_an_answer_are_a_problem_if_they_are_of_many_tasks(
    tmp_path: Path, reason: str, cause: str, said: str, tasks: int
) -> None:
    """One task of 16 makes 40 such calls in each step."""
    run = write_run(tmp_path / "run", steps=8, held_out=200)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["calls"] = {"recorded": 16 + 40 * tasks, "trained": 16, "dropped": {reason: 40 * tasks}}
        ids = [rollout_of(i, right=True, mode="train", step=line["step"]).id for i in range(tasks)]
        row = {"node": "", "place": "dropped", "reason": reason, "tokens": 0}
        rows = [{**row, "rollout": id, "span": str(call)} for id in ids for call in range(40)]
        RunDirectory(run).write_calls(rows, step=line["step"])
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found, n = diagnose(run), 320 * tasks
    whole = f"{n:,} of {128 + n:,} calls were not trained on: {said}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    (told,) = (line for line in str(found).splitlines() if whole in line)
    if tasks == 1:
        assert "; 1 of 16 training tasks made them: task-0000. " in told
        assert verdict(found).startswith("No fault was found, and the run got better.")
    else:
        assert [problem.cause for problem in found.problems] == [cause]
        assert told.endswith("; 8 of 16 training tasks made them: such as task-0000 and task-0001")


@pytest.mark.parametrize(
    ("error", "said", "setting", "advice"),
    [
        (
            "HTTP 400: this model's context is 512 tokens; the prompt has 600 (context_length_exceeded)",
            "most of their prompts left no room in the model's context",
            "algorithm.max_length",
            "let it take longer contexts, lower max_tokens",
        ),
        (
            "HTTP 404: no model gpt-4",
            "most often (16 of 16) with HTTP 404: no model gpt-4",
            "agent.use",
            "endpoint.model as the model",
        ),
        ("HTTP 429: busy", "with HTTP 429: busy", "server.use", "server.log"),
    ],
)
def test_calls_that_failed_name_their_error_and_its_cure(
    tmp_path: Path, error: str, said: str, setting: str, advice: str
) -> None:
    run = write_run(tmp_path / "run", steps=2)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["calls"] = {"recorded": 32, "trained": 16, "dropped": {"call-error": 16}}
        made = [rollout_of(i, right=True, mode="train", step=line["step"]) for i in range(16)]
        failed = Span(id="failed", parent=None, name=LLM_CALL, start=0.0, end=1.0, error=error)
        spans = [attrs.evolve(r, trace=attrs.evolve(r.trace, spans=(*r.trace.spans, failed))) for r in made]
        RunDirectory(run).write_rollouts(spans, mode="train", step=line["step"])
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = (problem for problem in diagnose(run).problems if problem.cause == "call-errors")
    assert said in found.text
    assert found.settings[0] == setting
    assert advice in found.advice


def test_a_difference_of_few_values_is_never_certain() -> None:
    assert trend.difference([1.0, 1.0], [0.0, 0.0]) > -trend.LIKELY
    assert trend.difference([1.0, 0.75], [0.0, 0.0]) > -trend.LIKELY
    assert -trend.SURE < trend.difference([1.0] * 4, [0.0] * 4) < -trend.LIKELY
    assert trend.difference([1.0] * 6, [0.0] * 6) < -trend.SURE
    assert trend.difference([1.0] * 9, [0.0] * 9) == -math.inf
    assert trend.difference([0.0] * 9, [0.0] * 9) == 0.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "metrics.jsonl cannot be read: Is a directory"),
        (b"\xff\x00\n{", "metrics.jsonl: lines 1 and 2 cannot be read"),
    ],
)
def test_why_fails_and_names_the_place_if_no_step_can_be_read(text: bytes | None, said: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert CliRunner().invoke(main, ["why", str(run)]).exit_code == 0
    file = run / "metrics.jsonl"
    file.unlink()
    if text is None:
        file.mkdir()
    else:
        file.write_bytes(text)
    done = CliRunner().invoke(main, ["why", str(run)])
    assert done.exit_code == 2, done.output
    assert said in done.output


def test_a_run_that_could_not_write_its_end_is_told_the_last_error_of_its_log(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2, ended=False)
    lines = [{"time": 1.0, "step": 1, "level": level, "text": level} for level in ("error", "warning")]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not diagnose(run).problems
    lines.append({"time": 2.0, "step": 2, "level": "error", "text": "the reward closed files.\n  Let it not"})
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = [f for f in diagnose(run).problems if f.ended]
    assert (found.text, found.advice) == ("the reward closed files.", "Let it not")
    assert "--resume" not in str(diagnose(run)).partition("Also know")[0]


def test_all_damaged_files_are_named_before_the_verdict(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    text = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(text.replace(b'"rollouts": ', b'"x\xff\xfe": 1, "rollouts": '))
    (run / "error.json").write_bytes(b"\0" * 200)
    _, files, *_ = str(diagnose(run)).split("\n\n")
    assert "metrics.jsonl is damaged: line 1 has bytes that are no UTF-8 text" in files
    assert "error.json is damaged" in files


def damage(run: Path, **change: Any) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps({**line, **change}) + "\n" for line in lines))


def test_a_run_is_told_apart_from_one_that_measured_nothing_if_its_measurements_cannot_be_read(tmp_path: Path) -> None:
    for name in ("text", "loop", "all", "gone"):
        run = write_run(tmp_path / name, steps=8, lift=0.0)
        if name == "text":
            (run / "rollouts" / "report-00008.parquet").write_text("PAR1 not PAR1")
        elif name == "loop":
            (run / "rollouts").rename(tmp_path / "away")
            (run / "rollouts").symlink_to("rollouts")
        elif name == "gone":
            (run / "rollouts" / "report-00008.parquet").unlink()
        else:
            for file in (run / "rollouts").iterdir():
                file.write_text("")
        found = diagnose(run)
        assert (found.no_gain, found.next_step) == (UNREADABLE, ""), name
        assert verdict(found) == UNREADABLE
        named = any("rollouts" in text and "cannot be read" in text for text in found.missing)
        assert named or name == "gone", found.missing  # this run did not note which files it wrote


def test_measurements_of_other_tasks_are_not_called_unreadable(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=8, lift=0.0)
    file = run / "rollouts" / "report-00008.parquet"
    rows = pq.read_table(file)
    others = pa.array([f"other-{task}" for task in rows["task_id"].to_pylist()])
    pq.write_table(rows.set_column(rows.column_names.index("task_id"), "task_id", others), file)
    assert verdict(diagnose(run)).startswith(UNMEASURED)


def test_damaged_lines_are_no_proof_that_nothing_was_trained(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3)
    damage(run, nodes={"seen": {"a": 1}, "trained": {}})
    assert "nothing was trained" in str([f.text for f in diagnose(run).warnings])
    damage(run, nodes=1)
    found = diagnose(run)
    assert "nothing was trained" not in str([f.text for f in [*found.warnings, *found.checks]])


def test_a_run_has_its_folders_name_in_its_folder_and_no_full_stop_follows_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "mine", steps=8, lift=0.0, ended=False)
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({key: manifest[key] for key in manifest if key != "name"}))
    (run / "error.json").write_text(json.dumps({"error": "KeyboardInterrupt", "message": "stopped", "cause": ""}))
    monkeypatch.chdir(run / "rollouts")
    for here, there in (("..", ".."), ("../../mine", "../../mine")):
        assert words(diagnose(Path(here))).startswith("mine: stopped, 8 steps\n")
        assert words(diagnose(Path(here))).splitlines()[2].endswith(f"Go on with: agentrig train --resume {there}")
    monkeypatch.chdir(run)
    assert words(diagnose(Path())).startswith("mine: stopped, 8 steps\n")
    assert "mine" in CliRunner().invoke(main, ["compare", "."]).output


def test_the_verdicts_of_an_audit_that_cannot_be_read_are_not_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    (run / "audit").mkdir(exist_ok=True)
    verdicts = [{"result": "ok", "detail": "", "link": link} for link in LINKS]
    (run / "audit" / "verdicts-00002.json").write_text(json.dumps({"step": 2, "seconds": 1, "verdicts": verdicts}))
    (run / "audit" / "verdicts-00001.json").write_text('{"a":' * 100_000)
    summary = json.loads((run / "summary.json").read_text())
    summary["audited"] = {"links": 9, "of": 9, "steps": [1, 2]}
    (run / "summary.json").write_text(json.dumps(summary))
    assert weights.links_audited(read_run(run)) == "the auditor recomputed 9 of 9 parts of step 2"
    assert "verdicts-00001.json is damaged: it is nested too deep. Its verdicts are left out" in str(diagnose(run))


@attrs.frozen(kw_only=True)
class Recorded:
    """A run as it was recorded, and what is said of it.

    Attributes:
        right: Of each step, how many of the 8 rollouts of each task are right.
        entropy: Of each step.
        causes: All of them, in order.
        said: What `why` says.
        unsaid: What it does not say.
        stop: How the error begins that ended the run in its last step; empty for a run that finished.
        cause: Of this error.
        answers: Whether the agent returns any.
        judges: Whether it returns its own reward instead.
        lift: How much held-out accuracy rises.
        parts: The first tasks, whose answers are right in part only, for half of the reward.
        told: Whether the reward says what is correct.
    """

    right: Sequence[Sequence[int]]
    entropy: Sequence[float] = ()
    causes: Sequence[str] = ()
    said: Sequence[str] = ()
    unsaid: Sequence[str] = ()
    stop: str = ""
    cause: str = NO_SIGNAL
    answers: bool = True
    judges: bool = False
    lift: float = 0.0
    parts: int = 0
    told: bool = True

    def write(self, run: Path) -> Path:
        """Write the run; one with all groups alike trains none."""
        steps = len(self.right)
        write_run(run, steps=steps, lift=self.lift, held_out=60, ended=not self.stop)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        entropy = self.entropy or [0.5] * steps
        for line, right, nats in zip(lines, self.right, entropy, strict=True):
            pairs = [(g, i, i < n) for g, n in enumerate(right) for i in range(8)]
            rollouts = [self.rollout(g, i, right=is_right, step=line["step"]) for g, i, is_right in pairs]
            RunDirectory(run).write_rollouts(rollouts, mode="train", step=line["step"])
            alike, n = sum(n in (0, 8) for n in right) / len(right), len(rollouts)
            reward = (sum(right) - sum(right[: self.parts]) / 2) / n
            line.update(rollouts=n, failures={}, reward=reward, zero_variance_groups=alike)
            line["algorithm"] |= {"entropy": nats, "weight_change": 0.0 if alike == 1 else 3.0}
            line["calls"] = {"recorded": n, "trained": 0 if alike == 1 else n}
        kept = lines[: steps - bool(self.stop)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
        manifest = json.loads((run / "manifest.json").read_text())
        manifest["data"]["train"] = {"split": "train", "tasks": 80, "fingerprint": "8e" * 32}
        (run / "manifest.json").write_text(json.dumps(manifest))
        if not self.told:
            summary = json.loads((run / "summary.json").read_text())
            (run / "summary.json").write_text(json.dumps({**summary, "correct_told": False}))
        if self.stop:
            error = {"error": "RunStopped", "message": self.message, "cause": self.cause}
            (run / "error.json").write_text(json.dumps(error))
        return run

    def rollout(self, group: int, i: int, *, right: bool, step: int) -> Rollout:
        made = attrs.evolve(rollout_of(group, right=right, mode="train", step=step), id=f"{group}-{i}")
        assert made.score is not None
        value = made.score.value / 2 if group < self.parts else made.score.value
        made = attrs.evolve(made, score=attrs.evolve(made.score, value=value))
        if self.judges:
            return attrs.evolve(made, outcome=Outcome(own_reward=value))
        return made if self.answers else attrs.evolve(made, outcome=Outcome(answer=None))

    @property
    def message(self) -> str:
        return f"step {len(self.right)}: {self.stop}\n  for example, the answer to task t was nothing"


ALIKE = "for 4 steps, the rollouts of each task got the same reward, so every advantage is zero."
ZERO = "all rollouts got the reward 0, so every advantage is zero."
DESTROYED = "the first updates destroyed the policy: the mean reward fell from 0.75 (step 1) to"
CAUSE = "The learning rate of 0.0003 is the likely cause. Use a"
TENTH = f"{CAUSE} tenth of it: agentrig train "
HALF = [4, 3, 4, 4, 3, 4, 3, 3]
MIXED = [[8] * 3 + [0] * 4 + [4] * 2, [8] * 3 + [0] * 5 + [3]]
"""In 7 and in 8 of 9 groups all rollouts got the same reward."""

RECORDED: Mapping[str, Recorded] = {
    "the agent forgets to return": Recorded(
        right=[[0] * 4],
        stop=ZERO,
        answers=False,
        causes=["no-answers", "tasks-too-hard"],
        said=["returned None in 32 of 32 scored", f"It ended the run in step 1: {ZERO}", "for example, ",
              "This follows from no-answers: mend that first."],
        unsaid=["agentrig warmup", "easier tasks"],
    ),
    "some answers are none": Recorded(right=[[5] * 8] * 6, unsaid=["None"]),
    "the tasks are too hard": Recorded(
        right=[[0] * 5] * 7,
        stop=ZERO,
        causes=["tasks-too-hard"],
        said=["in 35 of 35 groups", "a model that is sometimes right", "does the reward take right answers for wrong?",
              "config.toml --labels 60 --out models/mini",
              "seen in step 1"],
    ),
    "an answer is right but for its form": Recorded(
        right=[[0] * 5] * 7,
        stop=f"{ZERO}\n  It is the text '51', and private.answer is the number 51: {FORM_ONLY}.\n  {ONE_FORM}",
        causes=["tasks-too-hard"],
        said=["an answer differs from the right one only in form", "compare str(...) of both", f"{ONE_FORM}\n   Use a",
              "settings: reward.use, agent.use, tasks.use"],
    ),
    "the tasks of an agent without answers are too hard": Recorded(
        right=[[0] * 5] * 7, stop=ZERO, judges=True, causes=["tasks-too-hard"], unsaid=["the same answer"]
    ),
    "the tasks are too easy": Recorded(right=[[8] * 9] * 5, stop=ZERO, causes=["tasks-too-easy"]),
    "rewards of parts rise and no answer is right": Recorded(
        right=[[i % 8] * 6 for i in range(1, 8)],
        parts=6,
        causes=["tasks-too-hard"],
        said=["1. tasks-too-hard: none of 336 training answers was right; rewards were paid for parts only",
              "a model that is sometimes right", "agentrig forecast", "config.toml --labels 60"],
        unsaid=["rain for more steps", "No fault"],
    ),
    "a reward that does not say what is right": Recorded(
        right=[[i % 8] * 6 for i in range(1, 8)], parts=6, told=False, unsaid=["answers was right"]
    ),
    "tasks that were right in part only were never right": Recorded(
        right=[[5] * 10, *[[8] * 10] * 7],
        parts=4,
        lift=0.6,
        causes=["entropy-collapse"],
        said=["- 4 of 10 training tasks were right in no rollout"],
    ),
    "most tasks that stay wrong were never right": Recorded(
        right=[[4] * 6 + [0] * 6, *[[5] * 3 + [8] * 3 + [0] * 6] * 3, *[[8] * 5 + [0] * 7] * 8],
        entropy=[0.5] * 12,
        said=["More steps would hardly help",
              "6 of the 7 tasks whose answers are all wrong at the end were never right",
              "a longer warm-up", "config.toml --labels 60 --out models/mini"],
        unsaid=["algorithm.lr", "algorithm.temperature", "rain for more steps"],
    ),
    "the reward rises to the end, and most tasks that stay wrong were never right": Recorded(
        right=[*[[4] * 6 + [0] * 6] * 6, *[[8] * 3 + [0] * 9] * 3, *[[8] * 6 + [0] * 6] * 3],
        said=["More steps would hardly help", "6 of the 6 tasks whose", "a longer warm-up"],
        unsaid=["rain for more steps"],
    ),
    "tasks that were tried at the end only say nothing of the start": Recorded(
        right=[*[[1] * 4 + [0] * 2] * 9, *[[5] * 2 + [0] * 13] * 3],
        entropy=[0.5] * 12,
        said=["More steps would hardly help", "in no rollout"],
        unsaid=["were never right in", "a longer warm-up"],
    ),
    "an update destroys the policy before all tasks were tried": Recorded(
        right=[[6] * 8 + [0] * 8, *[[0] * 16] * 4],
        causes=["learning-rate-too-large", "entropy-collapse"],
        said=[f"{CAUSE} hundredth of it: agentrig train ", "config.toml algorithm.lr=3e-06"],
        unsaid=["right in no rollout"],
    ),
    "the learning rate destroys the policy step by step": Recorded(
        right=[HALF, HALF, *[[1, 0, 0, 1, 0, 1, 0, 0]] * 5, *[[8, 0, 0, 8, 0, 0, 0, 0]] * 4],
        stop=ALIKE,
        causes=["learning-rate-too-large", "entropy-collapse"],
        said=["right after the first updates, the mean reward fell from 0.438 (steps 1 to 2) to 0.25 (steps 8 to 11)",
              TENTH, f"in step 11: {ALIKE}",
              "seen in 9 of 11 steps, first seen in step 3", "did the agent or the reward break in between?",
              "This follows from learning-rate-too-large"],
        unsaid=["temperature"],
    ),
    "an update destroys the policy": Recorded(
        right=[[6] * 16, *[[8, 8, *[0] * 14]] * 4],
        entropy=[0.031, 0.0, 0.0, 0.0, 0.0],
        causes=["learning-rate-too-large", "entropy-collapse"],
        said=[f"{DESTROYED} 0.125 (steps 2 to 5)", "0 of 16 groups before, and in 64 of 64 groups since", TENTH,
              "first seen in step 2"],
    ),
    "another update destroys it for good": Recorded(
        right=[[6] * 16, [3] * 15 + [7], *[[8, 8, *[0] * 14]] * 3],
        entropy=[0.031, 0.02, 0.0, 0.0, 0.0],
        causes=["learning-rate-too-large", "entropy-collapse"],
        said=[f"{DESTROYED} 0.125 (steps 3 to 5)", "0 of 16 groups before, and in 48 of 48 groups since"],
    ),
    "an update destroys the policy for few tasks": Recorded(
        right=[[6] * 4, *[[8, 0, 0, 0]] * 4],
        entropy=[0.031, 0.0, 0.0, 0.0, 0.0],
        causes=["learning-rate-too-large"],
        said=[f"{DESTROYED} 0.25 (steps 2 to 5)", "0 of 4 groups before, and in 16 of 16 groups since"],
    ),
    "more steps would not help": Recorded(
        right=[[8] + [0] * 2 + [3] * 6, *[*MIXED, MIXED[1]] * 3, MIXED[1], MIXED[1]],
        entropy=[0.6, 0.53, 0.46, 0.4, 0.3, 0.3, 0.2, 0.2, 0.1, 0.09, 0.08, 0.07],
        said=["More steps would hardly help: in 89% of the groups of the last 3 steps", "% in the first 3 steps)",
              "from 0.53 nats a token (mean of steps 1 to 3) to 0.08 (steps 10 to 12)",
              "a lower learning rate (algorithm.lr)"],
        unsaid=["rain for more steps", "few, so"],
    ),
    "the reward falls a little": Recorded(
        right=[[3] * (8 - i) + [2] * i for i in range(8)],
        said=["More steps would hardly help: training got worse: the mean reward fell from 0.367 in the first 2 steps",
              "try a lower algorithm.lr"],
        unsaid=["rain for more steps"],
    ),
    "the entropy falls while groups still teach": Recorded(
        right=[HALF] * 12,
        entropy=[0.6, 0.5, 0.5, 0.4, 0.3, 0.3, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1],
        said=["rain for more steps", "the entropy fell from"],
        unsaid=["hardly", "algorithm.lr"],
    ),
    "kinds of tasks that were never right": Recorded(
        right=[*[[4, 0] * 4] * 6, *[[8, 0, 8, 0, 8, 0, 4, 0]] * 6],
        said=["In training, half=second (384 rollouts) was never right: reward can't teach what is never right."],
        unsaid=["algorithm.lr", "algorithm.temperature", "rain for more steps"],
    ),
    "more steps may help": Recorded(right=[HALF] * 12, said=["rain for more steps"], unsaid=["hardly"]),
    "most groups are alike from step 3 on": Recorded(
        right=[[5] * 12, [5] * 12, *[[8] * 6 + [0] * 5 + [4], [8] * 5 + [0] * 3 + [4] * 4] * 7, *[[8, *[4] * 11]] * 2,
               *[[8] * 6 + [0] * 5 + [4]] * 6],
        entropy=[0.3, 0.2, 0.18, 0.2, 0.21, 0.218, *[0.05] * 18],
        causes=["entropy-collapse"],
        said=["since step 3", "from 0.218 nats a token (mean of steps 1 to 6) to 0.05 (steps 19 to 24)"],
    ),
    "tasks that were never right are no sign of a collapse": Recorded(
        right=[*[[5] * 9 + [0] * 3] * 3, *[[8] * 9 + [0] * 3] * 16],
        entropy=[1.0, 1.0, 1.0, 0.5, *[0.1] * 15],
        lift=0.6,
        said=["12 of these groups every answer was wrong, in 36 every answer was right",
              "- 3 of 12 training tasks were right in no rollout"],
    ),
    "a run that gained stopped exploring": Recorded(
        right=[*[[5] * 9 + [1] * 3] * 3, *[[8] * 9 + [0] * 3] * 16],
        entropy=[1.0, 1.0, 1.0, 0.5, *[0.1] * 15],
        lift=0.6,
        causes=["entropy-collapse"],
        said=["stopped exploring"],
        unsaid=["right in no rollout"],
    ),
}  # fmt: skip
"""Runs in which one cause leads to what others could explain, too."""


@pytest.mark.parametrize("name", RECORDED)
def test_why_and_the_end_of_train_name_the_same_cause_of(tmp_path: Path, name: str) -> None:
    case = RECORDED[name]
    run = case.write(tmp_path / "run")
    found, text = diagnose(run), str(diagnose(run))
    assert [f.cause for f in found.problems] == list(case.causes), text
    assert [part for part in case.said if part not in text] == [], text
    assert [part for part in case.unsaid if part in text] == [], text
    assert [f.text for f in found.warnings if f.text in found.next_step] == [], "said once"
    assert text.count("reward can't teach what") <= 1, "said once"
    stopped = RunStopped(case.message, cause=NO_SIGNAL)
    stopped.run = run if case.stop else None
    shown = run_error(stopped) if case.stop else console_text(*run_ending(run))
    for line in ending(found):
        assert line.removeprefix(IT_ENDED) in shown, shown
    if case.stop:
        assert shown.splitlines()[0] == case.message.splitlines()[0]
        assert f"agentrig why {run}" in shown
        assert shown.count("for example") == 1


def test_an_agent_without_answers_is_compared_by_what_the_model_replied(tmp_path: Path) -> None:
    run = Recorded(right=[[4] * 5]).write(tmp_path / "run")
    for step in (0, 1):
        made = [rollout_of(i, right=i == step, mode="report", step=step) for i in range(4)]
        judged = [attrs.evolve(r, outcome=Outcome(own_reward=float(i == step))) for i, r in enumerate(made)]
        RunDirectory(run).write_rollouts(judged, mode="report", step=step)
    assert Evidence.of(read_run(run)).changed == (1, 1, 2, 4)
    alike = Recorded(right=[[0, 8, 8, 0, 0, 8, 8]] * 7, stop=ALIKE, judges=True).write(tmp_path / "alike")
    assert [f.cause for f in diagnose(alike).problems] == ["zero-variance-groups"], "and not no-exploration"


@pytest.mark.parametrize(
    ("cause", "key"), [("call-errors", "server.use"), ("overlong-prompts", "algorithm.max_length")]
)
def test_wrong_answers_after_calls_that_failed_follow_from_these(tmp_path: Path, cause: str, key: str) -> None:
    run = Recorded(right=[[0] * 8] * 4, stop=ZERO, cause=cause).write(tmp_path / "run")
    assert [f.cause for f in diagnose(run).problems] == [cause, "tasks-too-hard"]
    assert f"This follows from {cause}: mend that first." in str(diagnose(run))
    assert key in diagnose(run).problems[0].settings


def test_an_agent_that_answers_the_same_whatever_the_model_replies_is_named(tmp_path: Path) -> None:
    case = Recorded(right=[[0] * 5] * 7, stop=ZERO)
    run = case.write(tmp_path / "run")
    for step in range(1, 8):
        made = [case.rollout(g, i, right=False, step=step) for g in range(5) for i in range(8)]
        told = [
            attrs.evolve(r, outcome=Outcome(answer="?"), trace=trace_of(r.id, r.task, [r.id], right=False, start=0.0))
            for r in made
        ]
        RunDirectory(run).write_rollouts(told, mode="train", step=step)
    first, second = diagnose(run).problems
    assert (first.cause, second.cause, second.follows) == ("one-answer", "tasks-too-hard", "one-answer")
    assert (
        'differ in 35 of 35 groups (one task\'s rollouts in a step), and all 280 answers are the same ("?")'
        in first.text
    )


@pytest.mark.parametrize(("reply", "named"), [("{}", True), ("It is {}.", False)])
def test_an_agent_that_caches_the_first_reply_to_each_task_is_named(tmp_path: Path, reply: str, named: bool) -> None:
    case = Recorded(right=[[0] * 5] * 7, stop=ZERO)
    run = case.write(tmp_path / "run")
    for step in range(1, 8):
        made = []
        for g in range(5):
            for i in range(8):
                rollout = case.rollout(g, i, right=False, step=step)
                said = reply.format(f"day {step}-{g}" if i == 0 or not named else rollout.id.upper()) + " " * i
                trace = trace_of(rollout.id, rollout.task, [said], right=False, start=0.0)
                made.append(attrs.evolve(rollout, outcome=Outcome(answer=f"day {step}-{g}"), trace=trace))
        RunDirectory(run).write_rollouts(made, mode="train", step=step)
    found = diagnose(run).problems
    assert [f.cause for f in found][:1] == ["one-answer" if named else "tasks-too-hard"]
    text = "differ in 35 of 35 groups (one task's rollouts in a step), the agent's answers do not"
    assert (text in found[0].text, "cache the replies" in found[0].advice) == (named, named)


@pytest.mark.parametrize(("other", "of"), [(0, 30), (2, 200)])
def test_a_falling_reward_is_no_reason_to_lower_the_rate_of_a_policy_that_stayed_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: int, of: int
) -> None:
    run = RECORDED["the reward falls a little"].write(tmp_path / "run")
    monkeypatch.setattr(Evidence, "changed", property(lambda self: (0, 0, other, of)))
    found = diagnose(run)
    assert [f.cause for f in found.problems] == ["learning-rate-too-small"]
    assert "try a lower" not in words(found)
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("[algorithm]", "[algorithm]\nwarmup_steps = 40"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for n, line in enumerate(lines, 1):  # more than half of the way up
        line["algorithm"]["lr"] = tomllib.loads(config)["algorithm"]["lr"] * (0.5 + 0.2 * n / len(lines))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = diagnose(run)
    assert [f.cause for f in found.problems] == ["warmup-too-long"]
    assert found.problems[0].settings[0] == "algorithm.warmup_steps"


def console_text(*parts: Any) -> str:
    return "\n".join(str(part) for part in parts)


@pytest.mark.parametrize(("trained", "causes"), [(1, ["credit-leaves-out"]), (6, [])])
def test_a_credit_that_learns_from_few_of_the_groups_whose_rewards_differ_is_named(
    tmp_path: Path, trained: int, causes: list[str]
) -> None:
    run = Recorded(right=[[4] * 6] * 8).write(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["calls"] = {"recorded": 48, "trained": trained, "dropped": {"left-out-by-credit": 48 - trained}}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = diagnose(read_run(run))
    assert [problem.cause for problem in found.problems] == causes
    said = "the credit gave 8 of 384 calls a worth, so it learned from at most 8 of the 48 groups whose rewards differ"
    assert (said in str(found)) == bool(causes)


@pytest.mark.parametrize(("sign", "groups", "named"), [(-1, 6, True), (1, 6, False), (-1, 2, False)])
def test_a_credit_that_gives_the_better_rollouts_the_lower_worth_is_named(
    tmp_path: Path, sign: int, groups: int, named: bool
) -> None:
    run = Recorded(right=[[4] * groups]).write(tmp_path / "run")
    (file,) = read_run(run).of_mode("train")
    rows = [
        {"rollout": r["id"], "span": "s", "node": "", "place": "trained", "reason": "", "tokens": 9, "advantage": worth}
        for r in rollout_rows([file], ("id", "value"))
        for worth in [sign * (r["value"] - 0.5)]
    ]
    RunDirectory(run).write_calls(rows, step=file.step)
    found = [f for f in diagnose(run).problems if f.cause == "credit-reversed"]
    assert [f.text.startswith(f"in all {groups} groups whose rewards differ, ") for f in found] == [True] * named


def test_the_auditors_words_come_first_and_trends_before_other_warnings(tmp_path: Path) -> None:
    run = RECORDED["a run that gained stopped exploring"].write(tmp_path / "run")
    noted: dict[str, Any] = {"manifest": {"warnings": ["two are alike"]}, "summary": {"audited": {"faults": ["x"]}}}
    for name, more in noted.items():
        told = json.loads((run / f"{name}.json").read_text())
        (run / f"{name}.json").write_text(json.dumps({**told, **more}))
    first, second, third, *_ = [f.text for f in diagnose(run).warnings]
    assert (first, third) == ("the auditor found a fault: x", "two are alike")
    assert "all rollouts got the same reward" in second
    assert verdict(diagnose(run)).startswith(f"{FADED} was found")


def test_a_score_that_the_auditor_cannot_check_since_the_reward_contradicts_itself_is_a_warning(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4)
    summary = json.loads((run / "summary.json").read_text())
    left = {"score": f"{TWO_SCORES}: 0.3 and 0.7", "gradient": "it may take 10 s"}
    seen = {"links": 7, "of": 9, "steps": [1, 2], "not_looked_at": left}
    (run / "summary.json").write_text(json.dumps({**summary, "audited": seen}))
    first, *others = [f.text for f in diagnose(run).warnings]
    assert first == f"the auditor could check score in no step: {left['score']}"
    assert not any("gradient" in text for text in others)
    assert f"in any step: score ({left['score']}), gradient (it may take 10 s)." in verdict(diagnose(run))


def test_a_run_that_goes_on_and_has_no_step_yet_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1, ended=False)
    (run / "metrics.jsonl").unlink()
    shutil.rmtree(run / "rollouts")
    lock = Lock(run / "run.lock")
    assert lock.take()
    found = diagnose(run)
    assert (found.status, verdict(found)) == ("running", NOT_YET)
    lock.release()
    assert verdict(diagnose(run)).startswith("The run stopped before its first step had ended. Go on with")


def test_a_run_without_a_rollout_says_so(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "reward": null, "rollouts": 0}\n')
    (tmp_path / "summary.json").write_text('{"steps": 1, "solved": false, "complete": true}')
    said = str(diagnose(tmp_path))
    assert "No rollout was run, so nothing could be learned" in said
    assert "rain for more steps" not in said
