"""Credits: what the calls of a step are worth. Each is a small function with a name, which `[credit] use` selects.

Most of them give a rollout's worth to all of its calls, and so to all of their sampled tokens; `turn` tells the calls
apart, and `opd` the tokens. A failed rollout has no reward: it gets None, and no baseline counts it.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import attrs

from agentrig.adapters import Triplet
from agentrig.demonstrations import LEARN
from agentrig.endpoints import LIMIT, Endpoint
from agentrig.errors import AgentrigError, place_of
from agentrig.processes.put_back import put_back
from agentrig.rewards import given_to_calls, rounded
from agentrig.rollouts import Rollout
from agentrig.secrets import Secret, http_address
from agentrig.settings import setting
from agentrig.text import amount, words_of
from agentrig.traces import mapping

EPSILON = 1e-6
"""Added to a standard deviation, as verl does."""

LARGEST = 1e12
"""Largest reward, without its sign, that is learned from: the squares of such numbers still fit into fp32."""

CallWorth = float | None | Sequence[float]
"""What a call is worth: one number for all of its sampled tokens, or one for each. None leaves the call out."""

Worth = float | None | Sequence[CallWorth]
"""What the calls of a rollout are worth: one number for all of them, or a `CallWorth` for each of its triplets.

A positive number makes what was sampled more likely, a negative one less likely. None leaves the rollout out.
"""

Credit = Callable[[Sequence[Sequence[Rollout]]], Iterable[Sequence[Worth]]]
"""What `CreditSpec.build` returns: `credit(groups)` gives, for each group of a step, the worth of each of its rollouts.

