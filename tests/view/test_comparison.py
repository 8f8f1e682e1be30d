"""Runs in one table: the figures against others that are computed here from the files, and what is not compared."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from fractions import Fraction
from itertools import permutations, product
from pathlib import Path
from typing import Any

import attrs
import httpx
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from planted_runs import recorded

from agentrig.agents import Outcome
from agentrig.cli.entry import main
from agentrig.errors import AgentrigError
from agentrig.figures import number
from agentrig.rewards import Score
from agentrig.run.directory import RunDirectory
from agentrig.testing.run_directory import rollout_of, write_run
from agentrig.traces import LLM_CALL, SERVER
from agentrig.view.comparison import compare
from agentrig.view.figures import PAIRED
from agentrig.view.page import differing_settings, render
from agentrig.view.prices import read_prices
from agentrig.view.reading import read_run
from agentrig.view.terminal import run_ending
from agentrig.view.watch.app import serving

pytestmark = pytest.mark.usefixtures("quick_images")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return recorded(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three runs that differ only in their seed."""
    folder = tmp_path_factory.mktemp("seeds")
    return [write_run(folder / f"run-{seed}", steps=3, seed=seed) for seed in (0, 1, 2)]


def rows_of(run: Path, pattern: str, *columns: str) -> list[dict[str, Any]]:
    return [
        row
        for file in sorted((run / "rollouts").glob(pattern))
        for row in pq.read_table(file, columns=list(columns)).to_pylist()
    ]


def answers(run: Path, at: int) -> dict[str, bool]:
    """Whether each held-out task was answered right in the first (0) or the last (-1) measurement."""
    file = sorted((run / "rollouts").glob("report-*.parquet"))[at]
    return {row["task_id"]: row["correct"] for row in pq.read_table(file, columns=["task_id", "correct"]).to_pylist()}


def wilson_ends(share: float, n: int) -> list[float]:
    """The shares s at which the score test of `share` of n just reaches 1.96 standard errors, by bisection."""

    def far(s: float) -> float:
        return abs(share - s) - 1.959963984540054 * (s * (1 - s) / n) ** 0.5

    ends = []
    for inside, outside in ((share, 0.0), (share, 1.0)):
        for _ in range(80):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if far(middle) <= 0 else (inside, middle)
        ends.append(inside)
    return ends


def binomial_p(better: int, worse: int) -> float:
    """The share of all ways that fair coins can fall that are no more likely than this one."""
    n = better + worse
    ways = [1]
    for _ in range(n):
        ways = [a + b for a, b in zip([0, *ways], [*ways, 0], strict=True)]  # Pascal's triangle
    return float(Fraction(sum(w for w in ways if w <= ways[better]), 2**n))


def stratified_p(first: list[dict[str, bool]], other: list[dict[str, bool]]) -> float:
    """Twice the smaller tail of the right answers of `first`, if of each task any runs are as likely to be right."""
    chances, observed = {0: Fraction(1)}, 0
    for task in set().union(*first):
        here, there = ([end[task] for end in ends if task in end] for ends in (first, other))
        ways = Counter(sum(chosen[: len(here)]) for chosen in set(permutations(here + there)))
        observed += sum(here)
        grown: dict[int, Fraction] = defaultdict(Fraction)
        for total, (more, n) in product(chances, ways.items()):
            grown[total + more] += chances[total] * Fraction(n, ways.total())
        chances = grown
    tails = [sum(p for total, p in chances.items() if sign * (total - observed) >= 0) for sign in (1, -1)]
    return float(min(1, 2 * min(tails)))


def test_the_figures_of_recorded_runs_are_those_of_their_files(real: Mapping[str, Path]) -> None:
    runs = [real[name] for name in ("healthy: it learns", "KL loss too strong", "learning rate too small")]
    begun = answers(runs[0], 0)
    for run, row in zip(runs, compare(runs).rows, strict=True):
        ended = answers(run, -1)
        found, against = row["accuracy"], row["against_start"]
        for end, told in (("before", answers(run, 0)), ("after", ended)):
            share = sum(told.values()) / len(told)
            assert found[end] == pytest.approx(share)
            assert found[f"{end}_ci95"] == pytest.approx(wilson_ends(share, len(told)), abs=1e-9)
        better = sum(ended[task] and not begun[task] for task in begun)
        worse = sum(begun[task] and not ended[task] for task in begun)
        assert (against["better"], against["worse"], against["n"]) == (better, worse, 100)
        assert against["p"] == pytest.approx(binomial_p(better, worse))
        assert against["gain"] == pytest.approx((sum(ended.values()) - sum(begun.values())) / 100)
        every = rows_of(run, "*.parquet", "calls", "triplets", "prompt_tokens", "response_tokens")
        assert all(each["calls"] == each["triplets"] for each in every)
        assert (row["rollouts"], row["llm_calls"]) == (len(every), sum(each["calls"] for each in every))
        for part in ("prompt", "response"):
            assert row["tokens"][part] == sum(each[f"{part}_tokens"] for each in every)
        assert not row["at_least"]
        summary = json.loads((run / "summary.json").read_text())
        assert row["wall_s"] == pytest.approx(summary["wall_s"])
        assert (row["method"], row["start"], row["seed"]) == ("grpo", "model", 0)


def test_a_run_that_cannot_be_compared_says_why_instead_of_a_number(real: Mapping[str, Path], tmp_path: Path) -> None:
    names = ["healthy: it learns", "healthy: gains within noise", "healthy: high accuracy at the start"]
    found = compare([real[name] for name in names])
    assert [row["against_start"]["reason"] for row in found.rows] == [None, "other-tasks", "other-reward"]
    assert [row["against_start"]["p"] for row in found.rows][1:] == [None, None]
    text = " ".join(found.text(width=400).split())
    assert f"measured on other held-out tasks than {found.start['run']}" in text
    assert "another reward judged it" in text
    swapped = compare([real[name] for name in reversed(names)])
    for row in (*found.rows[1:], *(row for row in swapped.rows if row["run"] != swapped.start["run"])):
        own = compare([next(real[name] for name in names if real[name].name == row["run"])]).rows[0]
        assert row["against_own_start"] == own["against_start"], "whatever the order, it has its own difference"
        assert row["against_own_start"]["n"]
    assert found.rows[0]["against_own_start"] is None
    assert "Against its own start" in text
    assert "ommon start" not in text, "no two of them share one"
    two = shutil.copytree(real[names[0]], tmp_path / "two")
    text = " ".join(compare([real[names[0]], two, real[names[1]]], each=True).text(width=400).split())
    assert "Against the common start" in text
    assert "The common start is " in text
    assert text.count("against its own start:") == 1
    # the spans of these runs were not recorded, and half of the calls of the second are not trained
    assert [row["at_least"] for row in found.rows] == [False, True, False]
    assert "≥ 2,786 LLM calls" in text

    first, other, stopped = (write_run(tmp_path / name, steps=2, ended=name != "stopped") for name in
                             ("first", "other", "stopped"))  # fmt: skip
    changed(other, model="/models/another")
    lost = shutil.copytree(first, tmp_path / "lost")
    (lost / "manifest.json").unlink()
    unread = shutil.copytree(first, tmp_path / "unread")
    (unread / "rollouts" / "report-00002.parquet").write_bytes(b"no rollouts")
    early = write_run(tmp_path / "early", steps=0, ended=False)
    (early / "progress.json").unlink()
    unset = shutil.copytree(first, tmp_path / "unset")
    (unset / "config.toml").unlink()
    assert [row["against_start"]["reason"] for row in compare([first, unset], each=True).rows][1] == "reward-unknown"
    found = compare([first, other, stopped, lost, unread, early], each=True)
    reasons = [row["against_start"]["reason"] for row in found.rows]
    assert reasons == [None, "other-start", "unfinished", "tasks-unknown", "unreadable", "unfinished"]
    assert "crashed" in found.table().rows[2][0]
    assert "unread" in found.table().rows[4][0]
    assert found.rows[4]["at_least"]
    assert compare([early, first]).start["run"] == "first"
    alone = compare([early])
    assert alone.rows[0]["against_start"]["reason"] == "start-not-measured"
    manifest = json.loads((early / "manifest.json").read_text())
    manifest["data"]["report"]["fingerprint"] = "of other tasks"
    (early / "manifest.json").write_text(json.dumps(manifest))
    found = compare([first, early])
    assert [row["against_start"]["reason"] for row in found.rows] == [None, "start-not-measured"]
    unmeasured = "the start was not measured\nit was not measured after training: it did not finish"
    assert found.table().rows[1][2] == unmeasured
    assert "The common start is" not in alone.text()
    assert alone.table().rows[0][1] == "not measured"


