"""Links `score` and `advantages`: from the recorded answers to what each call is trained with."""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from agentrig.audit.record import TASKS, Call, Row
from agentrig.audit.step import Step
from agentrig.audit.verdicts import GIVEN, TWO_SCORES, CannotLook, Verdict, fault, faults, ok, some
from agentrig.text import amount
from agentrig.traces import LLM_CALL, REWARD, SERVER, mapping

SCORED_N = 16
"""So many answers of a step are scored again, however long it takes."""

INVALID_N = 4
"""So many `invalid` scores of a step are scored again."""

ANSWER = 8
"""Characters of the shortest answer that is looked for in replies."""

LONG = 8
"""Words of a reply that is no label, and no other text which several tasks have as their answer."""

MOVED = 4
"""So many answers that another rollout said are no coincidence."""

UNHEARD, UNHEARD_N = 0.9, 8
"""The share of rollouts, and the least number, whose later replies do not reach the answer, for that to be named."""

EXCHANGED = (
    "state that rollouts of the agent share (agent.use: a global, an attribute), or answers or calls that were mixed up"
)

CAUSES = "rewards that went to other rollouts, a reward that depends on more than task and answer"

EPSILON = 1e-6
"""What the credits add to a deviation, as the docstring of `agentrig.credit.advantages` says."""

LARGEST = 1e9
"""The largest reward that an agent may give, without its sign, as the docstring of `agentrig.reward` says."""

SAID = attrgetter("status", "value", "correct", "calls")
"""What two scores of an answer must have in common."""

Key = tuple[str, str]
"""A call: its rollout and its span."""

Worth = float | Sequence[float] | None
"""What a call is worth, or each of its tokens; None if it is left out."""

Calls = dict[Key, tuple[str, Worth]]
"""By call, its node and its advantage."""


def score(step: Step) -> Iterator[Verdict]:
    """Score recorded answers again, with a fresh reward and the task as the task set, loaded again, has it.

    Rewards are equal or not: the contract of a reward is that equal answers get equal scores. One that gives two
    scores to one answer here can't be looked at, nor can an answer that can't be scored any more.
    """
    values, told = [r.value for r in step.rows if r.value is not None], step.line.get("reward")
    if values and step.line.get("rollouts") == len(step.rows) and isinstance(told, int | float):
        mean = math.fsum(values) / len(values)
        if not abs(told - mean) <= 1e-9 * max(1.0, abs(mean)):
            detail = f"metrics.jsonl has the reward {told}, and the mean of the step's {len(values)} rewards is {mean}"
            yield fault(detail, "a line of metrics.jsonl or a file of rollouts that was changed since")
    yield from _exchanged(step.rows)
    looked, wrong = scored_again(step, step.rows, "train")
    yield from faults(f"{len(wrong)} of {looked} scores are others", wrong, CAUSES)
    if looked:
        apart, of = _calls_apart(step.rows)
        what = f"{len(apart)} of {of} calls whose reply is an answer to their task have another score than it"
        few = apart if 2 * len(apart) < of else ()  # most: the reward takes `Score.calls` for something else
        yield from faults(what, few, "`Score.calls`: values of other calls of the rollout, or of others")
        of_calls = f"`Score.calls` has other scores than the same answers: {some(apart)}" if apart else ""
        notes = "; ".join(note for note in (_valid_now(step), _unheard(step), of_calls) if note)
        yield ok(f"{looked} of {len(step.rows)} scores", note=notes)
    else:
        scored = [row.task_id for row in step.rows if row.failure is None and row.status == "ok"]
        if not scored:
            raise CannotLook("no rollout was scored")
        if {task.id for task in step.sources.splits["train"]}.isdisjoint(scored):
            if step.record.demonstrations not in ("", TASKS):
                raise CannotLook(f"{GIVEN}their scores came with them")
            raise CannotLook(
                f"the tasks of the {len(scored)} scored rollouts are not in the training split of the task set, loaded "
                "again"
            )
        raise CannotLook(f"the reward gave none of {len(scored)} scored answers a score at a second scoring")