A group is all rollouts of a task, failures included (their `value` is None).
"""


class Teacher(Protocol):
    """What scores the tokens of a step for a credit: `CreditSpec.build` returns a credit that has these two as well.

    Attributes:
        heard: Of the latest step: by rollout and call (its span), the teacher's log-probability of each response token.
    """

    heard: Mapping[tuple[str, str], Sequence[float]]

    def ready(self, student: Endpoint) -> None:
        """Check the teacher, before the first rollout.

        Args:
            student: A server of the model that is trained, which can score tokens and tokenize.

        Raises:
            ConfigError: It does not answer, has other tokens, or its answers are no log-probabilities.
        """


@attrs.frozen(kw_only=True)
class RelativeConfig:
    """Settings of a credit that compares a rollout with the others of its group."""

    negative_scale: float = setting(1.0, help="negative worths are multiplied by this", ge=0)


@attrs.frozen(kw_only=True)
class GroupConfig(RelativeConfig):
    """Settings of `grpo` and `dr-grpo`."""

    weighting: str = setting(
        "rollout",
        help="rollout: each rollout counts once in its group's baseline; call: each trained call does",
        choices=("rollout", "call"),
    )


@attrs.frozen(kw_only=True, slots=False)  # a class can't have two bases with slots
class GateConfig:
    """The key of each credit with a gate (`CreditSpec.admit`)."""

    max_num_gen_batches: int = setting(
        4,
        help="a step samples other tasks in the place of groups that are not admitted, in at most so many batches; "
        "1: every group is learned from",
        ge=1,
        le=100,
    )


@attrs.frozen(kw_only=True)
class DapoConfig(RelativeConfig, GateConfig):
    """Settings of `dapo`."""

    overlong_buffer_len: int = setting(
        64,
        help="so many of the last tokens that a reply may have lower its rollout's reward, by up to 1; 0 for none",
        ge=0,
    )


@attrs.frozen(kw_only=True)
class TeacherConfig:
    """Settings of `opd`."""

    base_url: str = setting(help="the teacher's address, up to and including /v1", validator=http_address)
    model: str = setting(help="the teacher's name there")
    api_key: Secret | None = setting(None, secret=True, help="its key")
    concurrency: int = setting(8, help="requests to it at the same time", ge=1, le=1024)


@attrs.frozen(kw_only=True)
class ImitationConfig:
    """Settings of `best-of-group` and `rft`: none."""


@attrs.frozen(kw_only=True)
class TurnConfig(RelativeConfig):
    """Settings of `turn`."""

    discount: float = setting(
        0.0,
        help="a call gets so much of the next call's reward too, its square of the one after, and so on",
        ge=0,
        le=1,
    )


def grpo(groups: Sequence[Sequence[Rollout]], config: GroupConfig) -> Iterator[list[Worth]]:
    """Yield GRPO's credit (DeepSeekMath, arXiv:2402.03300, section 4.1.2): (v - mean) / std of the group's rewards.

    The formula, with one reward for each rollout (outcome supervision), is in `advantages`.
    """
    return _by_group(groups, config, normalize=True)


def dr_grpo(groups: Sequence[Sequence[Rollout]], config: GroupConfig) -> Iterator[list[Worth]]:
    """Yield Dr. GRPO's credit (arXiv:2503.20783): v - mean of the group's rewards.

    Without GRPO's division, tasks that are almost always or almost never solved are not favoured. The paper's other
    change, a loss that is not divided by the length of each reply, is `algorithm.loss_agg_mode`.
    """
    return _by_group(groups, config, normalize=False)


def rloo(groups: Sequence[Sequence[Rollout]], config: RelativeConfig) -> Iterator[list[Worth]]:
    """Yield the credit of REINFORCE leave-one-out (RLOO, arXiv:2402.14740), of k scored rollouts:

        A_i = v_i - 1 / (k - 1) sum_{j != i} v_j

    The paper's KL penalty in the reward is not part of it: use `algorithm.kl_loss_coef`. A rollout that is alone, and
    a group of equal rewards, have 0.
    """  # noqa: D415
    for group in groups:
        values = [rollout.value for rollout in group]
        k = sum(value is not None for value in values)
        over_mean = advantages(values, normalize=False)  # v - mean is (k - 1) / k of the formula
        yield _worths(values, [a * k / (k - 1) if a else 0.0 for a in over_mean], config)


def reinforce_pp(groups: Sequence[Sequence[Rollout]], config: RelativeConfig) -> Iterator[list[Worth]]:
    """Yield the credit of REINFORCE++ with baseline (arXiv:2501.03262), the paper's variant for groups:

        B_i = v_i - mean of its group        A_i = B_i / (std + 1e-6)        std^2 = 1 / n sum_j B_j^2

    over the n scored rollouts of the whole step. The mean of all B is 0, so it is not subtracted again. The paper
    normalises over the tokens of a batch. Here each rollout counts once, so that long ones, and those with many calls,
    don't weigh more.
    """  # noqa: D415
    values = [[rollout.value for rollout in group] for group in groups]
    found = [advantages(group, normalize=False) for group in values]
    scored = sum(value is not None for group in values for value in group)
    std = math.sqrt(math.fsum(b * b for group in found for b in group) / max(scored, 1))
    for group, over_mean in zip(values, found, strict=True):
        yield _worths(group, [b / (std + EPSILON) for b in over_mean], config)


def dapo(groups: Sequence[Sequence[Rollout]], config: DapoConfig) -> Iterator[list[Worth]]:
    """Yield DAPO's credit (arXiv:2503.14476): that of `grpo`, on rewards with the soft overlong punishment (eq. 13).

    A reply y may have L tokens, and C is `overlong_buffer_len`, or L / 2 where that is less:

        R(y) = 0 if |y| <= L - C        ((L - C) - |y|) / C if L - C < |y| <= L        -1 if L < |y|

    L is the call's own limit, the `max_tokens` of its request. A rollout's reward is v plus the lowest R of its trained
    calls. The paper's dynamic sampling is the gate `differ`; its clip and its loss are `algorithm.clip_high` and
    `algorithm.loss_agg_mode`.
    """
    for group in groups:
        shaped = [None if r.value is None else r.value + overlong(r, config.overlong_buffer_len) for r in group]
        yield _worths(shaped, advantages(shaped), config)


def overlong(rollout: Rollout, buffer: int) -> float:
    """Return the punishment of a rollout's longest replies, see `dapo`: 0 for none, at least -1."""
    if not (buffer and rollout.triplets):
        return 0.0
    requests = {call.id: mapping(call.attributes.get("request")) for call in rollout.trace.llm_calls()}
    lowest = 0.0
    for triplet in rollout.triplets:
        request = requests.get(triplet.span_id, {})
        limits = [request[name] for name in LIMIT if isinstance(request.get(name), int)]
        if limits:
            last = min(buffer, min(limits) / 2)
            lowest = min(lowest, max((min(limits) - last - len(triplet.response_ids)) / last, -1.0))
    return lowest


