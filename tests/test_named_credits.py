"""The named credits, against numbers that are computed by hand from the papers' formulas."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from rollouts import rollout, trace_of

from agentrig import CreditSpec, Score, Span, Triplet, credit
from agentrig.credit import differ, grpo, opd, overlong, worths_of_calls
from agentrig.errors import AgentrigError, ConfigError, LookupFailed
from agentrig.plan import resolve
from agentrig.plugins.loading import load
from agentrig.rollouts import Rollout
from agentrig.run.metrics import reward_figures
from agentrig.settings import structure
from agentrig.traces import REWARD

SIXTH = math.sqrt(2 / 15)
"""The standard deviation of 2/3, -1/3, -1/3, 0, 0, whose squares have the sum 2/3."""

GOLDEN: dict[str, list[list[float | None]]] = {
    # mean 1/3, deviation sqrt((4/9 + 1/9 + 1/9) / 2) = sqrt(1/3)
    "grpo": [[2 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), None], [0.0, 0.0]],
    "dr-grpo": [[2 / 3, -1 / 3, -1 / 3, None], [0.0, 0.0]],
    # 1 - (0 + 0) / 2, and 0 - (1 + 0) / 2
    "rloo": [[1.0, -0.5, -0.5, None], [0.0, 0.0]],
    "reinforce++": [[2 / 3 / SIXTH, -1 / 3 / SIXTH, -1 / 3 / SIXTH, None], [0.0, 0.0]],
    "dapo": [[2 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), None], [0.0, 0.0]],
    "best-of-group": [[1.0, None, None, None], [None, None]],
}
"""What each credit gives a group with the rewards 1, 0, 0 and a failure, and one with 0.5 twice."""


def credit_of(name: str, **settings: Any) -> Any:
    """Return a credit of agentrig, built as a run builds it."""
    spec: Any = load().find("credit", name).spec
    return spec.build(structure(spec.config, settings, owner=name, section="credit"))


def group(*values: float | None, calls: Sequence[int] = ()) -> list[Rollout]:
    triplets = [Triplet(prompt_ids=[1], response_ids=[2])]
    counts = calls or [1] * len(values)
    return [rollout(value, triplets=triplets * n) for value, n in zip(values, counts, strict=True)]


@pytest.mark.parametrize("name", GOLDEN)
def test_the_formulas_of_the_papers(name: str) -> None:
    found = list(credit_of(name)([group(1.0, 0.0, 0.0, None), group(0.5, 0.5)]))
    assert [[w is None for w in g] for g in found] == [[w is None for w in g] for g in GOLDEN[name]]
    for worths, wanted in zip(found, GOLDEN[name], strict=True):
        assert [w or 0.0 for w in worths] == pytest.approx([w or 0.0 for w in wanted], abs=1e-5)


def test_rft_imitates_each_correct_answer_once() -> None:
    made = [
        attrs.evolve(one, outcome=attrs.evolve(one.outcome, answer=answer))
        for one, answer in zip(group(1.0, 1.0, 1.0, 0.0, None), "aabbc", strict=True)
    ]
    assert list(credit_of("rft")([made, group(0.0, 0.0)])) == [[1.0, None, 1.0, None, None], [None, None]]


@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "rloo", "reinforce++", "dapo"])
def test_negative_worths_are_scaled(name: str) -> None:
    full, half = (credit_of(name, negative_scale=scale)([group(1.0, 0.0, 0.0)]) for scale in (1.0, 0.5))
    (a,), (b,) = list(full), list(half)
    assert b[0] == a[0]
    assert b[1:] == [w / 2 for w in a[1:]]


def test_a_baseline_can_count_calls() -> None:
    (by_rollout,) = credit_of("dr-grpo")([group(1.0, 0.0, calls=[3, 1])])
    (failed,) = credit_of("dr-grpo")([group(1.0, 0.0, None, calls=[6, 1, 2])])
    assert failed == [0.5, -0.5, None]
    (by_call,) = credit_of("dr-grpo", weighting="call")([group(1.0, 0.0, calls=[3, 1])])
    assert (by_rollout, by_call) == ([0.5, -0.5], [0.25, -0.75])  # means 1/2 and 3/4
    (scaled,) = credit_of("grpo", weighting="call")([group(1.0, 0.0, calls=[3, 1])])
    assert scaled[1] == pytest.approx(-3 * scaled[0])


@pytest.mark.parametrize("name", [*GOLDEN, "turn"])
@pytest.mark.parametrize("values", [[], [None, None], [1.0], [1.0, None], [0.7, 0.7, 0.7]], ids=str)
def test_a_group_without_anything_to_compare_teaches_nothing(name: str, values: list[float | None]) -> None:
    scored = [attrs.evolve(r, score=Score.invalid("x") if r.value is None else scores(r.value)) for r in group(*values)]
    (found,) = credit_of(name)([scored])
    assert len(found) == len(values)
    assert not any(any(w) if isinstance(w, list) else w for w in found)
    assert [w is None for w, v in zip(found, values, strict=True) if v is None] == [True] * values.count(None)


@pytest.mark.parametrize("name", GOLDEN)
def test_no_step_at_all(name: str) -> None:
    assert list(credit_of(name)([])) == []


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("value", [1e13, -1e300, float("nan"), float("inf")])
def test_rewards_that_overflow_are_named(name: str, value: float) -> None:
    @attrs.frozen
    class Made:
        value: float
        triplets: Sequence[Any] = ()

    with pytest.raises(AgentrigError, match=r"has the reward .*Scale the reward"):
        list(credit_of(name)([[Made(value), Made(0.0)]]))


@pytest.mark.parametrize("name", GOLDEN)
def test_the_largest_rewards_have_finite_worths(name: str) -> None:
    (found,) = credit_of(name)([group(1e9, -1e9, 0.0)])
    assert all(w is None or math.isfinite(w) for w in found)


# --- long replies ---

LIMITED: list[tuple[int, dict[str, Any], float]] = [
    # at most 10 tokens, of which the last 4 cost: 0 up to 6, then a quarter each
    (5, {"max_tokens": 10}, 0.0), (6, {"max_tokens": 10}, 0.0), (7, {"max_tokens": 10}, -0.25),
    (8, {"max_completion_tokens": 10}, -0.5), (10, {"max_tokens": 10, "max_completion_tokens": 12}, -1.0),
    (11, {"max_tokens": 10}, -1.0), (99, {}, 0.0), (3, {"max_tokens": 6}, 0.0), (6, {"max_tokens": 6}, -1.0),
]  # fmt: skip
"""Tokens of a reply, its request, and what it costs by equation 13 with a buffer of 4."""


def spoken(value: float, *replies: tuple[int, dict[str, Any]]) -> Rollout:
    """Return a rollout of some calls, each with its number of tokens and its request."""
    trace = trace_of(*["write"] * len(replies))
    requests = {f"c{i}": {"request": request} for i, (_, request) in enumerate(replies)}
    spans = [attrs.evolve(s, attributes={**s.attributes, **requests.get(s.id, {})}) for s in trace.spans]
    triplets = [Triplet(prompt_ids=[1], response_ids=[2] * n, span_id=f"c{i}") for i, (n, _) in enumerate(replies)]
    return rollout(value, trace=attrs.evolve(trace, spans=spans), triplets=triplets)


@pytest.mark.parametrize(("tokens", "request_", "costs"), LIMITED, ids=str)
def test_overlong_replies_are_punished_as_the_paper_says(tokens: int, request_: dict[str, Any], costs: float) -> None:
    group = [spoken(1.0, (tokens, request_)), spoken(0.0, (1, request_)), rollout(failure="x")]
    worths = next(iter(credit_of("dapo", overlong_buffer_len=4)([group])))
    gap = 1.0 + costs  # the deviation of two numbers is their distance over the root of 2
    assert worths == [
        pytest.approx(gap and 1 / math.sqrt(2), abs=1e-5),
        pytest.approx(-(gap and 1 / math.sqrt(2)), abs=1e-5),
        None,
    ]
    equal = [spoken(1.0, (tokens, request_)), spoken(1.0, (1, request_))]
    worths = next(iter(credit_of("dapo", overlong_buffer_len=4)([equal])))
    assert worths[0] == pytest.approx(-(costs and 1 / math.sqrt(2)), abs=1e-5)
    assert next(iter(credit_of("dapo", overlong_buffer_len=0)([equal]))) == [0.0, 0.0]


def test_of_several_replies_the_longest_costs() -> None:
    calls = [(10, {"max_tokens": 10}), (7, {"max_tokens": 10}), (1, {"max_tokens": 10})]
    assert overlong(spoken(1.0, *calls), 4) == -1.0
    assert overlong(spoken(1.0, *calls[1:]), 4) == -0.25


def test_a_group_is_admitted_where_rewards_differ() -> None:
    assert differ(group(1.0, 0.0))
    for values in ([], [1.0], [1.0, None], [0.5, 0.5, None], [None, None]):
        assert not differ(group(*values))
    spec: Any = load().find("credit", "dapo").spec
    assert spec.admit is differ


def test_a_gate_needs_a_limit() -> None:
    with pytest.raises(ValueError, match=r"CreditSpec mine: admit needs a limit; write .*GateConfig"):
        CreditSpec(name="mine", summary="Mine.", build=lambda config: grpo, admit=differ)


# --- tokens ---


def test_a_teacher_judges_each_token() -> None:
    """log p_teacher - log p_student: 0.5 and -1.25 for the first call, 0 for the second."""
    triplets = [
        Triplet(prompt_ids=[1], response_ids=[2, 3], logprobs=[-1.0, -0.25], span_id="c0"),
        Triplet(prompt_ids=[1], response_ids=[4], logprobs=[-2.0], span_id="c1"),
    ]
    made = rollout(0.0, trace=trace_of("write", "write"), triplets=triplets)
    heard = {("r", "c0"): [-0.5, -1.5], ("r", "c1"): [-2.0]}
    groups = [[made, rollout(failure="x")]]
    assert list(opd(groups, heard)) == [[[[0.5, -1.25], [0.0]], None]]
    assert worths_of_calls(lambda _: opd(groups, heard), groups[0]) == [[[0.5, -1.25], [0.0]], []]
    once = [[map(iter, [[0.5, -1.25], [0.0]]), iter(())]]  # iterators can be read only once
    assert worths_of_calls(lambda _: once, groups[0]) == [[[0.5, -1.25], [0.0]], []]
    bare = attrs.evolve(made, triplets=[attrs.evolve(triplets[0], logprobs=None)])
    with pytest.raises(AgentrigError, match=r"call c0 has none: use a server that returns `logprobs`"):
        list(opd([[bare]], heard))


@pytest.mark.parametrize("wrong", [[1.0], [1.0, math.nan], [1.0, None], [1.0, 2.0, 3.0], "ab"], ids=str)
def test_worths_of_tokens_are_checked(wrong: Any) -> None:
    made = rollout(1.0, trace=trace_of("w"), triplets=[Triplet(prompt_ids=[1], response_ids=[2, 3], span_id="c0")])
    with pytest.raises(AgentrigError, match=r"for each call .* a number or a list with one for each token"):
        worths_of_calls(lambda groups: [[[wrong]]], [made])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda groups: None, r"^the credit returned None; yield or return one value for each rollout$"),
        (lambda groups: [[1.0] * (len(group) - 1) for group in groups], r"\(it returned 3 values for 4 rollouts\)$"),
        (lambda groups: [iter([1.0] * 5) for _ in groups], r"\(it returned 5 values for 4 rollouts\)$"),
        (lambda groups: [[1.0] * 4], r"\(it returned 1 list for 2 groups\)$"),
        (lambda groups: [None for _ in groups], r"\(it returned None for a group\)$"),
        (lambda groups: [1.0 for group in groups for _ in group], r"\(it returned 1\.0 for a group\)$"),
    ],
)
def test_a_credit_that_returns_none_or_another_number_of_values_is_told_what(wrong: Any, said: str) -> None:
    made = [attrs.evolve(rollout(1.0), id=f"{name}{i}", group=name) for name in "ab" for i in range(4)]
    with pytest.raises(AgentrigError, match=said):
        worths_of_calls(wrong, made)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["good"], r"\('good' for rollout r0 is no number: it is of type str\)$"),
        ([["good"]], r"\('good' for rollout r0 is no number: it is of type str\)$"),
        ([[[0.5, "bad"]]], r"\('bad' for rollout r0 is no number: it is of type str\)$"),
        ([{"r0": 1.0}], r"\(\{'r0': 1\.0\} for rollout r0 is no number: it is of type dict\)$"),
        ([object], r"\(<class 'object'> for rollout r0 is no number: it is of type type\)$"),
    ],
    ids=str,
)
def test_a_worth_that_is_no_number_is_named(wrong: Any, said: str) -> None:
    made = rollout(1.0, trace=trace_of("w"), triplets=[Triplet(prompt_ids=[1], response_ids=[2, 3], span_id="c0")])
    with pytest.raises(AgentrigError, match=said):
        worths_of_calls(lambda groups: [wrong], [attrs.evolve(made, id="r0")])


# --- sizes, and combinations without meaning ---


def test_a_credit_is_short_and_names_its_paper() -> None:
    """No estimator over 45 lines with its docstring, and no rule over 30 without."""
    for function in (*(vars(credit)[n] for n in ("grpo", "dr_grpo", "rloo", "reinforce_pp", "dapo", "opd")),
                     credit.best_of_group, credit.rft, credit.turn):  # fmt: skip
        lines = inspect.getsource(function).splitlines()
        said = (function.__doc__ or "").splitlines()
        assert len(lines) <= 45, function.__name__
        assert len(lines) - len(said) <= 30, function.__name__
        assert "arXiv:" in function.__doc__ or "Williams" in function.__doc__


TEACHER = ("credit.use=opd", "credit.base_url=http://127.0.0.1:9/v1", "credit.model=t")
GSPO = (
    "algorithm.loss=gspo", "algorithm.clip_low=3e-4", "algorithm.clip_high=4e-4",
    "algorithm.loss_agg_mode=seq-mean-token-mean",
)  # fmt: skip
MEANINGLESS: list[tuple[Sequence[str], str]] = [
    (("credit.use=rft", *GSPO), "rft with the algorithm grpo: it has no meaning with loss = gspo"),
    (("credit.use=best-of-group", *GSPO), "best-of-group .* one ratio for a whole reply: use the loss clip"),
    (("credit.use=turn", *GSPO), "turn .* one ratio for a whole reply"),
    ((*TEACHER, *GSPO), "opd .* one ratio for a whole reply"),
    ((*TEACHER, "algorithm.temperature=0.7"), "opd .* rollouts have temperature 0.7 and top_p 1: set both to 1"),
    ((*TEACHER, "algorithm.top_p=0.9"), "temperature 1 and top_p 0.9"),
    (
        ("credit.use=dapo", "credit.overlong_buffer_len=99", "algorithm.max_tokens=100"),
        "set it to 20, or to 0 for none",
    ),
    (("credit.use=dapo", "algorithm.max_staleness=1"), "dynamic sampling and max_staleness = 1 exclude each other"),
    (("algorithm.use=verl", "credit.use=dapo"), "verl: dynamic sampling is not possible: .*max_num_gen_batches = 1"),
    (
        ("algorithm.use=verl", "credit.use=rft", "algorithm.verl.actor_rollout_ref.actor.policy_loss.loss_mode=gspo"),
        "rft with the algorithm verl: it has no meaning with loss = gspo",
    ),
    (
        ("algorithm.use=verl", *TEACHER, "algorithm.verl.actor_rollout_ref.rollout.temperature=0.5"),
        "rollouts have temperature 0.5",
    ),
]


@pytest.mark.parametrize(("words", "why"), MEANINGLESS, ids=str)
def test_a_combination_without_meaning_is_refused(words: Sequence[str], why: str) -> None:
    plan = resolve("mini", overrides=words)
    with pytest.raises(ConfigError, match=why):
        plan.check_credit()


def test_a_combination_without_meaning_is_named_before_the_limits_of_its_loss() -> None:
    with pytest.raises(ConfigError, match="rft with the algorithm grpo: it has no meaning with loss = gspo"):
        resolve("mini", overrides=["credit.use=rft", "algorithm.loss=gspo"])
    with pytest.raises(ConfigError, match="set clip_low = 3e-4"):
        resolve("mini", overrides=["credit.use=rloo", "algorithm.loss=gspo"])


@pytest.mark.parametrize(
    "words",
    [
        (), GSPO, ("credit.use=rft", "algorithm.loss=cispo"), ("credit.use=dapo", "algorithm.clip_high=0.28"),
        TEACHER, ("credit.use=dapo", "credit.max_num_gen_batches=1", "algorithm.max_staleness=1"),
        ("algorithm.use=verl", "credit.use=dapo", "credit.max_num_gen_batches=1"),
        ("algorithm.use=verl", "credit.use=rloo"),
    ],
    ids=str,
)  # fmt: skip
def test_a_combination_with_a_meaning_is_not(words: Sequence[str]) -> None:
    resolve("mini", overrides=words).check_credit()


# --- turns ---


def scores(value: float, *calls: float | None) -> Score:
    return Score(status="ok", value=value, calls=calls or (value,))


def talk(*calls: float | None, nodes: Sequence[str] = ("write", "write", "write"), trained: str = "write") -> Rollout:
    """Return a rollout with these rewards of its calls; the adapter keeps those of one node."""
    trace = trace_of(*nodes[: len(calls)])
    kept = [i for i, node in enumerate(nodes[: len(calls)]) if node == trained]
    triplets = [Triplet(prompt_ids=[1], response_ids=[2], node=trained, span_id=f"c{i}") for i in kept]
    last = next((call for call in reversed(calls) if call is not None), 0.0)
    return rollout(score=scores(last, *calls), trace=trace, triplets=triplets)


def test_only_the_call_that_was_right_gains() -> None:
    """A rollout of three turns, in which only the second query is right."""
    groups = [[talk(0.0, 1.0, 0.0), talk(0.0, 0.0, 0.0), talk(0.0, 0.0, 0.0)]]
    ((mixed, *others),) = credit_of("turn")(groups)
    assert mixed == pytest.approx([0.0, 2 / 3, 0.0])
    assert others == [pytest.approx([0.0, -1 / 3, 0.0])] * 2
    assert worths_of_calls(credit_of("turn"), groups[0]) == [mixed, *others]


def test_the_return_to_go_is_discounted() -> None:
    """G of (0, 1, 0) with 1/2 is 1/2, 1, 0; of (1, 0, 1) it is 5/4, 1/2, 1."""
    ((first, second),) = [
        list(g) for g in credit_of("turn", discount=0.5)([[talk(0.0, 1.0, 0.0), talk(1.0, 0.0, 1.0)]])
    ]
    assert first == pytest.approx([-0.375, 0.25, -0.5])
    assert second == pytest.approx([0.375, -0.25, 0.5])
    ((first, second),) = [
        list(g)
        for g in credit_of("turn", discount=0.5, negative_scale=0.0)([[talk(0.0, 1.0, 0.0), talk(1.0, 0.0, 1.0)]])
    ]
    assert first == pytest.approx([0.0, 0.25, 0.0])


def test_turns_are_compared_with_the_same_turn_of_the_same_node() -> None:
    """A call of another node is no turn, one that nobody else made has 0, and a reward of None is skipped."""
    nodes = ("write", "check", "write")
    ((first, second),) = credit_of("turn")([[talk(1.0, None, 0.5, nodes=nodes), talk(0.0, 1.0)]])
    assert first == pytest.approx([0.5, -0.25])
    assert second == pytest.approx([-0.5, 0.25])
    ((first, second),) = credit_of("turn")([[talk(1.0, 1.0), talk(0.0)]])
    assert (first, second) == (pytest.approx([0.5, 0.0]), pytest.approx([-0.5]))
    ((first, second),) = credit_of("turn")([[talk(None, 1.0), talk(0.0, 0.0)]])
    assert first == [None, pytest.approx(0.5)]
    assert second == [0.0, pytest.approx(-0.5)]
    ((first, _),) = credit_of("turn", discount=1.0)([[talk(None, 1.0), talk(0.0, 0.0)]])
    assert first == pytest.approx([0.5, 0.5])


def test_a_reward_that_scores_no_call_is_refused() -> None:
    plain = [rollout(1.0, triplets=[Triplet(prompt_ids=[1], response_ids=[2], span_id="c0")]) for _ in range(2)]
    with pytest.raises(
        AgentrigError, match=r"`turn` learns from rewards of calls, and no call of 2 .*--credit dr-grpo"
    ):
        list(credit_of("turn")([plain]))
    ((first, _),) = credit_of("turn")([[plain[0], talk(1.0)]])
    assert first == [None], "one rollout whose calls are not scored is left out"


def gives(*calls: float | None, value: float = 0.0, scored: Sequence[float | None] = ()) -> Rollout:
    """Return a rollout of one node whose agent gave these rewards to its calls, each right after its call."""
    made = talk(*calls)
    spans = [
        Span(id=f"w{i}", parent="root", name="reward", start=i + 1, end=i + 1, attributes={REWARD: reward})
        for i, reward in enumerate(calls)
        if reward is not None
    ]
    trace = attrs.evolve(made.trace, spans=tuple(sorted([*made.trace.spans, *spans], key=lambda s: s.start)))
    return attrs.evolve(made, trace=trace, score=Score(status="ok", value=value, calls=scored))


def test_rewards_that_the_agent_gave_count_where_the_reward_scores_no_calls() -> None:
    """The same three turns, in which only the second query is right: whatever the rollouts' own rewards are."""
    groups = [[gives(0.0, 1.0, 0.0, value=0.5), gives(0.0, 0.0, 0.0), gives(0.0, 0.0, None, value=1.0)]]
    ((mixed, *others),) = credit_of("turn")(groups)
    assert mixed == pytest.approx([0.0, 2 / 3, 0.0])
    assert others[0] == pytest.approx([0.0, -1 / 3, 0.0])
    assert others[1] == [0.0, pytest.approx(-1 / 3), None], "a call without a reward is left out"
    ((first, second),) = credit_of("turn")([[gives(0.0, scored=[1.0]), gives(5.0, scored=[0.0])]])
    assert (first, second) == ([0.5], [-0.5]), "what the run's reward says of the calls counts first"