def test_a_file_of_the_common_start_that_cannot_be_read_is_told_as_that_runs(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", steps=2)
    other = shutil.copytree(first, tmp_path / "other")
    (first / "rollouts" / "report-00000.parquet").write_bytes(b"no rollouts")
    of_first, of_other = (row["missing"] for row in compare([first, other], each=True).rows)
    assert any(text.startswith("rollouts/report-00000.parquet cannot be read") for text in of_first)
    (said,) = [text for text in of_other if "cannot be read" in text]
    assert said.startswith(
        "not compared with the common start, because of first: rollouts/report-00000.parquet cannot be read"
    )


def test_the_common_start_is_the_one_that_most_runs_can_be_compared_with(tmp_path: Path) -> None:
    stopped = write_run(tmp_path / "a", steps=1, ended=False)
    changed(stopped, model="/models/another")
    good, better = (write_run(tmp_path / name, steps=2, seed=seed) for seed, name in enumerate("bc"))
    for runs in ([stopped, good], [good, stopped], [stopped, good, better]):
        found = compare(runs, each=True)
        assert found.start["run"] == "b"
        assert {row["run"]: row["against_start"]["reason"] for row in found.rows} == {
            run.name: "other-start" if run is stopped else None for run in runs
        }
    ended = write_run(tmp_path / "d", steps=1)
    changed(ended, model="/models/another")
    assert [compare(runs).start["run"] for runs in ([ended, good], [good, ended], [ended, good, better])] == list("dbb")
    others = [write_run(tmp_path / name, steps=1, ended=False) for name in ("e", "f")]
    for run in others:
        changed(run, model="/models/another")
    assert compare([good, stopped, *others]).start["run"] == "a", "most runs begin there, though none has ended"


def test_a_running_run_is_shown_with_what_it_has(tmp_path: Path) -> None:
    ended, going = write_run(tmp_path / "ended", steps=2), write_run(tmp_path / "going", steps=2, lr=1e-3, ended=False)
    run = RunDirectory(going)
    run.lock()
    try:
        found = compare([ended, going])
    finally:
        run.release()
    line = found.lines[1]
    assert line["status"] == {"running": 1}
    assert line["reasons"] == ["running"]
    assert line["before"] is not None
    assert line["after"] is None
    assert found.table().rows[1][0].endswith("running")
    run = RunDirectory(ended)  # it is resumed
    run.lock()
    try:
        row = compare([ended, going]).table().rows[0]
    finally:
        run.release()
    assert "→ –" in row[1].splitlines()[0]
    measured = json.loads((ended / "progress.json").read_text())["after"]["accuracy"]
    assert f"{100 * measured:.1f} before it was resumed" in row[1].splitlines()
    assert row[2] == "it still runs: it is measured at its end"
    assert " so far on " in row[3]
    assert compare([going]).rows[0]["wall_s"] == pytest.approx(sum(line["step_s"] for line in lines_of(going)))
    progress = json.loads((going / "progress.json").read_text())  # with what came before step 1, and before a resume
    saved = {"checkpoints": {"step-00001": []}, "wall_s": 1000.0}
    (going / "progress.json").write_text(json.dumps({**progress, **saved}))
    assert compare([going]).rows[0]["wall_s"] == pytest.approx(1000.0 + lines_of(going)[1]["step_s"])


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def changed(run: Path, *, model: str) -> None:
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("/models/qwen2-mini", model))
    facts = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**facts, "model": model}))