def differ(group: Sequence[Rollout]) -> bool:
    """Return whether two rollouts of a group have different rewards: DAPO's dynamic sampling (eq. 11) keeps no other.

    The paper asks that some rollouts are correct and some are not; with rewards of 0 and 1 that is the same.
    """
    return len({rollout.value for rollout in group if rollout.value is not None}) > 1


def opd(groups: Sequence[Sequence[Rollout]], heard: Mapping[tuple[str, str], Sequence[float]]) -> Iterator[list[Worth]]:
    """Yield the credit of on-policy distillation (GKD, arXiv:2306.13649; MiniLLM, arXiv:2306.08543), token by token:

        A_t = log p_teacher(y_t | x, y_<t) - log p_student(y_t | x, y_<t)

    Its mean over what the student samples is minus the reverse KL divergence of student and teacher, so a policy
    gradient with A lowers it. Rewards do not count.

    Args:
        heard: By rollout and call, what the teacher says of the call's response tokens.

    Raises:
        AgentrigError: The student's log-probabilities were not recorded.
    """  # noqa: D415
    for rollouts in groups:
        if lacking := [t.span_id for r in rollouts for t in r.triplets if t.logprobs is None]:
            raise AgentrigError(
                "the credit `opd` needs the log-probabilities of what was sampled, and call "
                f"{lacking[0]} has none: use a server that returns `logprobs`"
            )
        yield [
            None
            if r.value is None
            else [[a - b for a, b in zip(heard[r.id, t.span_id], t.logprobs or (), strict=True)] for t in r.triplets]
            for r in rollouts
        ]


def best_of_group(groups: Sequence[Sequence[Rollout]], config: ImitationConfig) -> Iterator[list[Worth]]:
    """Yield 1 for the rollouts with the best reward of their group, and None for all others, which are left out.

    It imitates the best of n samples, as RAFT does (arXiv:2304.06767). A group of equal rewards is left out: nothing
    says that it is good.
    """
    for group in groups:
        values = [rollout.value for rollout in group]
        better = any(advantages(values, normalize=False))
        best = max((value for value in values if value is not None), default=None)
        yield [1.0 if better and value == best else None for value in values]


def rft(groups: Sequence[Sequence[Rollout]], config: ImitationConfig) -> Iterator[list[Worth]]:
    """Yield 1 for the first of the correct rollouts of a group that have one answer, and None for all others.

    It is rejection sampling fine-tuning (RFT, arXiv:2308.01825): what the reward accepts is imitated, each different
    answer once. Unlike `best-of-group` it learns from a task that is always solved, and never from one that is not.
    """
    for group in groups:
        seen = set[str]()
        worths: list[Worth] = []
        for rollout in group:
            answer = json.dumps(rollout.outcome.answer)
            accepted = bool(rollout.correct) and answer not in seen
            worths.append(1.0 if accepted else None)
            seen |= {answer} if accepted else set()
        yield worths


