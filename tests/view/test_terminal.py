"""The span tree: every span once, below its parent, with prompts and replies. The end of a run: what it changed."""

from __future__ import annotations

import html
import io
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from rich.console import Console

from agentrig import Outcome, Score, Span, Task, Trace
from agentrig.cli.entry import Printable, main
from agentrig.rollouts import Rollout
from agentrig.run.directory import RunDirectory
from agentrig.run.rows import row_of
from agentrig.testing.run_directory import QUESTIONS, rollout_of, write_run
from agentrig.text import CONTROLS
from agentrig.traces import LLM_CALL, REWARD, RUNNER
from agentrig.view import build_report, tables
from agentrig.view.causes.evidence import Evidence
from agentrig.view.causes.outcome import by_class
from agentrig.view.comparison import compare
from agentrig.view.diagnosis import diagnose, words
from agentrig.view.page import render
from agentrig.view.reading import read_run
from agentrig.view.samples import before_after
from agentrig.view.table import results
from agentrig.view.tables import gain_alone
from agentrig.view.terminal import run_ending, span_text, span_tree


def test_a_gain_that_is_in_one_class_alone_is_told() -> None:
    """The rest must be enough tasks; trained calls are no class of tasks."""

    def classes(**parts: tuple[float, float, int]) -> dict[str, dict[str, float]]:
        return {
            name: {"before": before, "after": after, "n_before": n, "n_after": n, "n": n}
            for name, (before, after, n) in parts.items()
        }

    alone = classes(enough=(0.286, 0.226, 84), short=(0.697, 1.0, 66))
    assert gain_alone({"slices": {"stock": alone}}) == [
        "The gain is in stock short alone: 69.7 → 100.0% of 66 tasks; of the other 84 28.6 → 22.6%."
    ]
    for none in (
        {"calls": alone},
        {"stock": classes(enough=(0.286, 0.3, 84), short=(0.697, 1.0, 66))},
        {"stock": classes(enough=(0.3, 0.2, 10), short=(0.697, 1.0, 66))},
        {"stock": classes(enough=(0.3, 0.4, 84), short=(0.7, 0.75, 66), a=(0.2, 0.1, 30))},
    ):
        assert gain_alone({"slices": none}) == []


def depth(line: str) -> int:
    return len(line) - len(line.lstrip("│├└─ "))


def lines_with(text: str, part: str) -> list[str]:
    return [line for line in text.splitlines() if part in line]


def test_every_span_is_shown_once_below_its_parent():
    rollout = rollout_of(0, right=True, mode="dev", step=0, turns=2)
    text = span_text(rollout)
    assert len(lines_with(text, "─ write_query")) == 1
    assert len(lines_with(text, "─ rewrite_query")) == 1
    assert len(lines_with(text, "─ check_query")) == 2
    assert len(lines_with(text, "─ LLM call")) == 4
    order = [lines_with(text, part)[0] for part in ("─ rollout", "─ langgraph-sql", "─ write_query", "─ LLM call")]
    assert [depth(line) for line in order] == [4, 8, 12, 16]


def test_long_details_of_a_score_are_cut():
    rollout = rollout_of(0, right=True, mode="dev", step=0, turns=2)
    for score in (Score.ok(1.0, feedback="x" * 5000), Score.invalid("x" * 5000)):
        text = span_text(attrs.evolve(rollout, score=score))
        assert text.count("x" * 70) < 2_000 / 70
        assert "(cut from 5000 characters)" in " ".join(text.replace("│", "").split())


def test_prompts_replies_tokens_timings_and_training_are_shown():
    text = span_text(rollout_of(0, right=True, mode="dev", step=0, turns=2))
    assert "user: How many singers are older than 30?" in text
    assert "reply: It does not run. VERDICT: INCORRECT" in text
    assert '─ result: Error: near "FORM": syntax error' in text
    assert len(lines_with(text, "messages as in the call before: 1")) == 3
    call = lines_with(text, "─ LLM call")
    assert all("60 + 20 tokens" in line and "0.310 s" in line for line in call)
    assert [("for training" in line) for line in call] == [True, False, True, False]
    assert "score 1  judged in 1.0 ms" in text.splitlines()[1]
    assert lines_with(text, "─ answer: ") == ["├── answer: SELECT count(*) FROM singer WHERE age > 30"]
    other = attrs.evolve(rollout_of(0, right=True, mode="dev", step=0), outcome=Outcome(answer="42"))
    assert lines_with(span_text(other), "─ answer: ") == ["├── answer: 42"]
    forgot = attrs.evolve(other, outcome=Outcome(answer=None))
    assert lines_with(span_text(forgot), "─ answer: ") == ["├── answer: None"]
    assert "task task-0000" in text.splitlines()[0]