def test_runs_that_differ_only_in_their_seed_are_one_line(seeds: list[Path], tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", steps=3, seed=0, lr=1e-3)
    found = compare([*seeds, other])
    pooled, alone = found.lines
    assert (pooled["runs"], pooled["seeds"]) == (["run-0", "run-1", "run-2"], [0, 1, 2])
    assert alone["runs"] == ["other"]
    for end in ("before", "after"):
        shares = [sum(answers(run, 0 if end == "before" else -1).values()) / 40 for run in seeds]
        of = pooled[end]
        assert (of["least"], of["greatest"], of["unknown"]) == (min(shares), max(shares), 0)
        assert of["mean"] == pytest.approx(sum(shares) / 3)
        assert pooled[f"{end}_ci95"] == pytest.approx(wilson_ends(sum(shares) / 3, 40), abs=1e-9)
    begun, ended = answers(seeds[0], 0), [answers(run, -1) for run in seeds]
    assert pooled["p"] == pytest.approx(stratified_p([begun], ended)), "the start counts once"
    assert pooled["p"] < min(row["against_start"]["p"] for row in found.rows[:3])
    assert found.table().rows[0][2].endswith("exact test p < 0.001: a significant gain")
    least, greatest = (f"{100 * pooled['gain'][end]:+.1f}" for end in ("least", "greatest"))
    assert f" points (from {least} to {greatest} in 3 runs)\n" in found.table().rows[0][2], "a range, no interval"
    assert alone["p"] == found.rows[3]["against_start"]["p"]
    assert "seeds 0, 1, 2" in found.table().rows[0][0]
    manifest = json.loads((seeds[0] / "manifest.json").read_text())  # config.toml has the seed that the run has
    copied = shutil.copytree(seeds[0], tmp_path / "copied")
    (copied / "manifest.json").write_text(json.dumps({**manifest, "seed": 7}))
    assert compare([seeds[0], copied]).lines[0]["seeds"] == [0, 0]
    shares = zip(("before", "after", "gain"), (0.0806, 0.3824, 0.3018), strict=True)
    moved = {key: {"mean": of, "least": of, "greatest": of, "unknown": 0} for key, of in shares}
    moved["wall_s"] = {"mean": 60.0, "least": 59.7, "greatest": 60.4, "unknown": 0}
    cells = attrs.evolve(found, lines=[{**pooled, **moved}]).table().rows[0]
    assert (cells[1].split("\n")[0], cells[2].split("\n")[0]) == ("8.1 → 38.2", "+30.2 points")
    assert "\n1 min 0 s on cpu" in cells[3], "a range whose ends read the same is none"
    each = compare([*seeds, other], each=True)
    assert [line["runs"] for line in each.lines] == [["run-0"], ["run-1"], ["run-2"], ["other"]]
    assert each.rows == found.rows
    five = attrs.evolve(found, lines=[{**pooled, "seeds": [*range(5)]}, alone])
    several = (found, compare([*seeds[:2], other]), each, five)
    weak = [[line for line in some.table().note.splitlines() if "weak" in line] for some in several]
    said = "A range of {} runs is weak evidence: another seed lies outside it with probability {}."
    assert weak == [[said.format(3, "1/2")], [said.format(2, "2/3")], [], []]


def test_a_line_names_its_settings_that_differ_and_is_tested_against_the_first(
    seeds: list[Path], tmp_path: Path
) -> None:
    other = write_run(tmp_path / "other", steps=3, seed=3, lr=1e-3)
    found = compare([seeds[0], other])
    cells = [row[0].splitlines() for row in found.table().rows]
    assert cells == [
        ["run-0", "grpo", "lr 0.0003", "from qwen2-mini", "seed 0"],
        ["other", "grpo", "lr 0.001", "from qwen2-mini", "seed 3"],
    ]
    first, last = answers(seeds[0], -1), answers(other, -1)
    better, worse = (sum(a[task] and not b[task] for task in a) for a, b in ((last, first), (first, last)))
    (between,) = found.between
    assert (between["better"], between["worse"], between["n"]) == (better, worse, 40)
    assert between["p"] == pytest.approx(binomial_p(better, worse))
    line = f"After training, other against run-0, on the same 40 held-out tasks: {better} better, {worse} worse (sign"
    assert any(text.startswith(line) for text in found.text(width=200).splitlines())
    gap = f"{100 * (sum(last.values()) - sum(first.values())) / 40:+.1f}"
    level = "above" if better > worse else "below"
    verdict, advice = found.table().lead
    limit = "one seed each: may be chance"
    assert verdict == f"other is {gap[1:]} points {level} run-0; p = {between['p']:.2f}, {limit}."
    assert between["difference"] == pytest.approx(float(gap) / 100)
    assert found.text().startswith(verdict), "the answer comes first"
    assert re.search(
        rf": {re.escape(gap)} points(, 95% interval over the tasks [-+\d.]+ to [-+\d.]+)?\.", found.table().note
    )
    assert advice.splitlines() == [
        "One seed each can't tell settings from seeds. 3 seeds a side can:",
        "  for seed in 1 3; do",
        f"    agentrig train {seeds[0]}/config.toml run.seed=$seed run.name=run-$seed",
        "  done",
        "  for seed in 0 1; do",
        f"    agentrig train {other}/config.toml run.seed=$seed run.name=other-$seed",
        "  done",
        f"  agentrig compare {seeds[0]} {seeds[1]} {seeds[0].parent / 'run-3'} {other} {other}-0 {other}-1",
    ]
    note = found.table().note
    assert "ranges" not in note
    assert "does not say that a line is better than another" in note
    twin = write_run(tmp_path / "twin", steps=3, seed=3, lr=1e-4)
    alike = compare([other, twin])
    told = alike.text(width=200)
    said = "twin and other have the same 40 held-out tasks right and wrong: there is no difference to test."
    assert alike.table().lead == [said], "no seeds are asked for"
    assert ("on the same 40 held-out tasks: no task changed." in told, "0 better, 0 worse (" in told) == (True, False)

    runs = compare([*seeds, other])
    (pooled,) = runs.between
    ends = [answers(run, -1) for run in seeds]
    assert (pooled["runs"], pooled["against"]) == (["other"], ["run-0", "run-1", "run-2"])
    assert (pooled["better"], pooled["worse"], pooled["n"]) == (None, None, 40)
    assert pooled["p"] == pytest.approx(stratified_p([last], ends))
    shares = [sum(last.values()) / 40, sum(sum(end.values()) for end in ends) / 120]
    assert [pooled["accuracy"][side] for side in ("runs", "against")] == pytest.approx(shares)
    one, three = (f"{100 * share:.1f}%" for share in shares)
    line = f"run-0, run-1, run-2, on the same 40 held-out tasks: mean accuracy {one} against {three}: "
    note = runs.table().note.splitlines()
    assert line in note[0]
    assert "p: chance among tasks, for these runs. It does not cover other seeds." in note
    half = [task for task in last if int(task[-4:]) % 2]  # half = second
    of_class = next(of for of in pooled["classes"] if of["class"] == "half = second")
    ends = [{task: end[task] for task in half} for end in ends]
    assert of_class["p"] == pytest.approx(min(1.0, 2 * stratified_p([{t: last[t] for t in half}], ends)))
    begun = [answers(other, 0), *(answers(run, 0) for run in seeds)]
    shares = [sum(end[task] for task in half) / 20 for end in (begun[0], last, *begun[1:], *ends)]
    found = [of_class[end][side] for end in ("before", "accuracy") for side in ("runs", "against")]
    assert found == pytest.approx([shares[0], sum(shares[2:5]) / 3, shares[1], sum(shares[5:]) / 3])
    one, three, *after = (f"{100 * share:.1f}" for share in found)
    told = f"half = second, 20 tasks: other {one} → {after[0]}% against run {three} → {after[1]}% (p = "
    assert told in runs.table().note
    assert "greatest differences first, p corrected for 2 classes:\n" in runs.table().note
    verdict, advice = runs.table().lead
    assert re.fullmatch(r"other is [\d.]+ points (above|below) run; p = [\d.]+, one seed of other: .*", verdict)
    assert advice.startswith("One seed of other can't tell settings from seeds. 3 seeds a side can:\n")
    assert advice.count("agentrig train") == 1
    *_, advice = compare([*seeds[:2], other]).table().lead
    assert re.findall("for seed in ([^;]*)", advice) == ["3", "0 1"], "three a side, the same ones"
    found = compare([*seeds, other], each=True)
    note = found.table().note.splitlines()
    assert any(line.endswith("about one of 20 such tests is significant by chance.") for line in note)
    ends = [line.partition(", ")[2] for line in found.table().lead[:2]]
    assert all(end.startswith("the settings are the same: ") for end in ends), "run-1 and run-2 against run-0"


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [
        ([(20, 22), (21, 23)], "new is 2.5 points above old; p = 0.58, ranges overlap: may be chance."),
        (
            [(20, 20), (20, 20)],
            "new and old have the same 40 held-out tasks right and wrong: there is no difference to test.",
        ),
        ([(10, 24), (22, 36)], "new is 30.0 points above old; p < 0.001, ranges overlap: other seeds may reverse it."),
        (
            [(30, 32), (8, 12)],
            "new is 52.5 points below old; p < 0.001, ranges do not overlap, of 2 seeds: too few to say that others "
            "would not reverse it.",
        ),
        (
            [(30, 31, 32), (8, 10, 12)],
            "new is 52.5 points below old; p < 0.001, ranges do not overlap: unlikely to be chance.",
        ),
    ],
)
def test_the_verdict_of_several_seeds_says_whether_their_ranges_overlap(
    accuracies: list[tuple[int, ...]], verdict: str, seeds: list[Path], tmp_path: Path
) -> None:
    runs = []
    for name, lr, rights in zip(("old", "new"), (1e-4, 1e-3), accuracies, strict=True):
        for seed, n in enumerate(rights):
            run = write_run(tmp_path / f"{name}-{seed}", steps=1, seed=seed, lr=lr)
            after = [rollout_of(i, right=i < n, mode="report", step=1) for i in range(40)]
            RunDirectory(run).write_rollouts(after, mode="report", step=1)
            summary = json.loads((run / "summary.json").read_text())
            summary["accuracy"] |= {"after": n / 40}
            (run / "summary.json").write_text(json.dumps(summary))
            (run / "progress.json").unlink()  # it would have the accuracy before
            runs.append(run)
    found = compare(runs)
    assert found.table().lead == [verdict], "three seeds are asked for only where a side has one"
    assert found.as_dict()["between"][0]["verdict"] == verdict
    page = html.unescape(render([read_run(run) for run in runs]))
    assert page.index(f'<p class="lead"><b>{verdict}</b></p>') < page.index("<table"), "not small, and not in grey"
    for run in runs:
        summary = json.loads((run / "summary.json").read_text())
        summary["accuracy"] |= {"before": 0.95}
        (run / "summary.json").write_text(json.dumps(summary))
    assert compare(runs).table().lead == [f"{verdict} Both are less accurate than before training."]
    old, first = runs[: len(runs) // 2], runs[len(runs) // 2]
    said = compare([*old, first]).table().lead[0]
    assert ", one seed of new-0: " in said or "right and wrong" in said


def test_a_difference_of_lines_that_differ_in_several_settings_is_put_down_to_none(
    seeds: list[Path], tmp_path: Path
) -> None:
    other = write_run(tmp_path / "other", steps=3, seed=3, lr=1e-3)
    assert "These lines" not in compare([seeds[0], other]).table().lead[0], "one setting differs"
    changed(other, model="/models/another")
    for run, credit in ((seeds[1], 'use = "grpo"\nnegative_scale = 0.5'), (other, 'use = "best-of-group"')):
        copy = shutil.copytree(run, tmp_path / f"swapped-{run.name}")
        (copy / "config.toml").write_text(f"{(copy / 'config.toml').read_text()}\n[credit]\n{credit}\n")
    for runs, said in (
        ([seeds[0], other], "2 settings (algorithm.lr, the start)"),
        ([tmp_path / "swapped-run-1", tmp_path / "swapped-other"], "3 settings (algorithm.lr, credit, the start)"),
    ):
        verdict = compare(runs).table().lead[0]
        assert verdict.endswith(f" These lines differ in {said}, so the difference can't be put down to one of them.")


def test_a_significant_test_beside_intervals_that_overlap_is_explained(tmp_path: Path) -> None:
    runs = []
    for name, right in (("old", 16), ("new", 24)):
        runs.append(write_run(tmp_path / name, steps=1, lr=1e-3 if name == "new" else 1e-4))
        after = [rollout_of(i, right=i < right, mode="report", step=1) for i in range(40)]
        RunDirectory(runs[-1]).write_rollouts(after, mode="report", step=1)
        progress = json.loads((runs[-1] / "progress.json").read_text())
        progress["after"] |= {"accuracy": right / 40}
        (runs[-1] / "progress.json").write_text(json.dumps(progress))
    found = compare(runs)
    (between,) = found.between
    assert between["p"] < 0.05
    assert between["ci95"]["against"][1] > between["ci95"]["runs"][0]
    assert PAIRED.format(" of new against old") in found.table().note
    begun = [{**line, "before_ci95": (0.2, 0.5), "after_ci95": (0.4, 0.7), "p": 0.01} for line in found.lines]
    note = attrs.evolve(found, between=[{**between, "p": 0.3}], lines=begun).table().note
    assert [line for line in note.splitlines() if "overlap" in line] == [
        PAIRED.format(" of old; new against the start")
    ]
    wide = {**between, "ci95": {"runs": (0.7, 0.9), "against": (0.1, 0.3)}}
    lines = [{**line, "p": None} for line in found.lines]
    assert "intervals overlap" not in attrs.evolve(found, between=[wide], lines=lines).table().note


def test_held_out_tasks_that_the_start_was_warmed_up_on_are_told(seeds: list[Path], tmp_path: Path) -> None:
    run = shutil.copytree(seeds[0], tmp_path / "warmed")
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["data"]["report"]["labels"] = 12
    (run / "manifest.json").write_text(json.dumps(manifest))
    said = "12 of 40 held-out tasks were labels of the warm-up that made the starting model: it has seen their answers."
    assert f"warmed: {said}" in compare([seeds[1], run]).table().lead
    assert said in render([read_run(run)])
    assert said in list(run_ending(run))
    assert "labels" not in compare(seeds).text() + render([read_run(seeds[0])])


def test_a_task_counts_with_the_runs_that_measured_it(seeds: list[Path], tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", steps=3, seed=3, lr=1e-3)
    part = shutil.copytree(seeds[2], tmp_path / "part")
    file = sorted((part / "rollouts").glob("report-*.parquet"))[-1]
    pq.write_table(pq.read_table(file).slice(0, 25), file)
    ends = [answers(run, -1) for run in (seeds[0], part)]
    (found,) = compare([seeds[0], part, other]).between
    assert (len(ends[1]), found["n"]) == (25, 40)
    assert found["p"] == pytest.approx(stratified_p([answers(other, -1)], ends))


def test_a_gain_is_that_of_the_tasks_measured_at_both_ends(seeds: list[Path], tmp_path: Path) -> None:
    part = shutil.copytree(seeds[2], tmp_path / "part")
    first, last = sorted((part / "rollouts").glob("report-*.parquet"))
    pq.write_table(pq.read_table(first).slice(0, 25), first)
    pq.write_table(pq.read_table(last).slice(5), last)
    before, after = answers(part, 0), answers(part, -1)
    both = [*before.keys() & after.keys()]
    gain = f"{100 * (sum(map(after.get, both)) - sum(map(before.get, both))) / 20:+.1f} points"
    told = f"{gain}, of 20 tasks measured at both ends"
    found = compare([part])
    assert (len(both), found.rows[0]["against_start"]["unpaired"]) == (20, 20)
    assert found.table().rows[0][2].startswith(f"{told}\n")
    assert told in render([read_run(part)])
    assert told in next(run_ending(part)).columns[3]._cells
    assert f"{gain}: of 20 held-out tasks" in CliRunner().invoke(main, ["report", str(part)]).output
    assert "both ends" not in compare([seeds[2]]).text()


def test_runs_with_other_tasks_or_no_end_are_not_tested_against_each_other(seeds: list[Path], tmp_path: Path) -> None:
    stopped = write_run(tmp_path / "stopped", steps=2, ended=False)
    elsewhere = write_run(tmp_path / "elsewhere", steps=3)
    manifest = json.loads((elsewhere / "manifest.json").read_text())
    manifest["data"]["report"]["fingerprint"] = "of other tasks"
    (elsewhere / "manifest.json").write_text(json.dumps(manifest))
    assert [found["runs"] for found in compare([seeds[0], stopped, elsewhere, seeds[1]], each=True).between] == [
        ["run-1"]
    ]
    many = write_run(tmp_path / "many", steps=2, lr=1e-3)
    config = (many / "config.toml").read_text()
    for old, new in (("max_turns = 3", "max_turns = 4"), ("2048", "64"), ("512", "1024"), ('"write"', f'"{"w" * 99}"')):
        assert old in config
        config = config.replace(old, new)
    (many / "config.toml").write_text(config)
    (told,) = [text for text in compare([seeds[0], many]).table().rows[1][0].splitlines() if "max_turns" in text]
    assert told.startswith("lr 0.001, max_length 1024, max_turns 4, table_info_truncate 64, and 1 other setting (")
    assert told.endswith("(compare --json has all)")
    for name, limit in (("whole", 0), ("part", 4)):
        run = write_run(tmp_path / name, steps=2)
        config = (run / "config.toml").read_text().replace("[run]", f"[run]\nreport_tasks = {limit}")
        (run / "config.toml").write_text(config)
    runs = [tmp_path / "whole", tmp_path / "part"]
    assert [row[0].splitlines()[2] for row in compare(runs).table().rows] == ["report_tasks all", "report_tasks 4"]
    assert differing_settings([read_run(run) for run in runs]).rows == [["run.report_tasks", "all", "4"]]
    for run, plugins in zip(runs, ("[]", '["own.py"]'), strict=True):
        config = (run / "config.toml").read_text().replace("[run]", f"[run]\nplugins = {plugins}")
        (run / "config.toml").write_text(config)
    told = [row[0].splitlines()[2] for row in compare(runs).table().rows]
    assert told == ["report_tasks all, plugins none", 'report_tasks 4, plugins ["own.py"]']
    shared, folder = "/a/folder/with/a/long/name/shared.py", "/a/folder/with/a/long/name"
    for own, said in (
        (([], [f"{folder}/my_agent.py"]), ["no other", "my_agent.py"]),
        (([f"{folder}/a/own.py"], [f"{folder}/b/own.py"]), ["a/own.py", "b/own.py"]),
    ):
        for run, plugins in zip(runs, own, strict=True):
            file = run / "config.toml"
            file.write_text(re.sub("plugins = .*", f"plugins = {json.dumps([shared, *plugins])}", file.read_text()))
        told = [row[0].splitlines()[2].partition("plugins ")[2] for row in compare(runs).table().rows]
        assert told == said
    for run, answer in zip(runs, ("SELECT", "WITH"), strict=True):
        config = (run / "config.toml").read_text()
        prompt = f"Write one SQL query that answers the question, and begin it with {answer}"
        (run / "config.toml").write_text(config.replace("[agent]", f'[agent]\nprompt = "{prompt}"'))
    told = [row[0].splitlines()[2] for row in compare(runs).table().rows]
    assert ["prompt …SELECT" in told[0], "prompt …WITH" in told[1]] == [True, True]


def test_a_swapped_credit_and_reward_are_named_and_what_they_change(seeds: list[Path], tmp_path: Path) -> None:
    runs = []
    for name, credit in (("first", 'use = "grpo"\nnegative_scale = 0.5'), ("second", 'use = "best-of-group"')):
        runs.append(write_run(tmp_path / name, steps=3, lr=1e-3 if name == "second" else 1e-4))
        config = (runs[-1] / "config.toml").read_text() + f"\n[credit]\n{credit}\n"
        config = config.replace("[run]", f"[run]\naudit = {str(name == 'first').lower()}")
        if name == "second":
            config = config.replace('"spider-exec"', '"strict"')
        (runs[-1] / "config.toml").write_text(config)
    first, second = compare(runs).table().rows
    told = "reward.use spider-exec, negative_scale 0.5, lr 0.0001, audit true"
    assert first[0].splitlines()[1:3] == ["grpo, credit grpo", told]
    unset = "does not apply to credit best-of-group"
    told = "reward.use strict, lr 0.001, audit false"
    assert second[0].splitlines()[1:3] == ["grpo, credit best-of-group", told]
    assert ["credit.negative_scale", "0.5", unset] in differing_settings([read_run(run) for run in runs]).rows
    found = compare(runs)
    measure = "agentrig eval RUN/config.toml --reward spider-exec --checkpoint RUN"
    (said,) = found.rewards
    assert said.startswith("After training, second and first are not compared: different rewards judged them")
    assert f"(strict and spider-exec). Measure both with one: {measure}." in said
    assert said in found.table().note
    for run, weight in zip(runs, (0.1, 0.5), strict=True):
        config = (run / "config.toml").read_text().replace('"strict"', '"spider-exec"')
        (run / "config.toml").write_text(config.replace('"spider-exec"', f'"spider-exec"\nparts = ["a"]\nw = {weight}'))
    (said,) = compare(runs).rewards
    assert measure.replace("spider-exec ", "spider-exec reward.w=0.1 ") in said, "only what differs is named"
    other = write_run(tmp_path / "other", steps=3, seed=1)
    assert compare([seeds[0], seeds[1]]).rewards == []
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["data"]["report"]["fingerprint"] = "of other tasks"
    (other / "manifest.json").write_text(json.dumps(manifest))
    assert compare([runs[1], other]).rewards == []


def test_a_plugin_file_that_was_changed_under_its_name_is_named(seeds: list[Path], tmp_path: Path) -> None:
    runs = [shutil.copytree(run, tmp_path / run.name) for run in seeds]
    for run, judge in zip(runs, ("a", "a", "b"), strict=True):
        manifest = json.loads((run / "manifest.json").read_text())
        manifest["files"] = {"/x/judge.py": judge * 64, "/x/shop.py": "c" * 64, "/x/more.py": judge * 64}
        manifest["files"] |= {"/x/a/sums.py": judge * 64, "/x/b/sums.py": "c" * 64}  # modules that one of them imports
        manifest["component_files"] = {"agent": "/x/shop.py", "reward": "/x/judge.py"}
        (run / "manifest.json").write_text(json.dumps(manifest))
    found = compare(runs)
    assert [line["runs"] for line in found.lines] == [["run-0", "run-1"], ["run-2"]], "they differ in more than seeds"
    (said,) = found.files
    assert said.startswith(
        "run-2 and run-0, run-1 differ in the file judge.py (reward) and the file more.py and the file sums.py, "
    )
    assert "If the reward is another one, their accuracies can't be compared" in said
    assert said in found.table().lead
    assert found.between[0]["apart"] == ["the file judge.py (reward)", "the file more.py", "the file sums.py"]
    assert compare(runs[:2]).files == []


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (("7", "7"), "the reward gives one answer two scores: 40 of 40 held-out answers are the same before and"),
        (("7", "42"), "40 of 40 held-out tasks have the same requests and replies at both ends, another answer and"),
    ],
)
def test_a_gain_of_a_reward_or_agent_that_contradicts_itself_is_not_called_significant(
    tmp_path: Path, answers: tuple[str, str], why: str
) -> None:
    runs = [write_run(tmp_path / name, steps=2, lr=lr) for name, lr in (("old", 1e-4), ("new", 1e-3))]
    for run in runs:
        for step, answer in zip((0, 2), answers, strict=True):  # in `new` all have the same replies, and other scores
            made = [rollout_of(i, right=False, mode="report", step=step) for i in range(40)]
            told = {"outcome": Outcome(answer=answer), "score": Score.ok(0.5 + step / 4, correct=step > 0)}
            paid = [attrs.evolve(r, **told) for r in made] if run.name == "new" else made
            RunDirectory(run).write_rollouts(paid, mode="report", step=step)
    found = compare(runs)
    (verdict, *_), (old, new), note = found.table().lead, found.table().rows, found.table().note
    assert verdict.endswith("one seed each: not to be believed, for the reward or the agent contradicts itself in new.")
    assert (found.between[0]["p"] < 0.001, "significant" in new[2], "contradicts" in old[2]) == (True, False, False)
    assert "not to be believed: the reward or the agent contradicts itself" in new[2].replace("\n", " ")
    assert f"new: {why}" in note


