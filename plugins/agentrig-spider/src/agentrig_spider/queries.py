"""The queries in a model's replies, and in the calls of a rollout."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from agentrig import Span, Trace
from agentrig.traces import message_of

_FENCE = "```"
_STATEMENT = re.compile(r"(?i)\s*(select|with|values|explain|insert|update|delete|create|drop|alter|pragma|replace)\b")
_TAG_LINE = re.compile(r"[ \t]*[\w+#.-]+[ \t]*\r?\n")
_TAG_WORD = re.compile(r"(?i)[ \t]*sql(?:ite3?)?\s+")

KEYS = ("query", "sql")
"""Under which a node's output, or a tool's arguments, have a query."""


def sql_of(reply: str, former: str | None = None) -> str:
    r"""Return the query in a reply: its last fenced code block that is not empty.

    An unclosed block at the end counts too, because stop strings and token limits can cut it off.

    Args:
        reply: The model's reply.
        former: The query to keep when the reply has no block; None takes the whole reply instead.

    Returns:
        The query without surrounding space; may be empty.

    Example:
        >>> sql_of("Sure:\n```sql\nSELECT 1\n```\nDone.")
        'SELECT 1'
    """
    blocks = [block for part in reply.split(_FENCE)[1::2] if (block := _without_tag(part).strip())]
    if blocks:
        return blocks[-1]
    return reply.strip() if former is None else former


def _without_tag(block: str) -> str:
    """Drop the language name of a code block: a separate line, or `sql` before the query."""
    if _STATEMENT.match(block):
        return block
    tag = _TAG_LINE.match(block) or _TAG_WORD.match(block)
    return block[tag.end() :] if tag else block


def queries_of(trace: Trace) -> list[str | None]:
    """Return the query that the model wrote in each call of `Trace.llm_calls()`; None for a call without one.

    If the agent's nodes have a `query` in their output, as those of `langgraph-sql` do, only these count: a check may
    quote queries that no one runs. Otherwise it is the argument `query` or `sql` of the call's last tool call that has
    one, or else the reply, if its code block or the whole of it is SQL.
    """
    calls = trace.llm_calls()
    outputs = [_output(trace, call) for call in calls]
    if any(_named(output) is not None for output in outputs):
        return [_named(output) for output in outputs]
    return [_written(call) for call in calls]


def _output(trace: Trace, call: Span) -> Any:
    """Return the output of the node that made a call: of the outermost one below the graph itself."""
    nodes = [span for span in trace.ancestors(call) if span.node is not None]
    return nodes[-2].attributes.get("output") if len(nodes) > 1 else None


def _written(call: Span) -> str | None:
    message = message_of(call.attributes)
    tools: Any = message.get("tool_calls")
    for tool in reversed(tools) if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        try:
            found = _named(json.loads(arguments) if isinstance(arguments, str) else arguments)
        except (ValueError, RecursionError):
            continue
        if found is not None:
            return found
    content = message.get("content")
    query = sql_of(content) if isinstance(content, str) else ""
    return query if _STATEMENT.match(query) else None


def _named(value: Any) -> str | None:
    """Return the query in an output or in arguments, or None."""
    found = [value[key] for key in KEYS if isinstance(value.get(key), str)] if isinstance(value, Mapping) else []
    return found[0] if found else None