def imitate(groups: Sequence[Sequence[Rollout]]) -> Iterator[list[Worth]]:
    """Yield 1 for each call of a demonstration that the reward accepts, and None for all others, which are left out.

    So is a call whose reply is not to be learned (`agentrig.demonstrations.Reply.learn`). It is the credit of a run
    that learns from demonstrations: no setting selects it.
    """
    for group in groups:
        yield [[1.0 if r.correct and _learned(r, t) else None for t in r.triplets] for r in group]


def _learned(rollout: Rollout, triplet: Triplet) -> bool:
    call = next(call for call in rollout.trace.llm_calls() if call.id == triplet.span_id)
    return mapping(call.attributes.get("response")).get(LEARN) is not False


def turn(groups: Sequence[Sequence[Rollout]], config: TurnConfig) -> Iterator[list[Worth]]:
    """Yield a worth for each call, from the rewards r of a rollout's calls:

        G_t = r_t + discount G_(t+1)        A_t = G_t - mean of G_t in the group

    G is the return-to-go of REINFORCE (Williams, 1992). Its mean is over the calls of the same node and turn in the
    rollouts of the group: a call is the t-th that its rollout trains in that node. A call alone in its turn has 0.
    Calls without a reward are skipped in the sum; without any reward from there on, a call is left out.

    What the run's reward says of a rollout's calls (`Score.calls`) counts; where it says nothing, what the agent itself
    gave them (`agentrig.reward`).

    Raises:
        AgentrigError: No call of the step has a reward.
    """  # noqa: D415
    if unscored := unscored_calls([rollout for group in groups for rollout in group]):
        raise AgentrigError(unscored)
    for group in groups:
        returns = [returns_of_calls(rollout, config.discount) for rollout in group]
        turns = returns_by_turn(group, config.discount)

        def over_mean(place: tuple[str, int], value: float | None, among: Any = turns) -> float | None:
            if value is None or len(set(map(rounded, among[place]))) == 1:  # a sum of rewards rounds
                return None if value is None else 0.0
            worth = value - math.fsum(among[place]) / len(among[place])
            return worth * config.negative_scale if worth < 0 else worth

        yield [None if r.value is None else [over_mean(*p) for p in ps] for r, ps in zip(group, returns, strict=True)]


def unscored_calls(rollouts: Iterable[Rollout]) -> str:
    """Return that no call of some rollouts has a reward for `turn`, and what to do; '' if one has, or none is trained.

    A run asks it of the held-out rollouts before training too, and `agentrig doctor` of a demonstrated one.
    """
    trained = [r for r in rollouts if r.value is not None and r.triplets]
    if not trained or any(reward is not None for r in trained for reward in rewards_of_calls(r)):
        return ""
    return (
        f"the credit `turn` learns from rewards of calls, and no call of {amount(len(trained), 'rollout')} has one: "
        "let your reward return Score.ok(..., calls=[...]) (docs/rewards.md), or the agent call `agentrig.reward`, or "
        "use another credit, for example --credit dr-grpo"
    )


def rewards_of_calls(rollout: Rollout) -> Sequence[float | None]:
    """Return what `turn` learns from: the reward of each of `trace.llm_calls()`, None for a call without one."""
    return (rollout.score.calls if rollout.score is not None else ()) or given_to_calls(rollout.trace)


def returns_of_calls(rollout: Rollout, discount: float) -> list[tuple[tuple[str, int], float | None]]:
    """Return the place (node and turn) and the return-to-go of each trained call of a rollout; see `turn`."""
    calls = rollout.trace.llm_calls()
    rewards = rewards_of_calls(rollout)
    later, found = None, dict[str, float | None]()
    for call, reward in zip(reversed(calls), reversed(rewards), strict=True):
        if reward is not None:
            later = reward + discount * (later or 0.0)
            found[call.id] = later
        else:
            found[call.id] = later if discount else None
    seen, returns = Counter[str](), []
    nodes = {call.id: next(iter(rollout.trace.nodes(call)), "") for call in calls}
    for triplet in rollout.triplets:
        node = nodes.get(triplet.span_id, "")
        returns.append(((node, seen[node]), found.get(triplet.span_id)))
        seen[node] += 1
    return returns