def test_the_mean_reward_of_two_settings_is_tested_as_their_accuracy_is(seeds: list[Path], tmp_path: Path) -> None:
    def graded(name: str, seed: int, shift: float, lr: float) -> Path:
        run = write_run(tmp_path / name, steps=2, seed=seed, lr=lr)
        for step in (0, 2):
            made = [rollout_of(i, right=i < 9, mode="report", step=step) for i in range(40)]
            rewards = [i / 50 + step / 2 * (seed * (i % 3) / 200 + shift * (i % 5 > 0)) for i in range(40)]
            scores = [Score.ok(reward, correct=i < 9) for i, reward in enumerate(rewards)]
            paid = [attrs.evolve(r, score=score) for r, score in zip(made, scores, strict=True)]
            RunDirectory(run).write_rollouts(paid, mode="report", step=step)
        return run

    old = [graded(f"old-{seed}", seed, 0.0, 1e-4) for seed in (0, 1, 2)]
    new = [graded(f"new-{seed}", seed, 0.05, 1e-3) for seed in (0, 1, 2)]
    single = compare([old[0], new[0]])
    (found,) = single.between
    assert (found["alike"], found["reward"]["difference"]) == (True, pytest.approx(0.04))
    assert (found["reward"]["p"] < 0.001, found["reward"]["difference_ci95"][0] > 0) == (True, True)
    told = "Mean reward 0.430 against 0.390: +0.040; p < 0.001, one seed each: other seeds may reverse it."
    assert single.table().lead[0].endswith(f"there is no difference to test. {told}")
    assert "One seed each can't tell settings from seeds." in single.table().lead[1]
    note = single.table().note
    assert "mean reward 0.430 against 0.390: +0.040, 95% interval over the tasks +0.0" in note
    assert "(permutation test p < 0.001)" in note
    assert "Against a start only accuracy is tested, not the mean reward that old-0, new-0 trained on" in note

    several = compare([*old, *new])
    reward = several.between[0]["reward"]
    assert (reward["overlap"], reward["difference"]) == (False, pytest.approx(0.04))
    assert reward["range"]["against"] == pytest.approx([0.39, 0.39 + 2 * 39 / 40 / 200])
    assert "p < 0.001, ranges do not overlap: unlikely to be chance." in several.table().lead[0]
    assert "; ranges of runs 0.430–0.440 against 0.390–0.400" in several.table().note
    assert compare([seeds[0], graded("other", 0, 0.0, 1e-4)]).between[0]["reward"] is not None
    plain = compare([seeds[0], write_run(tmp_path / "plain", steps=2, lr=1e-3)])
    assert (plain.between[0]["reward"], "mean reward" in plain.text()) == (None, False)