def _exchanged(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Check that answers are those of the rollouts whose calls are recorded with them.

    An agent may change what the model says. Where most answers are in the replies of their rollouts as they are, some
    of a group that are only in each other's were exchanged: an agent that changes texts gives none of them to another.
    """
    texts = {row.id: text for row in rows if len(text := longest(row.answer)) >= ANSWER}
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.id in texts:
            groups[row.group].append(row)
    own, wrong = 0, list[str]()
    for members in groups.values():
        lost = [row for row in members if texts[row.id] not in row.said]
        own += len(members) - len(lost)
        here = [(a.id, b.id) for a in lost for b in lost if texts[a.id] in b.said]
        if lost and {a for a, _ in here} == {row.id for row in lost} == {b for _, b in here}:
            wrong += [f"rollouts {a} and {b}" for a, b in here]
    what = "answers are only in the replies of another rollout of their group"
    yield from faults(what, wrong if own > len(texts) / 2 else (), EXCHANGED)
    yield from moved(rows)


def moved(rows: Sequence[Row], before: Sequence[Row] = ()) -> Iterator[Verdict]:
    """Check that answers are not those of other rollouts of the same task, also of `before`, an earlier measurement.

    An answer is another rollout's if that one said it as it is, the own replies lack some of its words, and (of
    rollouts of one file) no rollout that said it answers with it: an agent that puts replies into one form keeps those
    that have the form already. If none of its task said it, see `_of_another_task`. A text that is answered to several
    tasks is a default, and stands for nothing. It takes `MOVED` such texts, and as many as there are other answers that
    are in no reply of their rollout: those show how often the agent takes its answers from elsewhere.
    """
    texts = {row.id: text for row in [*rows, *before] if len(text := longest(row.answer)) >= ANSWER}
    tasks: dict[str, list[Row]] = defaultdict(list)
    answered: dict[str, set[str]] = defaultdict(set)
    said: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        for call in row.calls:
            said[call.answered.strip()].append(row)
        if row.id in texts and row.calls:
            tasks[row.task_id].append(row)
            answered[texts[row.id]].add(row.task_id)
    lost, found = 0, dict[str, str]()
    for row in (row for members in tasks.values() for row in members):
        text, others = texts[row.id], [other for other in tasks[row.task_id] if other is not row]
        if text in row.said or not Counter(_words(text)) - Counter(_words(row.said)):
            continue
        lost += 1
        owners = [other for other in others if text in other.said]
        if any(texts[other.id] == text for other in owners):
            continue
        owners = owners or [*_of_another_task(row, texts, said)]
        if answered[text] - {owner.task_id for owner in owners} - {row.task_id}:
            continue
        owners = [*owners, *(other for other in before if other.task_id == row.task_id and text in other.said)]
        if owners:
            found.setdefault(text, f"rollout {row.id} has that of {owners[0].id}")
    wrong = [*found.values()] if len(found) >= max(MOVED, lost / 2) else []
    what = f"{len(wrong)} answers are not in the replies of their rollouts, but in those of another rollout"
    yield from faults(what, wrong, EXCHANGED)


def _of_another_task(row: Row, texts: Mapping[str, str], said: Mapping[str, Sequence[Row]]) -> Sequence[Row]:
    """Return who said the reply that is an answer, or most of it, where they are of one other task; else none.

    Nor may an own reply be in the answer, or one of them answer with that reply, as with a label that is found in
    several ways. With `LONG` and more words it is no label: the last of several rollouts that share a variable has it.
    """
    text = texts[row.id]
    if any(own in text for call in row.calls if (own := call.answered.strip())):
        return ()
    parts = (reply for reply in said if ANSWER <= len(reply) < len(text) < 2 * len(reply) and reply in text)
    for reply in (text,) if text in said else parts:
        long = reply == text and len(_words(text)) >= LONG
        kept = any(reply in texts.get(one.id, "") for one in said[reply])
        of = {one.task_id for one in said[reply]}
        if len(of) == 1 and row.task_id not in of and (long or not kept):
            return said[reply]
    return ()


def _words(text: str) -> list[str]:
    """Return the words of a text, in lower case, without the escapes of JSON."""
    return re.findall(r"\w+", re.sub(r'\\[nrtbf"/]', " ", text).lower())


def _calls_apart(rows: Sequence[Row]) -> tuple[list[str], int]:
    """Return the calls whose reply is an answer to their task, and whose score is not the answer's; of how many.

    `Score.calls` is what the reward would be if the rollout had ended with each call. A reward that takes it for
    something else has other scores in most calls.
    """
    known = {(r.task_id, longest(r.answer)): r.value for r in rows if r.status == "ok" and r.value is not None}
    apart, of = list[str](), 0
    for row in rows:
        said = {call.span: re.sub(r"```\w*", "", call.answered).strip() for call in row.calls}
        for span, value in scores_of_calls(row.spans, row.call_values).items():
            text = said.get(span, "")
            wanted = known.get((row.task_id, text)) if len(text) >= ANSWER else None
            if wanted is not None and value:  # 0 may be that of a query that ran too long
                of += 1
                apart += [f"call {span} of rollout {row.id} has {value} instead of {wanted}"] if value != wanted else []
    return apart, of


def scores_of_calls(spans: Sequence[Mapping[str, Any]], values: Sequence[float | None]) -> dict[str, float | None]:
    """Return the values that a reward gave to the calls of a rollout, by span."""
    return dict(zip((s["id"] for s in spans if s["name"] == LLM_CALL and s["error"] is None), values, strict=False))


def longest(answer: Any) -> str:
    """Return the longest text in an answer; '' without one."""
    if isinstance(answer, str):
        return answer.strip()
    inside = answer.values() if isinstance(answer, Mapping) else answer if isinstance(answer, list) else ()
    return max(map(longest, inside), key=len, default="")


def scored_again(step: Step, rows: Sequence[Row], role: str) -> tuple[int, list[str]]:
    """Return how many answers were scored again, and those whose score is another, or whether it is correct.

    Raises:
        CannotLook: The reward gives two scores to one answer.
    """
    known, sources = {task.id: task for task in step.sources.splits[role]}, step.sources
    rows = [r for r in rows if r.failure is None and r.status == "ok" and r.task_id in known]
    random.Random(step.number).shuffle(rows)
    end, wrong, looked = time.monotonic() + sources.seconds, [], 0
    for row in rows:
        if looked >= SCORED_N and time.monotonic() > end:
            break
        found = sources.score(known[row.task_id], row)
        if found.status != "ok":  # a limit of time, or something that was there when the answer was given
            continue
        looked += 1
        differ = [(a, b) for a, b in zip(row.call_values, found.calls, strict=False) if a and b is not None and a != b]
        if differ or (found.value, found.correct) != (row.value, row.correct):  # a call's 0 may be that of a time limit
            again = sources.score(known[row.task_id], row)
            if SAID(again) != SAID(found):
                raise CannotLook(f"{TWO_SCORES}: {found.value} and {again.value}")
            was, now = (f"{one.value}{' (correct)' if one.correct else ''}" for one in (row, found))
            where = f"rollout {row.id} of task {row.task_id}"
            if (found.value, found.correct) != (row.value, row.correct):
                wrong.append(f"{where} has {was}, and its answer scores {now}")
            else:
                wrong.append(f"a call of {where} has {differ[0][0]}, and scores {differ[0][1]}")
    return looked, wrong


def _valid_now(step: Step) -> str:
    """Return which `invalid` scores a second scoring finds valid; '' if none. The environment may have been the reason.

    A score that took too long is left out: it would again.
    """
    known = {task.id: task for task in step.sources.splits["train"]}
    invalid = [row for row in step.outcomes if row["status"] == "invalid"]
    reasons = {row["id"]: str(mapping(json.loads(row["details"])).get("reason", "")) for row in invalid}
    rows = [r for r in step.rows if r.id in reasons and r.task_id in known and "its budget" not in reasons[r.id]]
    end, looked, valid = time.monotonic() + step.sources.seconds, 0, list[str]()
    for row in rows[:INVALID_N]:
        if looked and time.monotonic() > end:
            break
        looked += 1
        if (found := step.sources.score(known[row.task_id], row)).status == "ok":
            valid.append(f"rollout {row.id} has {found.value}, and had none: {reasons[row.id] or 'without a reason'}")
    if not valid:
        return ""
    return f"{len(valid)} of {looked} invalid scores are valid at a second scoring: {some(valid)}"


def _unheard(step: Step) -> str:
    """Return in how many rollouts the answer is of an earlier trained reply, and not of the last; '' if in a few.

    Only where the last one is another version of the answer, by half of its words: a judge's verdict is none.
    """
    several, unheard = 0, list[str]()
    for row in step.rows:
        text, calls = longest(row.answer), [call for call in row.calls if (row.id, call.span) in step.trained]
        if len(text) < ANSWER or len(calls) < 2:
            continue
        heard = [text in said or (len(said) >= ANSWER and said in text) for said in (c.answered.strip() for c in calls)]
        words = Counter(_words(calls[-1].answered))
        if any(heard) and (heard[-1] or 2 * (words & Counter(_words(text))).total() >= words.total()):
            several += 1
            unheard += (
                [] if heard[-1] else [f"rollout {row.id} answers {text[:60]!r}, and said {calls[-1].answered[:60]!r}"]
            )
    if len(unheard) < max(UNHEARD_N, UNHEARD * several):
        return ""
    return (
        f"the answers of {len(unheard)} of {several} rollouts are an earlier reply, and not the last one, which is "
        f"trained with the same reward: does the agent use it? {some(unheard)}"
    )


def handed(step: Step) -> Calls:
    """Return, for each call that the adapter kept, its node, and the advantage that it was given, None if left out."""
    return {
        (row["rollout"], row["span"]): (row["node"] or "", row["worth"])
        for row in step.placed
        if row["worth"] is not None or row["reason"] in ("left-out-by-credit", "not-admitted")
    }


def one(values: Sequence[float]) -> bool:
    """Whether rewards are one reward: they differ by less than the twelfth decimal, or digit, that a score keeps."""
    return max(values) - min(values) <= 5e-13 * max(1.0, *map(abs, values))


def grpo(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """(v - mean) / (deviation + 1e-6): DeepSeekMath, arXiv:2402.03300, section 4.1.2."""
    over, total = dr_grpo(values, weights), sum(weights)
    spread = math.sqrt(math.fsum(w * o * o for o, w in zip(over, weights, strict=True)) / max(total - 1, 1))
    return [o / (spread + EPSILON) for o in over]


def dr_grpo(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """V - mean: Dr. GRPO, arXiv:2503.20783; 0 where there is nothing to compare with."""
    counted = [value for value, weight in zip(values, weights, strict=True) if weight]
    if len(counted) < 2 or one(counted):
        return [0.0] * len(values)
    mean = math.fsum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
    return [value - mean for value in values]


def rloo(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """V - mean of the others: RLOO, arXiv:2402.14740."""
    if one(values):
        return [0.0] * len(values)
    others = [[*values[:i], *values[i + 1 :]] for i in range(len(values))]
    return [value - math.fsum(other) / len(other) for value, other in zip(values, others, strict=True)]


def best(values: Sequence[float], weights: Sequence[int]) -> list[float | None]:
    """1 for the best of a group, if it has a worse one: RAFT, arXiv:2304.06767."""
    return [1.0 if value == max(values) > min(values) else None for value in values]


def dapo(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """Those of GRPO, whose rewards have been shaped: DAPO, arXiv:2503.14476, equation 9; each rollout counts once."""
    return grpo(values, [1] * len(values))


def punished(call: Call, buffer: int) -> float:
    """Return what the length of a reply costs: DAPO, arXiv:2503.14476, equation 13.

    Nothing up to L - C tokens, then less and less, and -1 at L: what the request lets a reply have. C is the buffer, at
    most half of L.
    """
    most, length = call.limit, len(call.reply)
    if not buffer or not most:
        return 0.0
    width = min(buffer, most / 2)
    free = most - width
    return 0.0 if length <= free else -1.0 if length > most else (free - length) / width


def admitted(name: str, keys: Mapping[str, Any], rewards: Sequence[float | None]) -> bool:
    """Return whether a step learns from a group with these rewards: DAPO's equation 11, if the step samples again."""
    return name != "dapo" or keys["max_num_gen_batches"] < 2 or len({r for r in rewards if r is not None}) > 1