def returns_by_turn(group: Sequence[Rollout], discount: float) -> dict[tuple[str, int], list[float]]:
    """Return what `turn` compares in a group: the returns of its trained calls, by node and turn."""
    turns: dict[tuple[str, int], list[float]] = defaultdict(list)
    for place, value in (pair for rollout in group for pair in returns_of_calls(rollout, discount)):
        if value is not None:
            turns[place].append(value)
    return turns


def turns_compared(group: Sequence[Rollout], credit: Any) -> list[list[float]] | None:
    """Return the returns of each turn of a group if `credit`, a credit's settings, is that of `turn`; else None."""
    return list(returns_by_turn(group, credit.discount).values()) if isinstance(credit, TurnConfig) else None


def worths_of_calls(credit: Credit, rollouts: Sequence[Rollout]) -> list[list[CallWorth]]:
    """Return what each trained call of a step's rollouts is worth: for each rollout, a `CallWorth` for each triplet.

    Raises:
        AgentrigError: The credit raises, or does not give one worth for each rollout or call.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for place, rollout in enumerate(rollouts):
        groups[rollout.group].append(place)
    try:
        with put_back("the credit"):
            returned: Any = credit([[rollouts[i] for i in places] for places in groups.values()])
            found = None if returned is None else list(returned)
    except AgentrigError:
        raise
    except Exception as error:
        raise AgentrigError(f"the credit failed: {words_of(error)}{place_of(error)}") from error
    if found is None:
        raise AgentrigError("the credit returned None; yield or return one value for each rollout")
    worths: list[list[CallWorth]] = [[] for _ in rollouts]
    try:
        for place, whole in _by_rollout([*groups.values()], found):
            triplets = rollouts[place].triplets
            who = f"rollout {rollouts[place].id}"
            _check_number(whole, who)
            given = list(whole) if isinstance(whole, Iterable) else [whole] * len(triplets)
            for worth in given:
                _check_number(worth, who)
            # Each is read once: it may be an iterator, or of a class that gives others each time.
            calls: list[CallWorth] = [list(worth) if isinstance(worth, Iterable) else worth for worth in given]
            if len(calls) != len(triplets):
                raise ValueError(f"{len(calls)} for the {len(triplets)} calls of {rollouts[place].id}")
            for worth, triplet in zip(calls, triplets, strict=True):
                for of_token in worth if isinstance(worth, list) else ():
                    _check_number(of_token, who)
                tokens = worth if isinstance(worth, list) else [0.0 if worth is None else worth]
                if isinstance(worth, list) and len(tokens) != len(triplet.response_ids):
                    raise ValueError(f"{len(tokens)} for the {len(triplet.response_ids)} tokens of {triplet.span_id}")
                if not all(map(math.isfinite, tokens)):
                    raise ValueError(f"{worth} for {who}")
            worths[place] = calls
    except (TypeError, ValueError) as error:
        raise AgentrigError(
            "the credit has to return, for each group, a list with a worth for each rollout: a finite number for all "
            "its calls, for each call (each triplet) a number or a list with one for each token, or None to leave it "
            f"out ({error})"
        ) from error
    return worths


def _check_number(worth: Any, who: str) -> None:
    """Raise `TypeError` if a worth is text or a mapping, which iterate over characters or keys, or no number at all."""
    text_like = isinstance(worth, str | bytes | Mapping)
    if text_like or not (worth is None or isinstance(worth, Iterable) or hasattr(worth, "__float__")):
        raise TypeError(f"{worth!r:.80} for {who} is no number: it is of type {type(worth).__name__}")


def _by_rollout(groups: Sequence[Sequence[int]], found: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Yield the place and the worth of each rollout, from what a credit returned for each group.

    Raises:
        ValueError: There are too few or too many groups, or values in a group.
    """
    for of_group in found:
        if not isinstance(of_group, Iterable):
            raise ValueError(f"it returned {of_group} for a group")
    if len(found) != len(groups):
        raise ValueError(f"it returned {amount(len(found), 'list')} for {amount(len(groups), 'group')}")
    for places, of_group in zip(groups, found, strict=True):
        values = list(of_group)
        if len(values) != len(places):
            raise ValueError(f"it returned {amount(len(values), 'value')} for {amount(len(places), 'rollout')}")
        yield from zip(places, values, strict=True)