def test_a_run_without_its_last_measurement_is_no_seed_of_the_finished_ones(seeds: list[Path], tmp_path: Path) -> None:
    begun = shutil.copytree(seeds[2], tmp_path / "begun")
    before = json.loads((begun / "progress.json").read_text())["before"]
    (begun / "progress.json").write_text(json.dumps({"before": before}))
    (begun / "summary.json").unlink()
    pooled, alone = compare([*seeds[:2], begun]).table().rows
    assert "seeds 0, 1" in pooled[0]
    assert "exact test p" in pooled[2]
    assert "unknown" not in " ".join(pooled)
    assert alone[0].endswith("crashed")
    assert alone[2] == "it was not measured after training: it did not finish"


def test_a_finished_run_that_cannot_be_compared_is_counted_with_its_reason(seeds: list[Path], tmp_path: Path) -> None:
    unread = shutil.copytree(seeds[2], tmp_path / "unread")
    (unread / "rollouts" / "report-00003.parquet").write_bytes(b"no rollouts")
    (line,) = compare([*seeds[:2], unread]).table().rows
    assert "unknown" not in line[2]
    assert line[2].endswith("1 of 3 runs: held-out rollouts cannot be read")


def test_runs_with_the_same_seed_are_repeats(seeds: list[Path], tmp_path: Path) -> None:
    again = shutil.copytree(seeds[0], tmp_path / "again")
    found = compare([seeds[0], again])
    assert "seeds 0, 0" in found.table().rows[0][0]
    assert "Runs of the same settings and the same seed are repeats" in found.table().note
    assert found.lines[0]["p"] == compare(seeds[:1]).lines[0]["p"] < 1, "a copy is no new evidence"
    found = compare([seeds[0], seeds[1], again])
    assert "seeds 0, 1, 0" in found.table().rows[0][0]
    assert found.lines[0]["p"] == compare(seeds[:2]).lines[0]["p"] < 1
    other = [write_run(tmp_path / f"other-{seed}", steps=3, seed=seed, lr=1e-4) for seed in (0, 1)]
    one, two = compare([*other, *seeds[:2]]).between, compare([*other, *seeds[:2], again]).between
    assert (two[0]["runs"], two[0]["p"], two[0]["range"]) == (one[0]["runs"], one[0]["p"], one[0]["range"])
    assert "repeats" not in compare(seeds).text()


