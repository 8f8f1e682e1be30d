"""Traces: the recording of a rollout, as spans similar to OpenTelemetry's."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import attrs
import orjson

from agentrig.text import json_text

LLM_CALL = "openai.chat.completion"
"""Span name of an LLM call. Its attributes: `request` and `response` (the JSON bodies),
`gen_ai.response.id`, `prompt_token_ids`, `response_token_ids`, `response_logprobs` (lists; absent
when the endpoint did not return them)."""

SERVER = "agentrig.server"
"""Attribute of a call to another server than the run's: that server. Such a call has no token ids."""

MISSED = "agentrig.missed"
"""Attribute of a rollout's root span: by library, the number of unrecorded connections to the run's server."""

CUT = "agentrig.cut"
"""Attribute of a rollout's root span: how many calls the gateway cut because the rollout had ended."""

ABORTED = "agentrig.aborted"
"""Attribute of a call with an error: the agent itself ended it, so the error is none of the server's."""

IGNORED = "agentrig.ignored"
"""Attribute of a call: the fields of its request that have no effect on the run's model, such as `reasoning`."""

ASKED = "agentrig.asked"
"""Attribute of a call of a measurement: the sampling fields of the agent that the run's have replaced."""

SENT = "agentrig.sent"
"""Attribute of a call: `message_digest` of the messages that the agent's client sent."""

HANDED = "agentrig.handed"
"""Attribute of a call that is no stream: `message_digest` of the message that the agent's client got back."""

GIVEN = "agentrig.given"
"""Attribute of a rollout's root span: `value_digest` of the input that the runner gave the agent, if it has names."""

RETURNED = "agentrig.returned"
"""Attribute of a rollout's root span: `value_digest` of what the agent returned, before it became JSON values."""

RUNNER = "agentrig.runner"
"""Attribute of a rollout's root span: the process that ran it, `PID@MACHINE`; others that it ran may share state."""

ADDRESS = "agentrig.address"
"""Attribute of a rollout's root span: where a program or service finds the model's address and key."""

REWARD = "agentrig.reward"
"""Attribute of a span: the reward that the agent itself gave at its start; read it with `agentrig.rewards.given`."""

FEEDBACK = "agentrig.feedback"
"""Attribute beside `REWARD`: what the agent said about it."""

PARENT = "agentrig-parent"
"""Header of a call to the gateway: the id of the span in which the call is made."""

NODE = "langchain.chain.type"
"""Attribute with the name of the graph node or chain of a span."""

MODEL = "langchain.model"
"""Attribute with the name of LangChain's class of a chat model, on the span around its call."""

VERSION = re.compile(r"v(\d+)")
"""How a server states the version of its weights, in the field `system_fingerprint` of its answers."""

ATTRIBUTES: Mapping[str, str] = {
    "request": "LLM call: the request body, with the fields that the tracer added",
    "response": "LLM call: the response body, a stream joined into one; without the token ids below",
    "prompt_token_ids": "LLM call: the prompt's token ids, from the server",
    "response_token_ids": "LLM call: the sampled token ids of the first choice",
    "response_logprobs": "LLM call: the log-probability of each sampled token under the sampling model",
    "finish_reason": "LLM call: why the first choice ended: `stop`, `length`, `tool_calls` …",
    "gen_ai.response.id": "LLM call: the completion's id",
    SENT: "LLM call: a digest of the messages that the client sent, for the auditor",
    HANDED: "LLM call that is no stream: a digest of the message that the agent's client got back",
    ABORTED: "LLM call: the agent ended it before its answer was complete",
    SERVER: "LLM call: the server, if it is not the run's; such a call has no token ids",
    NODE: "chain: the name of the graph node or chain",
    MODEL: "LangChain's model, around its call: the name of its class",
    "agent.name": "agent: the name that `agentrig.span` gave",
    "tool.name": "tool: its name",
    REWARD: "reward: what `agentrig.reward` gave, or Agent Lightning's `emit_reward`",
    FEEDBACK: "reward: what the agent said about it, cut at 20,000 characters",
    "command": "program: its command line",
    "exit_code": "program: its exit code; negative for the signal that ended it",
    "stderr": "program: what it wrote to stderr; the middle of a long text is missing",
    "cpu_s": "program: CPU seconds of all its processes",
    "peak_mb": "program: most memory at once, MiB",
    "exceeded": "program: the limit that ended it, such as `memory`; `stopped` if it went on after its answer",
    "processes_left": "program: how many processes it left at its end; they were ended",
    "input": "first chain, tool: its input, cut at 20,000 characters of JSON",
    "output": "chain, tool: its output, cut at the same length",
    MISSED: "rollout (the root): by library, the number of unrecorded connections to the run's server",
    CUT: "rollout (the root): how many calls its end cut",
    GIVEN: "rollout (the root): a digest of the input that the runner gave the agent, for the auditor",
    RUNNER: "rollout (the root): the process that ran it, `PID@MACHINE`",
    ADDRESS: "rollout (the root): where a program or service finds the model's address and key",
    RETURNED: "rollout (the root): a digest of the answer that the agent returned; not of one with a secret",
}
"""The attributes of the tracer's spans: attribute to the kind of span and its meaning. Spans that an agent of Agent
Lightning emits, or that its tracer records, have other attributes."""