def test_a_reward_of_a_call_is_shown_beside_it():
    """What the reward says of calls counts; where it says nothing, what the agent gave them."""
    rollout = rollout_of(0, right=True, mode="dev", step=0, turns=2)
    told = [line.split("reward ")[-1] for line in lines_with(span_text(rollout), "(Score.calls)")]
    assert told == ["0 (Score.calls)", "1 (Score.calls)"]
    spans = list(rollout.trace.spans)
    last = rollout.trace.llm_calls()[-1]
    spans.append(attrs.evolve(last, id="given", name="reward", start=last.end, attributes={REWARD: 0.25}))
    trace = attrs.evolve(rollout.trace, spans=spans)
    assert "(agentrig.reward)" not in span_text(attrs.evolve(rollout, trace=trace))
    unscored = attrs.evolve(rollout, trace=trace, score=Score.ok(1.0))
    shown = span_text(unscored).splitlines()
    (place,) = (i for i, line in enumerate(shown) if "reward 0.25 (agentrig.reward)" in line)
    (call,) = (i for i, line in enumerate(shown) if "VERDICT: CORRECT" in line)
    assert place < call, "beside the last call"


def test_a_table_as_input_is_one_line_where_it_fits():
    rollout = rollout_of(0, right=True, mode="dev", step=0)
    order = {"id": 7, "items": [{"name": "tea", "price": 2.5}, {"name": "mug", "price": 8}]}
    task = attrs.evolve(rollout.task, input={"order": order})
    assert lines_with(span_text(attrs.evolve(rollout, task=task)), "─ order: ") == [f"├── order: {json.dumps(order)}"]


def test_a_text_of_the_model_is_shown_once_and_no_path():
    rollout = rollout_of(0, right=True, mode="dev", step=0, turns=2)
    query = "SELECT count(*) FROM singer WHERE age > 30"
    text = span_text(rollout)
    assert [line.split("─ ")[-1] for line in lines_with(text, query)] == [f"answer: {query}", f"reply: {query}"]
    assert len(lines_with(text, "VERDICT: CORRECT")) == 1
    spans = [
        attrs.evolve(
            span, attributes={**span.attributes, "output": {"messages": [{"role": "assistant", "content": query}]}}
        )
        if span.node == "rewrite_query"
        else span
        for span in rollout.trace.spans
    ]
    text = span_text(attrs.evolve(rollout, trace=attrs.evolve(rollout.trace, spans=spans)))
    assert len(lines_with(text, query)) == 2
    assert "/data/" not in text
    assert lines_with(text, "database: …/concert_hall.sqlite")


def test_the_private_part_of_the_task_is_shown_beside_the_answer_if_it_is_asked_for():
    rollout = rollout_of(0, right=True, mode="dev", step=0)
    assert "SECRET GOLD" not in span_text(rollout)
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as shown:
        console.print(span_tree(rollout, gold=True))
    lines = shown.get().splitlines()
    (answer,) = (i for i, line in enumerate(lines) if "─ answer: " in line)
    assert lines[answer + 1] == "├── private.gold: SECRET GOLD"


def test_a_long_text_is_cut_and_what_is_left_out_is_said():
    """`agentrig dev` was silent for minutes at a task of 60 MB, which rich broke into lines."""
    rollout = rollout_of(0, right=True, mode="dev", step=0)
    long = "word " * 400_000
    task = attrs.evolve(rollout.task, input={"text": long}, private={"gold": long})
    spans = [
        attrs.evolve(s, attributes={**s.attributes, "request": {"messages": [{"role": "user", "content": long}]}})
        if s.name == LLM_CALL
        else s
        for s in rollout.trace.spans
    ]
    rollout = attrs.evolve(rollout, task=task, trace=attrs.evolve(rollout.trace, spans=spans))
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as shown:
        console.print(span_tree(rollout, gold=True))
    assert shown.get().count("… 1,998,000 characters more") == 2
    assert "… 1,960,000 characters more" in shown.get()
    assert row_of(rollout)["input"] == json.dumps({"text": long}), "as --json prints it"