def test_a_run_that_came_from_another_is_compared_with_the_start_of_that_one(tmp_path: Path) -> None:
    first, second = [], []
    for seed in (0, 1):
        first.append(write_run(tmp_path / f"sft-{seed}", steps=2, seed=seed))
        facts = json.loads((first[-1] / "manifest.json").read_text())
        facts["components"] = {**facts.get("components", {}), "credit": {"name": "rft"}}
        (first[-1] / "manifest.json").write_text(json.dumps(facts))
        second.append(write_run(tmp_path / f"grpo-{seed}", steps=2, seed=seed, lr=1e-3))
        changed(second[-1], model=str(first[-1] / "checkpoints" / "step-00002"))
    for runs in ([*second, *first], [*first, *second]):
        found = compare(runs)
        assert found.start["run"] == "sft-0"
        assert [row["against_start"]["reason"] for row in found.rows] == [None] * 4
        lines = {line["runs"][0]: line for line in found.lines}
        assert {name: line["runs"] for name, line in lines.items()} == {
            "sft-0": ["sft-0", "sft-1"],
            "grpo-0": ["grpo-0", "grpo-1"],
        }
        assert lines["grpo-0"]["chain"] == ["grpo, credit rft", "grpo"]
        assert "\ngrpo, credit rft → grpo\n" in found.table().rows[found.lines.index(lines["grpo-0"])][0]
        assert lines["grpo-0"]["starts"] == ["run sft-0, step 2", "run sft-1, step 2"]
        begun, ended = answers(first[0], 0), answers(second[1], -1)
        row = next(row for row in found.rows if row["run"] == "grpo-1")
        assert list(row["usage"]) == ["qwen2-mini"], "by this name it has a price"
        assert row["against_start"]["better"] == sum(ended[task] and not begun[task] for task in begun)
        assert "credit rft → grpo" in found.text(width=200)
    # alone, they began with two runs: the first one's start is no start of the other
    found = compare(second)
    assert [row["against_start"]["reason"] for row in found.rows] == [None, "other-start"]
    # the run is not there any more, so where it began is unknown
    shutil.rmtree(first[0])
    found = compare([write_run(tmp_path / "new", steps=2), second[0]])
    assert found.rows[1]["start"] == "run sft-0, step 2"
    assert found.rows[1]["against_start"]["reason"] == "other-start"


