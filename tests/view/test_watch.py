"""The live page: only with its token, only for this machine, and everything that a model says is text."""

from __future__ import annotations

import csv
import html
import io
import itertools
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrig.errors import AgentrigError
from agentrig.processes.locks import Lock
from agentrig.testing.run_directory import write_run
from agentrig.view import build_report, figures
from agentrig.view.diagnosis import diagnose
from agentrig.view.reading import read_run, rollout_rows
from agentrig.view.tables import spark
from agentrig.view.watch.app import serving
from agentrig.view.watch.rollouts import Rollouts

pytestmark = pytest.mark.usefixtures("quick_images")

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)> '\"</pre>{{7*7}} **b** `; DROP x; -- [a](javascript:b)"


def first_rollout(run: Path, **changes: Any) -> dict[str, Any]:
    """Change the first rollout of a run's last training step; return what it was."""
    file = sorted((run / "rollouts").glob("train-*.parquet"))[-1]
    table = pq.read_table(file)
    first, *others = table.to_pylist()
    pq.write_table(pa.Table.from_pylist([{**first, **changes}, *others], schema=table.schema), file)
    return dict(first)


@pytest.fixture(scope="module")
def runs(ended_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that a model wrote hostile text into, and with a run of another setting."""
    place = tmp_path_factory.mktemp("runs")
    for name in ("one", "two"):
        shutil.copytree(ended_run(), place / name, symlinks=True)
    config = (place / "two" / "config.toml").read_text()
    (place / "two" / "config.toml").write_text(config.replace("failure_limit", "failure_limit = 0.123 #"))
    first = first_rollout(place / "one")
    spans = json.loads(first["spans"])
    for span in spans:
        attributes = span["attributes"]
        if "response" in attributes:
            attributes["response"]["choices"][0]["message"]["content"] = HOSTILE
            attributes["request"]["messages"][0]["content"] = HOSTILE
            attributes.pop("response_token_ids", None)
        span["error"] = HOSTILE
    first_rollout(
        place / "one", input=json.dumps({"question": HOSTILE}), answer=json.dumps(HOSTILE), spans=json.dumps(spans),
        details=json.dumps({"reason": HOSTILE}), task_id=HOSTILE, replies=HOSTILE,
    )  # fmt: skip
    (place / "one" / "log.jsonl").write_text(json.dumps({"step": 1, "level": "warning", "text": HOSTILE}) + "\n")
    return place


@pytest.fixture(scope="module")
def link(runs: Path) -> Iterator[str]:
    with serving(runs) as link:
        yield link


def page(link: str, path: str = "", **query: str) -> str:
    reply = httpx.get(link + path, params=query or None, follow_redirects=True, timeout=30)
    assert reply.status_code == 200, reply.text
    return reply.text


def rollouts_of(text: str) -> list[str]:
    return re.findall(r'/rollout/([^"?#]+)"', text)


def test_one_bad_run_does_not_take_the_page_of_the_folder(ended_run: Callable[..., Path], tmp_path: Path) -> None:
    for name in ("deep", "good", "nothing"):
        shutil.copytree(ended_run(), tmp_path / name, symlinks=True)
    with (tmp_path / "deep" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "x": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    shutil.rmtree(tmp_path / "nothing")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "config.toml").write_text("")
    with serving(tmp_path) as link:
        text = page(link)
        assert all(f"/run/{name}" in text for name in ("deep", "good", "nothing"))
        assert "cannot be shown" in text
        assert "is not a run directory" in text
        assert "cannot be read" in page(link, "run/deep")


def test_files_of_other_types_do_not_take_a_runs_pages(ended_run: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(ended_run(), tmp_path / "typed", symlinks=True)
    files = sorted((tmp_path / "typed" / "rollouts").glob("report-*.parquet"))
    for file, column in ((files[-1], "value"), (tmp_path / "typed" / "calls" / "train-00001.parquet", "tokens")):
        table = pq.read_table(file)
        words = pa.array(["many"] * len(table))
        pq.write_table(table.set_column(table.column_names.index(column), column, words), file)
    with serving(tmp_path / "typed") as link:
        text = ""
        while not text or "files.</p>" in text:  # the other files are read meanwhile
            text = page(link, "run/typed/traces", mode="train", step="1")
        assert f"{files[-1].name} cannot be read: its column value holds string, not double" in text
        assert "many" not in page(link, f"run/typed/rollout/{rollouts_of(text)[0]}")
        assert "Traceback" not in page(link, "run/typed/why") + page(link, "run/typed/checks")
        changed = f"{files[-1].name} and calls/train-00001.parquet: changed since the run wrote them"
        assert changed in page(link, "run/typed")
    assert changed in str(diagnose(tmp_path / "typed"))


@pytest.mark.timeout(120)
def test_a_pipe_in_the_place_of_config_toml_holds_up_no_page(ended_run: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(ended_run(), tmp_path / "piped", symlinks=True)
    (tmp_path / "piped" / "config.toml").unlink()
    os.mkfifo(tmp_path / "piped" / "config.toml")
    with serving(tmp_path / "piped") as link:
        ids = rollouts_of(page(link, "run/piped/traces", mode="train", step="1"))
        assert "config.toml cannot be read: it is no regular file" in page(link, f"run/piped/rollout/{ids[0]}")
        page(link, "run/piped/examples")


def test_nothing_without_the_token_and_nothing_but_reading(link: str) -> None:
    port = httpx.URL(link).port
    for address in (f"http://127.0.0.1:{port}/", f"http://127.0.0.1:{port}/wrong/run/one", link[:-2] + "/"):
        assert httpx.get(address).status_code == 403
    assert httpx.get(link, headers={"host": f"evil.example:{port}"}).status_code == 403
    assert httpx.post(link).status_code == 405
    assert httpx.get(link.replace("127.0.0.1", "localhost")).status_code == 200
    assert httpx.get(f"{link}static/%2e%2e%2fapp.py").status_code == 404
    assert httpx.get(f"{link}static/app.py").status_code == 404
    assert httpx.get(f"{link}run/%2e%2e%2f%2e%2e").status_code == 404


def test_every_answer_forbids_foreign_scripts_and_frames(link: str) -> None:
    for path in ("", "run/one", "run/one/traces", "static/watch.js", "run/nobody"):
        headers = httpx.get(link + path, follow_redirects=True).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers


def test_hostile_text_is_shown_as_text(link: str) -> None:
    traces = page(link, "run/one/traces")
    ids = rollouts_of(traces)
    pages = [
        traces,
        page(link, "run/one"),
        page(link, "run/one/examples"),
        page(link, "run/one/traces", text=HOSTILE),
        page(link, "run/one/traces", task=HOSTILE),
        page(link, "run/one/traces", score=HOSTILE),
        *(page(link, f"run/one/rollout/{id}") for id in ids[:2]),
        page(link, f"run/one/rollout/{ids[0]}", against=ids[1]),
    ]
    escaped = "&lt;script&gt;alert(1)&lt;/script&gt;"
    for text in pages:
        assert "<script>alert" not in text
        assert "<img src=x" not in text
        assert 'href="javascript' not in text
        assert not re.search(r"\son\w+=(?!alert)", re.sub(r">[^<]*<", "><", text)), "no event handler in any tag"
        assert "style=" not in re.sub(r">[^<]*<", "><", text), "the policy would not apply it"
    assert all(escaped in pages[i] for i in (0, 1, 3, 5, 6)), "it is there, as text"
    assert "49" not in re.findall(r"question\"[^>]*>(.*?)<", traces)[0], "no template runs what a model says"


def test_traces_lead_to_a_rollout_and_to_two_side_by_side(link: str) -> None:
    traces = page(link, "run/two/traces")
    ids = rollouts_of(traces)
    assert len(ids) > 1
    rollout = page(link, f"run/two/rollout/{ids[0]}")
    assert "LLM call" in rollout
    assert "Never shown to the agent" in rollout
    assert "handed to the algorithm" in rollout
    assert "agentrig.returned" not in rollout, "a digest is nothing to read"
    place = re.search(r"rollout (\d+) of (\d+)</span>", rollout)
    assert place is not None
    numbers = [int(n) for n in re.findall(r"rollout (\d+) of its group", rollout)]
    assert sorted([*numbers, int(place[1])]) == list(range(1, int(place[2]) + 1))
    assert rollout.count("Colour of a sampled token") == ('<i class="p' in rollout or "<i title=" in rollout)
    measured = rollouts_of(page(link, "run/two/traces", mode="report", step="0"))[0]
    alone = page(link, f"run/two/rollout/{measured}")
    assert [("Its group" in text, "Other rollouts of its task" in text) for text in (rollout, alone)] == [
        (True, False),
        (False, True),
    ]
    two = page(link, f"run/two/rollout/{ids[0]}", against=ids[1])
    assert "What was said" in two
    assert re.findall(r'<th scope="col">(.*?)</th>', two) == ["A", "B"]
    assert not re.search(r'>(left|right)<|class="(left|right)"', two)
    told = set()
    for other in ids[:8]:
        two = page(link, f"run/two/rollout/{ids[0]}", against=other)
        differ = re.search(r'<tr class="(changed|a|b)\b', two) is not None
        assert ("~: the line differs" in two, "The same was said in both." in two) == (differ, not differ)
        told.add(differ)
    assert told == {True, False}
    assert httpx.get(f"{link}run/two/rollout/nobody").status_code == 404


def views(text: str) -> dict[str, str]:
    """The curves and the traces of a page, without addresses and anchors."""
    text = re.sub(r'(href|id)="[^"]*"', "", text)
    return {
        "curves": "".join(re.findall(r'<svg viewBox="0 0 620.*?</svg>', text, re.DOTALL)),
        "results": "".join(re.findall(r"<h2 ?>Results</h2>.*?</table>", text, re.DOTALL)),
        "trace": "".join(re.findall(r'<div class="trace">.*?</section>(?=\s*</div>\s*</div>)', text, re.DOTALL)[:1]),
    }


def test_the_report_is_the_same_views_in_a_file(link: str, runs: Path, tmp_path: Path) -> None:
    file = build_report([runs / "two"], tmp_path / "page.html").read_text()
    first = re.search(r'<a class="score [a-z]*" href="#(rollout-\d+)"', file)
    assert first is not None
    live = page(link, "run/two")
    assert len(views(live)["curves"]) > 1000
    assert views(live)["curves"] == views(file)["curves"]
    assert views(live)["results"] == views(file)["results"]
    traces = [views(page(link, f"run/two/rollout/{id}"))["trace"] for id in rollouts_of(page(link, "run/two/traces"))]
    assert views(file)["trace"] in traces
    assert "LLM call" in views(file)["trace"]


def test_a_rollout_begins_with_its_verdict_its_reason_and_the_gold_answer(runs: Path, link: str) -> None:
    details = json.dumps({"reason": "no such column: car", "x": "y"})
    was = first_rollout(runs / "two", value=0.0, correct=False, details=details)
    text = page(link, f"run/two/rollout/{was['id']}")
    first_rollout(runs / "two", **was)
    head, trace = text.split('<div class="trace">')
    verdict = re.search(r'<p class="verdict wrong">(.*?)</p>', head, re.DOTALL)
    assert verdict is not None
    assert re.sub(r"<[^>]*>|\s+", " ", verdict[1]).split() == ["0", "wrong", ":", "no", "such", "column:", "car"]
    assert head.count("no such column: car") == 1
    assert "<dt>x</dt><dd>y</dd>" in head
    before, after = head.split("Never shown to the agent")
    assert "gold" in after.lower() or "No gold answer can be shown" in after
    assert "Task</h2>" not in before
    assert "Never shown to the agent" not in trace


def test_the_list_of_runs_has_the_accuracy_of_each_step_or_its_reward(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", steps=3)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for key in ("reward", "accuracy"):
        for line in lines:
            line["accuracy"] = line["step"] % 2 / 2 if key == "accuracy" else None
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        values = figures.series(read_run(run), key)[1]
        assert len(values) == 3
        with serving(tmp_path) as link:
            assert spark(values, width=80) in page(link)
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("[algorithm]", '[algorithm]\ndemonstrations = "tasks"'))
    with serving(tmp_path) as link:
        assert 'class="spark"' not in page(link), "demonstrations are not the model's answers"


def test_the_list_of_runs_says_of_which_gains_may_be_chance(tmp_path: Path) -> None:
    for name, lift in (("none", 0.0), ("sure", 0.6)):
        write_run(tmp_path / name, steps=2, held_out=60, lift=lift)
    with serving(tmp_path) as link:
        rows = re.findall(r"<tr>.*?</tr>", page(link), re.DOTALL)[1:]
    assert {name: "may be chance" in row for row in rows for name in ("none", "sure") if f">{name}</a>" in row} == {
        "none": True,
        "sure": False,
    }


def test_before_and_after_is_a_page_that_begins_with_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_run(tmp_path / "run", steps=2)
    with serving(directory) as link:
        assert "THE RIGHT ANSWER" not in page(link, "run/run/examples")  # its tasks cannot be loaded here
        tasks = {f"task-{n:04}": {"item": "pen", "answer": "THE RIGHT ANSWER"} for n in range(40)}
        with monkeypatch.context() as patched:
            patched.setattr("agentrig.view.beside._load", lambda directory: (tasks, ""))
            assert "<b>Right answer, never shown to the agent</b><pre>THE RIGHT" in page(link, "run/run/examples")
            one = page(link, "run/run/rollout/report-0-0")
            assert one.index("THE RIGHT") < one.index("rest of the task's private part") < one.index("<pre>pen")
            tasks = {task: {"item": "pen", "price": "3"} for task in tasks}
            text = page(link, "run/run/examples")
            assert "Right answer" not in text, "nothing says which of the two it is"
            assert re.search('item</div><pre>pen</pre></div>\\s*<div class="out"><div class="note">price</div>', text)
        text = page(link, "run/run/examples")
        assert 'href="' + link[link.index("/", 8) :] + 'run/run/examples"' in page(link, "run/run")
    files = read_run(directory).of_mode("report")
    right = [{row["task_id"]: row["correct"] for row in rollout_rows([f], ("task_id", "correct"))} for f in files]
    better, worse = (sum(right[1][id] - right[0][id] == way for id in right[0]) for way in (1, -1))
    said = re.sub(r"\s+", " ", re.sub("<[^>]*>", "", text))
    assert f"Of 40 tasks, {better} went from wrong to right and {worse} from right to wrong (sign test p" in said
    assert text.count("<h1>") == 1
    assert "<h1>Before and after</h1>" in text
    assert text.index('<article class="pair">') < text.index("<h2")
    after = re.sub("<article.*?</article>", "", text, flags=re.DOTALL)
    tables = re.findall('<h2 id="(.*?)">(.*?)</h2>', after)
    assert [title for _, title in tables][:2] == ["Held-out accuracy by half", "Held-out accuracy by trained calls"]
    assert [f'<a href="#{id}">{title}</a>' for id, title in tables] == re.findall('<a href="#.*?</a>', text)
    assert not re.search("<h2[^>]*>(Checks|Algorithm|Time|Run|Curves)<", text)
    first = re.search(r'<div class="side">\s*<header>.*?</header>\s*<p class="verdict wrong">', text, re.DOTALL)
    assert first is not None, "each side begins with its verdict"


def test_pages_of_runs_name_what_they_have(tmp_path: Path) -> None:
    """A comparison without a chosen run says so; modes are those with rollouts, and the question leads to its task."""
    write_run(tmp_path / "runs" / "one", steps=3)
    with serving(tmp_path / "runs") as link:
        assert "No run is chosen" in page(link, "compare")
        assert "No run is chosen" not in page(link)
        traces = page(link, "run/one/traces")
        modes = traces[traces.index('<select name="mode">') :].partition("</select>")[0]
        assert re.findall(r'<option value="(\w+)"', modes) == ["train", "validation", "report"]
        assert re.search(r'<a class="question" href="[^"]*task=', traces)
        rewards = page(link, "run/one/rewards")
        heads = re.findall(r"<th>(steps? [^<]*)</th>", rewards)
        assert f"Rollouts with each reward in {' and in '.join(heads)}." in rewards


@pytest.mark.parametrize(("view", "asks"), [("rewards", "known"), ("traces", "values")])
def test_a_page_that_was_made_while_files_were_read_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, view: str, asks: str
) -> None:
    """The page asks again as long as it says so: else it would go on showing what was read until then."""
    ask = getattr(Rollouts, asks)

    def then_all_are_read(rollouts: Rollouts, *given: str) -> Any:
        found = ask(rollouts, *given)
        rollouts.table()
        return found

    monkeypatch.setattr(Rollouts, "read_all", lambda rollouts: None)
    monkeypatch.setattr(Rollouts, asks, then_all_are_read)
    with serving(write_run(tmp_path / "run", steps=3)) as link:
        assert 'role="status">The' in page(link, f"run/run/{view}")
        assert 'role="status">The' not in page(link, f"run/run/{view}")


def test_the_examples_of_a_run_that_goes_on_say_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=16, ended=False)
    lock = Lock(run / "run.lock")
    assert lock.take()
    try:
        with serving(run) as link:
            text = page(link, "run/run/examples")
    finally:
        lock.release()
    assert "So far, of 30 tasks" in " ".join(text.split())
    assert "(validation split, step 8 and step 16)" in text
    assert 'data-label="live"' in text


def test_a_filter_keeps_its_values_and_wrong_ones_are_told(link: str) -> None:
    text = page(link, "run/two/traces", score="right", text="a")
    assert 'value="right"' in text
    assert "score: right, wrong, part, failed, or 0.2..0.8" in text
    assert "is no score: write right, failed" in page(link, "run/two/traces", score="fine")
    assert "No rollout matches" in page(link, "run/two/traces", text="zzz-nobody-said-this")


@pytest.mark.parametrize("key", ["step", "shortest", "longest"])
@pytest.mark.parametrize("value", ["NaN", "-1", "1.5", "9" * 40])
def test_a_filter_that_is_no_number_is_told_and_nothing_is_shown(link: str, key: str, value: str) -> None:
    text = page(link, "run/two/traces", **{key: value})
    assert f"{key} is &#39;{value}&#39;, which is no whole number" in text
    assert not rollouts_of(text)


def test_a_change_of_the_run_is_told(runs: Path) -> None:
    opened, heard = threading.Event(), threading.Event()
    with serving(runs / "two") as link:
        events = httpx.URL(str(httpx.get(link, follow_redirects=True).url)).join("../events?run=two")

        def listen() -> None:
            with httpx.stream("GET", events, timeout=60) as stream:
                for line in stream.iter_lines():
                    opened.set()  # the server has looked at the files before its first line
                    if line == "event: changed":
                        heard.set()
                        return

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        assert opened.wait(60)
        file = runs / "two" / "metrics.jsonl"
        line = json.loads(file.read_text().splitlines()[-1])
        with file.open("a") as metrics:
            metrics.write(json.dumps({**line, "step": line["step"] + 1}) + "\n")
        assert heard.wait(30)
        assert f">{line['step'] + 1}<" in page(link)
        thread.join(5)


def test_what_is_no_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(AgentrigError, match="there is no folder"), serving(tmp_path / "nothing"):
        pass
    with serving(tmp_path) as link:
        assert "There are no runs here yet" in page(link)
        assert httpx.get(f"{link}run/nobody").status_code == 404


@pytest.mark.parametrize(
    "path", ["run/nobody", "run/two/nothing", "nothing/at/all", "run/two/rollout/<b>", "events?run=nobody", "chart.csv"]
)
def test_a_wrong_address_says_so_and_leads_back(link: str, path: str) -> None:
    reply = httpx.get(link + path)
    assert reply.status_code == 404
    assert "<h1>Not found</h1>" in reply.text
    assert "<b>&#39" not in reply.text
    (back,) = re.findall(r'<p><a href="([^"]*)">All runs</a>', reply.text)
    assert httpx.URL(link).join(back) == link
    assert 'aria-current="page">runs' not in reply.text
    assert 'aria-current="page">runs' in page(link, text="one")
    assert httpx.get(httpx.URL(link).join(back)).status_code == 200


def test_the_points_of_a_curve_are_csv(ended_run: Callable[..., Path], tmp_path: Path) -> None:
    for name in ("one", "=two"):
        shutil.copytree(ended_run(), tmp_path / name, symlinks=True)
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        (tmp_path / name / "manifest.json").write_text(json.dumps({**manifest, "name": name}))
    run = read_run(tmp_path / "one")
    with serving(tmp_path) as link:
        text = page(link, "chart.csv", run="one", plot="reward", x="time")
        rows = list(csv.DictReader(io.StringIO(text)))
        sampled = next(name for name in rows[0] if "each step" in name)
        trained = [row for row in rows if row[sampled]]
        assert [float(row[sampled]) for row in trained] == [line["reward"] for line in run.steps]
        took = list(itertools.accumulate(line["step_s"] for line in run.steps))
        assert [float(row["wall time of the steps, s"]) for row in trained] == pytest.approx(took)
        both = httpx.get(f"{link}chart.csv?run=one&run=%3Dtwo&plot=response+tokens&metric=step_s")
        assert both.headers["content-disposition"] == 'attachment; filename="response-tokens.csv"'
        heads = next(csv.reader(io.StringIO(both.text)))
        assert "'=two, train" in heads, "a spreadsheet takes no name for a formula"
        assert httpx.get(f"{link}chart.csv?run=one&plot=nothing").status_code == 404
        assert httpx.get(f"{link}chart.csv?run=nobody&plot=reward").status_code == 404


@pytest.mark.parametrize("query", ["", "run=", "x=&from=&to=&metric=&plot=", "page=x&mode=x&order=x&against=x&step=x"])
def test_no_address_fails_whatever_its_query_lacks(link: str, query: str) -> None:
    parts = ["", "why", "checks", "examples", "traces", "rewards", "rollout/nobody"]
    paths = ["", "compare", "chart.csv", *(f"run/two/{part}".rstrip("/") for part in parts)]
    answers = {path: httpx.get(f"{link}{path}?{query}") for path in paths}
    assert {path: answer.text for path, answer in answers.items() if answer.status_code >= 500} == {}
    assert answers["chart.csv"].status_code == 404
    assert httpx.get(f"{link}events?run=nobody").status_code == 404


def test_a_metric_is_explained_where_it_is_offered_drawn_and_listed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["algorithm"] |= {"kl": 0.01, "trained_tokens": 900.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serving(run) as link:
        at = str(httpx.get(link, follow_redirects=True).url)
        text, drawn = (html.unescape(httpx.get(at, params=query).text) for query in ({}, {"metric": "algorithm/kl"}))
    kl = "Nats a token by which the new policy is away from the sampling one (k3 estimate, never below 0)."
    assert f'<option value="algorithm/kl" title="{kl}">kl</option>' in text
    assert f"<figcaption>{kl}</figcaption>" in drawn
    assert "trained_tokens: Tokens of replies whose calls were trained, of every epoch. The loss divides by" in text


def test_what_somebody_writes_into_an_address_breaks_no_curve(link: str) -> None:
    odd = {"x": "hours", "from": "inf", "to": "1e400", "metric": HOSTILE}
    text = page(link, "run/one", **odd)
    assert "<script>alert" not in text
    assert len(views(text)["curves"]) > 1000
    wide = page(link, "run/one", **{"from": "-1e308", "to": "1e308"})
    assert 1000 < len(views(wide)["curves"]) < 2 * len(views(text)["curves"]), "no ticks for ever"
    assert "Nothing is in this part" in page(link, "run/one", **{"from": "5e300"})
    for path in ("run/one/rewards", "run/two/rewards"):
        text = page(link, path, mode="nothing", order=HOSTILE, page="9")
        assert "<script>alert" not in text
        assert "<img src=x" not in text


def test_tags_and_notes_are_kept_and_taken_from_this_page_only(
    ended_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(ended_run(), tmp_path / "one", symlinks=True)

    def files() -> dict[str, bytes]:
        return {str(f.relative_to(run)): f.read_bytes() for f in run.rglob("*") if f.is_file() and f.name != "run.lock"}

    before, damage = files(), read_run(run).missing
    with serving(tmp_path) as link:
        own = {"origin": link.rsplit("/", 2)[0], "content-type": "application/json"}

        def send(
            path: str = "run/one/notes", headers: dict[str, str] = own, method: str = "POST", **given: object
        ) -> int:
            body = json.dumps({"tags": "", "note": "", **given})
            return httpx.request(method, link + path, content=body, headers=headers, timeout=30).status_code

        assert send(headers={"content-type": "application/json"}) == 403
        assert send(headers={**own, "origin": "http://evil.example"}) == 403
        assert send(headers={**own, "origin": "null"}) == 403
        assert send(headers={**own, "content-type": "text/plain"}) == 403
        assert send(headers={**own, "host": "evil.example"}) == 403
        assert httpx.post(link[:-2] + "/run/one/notes", json={}, headers=own).status_code == 403
        assert send(method="PUT") == 405
        assert send("run/one") == 405
        assert send("run/nobody/notes") == 404
        assert send(note=["a", "list"]) == 400
        assert send(note="x" * 4001) == 400
        assert send(tags=",".join(map(str, range(21)))) == 400
        assert send(note="x" * 2_000_000) == 413
        assert httpx.post(f"{link}run/one/notes", content=b"[" * 100_000, headers=own).status_code == 400
        assert files() == before

        assert send(tags=f" first,  two  words ,first, {HOSTILE[:30]}", note=HOSTILE) == 204
        kept = json.loads((run / "notes.json").read_text())
        assert kept["tags"][:2] == ["first", "two words"]
        assert {name for name in files() if name not in before} == {"notes.json"}
        assert {name: text for name, text in files().items() if name != "notes.json"} == before
        assert read_run(run).missing == damage, "a run is not damaged by them"
        for text in (page(link), page(link, "run/one"), page(link, "", tag="first"), page(link, "", text="ALERT(1)")):
            assert "&lt;script&gt;alert(1)" in text
            assert "<script>alert" not in text
            assert "<img src=x" not in text
        assert "None of the 1 runs" in page(link, "", tag="third")

        (run / "notes.json").unlink()
        (run / ".notes.json.part").mkdir()  # it cannot be written
        reply = httpx.post(f"{link}run/one/notes", json={"tags": "a", "note": ""}, headers=own)
        assert reply.status_code == 400
        assert "notes.json cannot be written: Is a directory" in reply.text
        (run / "notes.json").write_text("{")
        assert "notes.json cannot be read" in page(link, "run/one")
        assert "/run/one" in page(link)
        (run / "notes.json").write_text('{"tags": {"a": 1}, "note": [1]}')
        assert "<textarea" in page(link, "run/one")
        monkeypatch.setattr("agentrig.view.watch.notes.os.access", lambda *_: False)
        text = page(link, "run/one")
        assert "read-only, so it cannot keep tags" in text
        assert "<textarea" not in text


def test_runs_are_sorted_and_filtered(tmp_path: Path) -> None:
    for name, steps, lift in (("b", 2, 0.3), ("a", 5, 0.0), ("c", 3, 0.6)):
        write_run(tmp_path / name, steps=steps, lift=lift)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.toml").write_text("")  # it cannot be shown, and has no figures
    with serving(tmp_path) as link:

        def keys(**query: str) -> list[str]:
            return re.findall(r'name="run" value="([^"]*)"', page(link, **query))

        after = {name: read_run(tmp_path / name).summary["accuracy"]["after"] for name in "abc"}
        rising = sorted(after, key=lambda name: after[name])
        assert keys(sort="name") == ["a", "b", "c", "empty"]
        assert keys(sort="-name") == ["empty", "c", "b", "a"]
        assert keys(sort="steps") == ["b", "c", "a", "empty"], "what is not known comes last"
        assert keys(sort="-steps") == ["a", "c", "b", "empty"]
        assert keys(sort="accuracy") == [*rising, "empty"]
        assert keys(sort="nothing") == keys()
        assert keys(text="cannot be shown") == ["empty"]
        text = page(link, sort="-steps", text="finished")
        assert re.search(
            r'<th class="n" aria-sort="descending"><a href="[^"]*text=finished&amp;sort=steps">Steps', text
        )


def test_a_page_says_that_its_run_has_ended_and_a_comparison_begins_with_what_differs(runs: Path) -> None:
    with serving(runs) as link:
        assert 'data-label="ended"' in page(link, "run/two")
        assert 'data-live="live"' in page(link)
        text = httpx.get(f"{link}compare?run=one&run=two", timeout=30).text
        assert text.index("<h2>Settings that differ") < text.index('class="plots"') < text.index("<h2>Results")


def test_tasks_by_step_are_shown_once_a_task_was_seen_in_two_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    with serving(run) as link:
        text = read_whole(link)
        assert "No task was seen in two steps," in text
        assert "tasks by step</h2>" not in text


def read_whole(link: str) -> str:
    """Return the page of rewards once all rollouts are read."""
    end = time.monotonic() + 30
    while "files so far" in (text := page(link, "run/run/rewards")) and time.monotonic() < end:
        time.sleep(0.1)
    return text