def test_an_answer_that_differs_from_gold_in_its_type_only_is_shown_with_both_types():
    rollout = rollout_of(0, right=False, mode="dev", step=0)
    task = attrs.evolve(rollout.task, private={"total": 27.79, "items": 3})
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as shown:
        console.print(span_tree(attrs.evolve(rollout, task=task, outcome=Outcome(answer="27.79")), gold=True))
    lines = shown.get().splitlines()
    (answer,) = (i for i, line in enumerate(lines) if "─ answer: " in line)
    assert [line.split("─ ")[-1] for line in lines[answer : answer + 3]] == [
        "answer: the text '27.79'", "private.total: the number 27.79", "private.items: 3",
    ]  # fmt: skip


def test_no_control_character_of_a_plugin_reaches_the_terminal(tmp_path: Path) -> None:
    """An exception with `ESC[2J` cleared the terminal at the end of `train`; a newline in an id broke the tree."""
    run = write_run(tmp_path / "run", steps=2, ended=False)
    told = {"error": "RunStopped", "message": "step 3: ValueError: \x1b[2Jgone", "cause": "failures"}
    (run / "error.json").write_text(json.dumps(told))
    assert r"why: failures: step 3: ValueError: \x1b[2Jgone" in "\n".join(map(str, run_ending(run)))
    assert r"ValueError: \x1b[2Jgone" in build_report([run]).read_text()


def test_failures_show_kind_and_message():
    text = span_text(rollout_of(0, right=False, mode="dev", step=0, failure="llm-error"))
    assert text.splitlines()[1].endswith("failed: llm-error  the model <server> did not answer")
    invalid = attrs.evolve(rollout_of(0, right=True, mode="dev", step=0), score=Score.invalid("gold does not run"))
    assert span_text(invalid).splitlines()[1].endswith("failed: reward-invalid  gold does not run")


def test_a_timeout_and_components_are_part_of_the_verdict():
    score = Score(status="timeout", value=0.0, components={"syntax": 14 / 15}, details={"reason": "5 s are over"})
    rollout = attrs.evolve(rollout_of(0, right=True, mode="dev", step=0), score=score)
    last = span_text(rollout).splitlines()[1]
    assert "score 0 (timeout)" in last
    assert last.endswith("5 s are over; syntax: 0.933")


def odd_rollout() -> Rollout:
    """Unusual spans: an orphan, a failed call, no ids, markup in texts, a tool, a cut reply."""
    request = {"messages": [{"role": "user", "content": [{"type": "text", "text": "[bold]x[/nothing]"}]}]}
    usage = {"usage": {"prompt_tokens": 7, "completion_tokens": 2}, "choices": [{"message": {"content": "y"}}]}
    tools = {"choices": [{"message": {"content": None, "tool_calls": [{"id": "t"}]}}]}
    rows: list[tuple[str, str | None, str, str | None, dict[str, Any]]] = [
        ("a", "lost", LLM_CALL, "HTTP 500: down", {"request": request}),
        ("b", None, LLM_CALL, None, {"request": request, "response": usage}),
        ("c", None, LLM_CALL, None, {"response": tools, "finish_reason": "length"}),
        ("d", None, "tool", None, {"tool.name": "sql", "input": "a\nb"}),
        ("e", "e", "agent", None, {"agent.name": "itself"}),
    ]
    spans = [
        Span(id=i, parent=parent, name=name, start=1.0, end=2.0, error=error, attributes=attributes)
        for i, parent, name, error, attributes in rows
    ]
    return Rollout(
        id="r",
        task=Task(id="t", input={"question": "[/red]", "n": 3}),
        group="g",
        mode="dev",
        step=0,
        outcome=Outcome(answer="y"),
        score=Score.ok(0.0),
        trace=Trace(rollout_id="r", spans=spans),
    )


def test_odd_spans_are_shown_as_they_are():
    text = span_text(odd_rollout())
    assert "question: [/red]" in text
    assert "[bold]x[/nothing]" in text
    assert "HTTP 500: down" in text
    assert "no token ids" in text
    assert "7 + 2 tokens, no ids" in text
    assert "ended by length" in text
    assert 'reply: {"id": "t"}' in text
    assert lines_with(text, "─ sql")
    assert lines_with(text, "─ itself")
    assert "\x1b" not in text


def test_a_rollout_without_spans_says_so():
    rollout = attrs.evolve(odd_rollout(), trace=Trace(rollout_id="r"))
    assert "no spans were recorded" in span_text(rollout)


def ending(run: Path) -> str:
    console = Console(width=130, color_system=None)
    with console.capture() as shown:
        for part in run_ending(run):
            console.print(part, soft_wrap=isinstance(part, str), highlight=False, markup=False)
    return shown.get()