def test_a_reward_that_no_call_gets_is_none_of_a_call() -> None:
    def early(value: float) -> Rollout:
        made = gives(value)  # before its first call
        spans = [attrs.evolve(span, start=-1.0) if REWARD in span.attributes else span for span in made.trace.spans]
        return attrs.evolve(made, trace=attrs.evolve(made.trace, spans=spans))

    for group in ([talk(None), talk(None)], [early(0.5), early(1.0)]):
        with pytest.raises(AgentrigError, match="no call of 2 rollouts has one"):
            list(credit_of("turn")([group]))
        assert reward_figures(group)["unlike_calls"] == 0


# --- how a run chooses one ---


def chosen(*words: str, **uses: str) -> tuple[str, Any]:
    plan = resolve("mini", overrides=words, uses=uses)
    return plan.components["credit"].spec.name, plan.configs["credit"]


def test_a_run_chooses_by_name() -> None:
    assert chosen()[0] == "grpo"  # the recipe's
    assert chosen(credit="rloo")[0] == "rloo"
    assert chosen("credit.use=reinforce++")[0] == "reinforce++"
    assert chosen("credit.negative_scale=0.25", credit="rloo")[1].negative_scale == 0.25
    assert chosen(credit="turn", algorithm="grpo")[0] == "turn"
    assert chosen(algorithm="verl")[0] == "grpo", "the default of verl, not the recipe's keys"
    assert chosen(algorithm="verl")[1].negative_scale == 1.0
    assert chosen(algorithm="verl", credit="rloo")[0] == "rloo"


