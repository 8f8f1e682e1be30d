"""Files of traces, in any format that is known, as distinct demonstrations; what is left out is counted by reason."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from agentrig.demonstrations import Turn, Unfit, demonstration_of
from agentrig.errors import AgentrigError, ConfigError
from agentrig.importing.calls import Found
from agentrig.importing.records import atif_calls, chat_calls
from agentrig.importing.runs import run_calls
from agentrig.importing.spans import Spans
from agentrig.rows import read_json
from agentrig.traces import items, mapping

FORMATS: Mapping[str, Sequence[str]] = {
    "otlp": ("resourceSpans", "resourceLogs", "spanId"),
    "atif": ("steps",),
    "chat": ("messages",),
}
"""The formats of files, and the keys of which a value has one."""


@attrs.frozen(kw_only=True)
class Imported:
    """What files of traces hold.

    Attributes:
        turns: The distinct demonstrations, in the order of the files; those of spans last.
        calls: How many calls of a model were found, and records that are none.
        duplicates: How many of them are there once more.
        left_out: How many can't be learned, by reason.
        examples: Place and detail of the first one, by reason.
    """

    turns: Sequence[Turn]
    calls: int
    duplicates: int
    left_out: Mapping[str, int]
    examples: Mapping[str, str]


def import_traces(paths: Sequence[Path], *, form: str | None = None, min_reward: float | None = None) -> Imported:
    """Return the demonstrations in files of traces and run directories.

    Args:
        form: One of `FORMATS`; None to recognise it for each value.
        min_reward: Leave out calls whose rollout has a smaller reward or none; None for those judged incorrect.

    Raises:
        AgentrigError: A file can't be read, or is no JSON.
        ConfigError: No demonstration is in them; the message has the reasons.
    """
    turns: dict[str, Turn] = {}
    left_out: Counter[str] = Counter()
    examples: dict[str, str] = {}
    calls = duplicates = 0
    for place, found in _found(paths, form, min_reward):
        calls += 1
        try:
            if isinstance(found, Unfit):
                raise found
            turn = demonstration_of({**found, "source": found.get("source") or place})
            if min_reward is not None:
                if turn.reward is None:
                    raise Unfit("no reward is recorded")
                if turn.reward < min_reward:
                    raise Unfit(f"its reward is below {min_reward:g}", f"it is {turn.reward:g}")
        except Unfit as error:
            left_out[error.reason] += 1
            detail = str(error).removeprefix(error.reason).removeprefix(": ")
            examples.setdefault(error.reason, f"{place}{f': {detail}' if detail else ''}")
            continue
        key = _key(turn)
        duplicates += key in turns
        if key not in turns or (turn.prompt_token_ids and not turns[key].prompt_token_ids):
            turns[key] = turn
    counts = dict(left_out.most_common())
    imported = Imported(
        turns=tuple(turns.values()), calls=calls, duplicates=duplicates, left_out=counts, examples=examples
    )
    if not turns:
        names = ", ".join(map(str, paths))
        raise ConfigError("\n".join([f"{names}: no call of a model can become a demonstration", *lines(imported)]))
    return imported


def lines(imported: Imported) -> Iterator[str]:
    """Yield why calls were left out, a line a reason, with the first one's place."""
    if not imported.calls:
        yield "  there is none: are these spans of generative AI (gen_ai.*), ATIF, or chats with messages?"
    width = len(str(max(imported.left_out.values(), default=0)))
    for reason, count in imported.left_out.items():
        yield f"  {count:{width}} {reason} ({imported.examples[reason]:.300})"


def _found(paths: Sequence[Path], form: str | None, min_reward: float | None) -> Iterator[Found]:
    """Yield the calls of all files; those of spans come last, because a trace may lie in several files."""
    spans = Spans()
    for path in paths:
        if path.is_dir():
            yield from run_calls(path, min_reward)
            continue
        for place, value in read_json(path):
            known = form or next((name for name, keys in FORMATS.items() if any(k in mapping(value) for k in keys)), "")
            if isinstance(value, AgentrigError):
                detail = str(value).removeprefix(place).lstrip(":, ").removeprefix("is no JSON: ")
                yield place, Unfit("it is no JSON", detail)
            elif not any(key in mapping(value) for key in FORMATS.get(known, ())):
                text = json.dumps(value, ensure_ascii=False)
                yield place, Unfit(f"it is not {form or 'OTLP, ATIF or a chat'}", text[:80])
            elif known == "otlp":
                spans.add(value, place)
            else:
                yield from (atif_calls if known == "atif" else chat_calls)(value, place)
    yield from spans.calls(judged=min_reward is None)


def _key(turn: Turn) -> str:
    """Return what two demonstrations that teach the same have in common: all but ids of tool calls, and the source."""
    messages: list[Any] = [*turn.messages, turn.reply.message()]
    text = json.dumps([messages, list(turn.tools)], sort_keys=True)
    given = (call.get("id") for message in messages for call in items(message.get("tool_calls")))
    for number, name in enumerate(dict.fromkeys(name for name in given if isinstance(name, str))):
        text = text.replace(json.dumps(name), f'"#{number}"')
    return text