def with_parts(run: Path, parts: dict[str, tuple[float, float]]) -> None:
    """Give the held-out scores of a run these components, before and after; `match` is the value itself."""
    for end, file in enumerate(sorted((run / "rollouts").glob("report-*.parquet"))):
        table = pq.read_table(file)
        own = {name: of[end] for name, of in parts.items()}
        column = [json.dumps({"match": value, **own}) for value in table["value"].to_pylist()]
        pq.write_table(table.set_column(table.schema.get_field_index("components"), "components", [column]), file)


def test_parts_of_the_held_out_reward_and_classes_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3, held_out=60, lift=0.6)
    with_parts(run, {"form": (0.25, 0.75), **{f"part {i}": (0.0, 0.5) for i in range(9)}})
    shown = ending(run)
    lines = [re.split(r"  +", line.strip()) for line in shown.splitlines()]
    assert ["form", "0.25", "0.75", "p < 0.001: significant"] in lines
    assert "Parts of the reward: permutation test, p corrected for 10 parts.\n" in shown
    assert [row[0] for row in lines[3:11]] == ["form", *(f"part {i}" for i in range(7))], "match is the reward"
    (calls,) = lines_with(shown, "calls scored below 1")
    assert re.search(r"\d+ of 90 +\d+ of 90", calls)
    classes = {row[0]: row[1:] for row in lines if row[0].startswith("half = ")}
    assert set(classes) == {"half = first", "half = second"}
    held_out = tables.held_out(read_run(run))
    first = held_out["slices"]["half"]["first"]
    assert classes["half = first"][:2] == [f"{100 * first[end]:.1f}%" for end in ("before", "after")]
    assert re.fullmatch(r"30 tasks, p [<=] 0\.\d+", classes["half = first"][2])
    assert held_out["components"]["form"] == {"before": 0.25, "after": 0.75, "p": pytest.approx(0.001, abs=2e-4)}
    assert "form: 0.25 → 0.75 (p < 0.001: significant)" in " ".join(compare([run]).table().rows[0][1].split())
    assert "permutation test, p corrected for 10 parts" in compare([run]).table().note
    assert re.search(r"Held-out reward by part.*?form.*?0\.25.*?0\.75", render([read_run(run)]), re.DOTALL)
    assert "form" in [row[0].strip() for row in results([compare([run]).rows[0]]).rows]


def test_a_part_of_the_reward_that_moved_is_tested(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3, held_out=60, lift=0.6)
    first, last = sorted((run / "rollouts").glob("report-*.parquet"))
    for file, orders, forms in ((first, 12, 4), (last, 0, 3)):  # `order` of 12 tasks, then of none; `form` of 4, then 3
        table = pq.read_table(file)
        of = [{"order": float(i < orders), "form": float(i < forms)} for i in range(60)]
        column = [json.dumps(each) for each in of]
        pq.write_table(table.set_column(table.schema.get_field_index("components"), "components", [column]), file)
    shown = ending(run)
    (order,), (form,) = lines_with(shown, "  order "), lines_with(shown, "  form ")
    assert re.search(r"0\.2 +0 +p = 0\.00\d\d: significant", order), order
    assert re.search(r"p = 1\.00: may be chance", form), form
    (told,) = lines_with(words(diagnose(run)), "parts of the held-out reward changed")
    assert re.search(r" significantly: order fell \(0\.2 → 0, p = 0\.00\d\d\); p corrected for 2 parts$", told), told


def with_graded(run: Path, lift: float) -> None:
    """Make the held-out rewards of wrong answers 0.1, and those of the first half `lift` more at the end."""
    for end, file in enumerate(sorted((run / "rollouts").glob("report-*.parquet"))):
        table = pq.read_table(file)
        rows = zip(table["value"].to_pylist(), table["slices"].to_pylist(), strict=True)
        values = [value or 0.1 + lift * end * ("first" in of) for value, of in rows]
        column = pa.array(values, table.schema.field("value").type)
        pq.write_table(table.set_column(table.schema.get_field_index("value"), "value", column), file)