def test_settings_of_another_credit_are_told_with_both_values(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level("INFO", logger="agentrig.plugins.selecting")

    def told(*words: str, source: str = "mini", **uses: str) -> list[str]:
        caplog.clear()
        resolve(source, overrides=words, uses=uses)
        return list(caplog.messages)

    assert chosen(credit="rloo")[1].negative_scale == 1.0, "the recipe chose it for its own credit"
    assert told(credit="rloo") == ["credit rloo: negative_scale is 1.0, its default; mini's 0.5 is for credit grpo"]
    assert told("credit.use=rft", credit="rloo") == ["credit rft has no negative_scale; mini's 0.5 is for credit grpo"]
    assert told("credit.negative_scale=0.5", credit="rloo") == []
    assert told(credit="grpo") == []
    assert told(algorithm="verl") == [], "the algorithm chose another credit"
    caplog.clear()
    with pytest.raises(LookupFailed, match="no credit called"):
        chosen(credit="nope")
    assert caplog.messages == []
    file = tmp_path / "own.toml"
    file.write_text(
        'recipe = "mini"\n[credit]\nuse = "opd"\nbase_url = "http://x/v1"\nmodel = "m"\napi_key = "env:SECRET"\n'
    )
    lines = told(source=str(file), credit="rloo")
    assert f"credit rloo has no api_key of its own; {file}'s api_key is for credit opd" in lines
    assert f"credit rloo has no model; {file}'s m is for credit opd" in lines
    assert "SECRET" not in "".join(lines)


def test_what_cannot_be_used_is_refused_in_plain_words() -> None:
    with pytest.raises(LookupFailed, match=r'no credit called "rlo"\. Did you mean "rloo"'):
        chosen(credit="rlo")
    with pytest.raises(ConfigError, match=r'grpo .* has no key "discount"\. It is a key of turn: credit.use=turn'):
        chosen("credit.discount=0.5")
    with pytest.raises(ConfigError, match=r"It is a key of .credit.: write credit.negative_scale"):
        chosen("algorithm.negative_scale=0.5")
    with pytest.raises(ConfigError, match=r"negative_scale"):
        chosen("credit.negative_scale=-1")
    with pytest.raises(ConfigError, match=r"discount"):
        chosen("credit.use=turn", "credit.discount=1.5")
    with pytest.raises(ConfigError, match=r"'weighting' must be in .'rollout', 'call'. .got 'token'"):
        chosen("credit.weighting=token")
    with pytest.raises(ConfigError, match=r"algorithm grpo brings no credit of its own.*dr-grpo"):
        chosen(credit="own")


def test_an_algorithm_that_takes_none_refuses_one(toy_file: str) -> None:
    plan = resolve("toy", files=[toy_file])
    assert plan.components["credit"].spec.name == "own"
    assert plan.as_dict()["credit"] == {"use": "own"}
    with pytest.raises(AgentrigError, match=r"names a default credit in its spec"):
        plan.build("credit")([])
    for words, uses in (((), {"credit": "rloo"}), (("credit.negative_scale=0.5",), {})):
        with pytest.raises(ConfigError, match=r"algorithm toy-\w+ decides itself what calls are worth"):
            resolve("toy", files=[toy_file], overrides=words, uses=uses)


@pytest.mark.parametrize(
    ("calls", "discount", "unlike"),
    [
        ([(1.0, 0.0), (1.0, 0.0)], 0.0, 0.0),  # of two turns: they are not compared
        ([(1.0, 0.0), (1.0, 1.0)], 0.0, 1.0),
        ([(1.0,), (1.0, 1.0)], 0.0, 0.0),  # the second turn is alone
        ([(1.0,), (1.0, 1.0)], 0.5, 1.0),
    ],
)
def test_calls_are_unlike_where_turn_learns_from_them(
    calls: Sequence[Sequence[float]], discount: float, unlike: float
) -> None:
    group = [talk(*of) for of in calls]
    assert any(map(any, next(credit_of("turn", discount=discount)([group])))) == bool(unlike)
    assert reward_figures(group, credit.TurnConfig(discount=discount))["unlike_calls"] == unlike