def test_runs_that_a_server_answers_for_begin_with_its_model(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run-{seed}", steps=2, seed=seed) for seed in (0, 1)]
    for run in runs:
        changed(run, model="")
        config = (run / "config.toml").read_text()
        (run / "config.toml").write_text(f'{config}\n[server]\nuse = "endpoint"\nmodel = "org/large-1"\n')
    found = compare(runs)
    assert [row["against_start"]["reason"] for row in found.rows] == [None, None]
    assert found.lines[0]["starts"] == ["large-1"]
    assert list(found.rows[0]["usage"]) == ["large-1"]


def test_demonstrations_are_no_calls_of_the_model(tmp_path: Path) -> None:
    run = write_run(tmp_path / "shown", steps=2)
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("[algorithm]", '[algorithm]\ndemonstrations = "tasks"'))
    found = compare([run])
    row, measured = found.rows[0], rows_of(run, "[rv]*.parquet", "calls")
    assert (row["rollouts"], row["demonstrations"]) == (len(measured), len(rows_of(run, "train*.parquet", "id")))
    assert row["llm_calls"] == sum(each["calls"] for each in measured)
    assert not row["at_least"]
    assert found.table().rows[0][3].startswith("32 demonstrations\n")


PRICES = """
currency = "EUR"
[models.qwen2-mini]
prompt = 2
response = 8.0
[models.large-1]
prompt = 10
response = 30
[machines."cpu: 2 x86-64 cores, AVX2"]
hour = 0.5
"""


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    """A run whose agent also calls another model, whose server does not always count tokens."""
    run = write_run(tmp_path / "planned", steps=1)
    found = []
    for i in range(4):
        rollout = rollout_of(i, right=True, mode="train", step=1)
        call = next(span for span in rollout.trace.spans if span.name == LLM_CALL)
        response: dict[str, Any] = {"model": "large-1", "usage": {"prompt_tokens": 1000 + i, "completion_tokens": 50}}
        if i == 3:
            response = {"model": "large-1"}
        spans = [*rollout.trace.spans]
        for n in range(i):  # one rollout has none
            about = {"request": {"model": "planner"}, "response": response, SERVER: "llm.example.com:443"}
            spans.append(attrs.evolve(call, id=f"other-{n}", attributes=about))
        spans.append(attrs.evolve(call, id="failed", error="it failed"))
        found.append(attrs.evolve(rollout, trace=attrs.evolve(rollout.trace, spans=tuple(spans))))
    RunDirectory(run).write_rollouts(found, mode="train", step=1)
    summary = json.loads((run / "summary.json").read_text())
    measured = rows_of(run, "[rv]*.parquet", "id")
    (run / "summary.json").write_text(json.dumps({**summary, "rollouts": 4 + len(measured)}))
    return run


def test_calls_and_tokens_are_counted_by_model_and_a_call_without_counts_is_said(planned: Path) -> None:
    (row,) = compare([planned]).rows
    own, other = row["usage"]["qwen2-mini"], row["usage"]["large-1"]
    measured = sum(each["calls"] for each in rows_of(planned, "[rv]*.parquet", "calls"))
    assert (own["calls"], own["prompt_tokens"], own["response_tokens"]) == (
        measured + 8, 60 * (measured + 8), 20 * (measured + 8)
    )  # fmt: skip
    assert (other["calls"], other["uncounted"]) == (6, 3)
    assert (other["prompt_tokens"], other["response_tokens"]) == (1001 + 2 * 1002, 3 * 50)
    assert row["at_least"]
    assert row["llm_calls"] == own["calls"] + 6
    assert compare([planned]).table().rows[0][3].count("≥") == 3


