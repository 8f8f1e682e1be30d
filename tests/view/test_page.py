"""The report's page, parsed as HTML."""

from __future__ import annotations

import html
import json
import re
import shutil
import statistics
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import attrs
import pytest

import agentrig.view
from agentrig import Outcome
from agentrig.run.directory import RunDirectory
from agentrig.testing.run_directory import rollout_of, write_run
from agentrig.view import ReportKept, build_report
from agentrig.view.comparison import compare
from agentrig.view.diagnosis import diagnose
from agentrig.view.html import Links, explained
from agentrig.view.observer import write_page
from agentrig.view.page import render, view
from agentrig.view.plots import plots_of
from agentrig.view.reading import read_run, rollout_rows
from agentrig.view.table import CELLS, results, row_of, text_of

pytestmark = pytest.mark.usefixtures("quick_images")

VOID = {"meta", "br", "link", "img", "hr", "input"}
LINKS = {"src", "href", "xlink:href", "srcset", "action", "data", "poster"}


class Page(HTMLParser):
    """Checks that elements nest, and gathers text, tags and links."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.headings: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(path.read_text("utf-8"))
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in LINKS]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            return
        self.words.append(data)
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if {"td", "th"} & set(self.open[-2:]):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "demo", steps=20, second_reward="spider-exec-strict")


@pytest.fixture(scope="module")
def page(finished: Path) -> Page:
    return Page(build_report([finished]))


def test_the_page_needs_no_other_file_and_no_script(finished: Path, page: Page):
    text = (finished / "report.html").read_text("utf-8")
    assert [link for link in page.links if not link.startswith("#")] == []
    assert "script" not in page.tags
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)", text)
    assert page.tags.count("svg") >= 4
    assert "prefers-color-scheme: dark" in text
    policy = re.search(r'http-equiv="content-security-policy" content="([^"]*)"', text)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "script-src" not in policy[1]


def test_every_link_leads_to_one_place_in_the_file(finished: Path, page: Page, tmp_path: Path):
    same = shutil.copytree(finished, tmp_path / "same")
    two = Page(build_report([finished, same], tmp_path / "two.html"))  # the same rollouts twice
    for each, rollouts in ((page, 14), (two, 28)):
        assert len(each.ids) == len(set(each.ids))
        assert {link.removeprefix("#") for link in each.links} <= set(each.ids)
        assert sum(re.fullmatch(r"(run-\d-)?rollout-\d+", id) is not None for id in each.ids) == rollouts
        assert len(each.links) > 2 * rollouts


def test_the_plots_take_their_colours_from_the_page_and_are_there_as_png(finished: Path, page: Page):
    text = (finished / "report.html").read_text("utf-8")
    plots = re.findall(r"<figure>.*?</figure>", text, re.DOTALL)
    assert len(plots) >= 6
    for plot in plots:
        assert not re.search(r"#[0-9a-f]{6}|style=", plot)
        assert re.search(r'class="[^"]*series-\d', plot)
    for name in ("accuracy", "reward", "time", "lengths"):
        assert (finished / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_figures_are_those_of_the_run(finished: Path, page: Page):
    accuracy = json.loads((finished / "summary.json").read_text())["accuracy"]
    before, after = f"{100 * accuracy['before']:.1f}", f"{100 * accuracy['after']:.1f}"
    assert f"{before} → {after} %" in page.text
    assert f"n = {accuracy['n']}" in page.text
    assert page.rows[0] == ["", "demo"]
    cells = dict(row for row in page.rows if len(row) == 2)
    row = {key: cells.get(heading) for key, (heading, _) in CELLS.items()}
    assert (row["model"], row["context"], row["turns"]) == ("qwen2-mini", "2048", "3")
    assert row_of(read_run(finished))["context"] == 2048
    assert row["trained"] == "rewrite_query, write_query"
    assert row["accuracy"] == f"{before} → {after}"
    assert (row["gpus"], row["steps"]) == ("0 (cpu)", "20")
    assert (cells["  rollouts"].split()[2], cells["  update"].split()[2]) == ("(58.3%)", "(35.7%)")


def test_every_part_of_the_page_is_there_and_what_few_need_is_folded(finished: Path, page: Page):
    folded = re.findall(r'<details[^>]* id="([^"]*)"[^>]*>', (finished / "report.html").read_text("utf-8"))
    assert {"more-curves", "more-tables", "about", "config", "manifest"} <= set(folded)
    expected = (
        "Did anything hold learning back?, Curves Checks Results Held-out accuracy by half, "
        "Held-out accuracy by trained calls, "
    )
    expected += "Held-out rollouts by turn, Held-out reward by part, Wrong answers, Failures, Parts of the reward, "
    expected += "Second rewards, Agent names, Algorithm, Where the rewards differ, Before and after, Rollouts, Run"
    assert page.headings == re.split(r", | (?=Results|Checks|Held)", expected)
    assert ["Node", "Calls", "Kept", "Share"] in page.rows
    assert ["check_query", "440", "0", "0.0%"] in page.rows
    assert ["write_query", "320", "300", "93.8%"] in page.rows
    assert ["llm-error", "0", "3", "0", "the model <server> did not answer"] in page.rows
    (second,) = (row for row in page.rows if row[0] == "spider-exec-strict")
    assert second[-2:] == ["20 of 317", "93.8%"]
    assert "Of the scored training rollouts, n = 317." in page.text
    assert ["columns", "0.5", "0.5", "0.5"] in page.rows
    assert page.text.count("step 20: trained reward") == 1
    assert "spider-exec-strict 0.5 (reads no table)" in page.text


def test_a_run_that_failed_before_its_first_step_says_why_and_shows_no_dashes(tmp_path: Path):
    directory = write_run(tmp_path / "failed", steps=0, ended=False)
    failed = [rollout_of(i, right=False, mode="report", step=0, failure="agent-error") for i in range(8)]
    failed[3] = attrs.evolve(failed[3], outcome=Outcome(failure="agent-error", message="there is no key"))
    RunDirectory(directory).write_rollouts(failed, mode="report", step=0)
    message = "step 0: 8 of 8 report rollouts failed\n  8 x agent-error: for example ValueError: my bug (agent.py:16)"
    told = {"error": "RunStopped", "message": message, "cause": "failures"}
    (directory / "error.json").write_text(json.dumps(told))
    (directory / "progress.json").unlink()
    assert row_of(read_run(directory))["failures"] == {"agent-error": 8}
    page = Page(build_report([directory]))
    top = page.text[: page.text.index("Curves")]
    assert "0 in training, 8 failed" in top
    assert "ValueError: my bug (agent.py:16)" in top
    assert ["Failures", "8 (8 agent-error)"] in page.rows
    assert ["agent-error", "8", "of 2 causes: the model <server> did not answer"] in page.rows
    assert not [row for row in page.rows if row[-1:] == ["–"]]
    assert not re.search("–|not there|no training step|1 of 1 steps|settings: run.failure_limit", top)


def test_every_task_that_changed_is_listed_and_the_examples_are_spread(finished: Path, page: Page):
    pairs = view(read_run(finished))["pairs"]
    changed = pairs["changed"]
    assert [len(tasks) for tasks in changed.values()] == [pairs["better"], pairs["worse"]]
    better = [each["task"] for each in changed["wrong before, right after"]]
    shown = [each["task"] for each in pairs["shown"]][:3]
    assert shown == [better[i * len(better) // 6] for i in (1, 3, 5)]
    for words, tasks in changed.items():
        assert f"{len(tasks)} {words}" in page.text
        assert all(each["task"] in page.text for each in tasks)
    one, other = changed["wrong before, right after"][0]["ids"]
    assert Links(run="/run/demo").both(one, other) == f"/run/demo/rollout/{one}?against={other}"


def test_a_class_with_other_tasks_after_training_has_a_number_of_them_for_both(tmp_path: Path):
    directory = write_run(tmp_path / "run", steps=2, held_out=8)
    turns = (1, 1, 1, 1, 1, 2, 2, 2)
    after = [rollout_of(i, right=i < 4, mode="report", step=2, turns=n) for i, n in enumerate(turns)]
    RunDirectory(directory).write_rollouts(after, mode="report", step=2)
    (calls,) = (
        table for table in view(read_run(directory))["slices"] if table.title == "Held-out accuracy by trained calls"
    )
    assert [head for head, _ in calls.heads] == ["Trained calls", "Before", "After"]
    assert [row[-1] for row in calls.rows] == ["80.0% of 5", "0.0% of 3"]
    assert [row[1].split(" of ")[1] for row in calls.rows] == ["4", "4"]


def test_the_held_out_accuracy_is_broken_down_by_slice(finished: Path, page: Page):
    run = read_run(finished)
    files = run.of_mode("report")
    shares = []
    for file in (files[0], files[-1]):
        half = [row for row in rollout_rows([file], ("correct", "slices")) if row["slices"]["half"] == "second"]
        shares.append(f"{100 * sum(row['correct'] for row in half) / len(half):.1f}% of {len(half)}")
    assert ["second", *shares] in page.rows
    ends = [[bool(row["correct"]) for row in rollout_rows([f], ("correct",))] for f in (files[0], files[-1])]
    wrong = [f"{len(end) - sum(end)} ({100 - 100 * sum(end) / len(end):.1f}%)" for end in ends]
    assert ["another number of rows", *wrong] in page.rows, "shares of all answers"


def test_the_held_out_rollouts_are_counted_by_turn(finished: Path, page: Page):
    """The odd tasks of such a run are answered at the second turn, after a query that fails."""
    rows = {row[0]: row[1:] for row in page.rows if row and re.search("at (every )?turn", row[0])}
    assert list(rows) == ["right at turn 1", "repaired at turn 2", "wrong at every turn"]
    files = read_run(finished).of_mode("report")
    for end, file in enumerate((files[0], files[-1])):
        found = list(rollout_rows([file], ("correct", "task_id")))
        odd = sum(bool(row["correct"]) and int(row["task_id"][-4:]) % 2 for row in found)
        right = sum(bool(row["correct"]) for row in found)
        counts = [int(row[end].partition(" ")[0]) for row in rows.values()]
        assert counts == [right - odd, odd, len(found) - right]


def test_the_page_has_no_private_parts_of_tasks(finished: Path, page: Page):
    assert "SECRET GOLD" not in (finished / "report.html").read_text("utf-8")


HOSTILE = "</pre></style><script>alert(1)</script><img src=http://x/ onerror=a> {{ 7*7 }} $x_1$ & \u0000"


def test_all_content_of_a_run_is_shown_as_text(tmp_path: Path):
    directory = write_run(tmp_path / "run", steps=3)
    hostile = rollout_of(0, right=True, mode="report", step=3)
    task = type(hostile.task)(id=HOSTILE, input={"question": HOSTILE, HOSTILE: HOSTILE}, private={})
    spans = tuple(
        attrs.evolve(s, attributes={**s.attributes, "output": {HOSTILE: HOSTILE}}, error=HOSTILE)
        for s in hostile.trace.spans
    )
    hostile = attrs.evolve(hostile, task=task, trace=attrs.evolve(hostile.trace, spans=spans))
    run = RunDirectory(directory)
    run.write_rollouts([hostile], mode="report", step=3)
    run.write_rollouts([attrs.evolve(hostile, step=0)], mode="report", step=0)
    manifest = run.read_json("manifest.json")
    run.write_json("manifest.json", {**manifest, "name": HOSTILE, "recipe": HOSTILE, "warnings": [HOSTILE]})
    line = {**run.metrics()[-1], "step": 4, "nodes": {"seen": {HOSTILE: 1}, "trained": {HOSTILE: 1}}}
    line |= {"failures": {HOSTILE: 1}, "second_rewards": {HOSTILE: {"mean": 0.5}}, "algorithm": {HOSTILE: 1.0}}
    run.append_metrics(line)
    other = shutil.copytree(directory, tmp_path / "other")
    for runs in ([directory], [directory, other]):
        page = Page(build_report(runs, tmp_path / "page.html"))  # the elements nest, so nothing broke out
        assert "script" not in page.tags
        assert "img" not in page.tags
        assert [link for link in page.links if not link.startswith("#")] == []
        assert "{{ 7*7 }}" in page.text


def test_a_running_run_counts_the_rollouts_that_a_finished_one_counts(tmp_path: Path):
    directory = write_run(tmp_path / "run", steps=5)
    finished = row_of(read_run(directory))["rollouts"]
    assert finished == json.loads((directory / "summary.json").read_text())["rollouts"]
    (directory / "summary.json").unlink()
    assert row_of(read_run(directory))["rollouts"] == finished


def damaged(directory: Path) -> Iterator[str]:
    """Break a run directory, one way at a time."""
    files = ["config.toml", "manifest.json", "metrics.jsonl", "summary.json", "progress.json"]
    files += [
        f"rollouts/{p.name}"
        for p in sorted((directory / "rollouts").iterdir())
        if "00000" in p.name or "train-00002" in p.name
    ]
    for name in files:
        whole = (directory / name).read_bytes()
        for content in (None, b"", whole[: len(whole) // 2], b"[1, 2]", b"\xff\xfe\x00"):
            (directory / name).unlink() if content is None else (directory / name).write_bytes(content)
            yield f"{name}: {content!r:.40}"
        (directory / name).write_bytes(whole)


def test_no_missing_or_broken_file_stops_the_page(tmp_path: Path):
    directory = write_run(tmp_path / "run", steps=2, held_out=4)
    target = tmp_path / "page.html"
    for what in damaged(directory):
        target.write_text(render([read_run(directory)]), "utf-8")  # the PNG files are slow, and read only the metrics
        assert "before" in Page(target).text, what


GARBAGE = (
    {"step": 1},
    {
        "step": 2,
        "reward": None,
        "time_s": None,
        "nodes": None,
        "failures": None,
        "algorithm": None,
        "second_rewards": None,
    },
    {"step": 3, "reward": "x", "time_s": [1], "nodes": {"seen": 3}, "failures": {"a": "b"}, "step_s": "2"},
    {"step": 4, "reward": float("nan"), "step_s": float("inf"), "time_s": {"rollout": "y"}, "algorithm": {"a": [1]}},
    {"step": 5, "reward": -3.5, "step_s": 0, "time_s": {}, "validation_accuracy": "z", "second_rewards": {"q": None}},
)


def test_a_report_with_curves_is_not_replaced_by_one_without(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=3)
    page = build_report([directory])
    before = {file: file.read_bytes() for file in (page, *(directory / "plots").iterdir())}
    (directory / "metrics.jsonl").write_text("7\n[]\n")
    with pytest.raises(ReportKept, match=r"are kept as they are: metrics\.jsonl has no step that can be read"):
        build_report([directory])
    write_page(directory)
    build_report([directory], tmp_path / "page.html")
    assert len(before) == 5
    assert {file: file.read_bytes() for file in (page, *(directory / "plots").iterdir())} == before


def test_odd_values_in_the_metrics_are_left_out(tmp_path: Path):
    directory = write_run(tmp_path / "run", steps=0, ended=False)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in GARBAGE))
    Page(build_report([directory]))
    other = shutil.copytree(directory, tmp_path / "other")
    Page(build_report([directory, other], tmp_path / "two.html"))


def test_several_runs_share_a_page_beside_the_first_of_them(tmp_path: Path):
    runs = [write_run(tmp_path / "a", steps=3), write_run(tmp_path / "_other$run$", steps=12, seed=1, lr=1e-3)]
    path = build_report(runs)
    assert path == tmp_path / "comparison" / "report.html"
    assert not (tmp_path / "a" / "report.html").exists()
    page = Page(path)
    assert page.text.count("2 runs compared") == 1
    assert page.headings[:1] == ["Comparison"]
    assert ["", "a", "_other$run$"] in page.rows
    assert ["algorithm.lr", "0.0003", "0.001"] in page.rows
    assert '<td class="n run" data-label="a">0.0003</td>' in path.read_text(), "it wraps, so that no column is cut"
    heads = [row[0] for row in page.rows if row]
    assert heads[heads.index("By half") :][:3] == ["By half", "  first", "  second"]
    assert heads[heads.index("By turn") :][:2] == ["By turn", "  right at turn 1"]
    assert (tmp_path / "comparison" / "plots" / "time.png").exists()
    assert re.search(r'</svg><b class="series-2">2</b> _other\$run\$</li>', path.read_text())


def test_the_results_are_plain_json_and_a_table_that_fits(tmp_path: Path, finished: Path):
    other = write_run(tmp_path / "other", steps=3, ended=False)
    rows = json.loads(json.dumps(compare([finished, other]).as_dict()))["runs"]
    assert [r["status"] for r in rows] == ["finished", "crashed"]
    assert set(CELLS) <= set(rows[0])
    assert rows[0]["turns"] == 3
    assert rows[0]["accuracy"]["before_ci95"][0] < rows[0]["accuracy"]["before"] < rows[0]["accuracy"]["before_ci95"][1]
    assert rows[1]["accuracy"]["after"] is None
    assert rows[0]["failures"] == {"llm-error": 3}
    text = text_of(results(rows), width=80)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"^Response tokens a call +\d+\.\d → \d+\.\d", text, re.MULTILINE)
    assert re.search(r"^Status +finished +crashed$", text, re.MULTILINE)
    part = rows[0]["slices"]["half"]["first"]
    assert part["n"] == 20
    shares = f"{100 * part['before']:.1f} → {100 * part['after']:.1f}"
    assert re.search(rf"^  first +{shares}, n = 20 +", text, re.MULTILINE)
    repaired = [rows[0]["by_turn"][when]["repaired at turn 2"] / 40 for when in ("before", "after")]
    assert re.search(rf"^  repaired at turn 2 +{100 * repaired[0]:.1f} → {100 * repaired[1]:.1f} +", text, re.MULTILINE)


def test_the_checks_say_what_shared_tokens_saved_and_what_the_algorithm_notes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "demo", steps=2)
    assert not [found for found in diagnose(run).checks if "traced" in found.text]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    for line in lines:
        line["algorithm"] |= {"traced_tokens": 1000.0, "computed_tokens": 400.0, "repeated_tokens": 40.0}
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", "utf-8")
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    (run / "summary.json").write_text(json.dumps({**summary, "notes": ["the small engine trains: no GPU"]}), "utf-8")
    page = render([read_run(run)])
    assert "the small engine trains: no GPU" in page
    assert "the updates traced 2\N{NARROW NO-BREAK SPACE}000 tokens and computed 800: 60% were saved" in page
    assert "80 of the computed tokens (10%) were computed again" in page


@pytest.mark.parametrize("why", ["vllm is not installed; embedded serves on cpu", None])
def test_the_page_says_why_auto_chose_the_server(tmp_path: Path, why: str | None) -> None:
    run = read_run(write_run(tmp_path / "demo", steps=0))
    run = attrs.evolve(run, manifest={**run.manifest, "server": {"name": "embedded", "chosen": why}})
    assert (f"embedded, chosen by auto: {why}" in render([run])) is (why is not None)


def test_a_fact_has_no_tick_and_raw_values_are_seen_beside_their_mean(finished: Path, page: Page):
    text = (finished / "report.html").read_text("utf-8")
    marks = {said: mark for mark, said in re.findall(r'<li class="(ok|fact)">(.*?)</li>', text)}
    facts = [said for said, mark in marks.items() if mark == "fact"]
    assert any("of the groups of the last" in said for said in facts)
    assert any("the weights changed in every step" in said for said, mark in marks.items() if mark == "ok")
    reward = re.findall(r"<figure>.*?</figure>", text, re.DOTALL)[1]
    raw = re.findall(r'<circle [^>]*class="raw series-2"><title>(.*?)</title>', reward)
    lines = read_run(finished).steps
    assert raw == [f"step {line['step']}: {line['reward']:.4g}" for line in lines]


def test_the_plot_says_at_which_temperatures_it_was_measured(tmp_path: Path):
    directory = write_run(tmp_path / "run", steps=4)
    config = (directory / "config.toml").read_text()
    settings = "[algorithm]\ntemperature = 1.0\nval_temperature = 0.0"
    (directory / "config.toml").write_text(config.replace("[algorithm]", settings))
    text = render([read_run(directory)])
    assert "training, temperature 1, mean of up to 2 steps" in text
    assert "held out, greedy, 95% interval" in text
    differ = "Training: temperature 1; validation and held out: greedy. So their levels differ."
    assert differ in text
    known = {"data": {"train": {"tasks": 88, "labels": 44}}}
    warmed = attrs.evolve(read_run(directory), manifest=known)
    few = attrs.evolve(warmed, manifest={"data": {"train": {"tasks": 88, "labels": 8}}})
    labels = "greedy. 44 of the 88 training tasks are the model's labels: their accuracy may be higher."
    assert labels in html.unescape(render([warmed]))
    assert differ not in render([warmed])
    captions = [plot.caption for plot in plots_of([warmed, few]) if plot.name in ("accuracy", "reward")]
    assert all("greedy. Some training tasks are the models' labels" in caption for caption in captions)
    assert len(captions) == 2
    shown = write_run(tmp_path / "shown", steps=4)
    demonstrations = settings.replace("temperature = 1.0", 'demonstrations = "tasks"')
    (shown / "config.toml").write_text(config.replace("[algorithm]", demonstrations))
    assert differ in render([read_run(directory), read_run(shown)]), "a run that does not sample has no temperature"
    assert ["<h3>loss</h3>" in render([read_run(each)]) for each in (directory, shown)] == [False, True]


def test_every_colour_of_the_page_can_be_read_as_text():
    """WCAG: a contrast of at least 4.5 with both backgrounds, in both schemes."""
    css = (Path(agentrig.view.__file__).parent / "watch" / "static" / "page.css").read_text()
    schemes = [dict(re.findall(r"--([\w-]+): #(\w{6})", part)) for part in css.split("prefers-color-scheme: dark")[:2]]

    def light(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    faint = []
    for scheme in schemes:
        for name in scheme.keys() - {"paper", "raised", "grid", "line"}:
            for paper in ("paper", "raised"):
                low, high = sorted((light(scheme[name]), light(scheme[paper])))
                if (high + 0.05) / (low + 0.05) < 4.5:
                    faint.append((name, scheme[name], paper, (high + 0.05) / (low + 0.05)))
    assert faint == []
    assert [len(scheme) for scheme in schemes] == [15, 15]


def test_a_run_that_ended_in_a_step_counts_the_rollouts_of_that_step(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=3)
    whole = row_of(read_run(directory))
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(lines[:2]))
    trained = [json.loads(line)["rollouts"] for line in lines]
    summary = json.loads((directory / "summary.json").read_text())
    summary |= {"rollouts": summary["rollouts"] - trained[-1], "train_rollouts": sum(trained[:-1]), "steps": 2}
    (directory / "summary.json").write_text(json.dumps(summary))
    error = {"error": "RunStopped", "cause": "tasks-too-hard", "message": "step 3: all rollouts got the reward 0"}
    (directory / "error.json").write_text(json.dumps(error))
    found = row_of(read_run(directory))
    assert (found["rollouts"], found["train_rollouts"]) == (whole["rollouts"], sum(trained))
    text = Page(build_report([directory])).text
    assert re.search(rf"{sum(trained)} in training, \d+ failed", text)
    assert "s each; ended in step 3" in text


@pytest.mark.parametrize(("before", "after", "alarms"), [(20, 40, [False, True]), (40, 20, [True, False])])
def test_only_what_happened_is_in_colour_before_and_after(
    tmp_path: Path, before: int, after: int, alarms: list[bool]
) -> None:
    run = write_run(tmp_path / "run", steps=2)
    for step, right in ((0, before), (2, after)):
        rollouts = [rollout_of(i, right=i < right, mode="report", step=step) for i in range(40)]
        RunDirectory(run).write_rollouts(rollouts, mode="report", step=step)
    text = render([read_run(run)])
    said = ['<b class="bad">20 from right to wrong</b>', '<b class="good">20 went from wrong to right</b>']
    assert [each in text for each in said] == alarms
    assert ('class="bad">0' in text, 'class="good">0' in text) == (False, False)
    assert ("0 from right to wrong" in text, "0 went from wrong to right" in text) == (True, True)


def test_an_accuracy_of_one_end_has_no_arrow_and_one_validation_is_no_best(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=3)
    assert (
        "best validation" in render([read_run(directory)]),
        '<span class="arrow">' in render([read_run(directory)]),
    ) == (False, True)
    progress = json.loads((directory / "progress.json").read_text())
    (directory / "progress.json").write_text(json.dumps({**progress, "after": None}))
    summary = json.loads((directory / "summary.json").read_text())
    summary["accuracy"]["after"] = None
    (directory / "summary.json").write_text(json.dumps(summary))
    text = render([read_run(directory)])
    assert '<span class="arrow">' not in text
    assert "accuracy before training on the held-out split test" in text


def test_words_of_the_ledger_say_what_they_mean() -> None:
    found = str(explained("20 calls: 9 zero-variance-group, 2 <b>"))
    assert found.startswith('20 calls: 9 <abbr title="all rollouts of its group got the same reward at their end, ')
    assert found.endswith(">zero-variance-group</abbr>, 2 &lt;b&gt;")


def test_the_training_reward_says_how_few_rollouts_it_is_a_mean_of(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "demo", steps=8))
    n = round(2 * statistics.fmean([line["rollouts"] for line in run.steps]))
    text = render([run])
    assert f"means of the first and the last 2 steps, about {n} rollouts of sampled tasks each: small changes" in text
    text = render([read_run(write_run(tmp_path / "one", steps=1))])
    assert re.search(r"<dt>training reward</dt><dd>0\.\d{3}<small>step 1</small>", text), "one step has no ends"


def test_the_time_of_the_steps_is_no_wall_time(tmp_path: Path) -> None:
    assert "<dt>wall time</dt>" in render([read_run(write_run(tmp_path / "ended", steps=2))])
    page = render([read_run(write_run(tmp_path / "cut", steps=2, ended=False))])
    assert "<dt>time of the steps</dt>" in page
    assert "<dt>wall time</dt>" not in page