def test_classes_tell_the_mean_reward_where_rewards_are_graded(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3, held_out=60, lift=0.0)
    assert "tasks, mean reward" not in ending(run)
    assert "reward_after" not in tables.held_out(read_run(run))["slices"]["half"]["first"]
    with_graded(run, 0.2)
    (line,) = lines_with(ending(run), "half = first")
    before, after = map(float, re.search(r"30 tasks, mean reward (0\.\d{3}) → (0\.\d{3})", line).groups())
    of = tables.held_out(read_run(run))["slices"]["half"]["first"]
    assert (before, after) == (
        pytest.approx(of["reward_before"], abs=1e-3),
        pytest.approx(of["reward_after"], abs=1e-3),
    )
    assert after > before
    assert re.search(r"first.*?of 30, mean reward 0\.\d+", render([read_run(run)]), re.DOTALL)


def test_the_classes_that_are_shown_changed_by_most_points_and_losses_are_among_them(tmp_path: Path) -> None:
    """A class of many tasks that changed in more of them, but by fewer points, comes after a small one."""
    shares = {f"gain {i}": (100, 10, 11 + i) for i in range(8)} | {"loss": (20, 10, 4)}

    def of(name: str, n: int, right: int) -> dict[str, tuple[str, bool, str, float]]:
        return {f"{name} {i}": (f"{name} {i}", i < right, "", float(i < right)) for i in range(n)}

    ends = {("kind", name): (of(name, n, before), of(name, n, after)) for name, (n, before, after) in shares.items()}
    evidence = Evidence(run=read_run(write_run(tmp_path / "run", steps=1)), steps=(), ends=None, where="held-out")
    evidence.__dict__["classes"] = ends
    corrected, rows = by_class(evidence, 8)
    assert [row[0] for row in rows] == ["kind = loss", *(f"kind = gain {i}" for i in range(7, 0, -1))]
    assert corrected == ""
    ends["kind", "loss"] = (of("loss", 20, 18), of("loss", 20, 2))
    assert by_class(evidence, 8)[0] == "p corrected for 9 classes"


def test_the_end_of_a_run_shows_the_gain_a_task_and_the_cause(tmp_path: Path):
    run = write_run(tmp_path / "my run", steps=3)
    lines = ending(run).splitlines()
    accuracy = json.loads((run / "summary.json").read_text())["accuracy"]
    assert lines[0].split() == ["40", "held-out", "tasks", "before", "after"]
    before, after = accuracy["before"], accuracy["after"]
    points = f"{100 * (after - before):+.1f}"
    assert lines[1].split() == ["accuracy", f"{100 * before:.1f}%", f"{100 * after:.1f}%", points, "points"]
    assert lines[2].split()[:2] == ["95%", "interval"]
    (tested,) = [line for line in lines if line.startswith("Of 40 held-out tasks")]
    assert re.search(r"\(sign test p .*: (significant|may be chance)\)", tested)
    (task,) = (i for i, line in enumerate(lines) if line.startswith("wrong before, right after: "))
    wrong, right = next((gold.split(" WHERE")[0], gold) for _, asked, gold in QUESTIONS if lines[task].endswith(asked))
    assert lines[task + 1].split() == ["before", "after"]
    assert " ".join(lines[task + 2].split()) == f"answer {wrong} {right}"
    assert lines[task + 3].split() == ["score", "0", "(wrong)", "1", "(right)"]
    (why,) = [line for line in lines if line.startswith("why: ")]
    assert why.removeprefix("why: ") in words(diagnose(run))
    assert "3 steps in " in ending(run)
    assert "failed 1 (1 llm-error)" in ending(run)


def test_of_an_answer_with_keys_those_that_differ_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3)
    for end, file in enumerate(sorted((run / "rollouts").glob("report-*.parquet"))):
        table = pq.read_table(file)
        answer = json.dumps({"ids": ["b11", "b13"], "title": f"of end {end}", "more": None})
        column = pa.array([answer] * len(table), table.schema.field("answer").type)
        pq.write_table(table.set_column(table.schema.get_field_index("answer"), "answer", column), file)
    shown = " ".join(ending(run).split())
    assert '"title": "of end 0" "title": "of end 1" } } … 2 keys alike … 2 keys alike' in shown
    assert "b11" not in shown


