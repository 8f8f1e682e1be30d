"""The teacher of `opd`: what it must answer, and what is said of one that does not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
from rollouts import rollout, trace_of

from agentrig import Endpoint, Triplet
from agentrig import teacher as module
from agentrig.credit import TeacherConfig, worths_of_calls
from agentrig.errors import ConfigError, RunStopped
from agentrig.secrets import Secret
from agentrig.teacher import TRIAL, Distillation
from agentrig.testing.scripted import LocalServer, QuietHandler, serving

Answer = Callable[[str, dict[str, Any]], tuple[int, Any]]


class Model(LocalServer):
    """A model whose tokens are the bytes of a text, as long as `answer` says nothing else."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(Answering)
        self.answer = answer
        self.keys, self.models = set[str](), set[str]()


class Answering(QuietHandler):
    server: Model

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.keys.add(self.headers["Authorization"])
        self.server.models.add(body["model"])
        self.reply(*self.server.answer(self.path, body))


def scores(ids: list[int], of: Callable[[int], Any] = lambda token: -token / 100) -> Any:
    found = [None, *({str(token): {"logprob": of(token)}} for token in ids[1:])]
    return {"choices": [{"prompt_logprobs": found}]}


def good(path: str, body: dict[str, Any]) -> tuple[int, Any]:
    if path == "/tokenize":
        assert body["add_special_tokens"] is False
        return 200, {"tokens": list(body["prompt"].encode())}
    return 200, scores(body["prompt"])


@contextmanager
def both(answer: Answer, student: Answer = good) -> Iterator[tuple[Distillation, Endpoint]]:
    with serving(Model(answer)) as teacher, serving(Model(student)) as own:
        credit = Distillation(TeacherConfig(base_url=teacher.url, model="t"))
        yield credit, Endpoint(base_url=own.url, model="policy")


def otherwise(path: str, reply: Any, status: int = 200) -> Answer:
    def answer(at: str, body: dict[str, Any]) -> tuple[int, Any]:
        if at != path:
            return good(at, body)
        return status, reply(body["prompt"]) if callable(reply) else reply

    return answer


SCORING = "/v1/completions"
BAD: dict[str, tuple[Answer, str]] = {
    "another tokenizer": (otherwise("/tokenize", {"tokens": [1, 2, 3]}), rf"3 tokens there and {len(TRIAL.encode())}"),
    "tokens in another order": (
        otherwise("/tokenize", lambda text: {"tokens": [*text.encode()[:5], 1, *text.encode()[6:]]}),
        "they differ from token 5 on",
    ),
    "no tokenizer": (otherwise("/tokenize", {}, 404), r"tokens can't be compared: POST http.*/tokenize answers 404"),
    "an empty answer": (otherwise("/tokenize", {"tokens": []}), r"makes 0 of a text of"),
    "no scores": (otherwise(SCORING, {"choices": [{"text": "hi"}]}), "its answer has no prompt_logprobs"),
    "no such route": (otherwise(SCORING, {}, 404), "404"),
    "a probability above 1": (otherwise(SCORING, lambda ids: scores(ids, lambda _: 0.5)), "log-probability 0.5, which"),
    "not a number": (otherwise(SCORING, lambda ids: scores(ids, lambda _: "NaN")), "log-probability nan, which"),
    "always the same": (otherwise(SCORING, lambda ids: scores(ids, lambda _: -2.0)), "-2 for each of"),
    "scores of other tokens": (otherwise(SCORING, lambda ids: scores([t + 1 for t in ids])), "no prompt_logprobs"),
    "one score too few": (otherwise(SCORING, lambda ids: scores(ids[:-1])), "no prompt_logprobs"),
    "no JSON": (otherwise(SCORING, b"<html>"), "does not answer"),
    "a server that fails": (otherwise(SCORING, {"error": "x"}, 500), "does not answer"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_teacher_that_cannot_be_used_is_refused(name: str) -> None:
    answer, why = BAD[name]
    with (
        both(answer) as (credit, student),
        pytest.raises(ConfigError, match=rf"the teacher t at .* can't be used: .*{why}"),
    ):
        credit.ready(student)


def test_a_good_teacher_is_not_refused_and_a_server_that_does_not_tokenize_is_named() -> None:
    with both(good) as (credit, student):
        credit.ready(student)
    silent = otherwise("/tokenize", {}, 404)
    with both(good, silent) as (credit, student), pytest.raises(ConfigError, match=r"tokens can't be compared: POST"):
        credit.ready(student)


def step() -> list[Any]:
    triplets = [
        Triplet(prompt_ids=[1, 2], response_ids=[30, 40], logprobs=[-0.5, -0.25], span_id="c0"),
        Triplet(prompt_ids=[1, 2, 30], response_ids=[50], logprobs=[-1.0], span_id="c1"),
    ]
    made = rollout(0.0, trace=trace_of("a", "b"), triplets=triplets)
    return [made, attrs.evolve(rollout(failure="x"), id="failed")]


def test_it_scores_what_was_sampled_after_its_prompt() -> None:
    with serving(Model(good)) as teacher:
        credit = Distillation(TeacherConfig(base_url=teacher.url, model="t", api_key=Secret("k")))
        found = worths_of_calls(credit, step())
    assert (teacher.keys, teacher.models) == ({"Bearer k"}, {"t"})
    assert credit.heard == {("r", "c0"): (-0.3, -0.4), ("r", "c1"): (-0.5,)}
    assert found == [[pytest.approx([0.2, -0.15]), pytest.approx([0.5])], []]


@pytest.mark.parametrize("most", [1, 4])
def test_as_many_calls_are_scored_at_once_as_concurrency_says(most: int) -> None:
    under_way, seen = list[int](), list[int]()

    def slowly(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        under_way.append(1)
        seen.append(len(under_way))
        time.sleep(0.1)
        under_way.pop()
        return good(path, body)

    with serving(Model(slowly)) as teacher:
        credit = Distillation(TeacherConfig(base_url=teacher.url, model="t", concurrency=most))
        worths_of_calls(credit, [attrs.evolve(made, id=f"r{i}") for i in range(4) for made in step()[:1]])
    assert (max(seen) > 1) == (most > 1)


def test_one_that_is_away_for_a_moment_is_asked_again_and_one_that_stays_away_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WAITS_S", (0.01, 0.01))
    tries = list[int]()

    def twice(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        tries.append(1)
        return good(path, body) if len(tries) > 2 else (503, {"error": "busy"})

    with both(twice) as (credit, _):
        credit = Distillation(TeacherConfig(base_url=credit.teacher.base_url, model="t", concurrency=1))
        assert len(worths_of_calls(credit, step())[0]) == 2
    for answer in (otherwise(SCORING, {}, 503), otherwise(SCORING, lambda ids: scores(ids, lambda _: 1.0))):
        with (
            both(answer) as (credit, _),
            pytest.raises(RunStopped, match=r"can't be used any more: .*resume the run") as stopped,
        ):
            worths_of_calls(credit, step())
        assert stopped.value.cause == "teacher-failed"