FORMULAS: Mapping[str, Callable[[Sequence[float], Sequence[int]], Sequence[float | None]]] = {
    "grpo": grpo,
    "dr-grpo": dr_grpo,
    "rloo": rloo,
    "reinforce++": dr_grpo,  # divided by the step's deviation then
    "dapo": dapo,
    "best-of-group": best,
}
"""What a group's rewards are worth, by the credit's name. Each is written from its paper."""


def expected(step: Step) -> dict[Key, Worth]:
    """Return what each call of a scored rollout is worth, as the credit's paper and settings say; None: left out."""
    (name, keys), calls = step.record.credit, handed(step)
    if name == "opd":
        return _by_teacher(step)
    if name not in FORMULAS and name not in ("turn", "rft", "demonstrations"):
        use = mapping(step.record.config.get("credit")).get("use")
        raise CannotLook(f"the credit {use} has a formula of its own, which is not known here")
    groups: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in step.outcomes:
        if row["value"] is not None:
            groups[row["task_id"], row["group"]].append(row)
    found: dict[Key, Worth] = {}
    if name == "turn":
        for rows in groups.values():
            found |= _by_turn(step, rows, calls, float(keys["discount"]))
    elif name == "demonstrations":  # each one that the reward accepts; not a reply that it marks as a mistake
        accepted = {row["id"] for rows in groups.values() for row in rows if row["correct"]}
        mistakes = {key for key, call in step.calls.items() if call.response.get("learn") is False}
        found = {key: 1.0 if key[0] in accepted and key not in mistakes else None for key in calls}
    elif name == "rft":  # the first of each accepted answer: arXiv:2308.01825
        firsts = {
            (*group, row["answer"]): row["id"] for group, rows in groups.items() for row in rows[::-1] if row["correct"]
        }
        accepted = set(firsts.values())
        found = {key: 1.0 if key[0] in accepted else None for key in calls}
    else:
        counts, worths = Counter(rollout for rollout, _ in calls), dict[str, float | None]()
        costs = defaultdict[str, float](float)  # of a rollout, by its longest reply
        for key in calls if name == "dapo" else ():
            costs[key[0]] = min(costs[key[0]], punished(step.calls[key], keys["overlong_buffer_len"]))
        for rows in groups.values():
            weights = [counts[row["id"]] if keys.get("weighting") == "call" else 1 for row in rows]
            rewards = [float(row["value"]) + costs[row["id"]] for row in rows]
            worth = FORMULAS[name](rewards, weights)
            if not admitted(name, keys, [row["value"] for row in rows]):
                worth = [None] * len(rows)
            worths |= dict(zip([row["id"] for row in rows], worth, strict=True))
        if name == "reinforce++":  # arXiv:2501.03262: over the deviation of the step's differences, whose mean is 0
            deviation = math.sqrt(math.fsum((b or 0.0) ** 2 for b in worths.values()) / max(len(worths), 1))
            worths = {rollout: (b or 0.0) / (deviation + EPSILON) for rollout, b in worths.items()}
        found = {key: worths[key[0]] for key in calls if key[0] in worths}
    scale = keys.get("negative_scale", 1.0)
    return {key: worth * scale if isinstance(worth, float) and worth < 0 else worth for key, worth in found.items()}


