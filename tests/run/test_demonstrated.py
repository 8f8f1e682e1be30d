"""Runs that learn from demonstrations of tasks, an earlier run or a file: audited, resumed, and every bad input."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import httpx
import pyarrow.parquet as pq
import pytest
import torch
from agentrig_grpo.learner import Learner
from audited_runs import tiny_model, verdicts
from click.testing import CliRunner
from rollouts import rollout

from agentrig import Task
from agentrig.cli.entry import main
from agentrig.correctness import Correctness
from agentrig.demonstrations import Reply, Turn
from agentrig.errors import AgentrigError, ConfigError, RunStopped
from agentrig.plan import resolve
from agentrig.rollouts import Rollout
from agentrig.run.demonstrated import Demonstrated
from agentrig.run.demonstration_server import demonstrating
from agentrig.run.directory import descent_of
from agentrig.run.resume import resume_plan
from agentrig.run.training import train
from agentrig.tracing.streams import joined
from agentrig.tracing.tokens import token_attributes
from agentrig.view import build_report
from agentrig.view.plots import plots_of
from agentrig.view.reading import read_run

pytestmark = pytest.mark.usefixtures("quick_images")

FILE = str(Path(__file__).resolve().parents[1] / "support" / "warmup_plugin.py")
SETTINGS = (
    "algorithm.tasks_per_step=6", "algorithm.lr=3e-3", "algorithm.validate_every=0", "algorithm.save_every=1",
    "adapter.match=", "run.report_tasks=2", 'run.block=["report"]',
)  # fmt: skip


def learned(folder: Path, name: str, *more: str, model: Path, steps: int = 2, **uses: str) -> Path:
    """Run `sft` on the colors; returns the run directory."""
    own = [f"run.directory={folder}", f"run.name={name}", f"algorithm.model={model}", f"algorithm.steps={steps}"]
    train(resolve("colors", overrides=[*own, *SETTINGS, *more], uses={"algorithm": "sft", **uses}, files=[FILE]))
    return folder / name


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def faults(run: Path) -> list[str]:
    return [f"{step} {v['link']}: {v['detail']}" for step, found in verdicts(run).items() for v in found.values()
            if v["result"] == "fault"]  # fmt: skip


def chats(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def chat(asked: str, reply: str, **more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]
    return {"messages": said, **more}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model, and of a run of four steps that learned its tasks."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("demonstrated")
    learned(folder, "four", model=tiny_model(folder), steps=4)
    return folder


def test_the_tasks_demonstrations_are_learned_and_the_mistakes_in_them_are_not(whole: Path, tmp_path: Path) -> None:
    steps = lines(whole / "four")
    losses = [line["algorithm"]["loss"] for line in steps]
    assert losses[-1] < 0.75 * losses[0], "the cross-entropy of what is demonstrated falls"
    assert {line["accuracy"] for line in steps} == {1.0}, "a constant reward is no reason to stop"
    for line in steps:  # each rollout has two calls, and `Reply(learn=False)` is the first one
        assert line["calls"]["trained"] == line["calls"]["dropped"]["left-out-by-credit"] == 6
        assert "sampled_difference" not in line["algorithm"]
        assert line["algorithm"]["ratio_max"] == 1
        assert [line[key] for key in ("reward", "reward_std", "rollouts_per_s", "tokens_per_s")] == [None] * 4
    run = read_run(whole / "four")
    assert not [line.label for plot in plots_of([run]) for line in plot.lines if "training" in line.label]
    page = build_report([run.directory], tmp_path / "page.html").read_text()
    assert "wall time" in page
    assert not any(tile in page for tile in (">training reward<", "rollouts a second"))
    assert CliRunner().invoke(main, ["compare", str(whole / "four")]).exit_code == 0
    shown = CliRunner().invoke(main, ["why", str(whole / "four")]).output
    assert "No fault was found" in shown
    assert not any(cause in shown for cause in ("constant-reward", "tasks-too-easy", "memorised", "zero-variance"))


def test_the_auditor_looks_at_each_link_but_the_sampling(whole: Path) -> None:
    found = verdicts(whole / "four")
    for step in (found[1], found[2]):
        unseen = {link: verdict["detail"] for link, verdict in step.items() if verdict["result"] != "ok"}
        assert unseen == {"distribution": "demonstrations: nothing was sampled"}
        assert "by demonstrations" in step["advantages"]["detail"]
        assert step["text"]["detail"].startswith("12 calls")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replaced", "link"),
    [("update", "gradient"), ("encode", "text")],
    ids=["a token of a demonstration before the update", "a token of what the agent was answered"],
)
def test_the_auditor_finds_a_token_that_was_replaced(
    replaced: str, link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(Learner, replaced)

    def update(self: Any, samples: Sequence[Any], **more: Any) -> Any:
        first, *rest = samples
        other = attrs.evolve(first, response_ids=[first.response_ids[0] ^ 1, *first.response_ids[1:]])
        return original(self, [other, *rest], **more)

    def encode(self: Any, turn: Any) -> Any:
        prompt, reply = original(self, turn)
        return prompt, [reply[0] ^ 1, *reply[1:]]

    monkeypatch.setattr(Learner, replaced, update if replaced == "update" else encode)
    with pytest.raises(RunStopped, match=rf"(?s)step 1: the audit found.* {link}: "):
        learned(tmp_path, "run", model=tiny_model(tmp_path))


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_weights_of_one_that_was_not_interrupted(whole: Path) -> None:
    run = learned(whole, "two", model=whole / "model", steps=2)
    train(resume_plan(run, overrides=["algorithm.steps=4"]), resume=run)
    assert [line["digests"] for line in lines(run)] == [line["digests"] for line in lines(whole / "four")]


@pytest.mark.slow
def test_accepted_rollouts_of_a_run_are_learned_token_for_token_and_its_model_goes_on(whole: Path) -> None:
    parent, before = whole / "four", lines(whole / "four")[-1]
    at = parent / "checkpoints" / "step-00004"
    run = learned(whole, "again", f"algorithm.demonstrations={parent}", model=at)
    assert not faults(run)
    known = {
        row["id"]: [ids_of(span) for span in json.loads(row["spans"])]
        for step in range(1, 5)
        for row in pq.read_table(parent / "rollouts" / f"train-{step:05d}.parquet").to_pylist()
    }
    (first, *_) = pq.read_table(run / "rollouts" / "train-00001.parquet").to_pylist()
    assert [ids_of(span) for span in json.loads(first["spans"])] == known[first["id"].rsplit("-", 2)[0]]
    assert [line["calls"]["trained"] for line in lines(run)] == [6, 6]
    (descent,) = json.loads((run / "manifest.json").read_text())["descent"]
    assert (descent["run"], descent["step"], descent["weights"]) == ("four", 4, before["digests"]["weights"])
    assert (
        f"starts from four, step 4 (weights {descent['weights'][:12]})"
        in CliRunner().invoke(main, ["why", str(run)]).output
    )
    assert [each["run"] for each in descent_of(run / "checkpoints" / "step-00002")] == ["again", "four"]
    assert descent_of(whole / "model") == []


def ids_of(span: dict[str, Any]) -> tuple[Any, Any]:
    return span["attributes"].get("prompt_token_ids"), span["attributes"].get("response_token_ids")


@pytest.mark.slow
def test_a_file_of_chats_is_learned_with_its_ids_where_they_are_this_models(
    whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = chats(
        whole / "chats.jsonl",
        *(chat(f"color {i}", color, task=f"t{i}") for i, color in enumerate(("red", "blue", "green"))),
        chat("color 9", "black", prompt_token_ids=[5, 6], response_token_ids=[7, 8], tokenizer="another"),
        chat("color 9", "white", reward=0.0),
        chat("x" * 900, "far too long"),
    )
    run = learned(whole, "file", f"algorithm.demonstrations={own}", "adapter.match=nowhere", model=whole / "model")
    assert not faults(run)
    assert [line["calls"]["trained"] for line in lines(run)] == [6, 6], "four chats, some twice"
    rows = pq.read_table(run / "rollouts" / "train-00001.parquet").to_pylist()
    assert {row["task_id"] for row in rows} == {"t0", "t1", "t2", "chats.jsonl:4"}
    assert all(ids_of(json.loads(row["spans"])[0]) != ([5, 6], [7, 8]) for row in rows)
    notes = json.loads((run / "summary.json").read_text())["notes"]
    assert f"1 of 6 demonstrations of {own} have a reward that does not count as correct" in notes
    assert f"1 of 5 demonstrations of {own} are left out" in notes
    assert any(note.startswith(f"1 of 5 demonstrations of {own} have token ids of another tokenizer") for note in notes)
    assert "1 x prompt and reply have 9" in caplog.text
    assert json.loads((run / "manifest.json").read_text())["demonstrations"]["n"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_the_ids_of_its_call_streamed_or_not(stream: bool) -> None:
    asked = list[Turn]()

    def encode(turn: Turn) -> tuple[Sequence[int], Sequence[int]]:
        asked.append(turn)
        return (5, 6), (7, 8, 1)

    def says(task: Task, call: Any) -> Reply:
        return Reply(content="stop here", learn=False) if call.turn == 0 else Reply(tool_calls=[{"name": "add"}])

    with demonstrating([Task(id="a", input={})], says, seed="0 1", encode=encode) as ((endpoint,), (conversation,)):

        def post(**more: Any) -> httpx.Response:
            body = {"messages": [{"role": "user", "content": "?"}], "stream": stream, **more}
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            return httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers)

        assert endpoint.token_ids
        refused = post(stop=["here"])
        assert refused.status_code == 400
        assert "the agent's stop sequence 'here' is in it" in refused.text
        assert not conversation.turns
        said = [post(chat_template_kwargs={"enable_thinking": False}) for _ in range(2)]
    bodies = [joined(each.text)[0] if stream else each.json() for each in said]
    assert [body.get("learn") for body in bodies] == [False, None]
    assert bodies[0]["id"] != bodies[1]["id"]
    assert asked[0].options == {"enable_thinking": False}
    for body in bodies:
        found = token_attributes(body)
        assert (found["prompt_token_ids"], found["response_token_ids"]) == ([5, 6], [7, 8, 1])


# --- bad input ---


def session(*ids: str, notes: list[str] | None = None) -> Any:
    scorer = SimpleNamespace(correctness=Correctness())
    reward = SimpleNamespace(spec=SimpleNamespace(name="exact"))
    return SimpleNamespace(
        directory=Path("/nowhere"),
        record=lambda name, value: None,
        train_tasks=[Task(id=name, input={"n": name}, private={"gold": "4"}) for name in ids],
        lines=[],
        engine=SimpleNamespace(scorer=scorer),
        note=([] if notes is None else notes).append,
        plan=SimpleNamespace(components={"reward": reward}),
        seed=0,
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file or run directory"),
        ("", "chats.jsonl is empty"),
        ('{"messages": [\n', "line 1"),
        (json.dumps(chat("a", "b")) + "\nnot JSON\n", "line 2"),
        (json.dumps(chat("a", "")) + "\n", "line 1: the reply is empty"),
        (json.dumps(chat("a", "b", reward=-1)) + "\n", "no reward in its 1 line is right"),
    ],
)
def test_a_file_that_cannot_be_learned_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(AgentrigError, match=message):
        Demonstrated(session(), str(file))


def test_a_run_without_anything_to_learn_is_refused(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no run directory, it has no config\.toml"):
        Demonstrated(session(), str(tmp_path))
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ConfigError, match="nothing to learn in its 0 training rollouts: its reward accepted none"):
        Demonstrated(session(), str(tmp_path))
    with pytest.raises(ConfigError, match="12 of them are accepted, of tasks that are not in this run's training"):
        Demonstrated(session("other"), str(whole / "four"))


def test_a_task_without_gold_is_refused_before_anything_runs(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    with pytest.raises(AgentrigError, match="the demonstrator raised KeyError: 'no plan'"):
        learned(tmp_path, "broken", model=model, agent="broken")
    no_gold = tmp_path / "rows.jsonl"
    no_gold.write_text("".join(f'{{"id": "{i}", "question": "{i}?", "x": 1, "y": 2}}\n' for i in range(30)))
    with pytest.raises(ConfigError, match="no gold to demonstrate"):
        learned(tmp_path, "gold", f"tasks.file={no_gold}", 'tasks.private=["x", "y"]', model=model, tasks="table")
    assert not (tmp_path / "gold").exists()


def test_chats_that_no_model_can_learn_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own, notes = chats(tmp_path / "chats.jsonl", chat("a", "b"), chat("a", "c")), list[str]()

    class Refuses:
        def encode(self, turn: Turn) -> tuple[Sequence[int], Sequence[int]]:
            if turn.reply.content == "b" or refused:
                raise ValueError("the chat template refuses these messages: no system message")
            return [1], [2, 3]

    found, refused = Demonstrated(session(notes=notes), str(own)), False
    found.begin(Refuses(), "sft")
    assert notes == [f"1 of 2 demonstrations of {own} are left out"]
    assert "have changed since" not in caplog.text
    (tmp_path / "manifest.json").write_text('{"demonstrations": {"fingerprint": "another"}}')
    resumed = session()
    resumed.directory = tmp_path
    Demonstrated(resumed, str(own)).begin(Refuses(), "sft")
    assert f"the demonstrations of {own} have changed since this run started" in caplog.text
    refused = True
    with pytest.raises(ConfigError, match=r"none of its 2 demonstrations can be learned:\n  2 x the chat template ref"):
        Demonstrated(session(), str(own)).begin(Refuses(), "sft")
    with pytest.raises(ConfigError, match="its learner has no method `encode`"):
        Demonstrated(session(), str(own)).begin(object(), "mine")


def test_demonstrations_that_the_reward_rejects_are_named_once_and_most_of_them_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def demonstrated(name: str, value: float) -> Rollout:
        return attrs.evolve(rollout(value, answer="4", group=name), id=name, task=Task(id=name, input={}))

    found = Demonstrated(session(), str(chats(tmp_path / "chats.jsonl", chat("a", "b"))))
    found._check([demonstrated("good", 1.0), demonstrated("poor", 0.5)], 1)
    found._check([demonstrated("good", 1.0), demonstrated("poor", 0.5)], 2)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "does not count 1 of 2 demonstrations as correct; they are not learned:\n  poor: '4' -> 0.5" in warning
    with pytest.raises(RunStopped, match=r"(?s)step 3: .*does not count 3 of 5 demonstrations by .* poor: '4'") as stop:
        found._check([demonstrated("poor", 0.5)], 3)
    assert stop.value.cause == "demonstrations-rejected"


def test_settings_of_sampling_and_a_credit_are_refused() -> None:
    plan = resolve("mini", uses={"algorithm": "sft"})
    config, credit = plan.configs["algorithm"], plan.components["credit"].spec.name
    assert (config.lr, config.tasks_per_step, config.group_size, credit) == (2e-4, 96, 1, "own")
    with pytest.raises(ConfigError, match="group_size"):
        resolve("mini", uses={"algorithm": "sft"}, overrides=["algorithm.group_size=2"])
    with pytest.raises(ConfigError, match="sft decides itself what calls are worth"):
        resolve("mini", uses={"algorithm": "sft", "credit": "rft"})


def test_start_names_the_checkpoint_that_a_run_ended_with(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()
    monkeypatch.setattr(
        "agentrig.run.training.train", lambda plan, **more: asked.append(plan.configs["algorithm"]) or {}
    )
    run = str(whole / "four")
    done = CliRunner().invoke(main, ["train", "mini", "--start", run, "--json"])
    assert done.exit_code == 0, done.output
    assert asked[0].model == str(whole / "four" / "checkpoints" / "step-00004")
    for more in (["--resume", run], ["algorithm.model=mini"]):
        refused = CliRunner().invoke(main, ["train", "--start", run, *more])
        assert refused.exit_code != 0
        assert "leave --resume and algorithm.model out" in refused.output


def test_the_rejected_demonstrations_of_before_a_resume_count(tmp_path: Path) -> None:
    before = [
        {"rollouts": 6, "failures": {"agent-error": 1}, "accuracy": 0.4},
        {"rollouts": 5, "failures": {}, "accuracy": 1.0},
    ]
    resumed = session()
    resumed.lines = before
    found = Demonstrated(resumed, str(chats(tmp_path / "chats.jsonl", chat("a", "b"))))
    assert (found._rejected, found._seen) == (3, 10)