def test_a_price_table_gives_costs_and_what_it_lacks_is_left_empty(seeds: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(PRICES)
    found = compare(seeds[:1], prices=read_prices(file))
    row, line = found.rows[0], found.lines[0]
    every = rows_of(seeds[0], "*.parquet", "calls")
    calls = sum(each["calls"] for each in every)
    tokens = calls * (60 * 2 + 20 * 8) / 1e6
    machine = 0.5 * json.loads((seeds[0] / "summary.json").read_text())["wall_s"] / 3600
    assert row["cost"]["models"] == {"qwen2-mini": pytest.approx(tokens)}
    assert row["cost"]["tokens"] == pytest.approx(tokens)
    assert row["cost"]["machine"] == pytest.approx(machine)
    assert row["cost"]["total"] == pytest.approx(tokens + machine)
    assert line["cost"]["total"]["mean"] == row["cost"]["total"]
    assert found.table().heads[-1] == ("Cost, EUR", "lines")
    assert "No price" not in found.table().note

    file.write_text(PRICES.replace("qwen2-mini", "other").replace("AVX2", "AVX512"))
    found = compare(seeds[:1], prices=read_prices(file))
    cost = found.rows[0]["cost"]
    assert cost["models"] == {"qwen2-mini": None}
    assert (cost["tokens"], cost["machine"], cost["total"]) == (None, None, None)
    assert found.table().rows[0][-1] == ""
    assert "No price for: machine cpu: 2 x86-64 cores, AVX2; model qwen2-mini." in found.table().note
    assert "Cost" not in compare(seeds).text()


def test_tokens_that_nobody_counted_have_no_cost(planned: Path, tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(PRICES)
    cost = compare([planned], prices=read_prices(file)).rows[0]["cost"]
    assert cost["models"]["large-1"] is None
    assert number(cost["models"]["qwen2-mini"]) is not None
    assert (cost["tokens"], cost["total"]) == (None, None)
    assert number(cost["machine"]) is not None


def test_the_model_of_the_run_itself_may_cost_no_more_than_its_machine(seeds: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text('[machines."cpu: 2 x86-64 cores, AVX2"]\nhour = 0.5')
    found = compare(seeds, prices=read_prices(file))
    for row in found.rows:
        assert row["cost"]["total"] == row["cost"]["machine"] == pytest.approx(0.5 * row["wall_s"] / 3600)
    assert "tokens" not in found.table().rows[0][-1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[model.a]\nprompt = 1", 'no key "model". Did you mean "models"?'),
        ("[models.a]\npromt = 1\nresponse = 1", 'no key "promt". Did you mean "prompt"?'),
        ("[models.a]\nprompt = 1", "needs response"),
        ("[models.a]\nprompt = -1\nresponse = 1", "'prompt' must be >= 0: -1"),
        ("[models.a]\nprompt = 1\nresponse = inf", "expected a finite number"),
        ("[machines]\ncpu = 3", '[machines."cpu"]\nhour = 1.0'),
        ('[machines.cpu]\nhour = "3"', "expected a number"),
        ("[machines.cpu]\nhour = 1e308", "'hour' must be <= 1000000000000.0: 1e+308"),
        ("models = 3", "models = 3 does not fit the price table: expected a table ([models.NAME] has"),
        ("currency = 3", "currency = 3 does not fit the price table: expected text"),
        (b"\xff\xfe[\0", "is UTF-16 text; save it as UTF-8"),
        (b'currency = "\x80"', "line 1, character 13: the byte 0x80 is not UTF-8; if it is text, save it as UTF-8"),
        ("== 1", "is no TOML"),
    ],
)
def test_a_wrong_price_table_is_refused_by_name(text: str | bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(AgentrigError) as wrong:
        read_prices(file)
    assert said in str(wrong.value)
    assert str(file) in str(wrong.value)


def test_the_command_warns_of_a_run_whose_files_cannot_be_read(seeds: list[Path], tmp_path: Path) -> None:
    run = shutil.copytree(seeds[0], tmp_path / "run")
    assert "warning" not in CliRunner().invoke(main, ["compare", str(run)]).stderr
    (run / "metrics.jsonl").write_bytes(b"\xff\n")
    said = CliRunner().invoke(main, ["compare", str(run)]).stderr
    assert "agentrig: warning: run: metrics.jsonl: line 1 cannot be read" in said


def test_the_command_prints_the_table_or_json_and_writes_a_page(seeds: list[Path], tmp_path: Path) -> None:
    words, page = ["compare", *map(str, seeds)], tmp_path / "page.html"
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80
    assert "seeds 0, 1, 2" in done.output
    named = shutil.copytree(seeds[0], tmp_path / "mini-20260101-120000-with-a-long-name")
    told = CliRunner().invoke(main, ["compare", str(seeds[1]), str(named)])
    assert named.name in told.output, "a pipe gets whole names"
    config = (named / "config.toml").read_text()
    config = config.replace("max_turns = 3", "max_turns = 4").replace("2048", "64").replace("512", "1024")
    (named / "config.toml").write_text(config.replace("[run]", f"[run]\nreport = {'abcd ' * 9!r}"))
    config = (seeds[1] / "config.toml").read_text()
    wide = CliRunner().invoke(main, ["compare", str(seeds[1]), str(named)]).output
    assert "max_turns 4" in wide
    table = [line for line in wide.splitlines() if "agentrig " not in line]
    assert max(map(len, table)) <= 110, "its settings are broken between words"
    said = CliRunner().invoke(main, [*words, "--out", str(page)]).output
    assert f"report: {page}, images: {tmp_path / 'page-plots'}" in said
    assert "Plots as PNG: page-plots/." in page.read_text()
    (tmp_path / "page-plots" / "time.png").write_bytes(b"of the first page")
    assert CliRunner().invoke(main, [*words, "--out", str(tmp_path / "cmp2.html")]).exit_code == 0
    assert (tmp_path / "page-plots" / "time.png").read_bytes() == b"of the first page"
    assert (tmp_path / "cmp2-plots" / "time.png").is_file()
    told = json.loads(CliRunner().invoke(main, [*words, "--json", "--each", "--out", str(page)]).output)
    assert told["report"] == str(page)
    assert [line["runs"] for line in told["lines"]] == [["run-0"], ["run-1"], ["run-2"]]
    assert told["runs"][0]["slices"]["half"]["first"]["n"] == 20
    assert told["common_start"]["n"] == 40
    assert page.is_file()
    assert not (seeds[0].parent / "comparison").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (lambda runs, empty: [runs[0], empty], "is not a run directory"),
        (lambda runs, empty: [runs[0], f"{runs[0]}/../{Path(runs[0]).name}"], "is named twice"),
        (lambda runs, empty: [runs[0], empty + "/gone"], "there is no run directory"),
        (lambda runs, empty: [*runs, "--gold"], "--gold is for the page: name one with --out PAGE.html"),
        (lambda runs, empty: [*runs, "--prices", empty + "/gone.toml"], "does not exist"),
        (lambda runs, empty: [], "name the runs to compare: agentrig compare RUN RUN"),
    ],
)
def test_wrong_words_are_refused_by_name(
    words: Callable[[list[str], str], list[str]], said: str, seeds: list[Path], tmp_path: Path
) -> None:
    done = CliRunner().invoke(main, ["compare", *words([str(run) for run in seeds], str(tmp_path))])
    assert done.exit_code != 0
    assert said in " ".join((done.output + str(done.exception or "")).split())


def test_a_report_is_of_one_run_and_names_the_command_for_several(seeds: list[Path]) -> None:
    done = CliRunner().invoke(main, ["report", *map(str, seeds)])
    assert done.exit_code == 2
    assert f"agentrig compare {seeds[0]}" in done.output


def test_the_page_and_the_live_page_have_the_same_lines(seeds: list[Path], tmp_path: Path) -> None:
    rows = compare(seeds).table().rows
    text = re.sub("</?b>", "", html.unescape(render([read_run(run) for run in seeds])))
    for cell in (cell for row in rows for cell in row):
        assert f">{cell}</t" in text
    file = tmp_path / "prices.toml"
    file.write_text(PRICES)
    prices = read_prices(file)
    rows = compare(seeds, prices=prices).table().rows
    with serving(seeds[0].parent, prices=prices) as link:
        query = "&".join(f"run={run.name}" for run in seeds)
        pooled = httpx.get(f"{link}compare?{query}", timeout=60).text
        each = httpx.get(f"{link}compare?{query}&each=1", timeout=60).text
    pooled, each = (re.sub("</?b>", "", html.unescape(page)) for page in (pooled, each))
    for cell in (cell for row in rows for cell in row):
        assert f">{cell}</t" in pooled
    assert f"compare?{query}&each=1" in pooled
    for cell in (cell for row in compare(seeds, each=True, prices=prices).table().rows for cell in row):
        assert f">{cell}</t" in each