def _by_teacher(step: Step) -> dict[Key, Worth]:
    """Return the log-ratio of teacher and student for each token: the gradient of their reverse KL divergence.

    GKD (arXiv:2306.13649), MiniLLM (arXiv:2306.08543). The student's part is what was recorded when it sampled.
    """
    scored = {row["id"] for row in step.outcomes if row["value"] is not None}
    found = dict[Key, Worth]()
    for row in step.placed:
        key, said = (row["rollout"], row["span"]), row["teacher_logprobs"]
        if row["rollout"] in scored and said is not None:
            student = step.calls[key].logprobs or ()
            found[key] = [teacher - own for teacher, own in zip(json.loads(said), student, strict=True)]
    if not found:
        raise CannotLook(f"what the teacher said in step {step.number} was not recorded")
    return found


def _by_turn(step: Step, rows: Sequence[Any], calls: Calls, discount: float) -> dict[Key, Worth]:
    """Return a group's worths by `turn`: the discounted sum of the rewards from a call on, minus that of its turn.

    The mean is over the calls that are the same trained call of the same node in their rollouts.
    """
    spans, returns = {row.id: row.spans for row in step.rows}, dict[Key, float | None]()
    turns: dict[tuple[str, int], list[Key]] = defaultdict(list)
    for row in rows:
        rollout, seen = row["id"], Counter[str]()
        answered = [span["id"] for span in spans[rollout] if span["name"] == LLM_CALL and span["error"] is None]
        values = json.loads(row["call_values"])
        if not values:  # the run's reward scores no calls
            by_agent = _given(spans[rollout])
            values = [by_agent.get(span) for span in answered]
        for i, span in enumerate(answered):
            if (rollout, span) not in calls:
                continue
            node = calls[rollout, span][0]
            scored = [value for value in values[i:] if value is not None]
            heard = bool(scored) and (values[i] is not None or discount > 0)
            returns[rollout, span] = math.fsum(v * discount**n for n, v in enumerate(scored)) if heard else None
            turns[node, seen[node]].append((rollout, span))
            seen[node] += 1
    found = dict[Key, Worth]()
    for keys in turns.values():
        heard_of = [value for key in keys if (value := returns[key]) is not None]
        mean = math.fsum(heard_of) / max(len(heard_of), 1)
        for key in keys:
            value = returns[key]
            found[key] = None if value is None else 0.0 if one(heard_of) else value - mean
    return found


