"""The lines of metrics in memory: as they were, and small."""

from __future__ import annotations

import gc
import json
import tracemalloc
from typing import Any

from agentrig.run.lines import Lines


def line_of(step: int) -> dict[str, Any]:
    """Return a line like those of a real step: some sixty figures and twenty digests."""
    figures = {f"figure {i}": step / (i + 1) for i in range(60)}
    digests = {f"model.layers.{i}": f"{step * 7919 + i:032x}" for i in range(20)}
    return {"step": step, "algorithm": figures, "digests": {"weights": digests}, "loss": float("inf"), "nodes": None}


def test_lines_come_back_as_they_were() -> None:
    lines = Lines([line_of(1), line_of(2)])
    lines.append(line_of(3))
    assert len(lines) == 3
    assert list(lines) == [line_of(step) for step in (1, 2, 3)]
    assert lines[-1] == line_of(3)
    assert lines[1:] == [line_of(2), line_of(3)]
    assert not Lines()


def test_a_long_run_keeps_little_of_each_step() -> None:
    text = json.dumps(line_of(1))
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        lines = Lines()
        for step in range(300):
            lines.append(line_of(step))
        held = (tracemalloc.get_traced_memory()[0] - before) / len(lines)
    finally:
        tracemalloc.stop()
    assert held < len(text), f"{held:.0f} bytes a step; as text it is {len(text)}"
