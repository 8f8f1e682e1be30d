"""Every recorded request and response is shown and read, whatever types its fields have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
from agentrig_agent_match import AgentMatch, AgentMatchConfig
from click.testing import CliRunner

from agentrig import Span, Trace, load_run
from agentrig.audit.record import COLUMNS, _row
from agentrig.cli.entry import main
from agentrig.otlp import exporting
from agentrig.otlp.spans import Origin, spans_of
from agentrig.rollouts import Rollout
from agentrig.run.directory import RunDirectory
from agentrig.run.guards import missed_calls, warn_of_constraints, warn_of_fields
from agentrig.run.rows import row_of
from agentrig.testing.run_directory import rollout_of, write_run
from agentrig.traces import LLM_CALL
from agentrig.tracing.gen_ai import flat, tool_calls
from agentrig.view.rollout import readable_rollout
from agentrig.view.terminal import span_text
from agentrig.view.watch.app import serving

pytestmark = pytest.mark.usefixtures("quick_images")

WRONG = (5, "odd", True, 2.5, [1], [None], [[]], {"odd": 1}, [{"odd": {}}], 10**30, float("nan"))
REQUEST = (
    "model", "messages", "tools", "temperature", "max_tokens", "max_completion_tokens", "top_p", "top_k", "seed", "n",
    "stop", "stream", "response_format", "tool_choice", "logit_bias", "chat_template_kwargs", "user",
)  # fmt: skip
RESPONSE = ("id", "model", "choices", "usage", "system_fingerprint")
ATTRIBUTES = ("request", "response", "prompt_token_ids", "response_token_ids", "response_logprobs", "finish_reason")


def malformed(wrong: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield attributes of calls in which one field each has a value of a wrong type."""
    for name in ATTRIBUTES:
        yield name, {name: wrong}
    for name in REQUEST:
        yield f"request.{name}", {"request": {"messages": [{"role": "user", "content": "?"}], name: wrong}}
    for name in RESPONSE:
        yield f"response.{name}", {"response": {"choices": [{"message": {"content": "!"}}], name: wrong}}
    for name in ("role", "content", "tool_calls", "tool_call_id"):
        message = {"role": "assistant", "content": "text", name: wrong}
        yield f"messages.{name}", {"request": {"messages": [message]}}
        yield f"choices.message.{name}", {"response": {"choices": [{"message": message}]}}
    for name in ("index", "message", "finish_reason", "logprobs"):
        yield f"choices.{name}", {"response": {"choices": [{name: wrong}]}}
    for name in ("prompt_tokens", "completion_tokens"):
        usage = {"prompt_tokens": 1, "completion_tokens": 1, name: wrong}
        yield f"usage.{name}", {"response": {"usage": usage}, "prompt_token_ids": None}
    for tool in ({"function": wrong}, {"function": {"name": wrong, "parameters": wrong, "arguments": wrong}}):
        yield "tools.function", {"request": {"messages": [], "tools": [tool]}}
        yield "tool_calls.function", {"response": {"choices": [{"message": {"tool_calls": [tool]}}]}}


def changed(rollout: Rollout, attributes: Mapping[str, Any], *, error: str | None = None) -> Rollout:
    spans = [
        attrs.evolve(span, attributes={**span.attributes, **attributes}, error=error) if span.name == LLM_CALL else span
        for span in rollout.trace.spans
    ]
    return attrs.evolve(rollout, trace=Trace(rollout_id=rollout.id, spans=spans), triplets=())


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_no_reader_of_calls_stops_at_a_field_of_a_wrong_type(wrong: Any) -> None:
    for what, attributes in malformed(wrong):
        rollout = changed(rollout_of(0, right=True, mode="train", step=1), attributes)
        try:
            seen = readable_rollout(rollout)
            assert seen.calls, what
            span_text(rollout)
            exporting.json_line(spans_of(rollout, Origin(run="r", agent="a", reward="x")))
            for call in rollout.trace.llm_calls():
                bodies = [b if isinstance(b := call.attributes.get(k), dict) else {} for k in ("request", "response")]
                flat(*bodies)
                list(tool_calls(bodies[1]))
                if not what.endswith(("token_ids", "response_logprobs")):  # those are checked when they are recorded
                    AgentMatch(AgentMatchConfig(match="", model="m"))(rollout.trace)
            rollout.trace.versions()
            missed_calls([rollout])
            warn_of_fields([rollout], {})
            warn_of_constraints([rollout], step=1)
            if "token_ids" not in what and "logprobs" not in what:
                row = row_of(rollout)
                for call in _row({name: row[name] for name in COLUMNS}).calls:
                    assert isinstance(call.plain, bool)
                    assert isinstance(call.choice, Mapping)
                    assert isinstance(call.asked, str)
        except Exception as error:
            error.add_note(f"{what} = {wrong!r}")
            raise


def test_a_malformed_field_is_shown_as_json() -> None:
    request = {"messages": {"odd": 1}, "tools": 5}
    rollout = changed(rollout_of(0, right=True, mode="train", step=1), {"request": request, "response": [3]})
    part = next(part for part in readable_rollout(rollout).parts if part.call)
    assert part.call is not None
    assert [json.loads(message.text or "null") for message in part.call.messages] == [None]
    assert dict(part.facts) == {"tools": "5", "response": "[\n 3\n]", "reward": "1 (Score.calls)"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a training rollout for each wrong value, which has a call for each field."""
    directory, rollouts = write_run(tmp_path / "run", steps=1, held_out=2), []
    for place, wrong in enumerate(WRONG):
        rollout = rollout_of(place, right=True, mode="train", step=1)
        root = rollout.trace.spans[0]
        calls = [
            Span(id=f"c{i}", parent=root.id, name=LLM_CALL, start=root.start, end=root.end, attributes=attributes)
            for i, (_, attributes) in enumerate(malformed(wrong))
        ]
        refused = {"request": {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": wrong}}
        error = 'HTTP 400: {"error": {"message": "tools must be a list"}}'
        calls.append(Span(id="r", parent=root.id, name=LLM_CALL, start=root.start, end=root.end, error=error,
                          attributes=refused))  # fmt: skip
        rollouts.append(attrs.evolve(rollout, trace=Trace(rollout_id=rollout.id, spans=(root, *calls)), triplets=()))
    RunDirectory(directory).write_rollouts(rollouts, mode="train", step=1)
    RunDirectory(directory).write_rollouts(rollouts, mode="report", step=0)
    RunDirectory(directory).write_rollouts(rollouts, mode="report", step=1)
    return directory


def test_every_view_of_a_run_shows_malformed_calls(run: Path, tmp_path: Path) -> None:
    def command(*words: str) -> str:
        done = CliRunner().invoke(main, list(words), catch_exceptions=False)
        assert done.exit_code in (0, 1), done.output
        return done.output

    command("report", str(run), "--out", str(tmp_path / "page.html"))
    assert "tools must be a list" in (tmp_path / "page.html").read_text()
    command("why", str(run))
    command("export-traces", str(run), "--file", str(tmp_path / "traces.jsonl"))
    spans = load_run(run).traces()
    assert len(spans) > len(WRONG) * len(list(malformed(1)))
    with serving(run) as link:
        for path in (
            "run/run",
            "run/run/examples",
            "run/run/traces",
            *(f"run/run/rollout/train-1-{i}" for i in range(11)),
        ):
            reply = httpx.get(link + path, follow_redirects=True, timeout=60)
            assert reply.status_code == 200, (path, reply.text)