def _given(spans: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return, by call, the reward that the agent gave it last: a reward is of the last call that ended before it.

    Of several calls, one in a span closer around the reward comes first. Calls to other servers have none.
    """
    above = {span["id"]: span["parent"] for span in spans}

    def around(span: str) -> list[str]:
        outer, at = list[str](), above.get(span)
        while at and at not in outer:
            outer.append(at)
            at = above.get(at)
        return outer

    calls = [s for s in spans if s["name"] == LLM_CALL and s["error"] is None and SERVER not in s["attributes"]]
    found: dict[str, float] = {}
    for span in spans:
        value, outer = span["attributes"].get(REWARD), around(span["id"])
        if isinstance(value, int | float) and -LARGEST <= value <= LARGEST:
            near = {
                -min(map(outer.index, shared)): call["id"]  # of equally close ones, the last stays
                for call in calls
                if call["end"] <= span["start"] and (shared := set(outer) & set(around(call["id"])))
            }
            if near:
                found[near[max(near)]] = float(value)
    return found


def by_call(step: Step) -> Mapping[Key, float | Sequence[float]]:
    """Return the advantage of each call, or each of its tokens: by the formula, or as recorded where none is known."""
    try:
        wanted = expected(step)
    except CannotLook:
        return step.trained
    return {key: worth for key, worth in wanted.items() if worth is not None}


def advantages(step: Step) -> Iterator[Verdict]:
    """Compare the advantage that each call was trained with to what the credit's formula says.

    The bound is 1e-12 of the step's largest reward: a mean of n rewards in 64 bits rounds by at most n * 1.1e-16 of it,
    and no group has more than 1,024. A division by the deviation enlarges that to at most a millionfold.
    """
    if not step.trained:
        raise CannotLook(f"step {step.number} has no record of the calls that were trained")
    yield from _nodes(step)
    wanted, given, (name, _) = expected(step), handed(step), step.record.credit
    size = max((abs(row["value"]) for row in step.outcomes if row["value"] is not None), default=0.0)
    size += name == "dapo"  # a punishment is at most 1
    bound = 1e-12 * (size or 1.0) / (EPSILON if name in ("grpo", "reinforce++", "dapo") else 1.0)
    wrong, worst = list[str](), 0.0
    for (rollout, span), (_, advantage) in given.items():
        worth = wanted.get((rollout, span), math.inf)
        off = _apart(worth, advantage)
        if off <= bound:
            worst = max(worst, off)
        else:
            wrong.append(f"call {span} of rollout {rollout}: {_said(advantage)} instead of {_said(worth)}")
    what = f"{len(wrong)} of {len(given)} calls have another advantage (bound {bound:.1g})"
    yield from faults(what, wrong, "groups that were mixed up, an advantage of another rollout, its size")
    rollouts = amount(len({rollout for rollout, _ in given}), "rollout")
    yield ok(f"{amount(len(given), 'call')} of {rollouts}, by {name}", worst / bound)


def _apart(worth: Worth, other: Worth) -> float:
    """Return how far two worths of a call are apart at most; infinity if one is none, or of other tokens."""
    if worth == other:
        return 0.0
    if worth is None or other is None:
        return math.inf
    ours, theirs = ([one] if isinstance(one, int | float) else one for one in (worth, other))
    if len(ours) != len(theirs):
        return math.inf
    return max((abs(a - b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def _said(worth: Worth) -> str:
    if worth is None or worth == math.inf:
        return "none"
    return f"{worth:.6g}" if isinstance(worth, int | float) else f"[{', '.join(f'{one:.6g}' for one in worth[:8])}]"


def _nodes(step: Step) -> Iterator[Verdict]:
    """Check which calls `agent-match` handed over: those with its pattern in the name of a node around them."""
    adapter = step.record.config["adapter"]
    given = step.record.demonstrations not in ("", TASKS)  # a file's calls have no nodes
    if adapter["use"] != "agent-match" or not adapter.get("match") or given:
        return
    wrong = []
    for row in step.placed:
        unmatched, matches = row["reason"] == "unmatched-node", bool(re.search(adapter["match"], row["node"] or ""))
        if unmatched == matches and (unmatched or row["place"] == "trained"):
            wrong.append(f"call {row['span']} of rollout {row['rollout']}, node {row['node']}")
    what = f"adapter.match = {adapter['match']!r} says otherwise of {len(wrong)} calls"
    yield from faults(what, wrong, "the adapter")
