"""Guards stop a run that would learn nothing; each message says what was observed and what to change."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import attrs
import pytest
from rollouts import rollout, trace_of

from agentrig import AdapterSpec, Outcome, Score, Task, Triplet
from agentrig.errors import OutOfMemory, RunStopped
from agentrig.processes.servers import ServerError, ServerOutOfMemory
from agentrig.rollouts import Rollout
from agentrig.run.guards import (
    NO_SIGNAL,
    check_failures,
    check_rewards,
    check_sampling,
    check_triplets,
    dead_server_first,
    refused_sampling,
    unseen_calls,
    warn_of_constraints,
    warn_of_fields,
    warn_of_late,
    warn_of_loss,
    warn_of_overpaid,
    warn_of_sampling,
    wrong_in_form,
)
from agentrig.run.metrics import count_failures, count_nodes, reason_of, warn_of_new_failures
from agentrig.traces import ABORTED, ASKED, LLM_CALL, SERVER, Trace

TRIPLET = Triplet(prompt_ids=(1,), response_ids=(2,), node="write_query")


def test_failures_are_counted_by_kind_and_invalid_scores_among_them() -> None:
    rollouts = [rollout(), rollout(failure="deadline"), rollout(failure="deadline"), rollout(None)]
    assert count_failures(rollouts) == {"deadline": 2, "reward-invalid": 1}


@pytest.mark.parametrize(("failed", "stops"), [(0, False), (2, False), (3, True), (8, True)])
def test_the_failure_limit(failed: int, stops: bool) -> None:
    rollouts = [rollout(failure="llm-error", message="HTTP 503") for _ in range(failed)]
    rollouts += [rollout() for _ in range(8 - failed)]
    if not stops:
        check_failures(rollouts, 0.25, step=4, mode="train")
        return
    with pytest.raises(RunStopped) as caught:
        check_failures(rollouts, 0.25, step=4, mode="train")
    message = str(caught.value)
    assert f"step 4: {failed} of 8 train rollouts failed (limit 25%, run.failure_limit)" in message
    assert f"{failed} x llm-error: for example HTTP 503" in message


PROGRAMS = {
    "raises": ("def f():\n    raise OSError(28, 'No space left')\nf()", " … OSError: [Errno 28] No space left"),
    "raises again": ("try:\n    1 / 0\nexcept Exception:\n    raise KeyError('x')", " … KeyError: 'x'"),
    "two lines": ("raise ValueError('2 fields are missing\\nsee the manual')", " … ValueError: 2 fields are missing"),
    "says": ("import sys\nsys.exit('warming up\\n\\nthere is no key\\n---')", " warming up … there is no key"),
    "one line": ("import sys\nsys.exit('there is no key')", " there is no key"),
}
"""A program, and how the warning of its failure ends."""


@pytest.mark.parametrize(("program", "end"), PROGRAMS.values(), ids=PROGRAMS)
def test_the_first_failure_of_a_kind_is_told_on_one_line_with_what_says_the_cause(
    program: str, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    said = f"AgentFailure: the program ended with exit code 1; the end of its stderr: {done.stderr.strip()}"
    rollouts = [rollout(), rollout(failure="agent-error", message=said)]
    warn_of_new_failures(rollouts, (), step=1, mode="train")
    told = "step 1: 1 of 2 train rollouts failed (agent-error), for example at task t: "
    assert caplog.messages == [f"{told}AgentFailure: the program ended with exit code 1; the end of its stderr:{end}"]
    other = rollout(failure="agent-error", message="no key")
    warn_of_new_failures([*rollouts, other], (), step=2, mode="train")
    assert "2 of 3 train rollouts failed (agent-error, of 2 causes), for example at task t: Agent" in caplog.messages[1]


def test_answers_that_the_reward_scored_as_timeout_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    late = attrs.evolve(rollout(), score=Score.timeout("slow\n"))
    assert not warn_of_late([rollout(), rollout(failure="deadline")], step=1)
    assert warn_of_late([rollout(), rollout(failure="deadline"), late], step=2)
    (said,) = caplog.messages
    assert said.startswith(
        "step 2: the reward scored 1 of 2 answers as `timeout`, for example: slow. They count as wrong"
    )


def test_all_kinds_of_failure_are_explained_the_most_frequent_first() -> None:
    rollouts = [
        rollout(None),
        rollout(failure="deadline", message="too slow"),
        rollout(failure="deadline", message="x"),
    ]
    with pytest.raises(RunStopped) as caught:
        check_failures(rollouts, 0.5, step=1, mode="validation")
    lines = str(caught.value).splitlines()
    assert lines[1].strip() == "2 x deadline, of 2 causes: 1 x too slow; 1 x x"
    assert lines[2].strip() == "1 x reward-invalid: for example the database is corrupt"
    many = [*(f"task {i} is odd" for i in range(9)), *["late"] * 5, *["x", "y", "z"] * 4, "y"]
    rollouts = [rollout(failure="reward-invalid", message=each) for each in many]
    with pytest.raises(RunStopped, match=r"27 x reward-invalid, of 5 causes: 9 x task 0 is odd; 5 x late; 5 x y$"):
        check_failures(rollouts, 0.5, step=1, mode="train")


def test_a_step_with_only_failures_stops_at_any_limit() -> None:
    rollouts = [rollout(failure="deadline")] * 2
    check_failures(rollouts, 1.0, step=1, mode="validation")
    with pytest.raises(RunStopped, match="2 of 2 train rollouts failed"):
        check_failures(rollouts, 1.0, step=1, mode="train")


def test_the_first_rollouts_of_a_batch_stop_it() -> None:
    with pytest.raises(RunStopped, match="step 0: all of the first 32 of 371 held-out rollouts failed"):
        check_failures([rollout(failure="deadline")] * 32, 0.25, step=0, mode="report", expected=371)
    with pytest.raises(RunStopped, match="step 0: 30 of the first 32 of 371 held-out rollouts failed"):
        check_failures(
            [*[rollout(failure="deadline")] * 30, *[rollout()] * 2], 0.25, step=0, mode="report", expected=371
        )


def test_a_step_without_rollouts_has_no_failures() -> None:
    check_failures([], 0.0, step=1, mode="train")


def test_a_failure_without_a_message_is_named_by_its_kind() -> None:
    assert reason_of(rollout(failure="runner-died")) == "runner-died"


def changed(trace: Trace, *attributes: dict[str, Any]) -> Trace:
    """Return a trace whose calls have these attributes too, in turn."""
    more = iter(attributes)
    spans = [
        attrs.evolve(s, attributes={**s.attributes, **next(more)}) if s.name == LLM_CALL else s for s in trace.spans
    ]
    return attrs.evolve(trace, spans=tuple(spans))


NAMED = [{"request": {"model": "planner"}}] * 2 + [{"request": {"model": "coder"}, SERVER: "coder:8000"}]
NOTHING_KEPT: dict[str, tuple[list[Trace], list[str]]] = {
    "no recorded call": (
        [trace_of()],
        ["No call to the model was recorded. Does the agent call endpoint.base_url?", "gateway.use=on sees every"],
    ),
    "no token ids": (
        [trace_of("write", "check", ids=False)],
        ["The calls were recorded (2), but the endpoint returned no token ids", "return_token_ids"],
    ),
    "no token ids of prompts": (
        [changed(trace_of("write"), {"prompt_token_ids": None})],
        ["returned the token ids of replies (`choices[].token_ids`, 1 call), but not those of prompts"],
    ),
    "other servers only": (
        [changed(trace_of("write", ids=False), {SERVER: "judge:8000"})],
        ["All calls (1) went to other servers than the run's: judge:8000 (1)"],
    ),
    "names that match nothing": (
        [trace_of("plan", "plan", "check", "")] * 2,
        ["The adapter agent-match kept none of 8 calls", "plan (4), check (2), (no node) (2)", "adapter.match="],
    ),
    "models that match nothing": (
        [changed(trace_of("plan", "plan", "code"), *NAMED)],
        ["They named these models: planner (2), coder, not the run's (1).", "(adapter.match, adapter.model)"],
    ),
}


MATCHING = AdapterSpec(
    name="agent-match", summary="", config=attrs.make_class("Keys", ["match", "model"]), build=lambda config: None
)
OWN = AdapterSpec(name="own", summary="", build=lambda config: None)


@pytest.mark.parametrize("why", NOTHING_KEPT)
def test_rollouts_without_triplets_are_explained(why: str) -> None:
    traces, said = NOTHING_KEPT[why]
    with pytest.raises(RunStopped) as caught:
        check_triplets([rollout(trace=trace) for trace in traces], step=1, adapter=MATCHING)
    assert [part for part in said if part not in str(caught.value)] == []


def test_an_adapter_without_the_key_match_is_not_told_to_change_it() -> None:
    with pytest.raises(RunStopped, match="The adapter own kept none of 1 call") as caught:
        check_triplets([rollout(trace=trace_of("write"))], step=1, adapter=OWN)
    said = "Your adapter own returned no triplet for any call: mend it, or choose another (adapter.use)."
    assert said in str(caught.value)
    assert "adapter.match" not in str(caught.value)


def test_calls_that_all_failed_are_not_called_unrecorded() -> None:
    trace = trace_of("write_query")
    calls = tuple(attrs.evolve(s, error="HTTP 404: no model gpt-4o") if s.name == LLM_CALL else s for s in trace.spans)
    swallowed = attrs.evolve(rollout(), trace=attrs.evolve(trace, spans=calls))
    said = "All calls to the model failed (2), for example: HTTP 404: no model gpt-4o"
    assert unseen_calls([swallowed, swallowed]) == said
    for error, cause in (("HTTP 404: no", "call-errors"), ("HTTP 400: max_model_len is 512", "overlong-prompts")):
        told = [attrs.evolve(s, error=error) if s.name == LLM_CALL else s for s in calls]
        failed = attrs.evolve(swallowed, trace=attrs.evolve(trace, spans=told))
        with pytest.raises(RunStopped, match=f"All calls to the model failed.*{error}") as stopped:
            check_triplets([failed, failed], step=1, adapter=MATCHING)
        assert stopped.value.cause == cause
    assert unseen_calls([swallowed, rollout(trace=trace)]) == "", "one call counts"
    away = [attrs.evolve(s, attributes={**s.attributes, SERVER: "api.openai.com:443"}) for s in calls]
    other = attrs.evolve(rollout(), trace=attrs.evolve(trace, spans=away))
    assert "They went to api.openai.com:443, not to the run's model: give the agent's client" in unseen_calls([other])
    ended = rollout(failure="agent-error", trace=trace_of())
    assert unseen_calls([ended]) == "", "an agent that ended before it asked"
    assert "No call to the model was recorded" in unseen_calls([rollout(trace=trace_of()), ended])


def test_one_triplet_is_enough_and_failures_do_not_count() -> None:
    check_triplets([rollout(trace=trace_of()), rollout(triplets=[TRIPLET])], step=1, adapter=OWN)
    check_triplets([rollout(failure="deadline", trace=trace_of())], step=1, adapter=OWN)


def test_a_constant_reward() -> None:
    with pytest.raises(RunStopped) as caught:
        check_rewards([rollout(0.0, answer="SELECT 2"), rollout(0.0), rollout(None)], step=1)
    message = str(caught.value)
    assert "step 1: all 2 rollouts got the reward 0, so every advantage is zero" in message
    assert 'for example, the answer to task t was "SELECT 2"' in message
    assert caught.value.cause == NO_SIGNAL


def test_a_constant_reward_after_calls_that_failed_says_why_they_failed() -> None:
    error = "HTTP 400: this model's context is 512 tokens; the prompt has 1070"
    whole = trace_of("write", "check")
    half = attrs.evolve(whole, spans=(*whole.spans[:-1], attrs.evolve(whole.spans[-1], error=error)))
    with pytest.raises(RunStopped) as caught:
        check_rewards([rollout(0.0, trace=half), rollout(0.0, trace=half)], step=1)
    assert f"2 of 4 calls to the model failed, and the agent went on without their answers. For example: {error}" in (
        str(caught.value)
    )
    assert caught.value.cause == "overlong-prompts"
    left = attrs.evolve(half.spans[-1], attributes={ABORTED: True})
    aborted = attrs.evolve(half, spans=(*half.spans[:-1], left))
    with pytest.raises(RunStopped, match="the agent ended 2 of 4 calls to the model before their answers") as caught:
        check_rewards([rollout(0.0, trace=aborted), rollout(0.0, trace=aborted)], step=1)
    assert caught.value.cause == "aborted-calls"
    with pytest.raises(RunStopped) as caught:
        check_rewards([rollout(0.0, trace=half), rollout(0.0, trace=whole)], step=1)
    assert caught.value.cause == NO_SIGNAL


def test_the_examples_of_a_constant_reward_are_unlike_answers() -> None:
    with pytest.raises(RunStopped) as caught:
        check_rewards([rollout(0.5, answer=a) for a in ("a", "a", "a", "b", "c", "d")], step=1)
    shown = [line.split(" -> ")[0] for line in str(caught.value).splitlines() if "for example" in line]
    assert shown == [f'  for example, the answer to task t was "{a}"' for a in "abc"]
    several = [attrs.evolve(r, task=attrs.evolve(r.task, id=r.outcome.answer[0])) for r in map(answered, SEVERAL)]
    with pytest.raises(RunStopped) as caught:
        check_rewards(several, step=1)
    shown = [line.split(" -> ")[0] for line in str(caught.value).splitlines() if "for example" in line]
    assert shown == [f'  for example, the answer to task {a[0]} was "{a}"' for a in ("s1", "t1", "s2")]


SEVERAL = ["s1", "s2", "s3", "t1"]
"""Answers that begin with the name of their task."""


def answered(answer: str) -> Any:
    return rollout(0.5, answer=answer)


def test_an_agent_that_computes_its_own_reward_needs_no_answer() -> None:
    judged = attrs.evolve(rollout(1.0, answer=None), outcome=Outcome(own_reward=1.0))
    with pytest.raises(RunStopped) as caught:
        check_rewards([judged] * 2, step=1)
    assert "for example" not in str(caught.value)


@pytest.mark.parametrize("values", [[0.0, 1.0], [1.0], [], [None, None]])
def test_different_rewards_or_too_few_of_them_do_not_stop(values: list[float | None]) -> None:
    check_rewards([rollout(v) for v in values], step=1)


def asked(*requests: dict[str, Any], trained: int) -> Any:
    """Return a rollout whose calls had these requests, the first of them trained on."""
    trace = changed(trace_of(*("write",) * len(requests)), *({"request": request} for request in requests))
    triplets = [attrs.evolve(TRIPLET, span_id=f"c{i}") for i in range(trained)]
    return rollout(trace=trace, triplets=triplets)


def test_calls_with_other_sampling_settings_than_the_runs(caplog: pytest.LogCaptureFixture) -> None:
    run = {"temperature": 1.0, "top_p": 0.9, "max_tokens": 40}
    same = asked({"temperature": 1, "top_p": 0.9, "max_tokens": 20}, {"temperature": 0, "top_p": 0.9}, trained=1)
    check_sampling([same, same], run, step=3)  # the second call is not trained, and may have fewer tokens
    with pytest.raises(RunStopped, match=r"^step 3: 1 of 3 calls were sampled with temperature 0, the run's is 1\.0: "):
        check_sampling([same, asked({"temperature": 0, "top_p": 0.9}, {"top_p": 0.9}, trained=2)], run, step=3)
    for temperature, said, not_said in ((0, "measurements are greedy anyway", "same ("), (0.5, "same (", "greedy")):
        with pytest.raises(RunStopped, match=re.escape(said)) as stopped:
            check_sampling([asked({"temperature": temperature, "top_p": 0.9}, trained=1)], run, step=3)
        assert not_said not in str(stopped.value)
    greedy = asked({"temperature": 0.0}, trained=1)  # as `dev` sets it
    assert not refused_sampling([greedy], {"temperature": 0.7}, {"temperature": 0})
    own = changed(greedy.trace, {ASKED: {"temperature": 0.2}})
    refused = refused_sampling([attrs.evolve(greedy, trace=own)], {"temperature": 0.7}, {"temperature": 0})
    assert refused.startswith("`agentrig train` would end in its first step: 1 of 1 calls were sampled with temperatu")
    fixed = attrs.evolve(greedy, trace=changed(greedy.trace, {ASKED: {"temperature": 0}}))
    refused = refused_sampling([fixed], {"temperature": 0.7}, {"temperature": 0.0})
    assert "step, unless the agent takes these values from endpoint.sampling: 1 of 1 calls were" in refused
    assert "Training samples, so its temperature can't be 0" in refused
    assert warn_of_sampling([same], run, mode="validation")
    assert caplog.messages == [
        "validation: 1 of 2 calls were sampled with temperature 0, the run's is 1.0: "
        "the agent sends values of its own (docs/how-to/existing-agent.md)"
    ]
    assert not warn_of_sampling([asked({"temperature": 1, "top_p": 0.9}, trained=0)], run, mode="validation")


@pytest.mark.parametrize(
    ("answer", "gold", "told"),
    [
        ({"answer": "42"}, "42", True),
        ('{"answer": 42, "why": "so"}', "42", True),
        ({"total": "42"}, 42, True),
        ("'Paris.'", "paris", True),
        ("42", 42, True),
        ('{"a": 1}', {"a": 1}, True),
        ({"why": "42", "answer": "43"}, "42", False),
        ("42", "42", False),
        ("4.2", "42", False),
        (None, "42", False),
        (".", "", False),
    ],
)
def test_an_answer_that_is_right_but_for_its_form_is_told(answer: Any, gold: Any, told: bool) -> None:
    task = Task(id="t", input={"question": "?"}, private={"gold": gold})
    given = [attrs.evolve(rollout(0.0, answer=each), task=task) for each in ("no", answer)]
    assert ("differs from the right one only in form" in wrong_in_form(given)) == told
    with pytest.raises(RunStopped) as stopped:
        check_rewards(given, step=1)
    assert ("Let the agent return the answer in the form" in str(stopped.value)) == told
    assert not wrong_in_form([*given, rollout(1.0, score=Score.ok(1.0, correct=True))])


def test_a_call_with_several_choices() -> None:
    check_sampling([asked({"n": 1}, {"n": 2}, trained=1), asked({"n": None}, trained=1)], {}, step=1)
    with pytest.raises(RunStopped, match=r"^step 2: 1 of 2 calls that are trained on asked for more than one choice"):
        check_sampling([asked({"n": 1}, {"n": 2}, trained=2)], {}, step=2)


def test_a_missing_field_counts_as_the_servers_default() -> None:
    check_sampling([asked({}, trained=1)], {"temperature": 1.0, "top_p": 1.0}, step=1)
    check_sampling([asked({"temperature": 0.3}, trained=1)], {}, step=1)
    with pytest.raises(RunStopped, match=r"with temperature 1\.0, the run's is 0\.7"):
        check_sampling([asked({}, trained=1)], {"temperature": 0.7}, step=1)


@pytest.mark.parametrize(
    "field",
    [{"top_k": 1}, {"min_p": 0.5}, {"repetition_penalty": 1.3}, {"presence_penalty": 1}, {"logit_bias": {"7": 9}}],
)
def test_other_settings_that_change_the_distribution(field: dict[str, Any]) -> None:
    with pytest.raises(RunStopped, match=rf"1 of 1 calls were sampled with {next(iter(field))} "):
        check_sampling([asked(field, trained=1)], {"temperature": 1.0}, step=1)
    neutral = {"top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": None, "logit_bias": {}}
    check_sampling([asked(neutral, trained=1)], {}, step=1)
    check_sampling([asked({"top_k": 20}, trained=1)], {"top_k": 20}, step=1)


def test_a_seed_that_rollouts_of_a_group_share() -> None:
    run, seeded = {"temperature": 1.0}, [asked({"seed": seed}, trained=1) for seed in (0, 0, 1)]
    with pytest.raises(RunStopped, match="with seed 0: the agent sends a seed of its own, so all rollouts") as stopped:
        check_sampling(seeded, run, step=1)
    assert stopped.value.cause == "other-sampling"
    check_sampling(seeded[1:], run, step=1)
    check_sampling(seeded, {**run, "seed": 0}, step=1)
    check_sampling([attrs.evolve(each, group=str(i)) for i, each in enumerate(seeded)], run, step=1)
    assert "each rollout has another seed: the agent sends" in refused_sampling(seeded[:1], run, {"temperature": 0})
    assert not warn_of_sampling(seeded, run, mode="validation")


def test_constrained_calls_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    free = {"response_format": {"type": "text"}, "tool_choice": "auto", "guided_json": None}
    assert not warn_of_constraints([asked(free, trained=1)], step=1)
    assert not warn_of_constraints([asked({"tool_choice": "required"}, trained=0)], step=1)
    schema = {"response_format": {"type": "json_object"}}
    assert warn_of_constraints([asked(schema, free, trained=2)], step=4)
    (message,) = caplog.messages
    assert message.startswith("step 4: 1 of 2 trained calls set response_format: ")


def test_a_call_that_asks_for_its_storage_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert not warn_of_fields([asked({"store": False}, {}, trained=0)], {})
    assert warn_of_fields([asked({"store": True}, {}, trained=0)], {})
    (message,) = caplog.messages
    assert message.startswith("1 call set store, which has no effect on the run's model")


def test_a_wrong_answer_with_the_full_reward_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    less = rollout(score=Score.ok(0.9, correct=False))
    hole = rollout(score=Score.ok(1.0, correct=False), answer="1991-10-26-26")
    answers = [rollout(score=Score.ok(1.0, correct=True)), less, rollout(None), rollout(failure="deadline")]
    assert not warn_of_overpaid(answers, step=3, reward="dates")
    assert not warn_of_overpaid([hole], step=3, reward="dates"), "what is full is not known"
    assert warn_of_overpaid([*answers, hole], step=3, reward="dates")
    (message,) = caplog.messages
    said = "step 3: the reward dates gave 1 of 3 answers the full reward, 1, although it says correct=False"
    assert message.startswith(f'{said}, for example "1991-10-26-26" to task ')


def test_a_validation_that_is_significantly_worse_than_the_first_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def validated(right: int, of: int = 12) -> list[Rollout]:
        tasks = [Task(id=f"t{i}", input={}) for i in range(of)]
        answers = ["right" if i < right else "wrong" for i in range(of)]
        made = [rollout(score=Score.ok(0.5, correct=a == "right"), answer=a) for a in answers]
        return [attrs.evolve(r, task=t) for r, t in zip(made, tasks, strict=True)]

    assert not warn_of_loss(validated(10), validated(8), step=2, run="runs/a")
    assert not warn_of_loss(validated(2), validated(10), step=2, run="runs/a"), "this is a gain"
    assert warn_of_loss(validated(10), validated(2), step=4, run="runs/a")
    (message,) = caplog.messages
    assert message.startswith(
        "step 4: validation accuracy fell significantly: 0 of 12 tasks went from wrong to right and 8 from right to "
        "wrong. Lower the learning rate (algorithm.lr)"
    )
    assert "\n" not in message
    caplog.clear()
    rescored = [attrs.evolve(r, score=Score.ok(0.5, correct=i < 2)) for i, r in enumerate(validated(10))]
    assert warn_of_loss(validated(10), rescored, step=4, run="runs/a")
    (message,) = caplog.messages
    assert message.startswith("step 4: validation accuracy fell by the reward, not the model: 8 of the 8 tasks that ch")
    assert "algorithm.lr" not in message


def test_calls_are_counted_by_the_node_they_were_made_under() -> None:
    trained = rollout(trace=trace_of("write", "check", ""), triplets=[TRIPLET, TRIPLET])
    assert count_nodes([trained, rollout(trace=trace_of("write"))]) == {
        "seen": {"write": 2, "check": 1, "(no node)": 1},
        "trained": {"write_query": 2},
    }


def test_a_servers_lack_of_memory_keeps_its_cause_when_a_run_stops() -> None:
    class Server:
        def check(self) -> None:
            raise ServerOutOfMemory("the server could not answer: its device ran out of memory")

    server: Any = Server()
    words = r"(?s)ran out of memory.*is lost; step 1 was not saved, so a resume starts over; resume with"
    advice = "step 1 was not saved, so a resume starts over; resume with: agentrig train --resume runs/x"
    with pytest.raises(OutOfMemory, match=words) as caught, dead_server_first(server, lambda: advice):
        raise RunStopped("every rollout failed", cause="failures")
    assert caught.value.cause == "out-of-memory"
    assert isinstance(caught.value, ServerError)