def test_the_end_of_a_run_has_its_second_reward(tmp_path: Path):
    run = write_run(tmp_path / "run", steps=4, second_reward="strict")
    rewards = [json.loads(line)["reward"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    (said,) = [line for line in ending(run).splitlines() if line.startswith("second reward")]
    shown = [f"{max(0, rewards[0] - less):.3g} → {max(0, rewards[-1] - less):.3g}" for less in (0.08, 0)]
    assert said == f"second reward strict, first → last steps: {', trained reward '.join(shown)}"
    assert "second reward" not in ending(write_run(tmp_path / "other", steps=2))


def test_graded_rewards_have_an_interval_and_a_test_of_their_mean(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2, lift=0.0)
    assert "mean reward of the" not in ending(run), "right and wrong say it all"
    for step, most in ((0, 0.3), (2, 0.6)):
        rewards = [round(most * (i % 5) / 4, 3) for i in range(40)]
        made = [
            attrs.evolve(
                rollout_of(i, right=False, mode="report", step=step, turns=1 + step),
                score=Score.ok(reward),
                outcome=Outcome(answer=f"{step}"),
            )
            for i, reward in enumerate(rewards)
        ]
        RunDirectory(run).write_rollouts(made, mode="report", step=step)
    said = (
        "he mean reward of the 40 held-out tasks went from 0.150 to 0.300: +0.150, 95% interval +0.115 to +0.184 "
        "(permutation test p < 0.001: significant)"
    )
    assert f"T{said}." in ending(run)
    assert f"t{said}" in html.unescape(build_report([run]).read_text())


@pytest.mark.parametrize(("n", "named"), [(40, True), (5, True), (1, False)])
def test_a_gain_of_answers_that_only_the_reward_changed_is_not_called_significant(
    tmp_path: Path, n: int, named: bool
) -> None:
    run = write_run(tmp_path / "run", steps=8)
    for step in (0, 8):  # the first n tasks have the same answer at both ends, the others of the first 30 got right
        made = [rollout_of(i, right=step > 0 and n <= i < 30, mode="report", step=step) for i in range(40)]
        paid = [attrs.evolve(r, score=Score.ok(1.0, correct=True)) if step and i < n else r for i, r in enumerate(made)]
        RunDirectory(run).write_rollouts(paid, mode="report", step=step)
    text, found, page = ending(run), diagnose(run), html.unescape(build_report([run]).read_text())
    assert [f.cause for f in found.problems if not f.follows] == ["reward-contradicts-itself"] * named
    same = f"{n} of these {max(n, 30)} have the same answer at both ends; without them, "
    tested = {40: f"({same}no task changed)", 5: f"({same}sign test p < 0.001: significant)"}
    for shown in (text, page):
        assert tested.get(n, "(sign test p < 0.001: significant)") in re.sub("<.*?>", "", shown)
    if n == 40:
        assert "so the gain is the reward's, not the model's" in text
        assert "significant" not in text
        assert not found.gained
        assert '<b class="good">' not in page[page.index('<div class="accuracy">') :].split("95% intervals")[0]


@pytest.mark.parametrize(("n", "named"), [(12, True), (2, False)])
def test_a_gain_of_an_agent_that_answers_equal_replies_anew_is_not_called_significant(
    tmp_path: Path, n: int, named: bool
) -> None:
    run = write_run(tmp_path / "run", steps=8)
    for step in (0, 8):  # n of the first 12 tasks have the same replies and another answer, the last 10 got right
        made = [rollout_of(i, right=step > 0 and i >= 20, mode="report", step=step) for i in range(30)]
        told = Outcome(answer="42"), Score.ok(1.0, correct=True)
        made = [attrs.evolve(r, outcome=told[0], score=told[1]) if step and i < n else r for i, r in enumerate(made)]
        RunDirectory(run).write_rollouts(made, mode="report", step=step)
    text, found = ending(run), diagnose(run)
    assert [f.cause for f in found.problems] == ["agent-contradicts-itself"] * named
    assert (f"{n} of 30 held-out tasks have the same requests and replies at both ends" in text) == named
    assert ("significant" in text, found.gained) == (not named, not named)


@pytest.mark.parametrize(
    ("process", "order", "said"),
    [
        (lambda i, step: step if i >= 10 else 0, 7, "(10 of 10 tasks of one runner process, 0 of 10 of two)"),
        (lambda i, step: 0, 1, "(10 of 10 tasks of the first half that a process ran, 0 of 10 later ones)"),
        (lambda i, step: step * (i % 2), 7, ""),
    ],
)
def test_answers_that_depend_on_what_a_process_ran_before_are_told(
    tmp_path: Path, process: Callable[[int, int], int], order: int, said: str
) -> None:
    run = write_run(tmp_path / "run", steps=8)
    for step in (0, 8):  # the first 10 of 20 tasks have the same replies and another answer
        made = []
        for i in range(20):
            of = rollout_of(i, right=False, mode="report", step=step)
            root, *spans = of.trace.spans
            root = attrs.evolve(root, start=i * order % 20, attributes={RUNNER: f"{process(i, step)}@here"})
            told = {"outcome": Outcome(answer="42"), "score": Score.ok(1.0, correct=True)} if step and i < 10 else {}
            made.append(attrs.evolve(of, trace=attrs.evolve(of.trace, spans=[root, *spans]), **told))
        RunDirectory(run).write_rollouts(made, mode="report", step=step)
    (found,) = (f for f in diagnose(run).problems if f.cause == "agent-contradicts-itself")
    assert found.text.endswith(f"not the model's{said and f', and depends on what its process ran before {said}'}")


def test_a_run_that_got_worse_shows_a_task_that_did(tmp_path: Path):
    assert "right before, wrong after" in ending(write_run(tmp_path / "worse", steps=8, lift=-0.2, held_out=60))
    better = write_run(tmp_path / "better", steps=8, lift=0.2, held_out=60)
    pairs = before_after(Evidence.of(read_run(better)))
    assert pairs is not None
    assert pairs["better"] > pairs["worse"] > 0, "one of both is shown"
    text = ending(better)
    assert text.index("wrong before, right after: ") < text.index("right before, wrong after: ")
    assert text.count("agentrig watch shows the right answer too") == 1


def test_the_end_of_a_run_names_the_commands_that_work_with_it(tmp_path: Path):
    run = write_run(tmp_path / "my run", steps=2)
    quoted = f"'{run}'"
    lines = ending(run).splitlines()
    assert lines[-3:] == [
        f"report  not written: `agentrig report {quoted}` says why",
        f"why     agentrig why {quoted}",
        f"watch   agentrig watch {quoted}",
    ]
    (run / "report.html").touch()
    (run / "checkpoints" / "latest").write_text("step-00002")
    lines = ending(run).splitlines()
    assert f"report  {run / 'report.html'}" in lines
    assert lines[-2:] == [
        f"eval    agentrig eval '{run / 'config.toml'}' --checkpoint {quoted}",
        f"export  agentrig export {quoted} my-model",
    ]
    summary = json.loads((run / "summary.json").read_text())
    wrote = {"folder": "/runs/wandb", "command": "wandb sync /runs/wandb"}
    page = {"folder": "/runs/mlruns", "url": "http://127.0.0.1:5000/1"}
    writes = {"observer_writes": {"wandb": wrote, "mlflow": page}}
    (run / "summary.json").write_text(json.dumps(summary | writes))
    assert ending(run).splitlines()[-2:] == ["wandb   wandb sync /runs/wandb", "mlflow  http://127.0.0.1:5000/1"]
    failed = {"observer_writes": {"otlp": {"written": 0, "failed": 1, "unsent": 38, "url": "http://127.0.0.1:4318"}}}
    (run / "summary.json").write_text(json.dumps(summary | failed))
    assert ending(run).splitlines()[-1] == "otlp    nothing arrived: http://127.0.0.1:4318"


def test_the_end_of_a_run_and_why_name_compare_if_its_folder_has_a_run_on_the_same_tasks(tmp_path: Path) -> None:
    run = write_run(tmp_path / "new", steps=3, held_out=60)
    write_run(tmp_path / "stopped", steps=2, ended=False, held_out=60)
    elsewhere = write_run(tmp_path / "elsewhere", steps=2, held_out=60)
    manifest = json.loads((elsewhere / "manifest.json").read_text())
    manifest["data"]["report"]["fingerprint"] = "of other tasks"
    (elsewhere / "manifest.json").write_text(json.dumps(manifest))
    for text in (ending(run), words(diagnose(run))):
        assert "compare" not in text
    other = write_run(tmp_path / "one", steps=3, held_out=60)
    command = f"agentrig compare {other} {run}"
    assert f"compare  {command}" in ending(run).splitlines()
    said = f"One run's gain does not say which of two settings is better: {command}"
    assert said in words(diagnose(run)).splitlines()
    for name, settings in (("far", {"lr": 1.0, "kl_loss_coef": 1.0}), ("near", {"lr": 1.0}), ("newest", {})):
        path = write_run(tmp_path / name, steps=3, held_out=60)
        manifest = json.loads((path / "manifest.json").read_text())
        told = {"run": {"seed": 7}, "algorithm": settings}
        (path / "manifest.json").write_text(json.dumps(manifest | {"config": told}))
    manifest = json.loads((run / "manifest.json").read_text()) | {"config": {"run": {"seed": 0}, "algorithm": {}}}
    (run / "manifest.json").write_text(json.dumps(manifest))
    shutil.rmtree(other)
    for name, damage in (("binary", b"\xff\x00"), ("list", b"[]")):  # another run's damage is not this one's
        (write_run(tmp_path / name, steps=3, held_out=60) / "manifest.json").write_bytes(damage)
    assert said.replace(str(other), str(tmp_path / "near")) in words(diagnose(run)).splitlines()
    assert f"compare  agentrig compare {tmp_path / 'near'} {run}" in ending(run).splitlines(), (
        "the nearest, not the newest"
    )
    worse = write_run(tmp_path / "worse", steps=3, held_out=60, lift=-0.2)
    assert "agentrig compare" not in words(diagnose(worse))


def script_run(directory: Path) -> Path:
    """A run as a script leaves it: its plugin file is gone."""
    run = write_run(directory, steps=2)
    config = (run / "config.toml").read_text()
    config = config.replace("[run]\n", '[run]\nplugins = ["/gone/script.py"]\n')
    (run / "config.toml").write_text(config.replace("[algorithm]\n", "[algorithm]\nsteps = 2\n"))
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "resumes": "agentrig run --resume {run} script.py"}))
    (run / "checkpoints" / "latest").write_text("step-00002")
    return run


