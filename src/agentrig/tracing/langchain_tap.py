"""The LangChain tap: a callback handler in a context variable makes spans of graphs, chains, models and tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from agentrig.text import words_of
from agentrig.traces import MODEL, NODE
from agentrig.tracing.recorder import Recorder, plain

ROLES = {"ai": "assistant", "human": "user"}
"""LangChain's types of messages, and the roles that requests have for them."""

_variable: ContextVar[Any] | None = None
_make: Callable[[Recorder], Any]


@contextmanager
def attached(recorder: Recorder) -> Iterator[None]:
    """Make LangChain report to a recorder in this context; without LangChain it does nothing."""
    if _variable is None:
        yield
        return
    token = _variable.set(_make(recorder))
    try:
        yield
    finally:
        _variable.reset(token)


def install() -> None:
    """Make LangChain find a handler in every context in which `attached` runs.

    Raises:
        ImportError: LangChain is not installed.
    """
    global _variable, _make
    from langchain_core.callbacks.base import BaseCallbackHandler
    from langchain_core.messages import BaseMessage
    from langchain_core.tracers.context import register_configure_hook

    def shown(value: Any) -> Any:
        """Return a node's value as JSON values; a message is its role, text and tool calls, as in a request."""
        try:
            return plain(_said(value, BaseMessage))
        except RecursionError:  # it contains itself
            return plain(value)

    class Handler(BaseCallbackHandler):
        """Turns LangChain's runs into spans."""

        run_inline = True  # in async graphs too, so that the context variables reach the call
        raise_error = False

        def __init__(self, recorder: Recorder) -> None:
            self._recorder = recorder

        def on_chain_start(self, serialized: Any, inputs: Any, *, run_id: Any, **more: Any) -> None:
            parent = more.get("parent_run_id")
            if "langsmith:hidden" in (more.get("tags") or ()):
                self._recorder.hide(run_id.hex, parent.hex if parent else None)
                return
            name = more.get("name") or (serialized or {}).get("name") or "chain"
            attributes: dict[str, Any] = {NODE: name}
            if parent is None:
                attributes["input"] = shown(inputs)
            self._recorder.open(run_id.hex, parent.hex if parent else None, "chain.chain", attributes)

        def on_chain_end(self, outputs: Any, *, run_id: Any, **more: Any) -> None:
            self._recorder.close(run_id.hex, attributes={"output": shown(outputs)})

        def on_chain_error(self, error: BaseException, *, run_id: Any, **more: Any) -> None:
            self._recorder.close(run_id.hex, error=words_of(error))

        on_llm_error = on_tool_error = on_chain_error

        def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: Any, **more: Any) -> None:
            self._model("chat_model.llm", serialized, run_id, more)

        def on_llm_start(self, serialized: Any, prompts: Any, *, run_id: Any, **more: Any) -> None:
            self._model("llm.llm", serialized, run_id, more)

        def _model(self, span: str, serialized: Any, run_id: Any, more: dict[str, Any]) -> None:
            name, parent = more.get("name") or (serialized or {}).get("name") or "model", more.get("parent_run_id")
            self._recorder.open(run_id.hex, parent.hex if parent else None, span, {MODEL: name})

        def on_llm_end(self, response: Any, *, run_id: Any, **more: Any) -> None:
            self._recorder.close(run_id.hex)

        def on_tool_start(self, serialized: Any, input_str: str, *, run_id: Any, **more: Any) -> None:
            name = more.get("name") or (serialized or {}).get("name") or "tool"
            parent = more.get("parent_run_id")
            attributes = {"tool.name": name, "input": plain(input_str)}
            self._recorder.open(run_id.hex, parent.hex if parent else None, "tool", attributes)

        def on_tool_end(self, output: Any, *, run_id: Any, **more: Any) -> None:
            self._recorder.close(run_id.hex, attributes={"output": shown(output)})

    variable: ContextVar[Any] = ContextVar("agentrig_langchain_handler", default=None)
    register_configure_hook(variable, inheritable=True)
    _variable, _make = variable, Handler


def _said(value: Any, message: type) -> Any:
    if isinstance(value, message):
        found: Any = value
        calls = getattr(found, "tool_calls", None)
        return {
            "role": ROLES.get(found.type, found.type),
            "content": found.content,
            **({"tool_calls": calls} if calls else {}),
        }
    if isinstance(value, dict):
        return {key: _said(part, message) for key, part in value.items()}
    return [_said(part, message) for part in value] if isinstance(value, list | tuple) else value
