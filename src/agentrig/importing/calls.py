"""One recorded call of a model as a line of a file of demonstrations, or the reason why it can't become one."""

from __future__ import annotations

from typing import Any

from agentrig.demonstrations import Unfit
from agentrig.traces import mapping

CUT_SHORT = "its stream was cut short"
ENDS = {
    "length": "the reply was cut at its token limit",
    "max_tokens": "the reply was cut at its token limit",
    "content_filter": "a content filter ended the reply",
    "error": CUT_SHORT,
}
"""Reasons for the ends (`finish_reason`) after which a reply is not whole."""

Found = tuple[str, "dict[str, Any] | Unfit"]
"""Where a call was found, and its line, or why it is none."""


def rollout_fault(*, mode: Any, failure: str | None, incorrect: bool) -> Unfit | None:
    """Return why no call of a rollout may be learned, or None; `mode` is that of a rollout of agentrig."""
    if mode in ("validation", "report"):
        return Unfit("its rollout measures on held-out tasks")
    if failure is not None:
        return Unfit("its rollout failed", failure)
    return Unfit("its rollout was judged incorrect") if incorrect else None


def line_of(
    *, messages: Any, reply: Any, finish: Any, tools: Any = None, error: str | None = None, streamed: bool = False,
    **more: Any,
) -> dict[str, Any] | Unfit:  # fmt: skip
    """Return a call as a line of a file of demonstrations; what was not recorded is None.

    A `streamed` reply that is whole says why it ended (`finish`). `tools` have the form of any provider; `more` are
    further keys of the line.
    """
    said = mapping(reply)
    if error is not None:
        return Unfit(CUT_SHORT if said.get("content") or said.get("tool_calls") else "the call failed", error)
    if not isinstance(messages, list) or not said:
        return Unfit("its messages are not recorded")
    if isinstance(finish, str) and finish in ENDS:
        return Unfit(ENDS[finish])
    if streamed and not finish:
        return Unfit(CUT_SHORT, "it has no finish reason")
    return {"messages": [*messages, reply], "tools": tools_of(tools), **more}


def tools_of(tools: Any) -> Any:
    """Return tools in OpenAI's form; those that are flat have name, description and parameters side by side."""
    if not isinstance(tools, list):
        return tools
    found = []
    for tool in tools:
        flat = mapping(tool)
        if "function" not in flat and "name" in flat:
            function = {key: flat[key] for key in ("name", "description", "parameters", "strict") if key in flat}
            if "parameters" not in function and "input_schema" in flat:
                function["parameters"] = flat["input_schema"]
            tool = {"type": "function", "function": function}
        found.append(tool)
    return found