def test_no_command_that_needs_the_script_is_named_at_the_end_of_its_run(tmp_path: Path) -> None:
    run = script_run(tmp_path / "run")
    text = ending(run)
    assert "agentrig eval" not in text
    assert f"export  agentrig export {run} my-model" in text
    assert "eval    by the script, with the exported model: only the script has the agent and the tasks" in text
    assert f"resume  agentrig run --resume {run} --set algorithm.steps=4 script.py" in text


@pytest.mark.parametrize("words", [["dev"], ["eval", "--endpoint", "http://127.0.0.1:9/v1"], ["audit"]])
def test_commands_say_why_they_cannot_go_on_with_the_run_of_a_script(tmp_path: Path, words: list[str]) -> None:
    run = script_run(tmp_path / "run")
    done = CliRunner().invoke(main, [words[0], str(run if words == ["audit"] else run / "config.toml"), *words[1:]])
    assert done.exit_code
    said = f"{done.output}{done.exception or ''}"
    assert "of the run of a script" in said or "is the run of a script" in said, said
    assert "only the script has its" in said
    assert "failed to load" not in said
    assert "resumes with" not in said
    assert (f"the verdicts are in {run}/audit" if words == ["audit"] else f"agentrig export {run} my-model") in said


def test_the_end_of_a_run_without_held_out_tasks(tmp_path: Path):
    run = write_run(tmp_path / "run", steps=2)
    (run / "progress.json").unlink()
    for file in (run / "rollouts").glob("[rv]e*.parquet"):
        file.unlink()
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "accuracy": {}, "solved": True}))
    lines = ending(run).splitlines()
    assert lines[0] == "no held-out accuracy: there are no report tasks (run.report names their split)"
    assert "95% interval" not in "\n".join(lines)
    assert [line for line in lines if line.startswith("2 steps in ") and ", solved" in line]


