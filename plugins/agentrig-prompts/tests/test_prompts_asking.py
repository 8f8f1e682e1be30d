"""What the questions of a search make of failures, of nonsense, and of models that are away."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import httpx
import pytest
from agentrig_prompts.apo import ranked
from agentrig_prompts.asking import Asking, Stopping, shown
from agentrig_prompts.config import ApoConfig, GepaConfig
from agentrig_prompts.gepa import REFLECT, GepaSearch
from agentrig_prompts.record import FILE, Record, digest_of
from agentrig_prompts.search import EXCLUDED, best_of, mean
from prompted_model import Model

from agentrig import Endpoint, Outcome, Score, Secret, Span, Task, Trace
from agentrig.errors import ConfigError, RunStopped
from agentrig.prompting import prompted
from agentrig.rollouts import Rollout
from agentrig.testing.scripted import serving
from agentrig.traces import LLM_CALL

PROMPT = "Answer {question} with a number."
TASKS = [("train", Task(id=f"t{i}", input={"question": f"sum of {i} and 1"})) for i in range(4)]
USAGE = {"usage": {"prompt_tokens": 30, "completion_tokens": 10}}


class Session:
    """A run whose rollouts end as `plays` says: a value, or the kind of a failure; `calls` of them asked the model."""

    def __init__(self, directory: Path, plays: Callable[[str, int], float | str] = lambda task, attempt: 1.0) -> None:
        self.directory, self.plays, self.prompts = directory, plays, {"system": PROMPT}
        self.train_tasks = self.validation_tasks = [task for _, task in TASKS]
        self.notes: list[str] = []
        self.stopping, self.resumes, self.answered = False, "agentrig train --resume run", True
        self.attempts: list[str] = []
        self.checked: Sequence[Rollout] = ()
        self.recorded: dict[str, Any] = {}

    def record(self, name: str, value: Any) -> None:
        self.recorded[name] = value

    def rollouts(self, tasks: Sequence[Task], *, on_groups: Any, **more: Any) -> list[Rollout]:
        ended = []
        for place, task in enumerate(tasks):
            self.attempts.append(task.id)
            found = self.plays(task.id, self.attempts.count(task.id))
            failed = isinstance(found, str)
            call = Span(id="c", parent=None, name=LLM_CALL, start=0, end=0, attributes={"response": USAGE})
            rollout = Rollout(
                id=f"r{len(self.attempts)}",
                task=task,
                group="g",
                mode="train",
                step=1,
                outcome=Outcome(failure=found) if isinstance(found, str) else Outcome(answer="2"),
                score=None if isinstance(found, str) else Score.ok(found, feedback="too small"),
                trace=Trace(rollout_id="r", spans=(call,) if self.answered or not failed else ()),
            )
            ended.append(rollout)
            on_groups({place: [rollout]})
        return ended

    def note(self, text: str) -> None:
        self.notes.append(text)

    def check_failures(self, rollouts: Sequence[Rollout], *, step: int) -> None:
        self.checked = rollouts
        if all(rollout.failure for rollout in rollouts):
            raise RunStopped("all failed", cause="failures")


@pytest.fixture
def model() -> Iterator[Model]:
    with serving(Model()) as server:
        yield server


def endpoint_of(model: Model) -> Endpoint:
    return Endpoint(base_url=model.url, model="m")


def asking(session: Any, url: str = "http://127.0.0.1:9/v1", **keys: Any) -> tuple[Asking, Record]:
    record = Record(session.directory)
    made = Asking(session, [Endpoint(base_url=url, model="m")], GepaConfig(**{"patience_s": 0.0, **keys}), record)
    made.spare = 100
    return made, record


def searching(session: Any, config: GepaConfig) -> GepaSearch:
    search = GepaSearch(config)
    search.begin(session)
    return search


def values(lines: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [line["value"] for line in lines]


def test_a_failure_is_sampled_again_and_never_counts_as_zero(tmp_path: Path) -> None:
    session = Session(tmp_path, lambda task, attempt: "llm-error" if (task, attempt) in {("t1", 1), ("t2", 1)} else 0.5)
    ask, record = asking(session)
    assert values(ask.rollouts(TASKS, {"system": PROMPT})) == [0.5] * 4
    assert session.attempts == ["t0", "t1", "t2", "t3", "t1", "t2"]
    assert (record.calls, record.tokens, record.largest, record.excluded) == (6, 240, 40, 0)
    assert ask.spare == 98
    assert values(ask.rollouts(TASKS[:2], {"system": PROMPT})) == [0.5] * 2
    assert len(session.attempts) == 6  # what was paid is kept
    ask.rollouts(TASKS[:2], {"system": "another {question}"})
    assert len(session.attempts) == 8


@pytest.mark.parametrize("keys", [{"retries": 2}, {"retries": 9}])
def test_a_task_whose_every_attempt_fails_is_left_out_and_counted(tmp_path: Path, keys: dict[str, int]) -> None:
    session = Session(tmp_path, lambda task, attempt: "agent-error" if task == "t3" else 1.0)
    ask, record = asking(session, **keys)
    ask.spare = 2  # the second retry takes the last of them
    assert values(ask.rollouts(TASKS, {"system": PROMPT})) == [1.0, 1.0, 1.0, None]
    assert session.attempts.count("t3") == 3
    assert [r.failure for r in session.checked] == [None, None, None, "agent-error"]
    assert record.excluded == 1
    again = Record(tmp_path)
    assert again.settled(digest_of({"system": PROMPT}, "train", "t3")) is not None
    assert (again.excluded, again.calls) == (1, 3)


def test_a_run_in_which_everything_fails_stops(tmp_path: Path, model: Model) -> None:
    session = Session(tmp_path, lambda task, attempt: "llm-error")
    session.answered = False
    ask, record = asking(session, model.url, retries=1)
    with pytest.raises(RunStopped, match="all failed"):
        ask.rollouts(TASKS, {"system": PROMPT})
    assert session.attempts.count("t0") == 2
    assert record.calls == 0  # the model answered none: nothing was paid


def test_a_model_that_stays_away_stops_the_run_with_the_command_that_goes_on(tmp_path: Path) -> None:
    session = Session(tmp_path, lambda task, attempt: "llm-error")
    session.answered = False
    ask, _ = asking(session)
    said = re.compile(r"127\.0\.0\.1:9/v1 does not answer.*patience_s.*agentrig train --resume run")
    for asked in (
        lambda: ask.rollouts(TASKS, {"system": PROMPT}),
        lambda: ask.better(REFLECT, PROMPT, "system", ""),
    ):
        with pytest.raises(Stopping) as stopped:
            asked()
        assert isinstance(stopped.value.__cause__, RunStopped)
        assert said.search(str(stopped.value.__cause__))
    session.stopping = True
    with pytest.raises(Stopping) as stopped:
        ask.rollouts([("train", Task(id="new", input={}))], {"system": PROMPT})
    assert stopped.value.__cause__ is None


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("I would rather talk about the weather.", "no prompt between"),
        ("```\nAnswer with a number.\n```", "lacks the field {question}"),
        ("```\nAnswer {question} for {user}.\n```", "has a field {user}"),
        ("```\nAnswer {question} as {\n```", "is no template"),
        ("```\n\n```", "no prompt between"),
        (None, "no prompt between"),
    ],
)
def test_a_text_that_cannot_be_the_prompt_is_refused_and_counted(
    tmp_path: Path, model: Model, caplog: pytest.LogCaptureFixture, reply: Any, said: str
) -> None:
    model.reflects = lambda asked: reply
    ask, record = asking(Session(tmp_path), model.url)
    assert ask.better(REFLECT, PROMPT, "system", "") is None
    assert ask.refused == record.calls == 1
    assert said in caplog.text


def test_a_reflection_sees_inputs_outputs_and_feedback_and_is_paid_once(tmp_path: Path, model: Model) -> None:
    model.reflects = lambda asked: "```\nAnswer {question} with one number.\n```"
    keys = {"reflection_base_url": f"{model.url}/", "reflection_model": "big", "reflection_temperature": 0.3}
    ask, _ = asking(Session(tmp_path), **keys)
    search = searching(Session(tmp_path), GepaConfig(max_calls=99))
    search._asking = ask
    evaluated = search.evaluate(list(TASKS), {"system": PROMPT})
    dataset = search.make_reflective_dataset({}, evaluated, ["system"])
    assert search.propose_new_texts({"system": PROMPT}, dataset, ["system"]) == {
        "system": "Answer {question} with one number."
    }
    for part in (PROMPT, "fields and add none: {question}", "sum of 3 and 1", "too small", "reward 1"):
        assert part in model.paid[0]
    assert model.temperatures == [0.3]
    again, _ = asking(Session(tmp_path), **keys)
    assert again.better(REFLECT, PROMPT, "system", shown(dataset["system"])) == "Answer {question} with one number."
    assert len(model.paid) == 1


def test_the_reflecting_model_gets_its_own_key(tmp_path: Path, model: Model) -> None:
    own = GepaConfig(
        reflection_base_url=model.url, reflection_model="big", reflection_api_key=Secret("of-the-reflecting-model")
    )
    server = Endpoint(base_url=model.url, model="m", api_key="of-the-server")
    for config, key in ((own, "of-the-reflecting-model"), (GepaConfig(), "of-the-server")):
        model.keys.clear()
        Asking(Session(tmp_path), [server], config, Record(tmp_path)).reply(f"{key} {REFLECT}", PROMPT, "")
        assert model.keys == {f"Bearer {key}"}


@pytest.mark.parametrize("perfect", [1.0, 2.0])
def test_an_answer_with_the_perfect_reward_is_not_reflected_on(tmp_path: Path, model: Model, perfect: float) -> None:
    session: Any = Session(tmp_path)
    session.first_step, session.solved, session.seed = 99, False, 0
    search = searching(session, GepaConfig(max_calls=60, perfect=perfect))
    search._asking = Asking(session, [endpoint_of(model)], search._config, search._record)
    search.search()
    assert bool(model.paid) == (perfect > 1.0)


def test_a_key_that_is_refused_stops_the_run_at_once(tmp_path: Path, model: Model) -> None:
    ask, _ = asking(Session(tmp_path), f"{model.url}/no/such")
    ask._answer = lambda endpoint, path, body: (SimpleNamespace(status_code=401, text="no key"), False)  # type: ignore
    with pytest.raises(Stopping) as stopped:
        ask.better(REFLECT, PROMPT, "system", "")
    assert "refuses the request: 401 no key" in str(stopped.value.__cause__)
    assert "reflection_api_key" in str(stopped.value.__cause__)


def test_an_answer_that_is_no_chat_completion_is_named(
    tmp_path: Path, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    ask, record = asking(Session(tmp_path), model.url)
    answered = httpx.Response(200, text="<html>Welcome</html>")
    ask._answer = lambda endpoint, path, body=None: (answered, False)  # type: ignore[method-assign]
    assert ask.better(REFLECT, PROMPT, "system", "") is None
    assert ask.refused == record.calls == 1
    assert f"{model.url} did not answer with a chat completion: <html>Welcome" in caplog.text


def test_a_torn_line_is_dropped(tmp_path: Path) -> None:
    record = Record(tmp_path)
    record.add("a", calls=1, tokens=5, settled=True, value=1.0)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"key": "b", "calls": 1, "tok')
    again = Record(tmp_path)
    assert again.settled("b") is None
    assert again.settled("a") is not None
    again.add("b", calls=1, tokens=7, settled=True, value=0.0)
    found = Record(tmp_path)
    assert (found.settled("a") or {})["value"] == 1.0
    assert (found.settled("b") or {})["value"] == 0.0
    assert (found.calls, found.tokens, found.largest) == (2, 12, 7)


def test_candidates_are_compared_where_neither_has_left_a_task_out(tmp_path: Path) -> None:
    search = searching(Session(tmp_path), GepaConfig(max_calls=99))

    def accepted(before: list[float], after: list[float]) -> bool:
        scores = SimpleNamespace(subsample_scores_before=before, subsample_scores_after=after)
        return search.should_accept(scores, None)

    assert accepted([0.0, 1.0], [1.0, 1.0])
    assert not accepted([1.0, 0.0], [1.0, 0.0])
    assert accepted([0.0, 1.0], [1.0, EXCLUDED])
    assert not accepted([1.0, EXCLUDED], [1.0, 1.0])
    scores = [{0: 1.0, 1: 0.0, 2: 0.0}, {0: 1.0, 1: EXCLUDED, 2: EXCLUDED}, {0: 1.0, 1: 1.0, 2: EXCLUDED}]
    assert best_of(scores) == ranked(scores)[0] == 2
    assert mean(scores[2]) == 1.0


def test_max_tokens_stops_the_search_and_a_value_too_small_is_refused(tmp_path: Path) -> None:
    session: Any = Session(tmp_path)
    session.first_step, session.solved = 9, False
    state = SimpleNamespace(i=-1, program_candidates=[{}], prog_candidate_val_subscores=[{0: 1.0}])

    def stops(max_tokens: int, i: int = -1) -> bool:
        search = searching(session, GepaConfig(max_calls=99, max_tokens=max_tokens))
        search._asking, search._record = asking(session)
        search._asking._record = search._record
        search.evaluate(list(TASKS), {"system": PROMPT})
        state.i = i
        return search.stop(state)

    with pytest.raises(RunStopped, match=r"max_tokens = 999 can find nothing: .* need at least 1000"):
        stops(999)  # 40 tokens for each of 4 + 3 * (3 + 4) rollouts
    assert not stops(1000)
    assert not stops(600, i=0)  # 160 and 11 more rollouts
    assert stops(599, i=0)


def test_sampling_and_model_are_those_of_the_settings(tmp_path: Path) -> None:
    algorithm = GepaSearch(GepaConfig(temperature=0.7, reply_tokens=64, model="/m", dtype="bfloat16"))
    (endpoint,) = algorithm._sampled([Endpoint(base_url="http://127.0.0.1:9/v1", model="m")])
    assert endpoint.sampling == {"temperature": 0.7, "max_tokens": 64}
    hardware: Any = None
    plan = algorithm._plan(hardware)
    assert (plan.model, plan.dtype) == (Path("/m"), "bfloat16")
    with (
        pytest.raises(ConfigError, match="--prompts"),
        algorithm.serve(
            hardware=hardware,
            checkpoint=tmp_path,
            server=lambda plan: None,  # type: ignore[arg-type, return-value]
        ),
    ):
        pass
    with pytest.raises(ValueError, match="go together"):
        GepaConfig(reflection_base_url="http://127.0.0.1:9/v1")


def test_the_readme_names_every_setting_with_its_default() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", text, re.M))
    for field in (*attrs.fields(GepaConfig), attrs.fields(ApoConfig).beam_width, attrs.fields(ApoConfig).branch_factor):
        default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
        assert rows.pop(field.name).strip('"') == default, field.name
    assert not rows


def test_the_agent_of_the_docs_uses_the_prompts_in_force() -> None:
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    (block,) = [b for b in re.findall(r"^```python\n(.*?)^```", page, re.S | re.M) if "prompts(PROMPTS)" in b]
    space: dict[str, Any] = {}
    exec(block, space)
    (spec,) = space["register_agents"]()
    answer = spec.build(None)
    assert answer({"question": "why"}, None) == "Answer why with one word."
    with prompted({"system": "Briefly: {question}"}):
        assert answer({"question": "why"}, None) == "Briefly: why"
