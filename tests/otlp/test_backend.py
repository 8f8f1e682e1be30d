"""A run's spans, sent to a real backend and read back by its own API.

It needs a running Arize Phoenix, best in an environment of its own: `pip install arize-phoenix`, `phoenix serve`, and
then `PHOENIX_URL=http://127.0.0.1:6006 pytest -m slow tests/otlp/test_backend.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from agentrig.cli.entry import main
from agentrig.otlp.exporting import origin_of
from agentrig.otlp.spans import spans_of
from agentrig.run.directory import RunDirectory
from agentrig.run.rows import stored_rollouts

MICROSECOND = 1000
"""In nanoseconds: Phoenix keeps no finer times."""


def stored(url: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the spans that Phoenix has: trace and span id to the span."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    cursor = None
    while True:
        asked = {"limit": 500, **({"cursor": cursor} if cursor else {})}
        page = httpx.get(f"{url}/v1/projects/default/spans/otlpv1", params=asked, timeout=120).raise_for_status().json()
        for span in page["data"]:
            found[span["trace_id"], span["span_id"]] = span
        cursor = page["next_cursor"]
        if not cursor:
            return found


def value(attribute: dict[str, Any]) -> Any:
    ((kind, held),) = ((k, v) for k, v in attribute["value"].items() if v is not None)
    return int(held) if kind == "int_value" else held


@pytest.mark.slow
def test_phoenix_has_the_spans_of_the_run(ended_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    url = os.environ.get("PHOENIX_URL")
    if not url:
        pytest.skip("no Phoenix is there: start one, and name it by PHOENIX_URL")
    monkeypatch.delenv("PHOENIX_URL")
    run = ended_run()
    done = CliRunner().invoke(main, ["export-traces", str(run), "--otlp", url], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    origin = origin_of(RunDirectory(run).read_json("manifest.json")["config"], run.name, content=True)
    rollouts = [r for batch in stored_rollouts(run / "rollouts", size=16) for r in batch]
    wanted = {
        (f"{s.context.trace_id:032x}", f"{s.context.span_id:016x}"): s for r in rollouts for s in spans_of(r, origin)
    }
    assert len(wanted) > 60
    for _ in range(60):  # Phoenix takes spans in the background
        seen = {key: span for key, span in stored(url).items() if key in wanted}
        if len(seen) == len(wanted):
            break
    assert set(seen) == set(wanted)
    for key, span in wanted.items():
        there = seen[key]
        assert there["name"] == span.name
        assert (there.get("parent_span_id") or None) == (span.parent and f"{span.parent.span_id:016x}")
        assert abs(int(there["start_time_unix_nano"]) - span.start_time) <= MICROSECOND
        assert abs(int(there["end_time_unix_nano"]) - span.end_time) <= MICROSECOND
        operation = [value(a) for a in there["attributes"] if a["key"] == "gen_ai.operation.name"]
        assert operation == [o for o in [span.attributes.get("gen_ai.operation.name")] if o]
        assert [e["name"] for e in there.get("events") or ()] == [e.name for e in span.events]