def mapping(value: Any) -> Mapping[str, Any]:
    """Return the value if it is a mapping, else an empty one.

    Read what a trace has of requests and responses with this and `items`: a program may send, and a server may
    answer, a field of any type.
    """
    return value if isinstance(value, Mapping) else {}


def items(value: Any) -> Sequence[Any]:
    """Return the value if it is a list or a tuple, else an empty one."""
    return value if isinstance(value, list | tuple) else ()


def tool_calls_of(message: Any) -> list[str]:
    """Return the tool calls of a message of the assistant as text: `add({"a": 2})`; none for any other message.

    Those that do not have OpenAI's form are JSON.
    """
    calls = mapping(message).get("tool_calls")
    found = []
    for call in items(calls) or filter(None, [calls]):
        function = mapping(mapping(call).get("function"))
        if isinstance(function.get("name"), str):
            arguments = function.get("arguments")
            found.append(f"{function['name']}({arguments if isinstance(arguments, str) else json_text(arguments)})")
        else:
            found.append(json_text(call))
    return found


def message_of(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with which the model replied in a call; empty if the response has none."""
    choices = items(mapping(attributes.get("response")).get("choices"))
    return mapping(mapping(choices[0]).get("message")) if choices else {}


def reply_of(attributes: Mapping[str, Any]) -> str:
    """Return what the model replied in a call, as `said_in` has it."""
    return said_in(message_of(attributes))


def said_in(message: Mapping[str, Any]) -> str:
    """Return what a message of the assistant says: its text, then its tool calls, a line each."""
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json_text(content)
    return "\n".join(filter(None, [text, *tool_calls_of(message)]))


def token_count(attributes: Mapping[str, Any], part: Literal["prompt", "response"]) -> int | None:
    """Return how many tokens a call's prompt or response has: its ids, or what the server counted; or None."""
    ids = attributes.get(f"{part}_token_ids")
    usage = mapping(mapping(attributes.get("response")).get("usage"))
    stated = usage.get("prompt_tokens" if part == "prompt" else "completion_tokens")
    if ids or not isinstance(stated, int):
        return len(ids) if isinstance(ids, list | tuple) else None
    return stated


def usage(calls: Iterable[Mapping[str, Any]], own: str = "") -> Counter[tuple[str, str]]:
    """Count calls, given by their attributes, and their tokens, by the model that answered.

    Args:
        own: Stands for the run's own model; another server's is what that calls it.

    Returns:
        By model `calls`, `prompt`, `response`, and `uncounted`: calls whose tokens nobody counted.
    """
    found: Counter[tuple[str, str]] = Counter()
    for attributes in calls:
        model = own
        if SERVER in attributes:
            sides = (mapping(attributes.get(side)).get("model") for side in ("response", "request"))
            model = next((str(name) for name in sides if name), str(attributes[SERVER]))
        prompt, response = token_count(attributes, "prompt"), token_count(attributes, "response")
        found[model, "calls"] += 1
        found[model, "uncounted"] += prompt is None or response is None
        found[model, "prompt"] += prompt or 0
        found[model, "response"] += response or 0
    return found


def weights_version(body: Mapping[str, Any]) -> int | None:
    """Return the version of the weights that a server's answer states, or None if it states none."""
    found = VERSION.fullmatch(str(body.get("system_fingerprint")))
    return int(found[1]) if found else None


@attrs.frozen(kw_only=True)
class Span:
    """One recorded operation.

    Attributes:
        id: Unique within the trace.
        parent: The enclosing span's id, or None at the root.
        name: The operation; `LLM_CALL` for calls to the model, `chain.chain` for a graph node.
        start: Unix time in seconds.
        end: Unix time in seconds.
        error: The exception as text, or None.
        attributes: JSON values.
        otel: What else OpenTelemetry has of a span that another tracer recorded, as JSON values: `trace_id`, `status`,
            `events`, `links`, `resource` and more. Empty for the tracer's own spans.
    """

    id: str
    parent: str | None
    name: str
    start: float
    end: float
    error: str | None = None
    attributes: Mapping[str, Any] = attrs.field(factory=dict)
    otel: Mapping[str, Any] = attrs.field(factory=dict, repr=False)

    @property
    def node(self) -> str | None:
        """The name of the graph node (or of `agentrig.span`), or None."""
        name = self.attributes.get(NODE) or self.attributes.get("agent.name")
        return name if isinstance(name, str) else None


_ONE_FORM = orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME


def message_digest(messages: Any) -> str | None:
    """Return a digest of JSON values; None if they can't be compared: with NaN or a lone surrogate, for example."""
    try:
        return hashlib.blake2b(orjson.dumps(messages, option=_ONE_FORM), digest_size=16).hexdigest()
    except (TypeError, RecursionError):  # orjson's own error is a TypeError
        return None


def value_digest(value: Any) -> str | None:
    """Return a digest of plain data as JSON holds it; None if it can't be compared."""
    if isinstance(value, Mapping) and not isinstance(value, dict):
        value = dict(value)
    own = isinstance(value, dict) and type(value) is not dict  # its own methods say what JSON holds of it
    found = None if own else message_digest(value)
    if found is None:  # tuples with names, numbers of numpy, halves of characters
        try:
            found = message_digest(json.loads(json.dumps(value)))  # which joins halves of a pair
        except Exception:  # a dict's or list's own methods may raise anything
            return None
    return found


@attrs.frozen(kw_only=True, slots=False)
class Trace:
    """All spans of one rollout, in order of start.

    Attributes:
        rollout_id: The rollout's id.
        spans: The first one is the root, called `rollout`.
    """

    rollout_id: str
    spans: Sequence[Span] = ()

    @cached_property
    def _by_id(self) -> dict[str, Span]:
        return {span.id: span for span in self.spans}

    def llm_calls(self) -> list[Span]:
        """Return the spans of calls to the model that got a response, in order of start."""
        return [s for s in self.spans if s.name == LLM_CALL and s.error is None]

    def versions(self) -> dict[str, int]:
        """Return, by span id, the versions of the weights that the run's server stated in its answers."""
        answers = {s.id: mapping(s.attributes.get("response")) for s in self.llm_calls() if SERVER not in s.attributes}
        stated = {span: weights_version(answer) for span, answer in answers.items()}
        return {span: version for span, version in stated.items() if version is not None}

    def ancestors(self, span: Span) -> Iterator[Span]:
        """Yield the span's parent, its parent, and so on up to the root."""
        seen = {span.id}
        while span.parent is not None and span.parent not in seen:
            parent = self._by_id.get(span.parent)
            if parent is None:
                return
            seen.add(parent.id)
            yield parent
            span = parent

    def nodes(self, span: Span) -> list[str]:
        """Return the names of the graph nodes that enclose a span, innermost first."""
        return [s.node for s in self.ancestors(span) if s.node is not None]