def test_what_a_terminal_would_obey_is_shown_as_text_and_a_long_id_is_cut():
    rollout = rollout_of(0, right=True, mode="dev", step=0)
    odd = "\x1b[31mRED\x1b]0;title\x07 \x9b31m\u202e\0"
    task = attrs.evolve(rollout.task, id=f"{odd}\n" + "x" * 100_000)
    text = span_text(attrs.evolve(rollout, task=task, outcome=Outcome(answer=f"é\n\t{odd}")), width=400)
    shown = r"\x1b[31mRED\x1b]0;title\x07 \x9b31m\u202e\x00"
    assert rf"task {shown}\nxxx" in text.splitlines()[0]
    assert "(cut from 1000" in text.splitlines()[0]
    assert sum(shown in line for line in text.splitlines()) == 2
    assert not CONTROLS.search(text)


def test_messages_and_lines_of_the_log_have_no_controls_and_no_endless_lines():
    record = logging.LogRecord("agentrig", logging.WARNING, "f", 1, "the first: %s", ("\x1b[2J" + "x" * 9000,), None)
    line = Printable("%(levelname)s %(name)s: %(message)s").format(record)
    assert line.startswith(r"WARNING agentrig: the first: \x1b[2Jxxx")
    assert line.endswith("characters)")
    assert len(line) < 2100
    result = CliRunner().invoke(main, ["why", "no\x1b[2J-run"])
    assert r"no\x1b[2J-run" in result.stderr