def _by_group(groups: Sequence[Sequence[Rollout]], config: GroupConfig, *, normalize: bool) -> Iterator[list[Worth]]:
    for group in groups:
        values, calls = [r.value for r in group], [len(r.triplets) for r in group]
        yield _worths(values, advantages(values, calls, weighting=config.weighting, normalize=normalize), config)


def _worths(values: Sequence[float | None], found: Sequence[float], config: RelativeConfig) -> list[Worth]:
    """Return the worth of each rollout of a group: None for a failure, negative ones scaled."""
    scaled = [a * config.negative_scale if a < 0 else a for a in found]
    return [None if value is None else worth for value, worth in zip(values, scaled, strict=True)]


def advantages(
    values: Sequence[float | None],
    calls: Sequence[int] | None = None,
    *,
    weighting: str = "rollout",
    normalize: bool = True,
) -> list[float]:
    """Return the advantage of each rollout of one group.

    A rollout i with value v_i and weight w_i (1, or its number of calls) has the advantage

        A_i = (v_i - mean) / (std + 1e-6)    mean = sum_j w_j v_j / sum_j w_j
                                             std^2 = sum_j w_j (v_j - mean)^2 / (sum_j w_j - 1)

    which is GRPO's (DeepSeekMath, arXiv:2402.03300, section 4.1.2). Without `normalize` it is v_i - mean, as in
    Dr. GRPO (arXiv:2503.20783).

    Args:
        values: The rollouts' values; None for a failure, which is left out of the baseline.
        calls: How many trained calls (or sequences) each rollout has; needed by `call` only.
        weighting: `rollout`: each rollout counts once in mean and deviation. `call`: each trained
            call counts once, so that a rollout with more calls pulls the baseline towards itself
            (as in algorithms that see only calls).
        normalize: Divide by the standard deviation (unbiased); else only the mean is subtracted.

    Returns:
        One number a rollout. 0.0 for failures, in a zero-variance group, and for a rollout
        that is alone in its group: there is nothing to compare it with.

    Raises:
        AgentrigError: A reward is larger than `LARGEST`, or is not a number.
        ValueError: `values` and `calls` differ in length.
    """
    calls = [1] * len(values) if calls is None else calls
    if len(values) != len(calls):
        raise ValueError(f"{len(values)} values, but {len(calls)} counts of calls")
    for value in values:
        if value is not None and not abs(value) <= LARGEST:
            raise AgentrigError(
                f"a rollout of this step has the reward {value:g}; the loss is computed in fp32, where rewards beyond "
                f"{LARGEST:g} overflow. Scale the reward: most lie between 0 and 1"
            )
    valid = [(v, 1 if weighting == "rollout" else c) for v, c in zip(values, calls, strict=True) if v is not None]
    total = sum(w for _, w in valid)
    if len({rounded(v) for v, w in valid if w > 0}) < 2:
        return [0.0] * len(values)  # exactly: rounding in the mean must not make a gradient
    mean = math.fsum(v * w for v, w in valid) / total
    squares = math.fsum(w * (v - mean) ** 2 for v, w in valid)
    scale = math.sqrt(squares / (total - 1)) + EPSILON if normalize else 1.0
    return [0.0 if v is None else (v - mean) / scale for v in values]
