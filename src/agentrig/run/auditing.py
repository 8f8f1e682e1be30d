"""The auditor in a run: which steps it looks at, and what a finding does."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrig.audit.auditor import Audited, Auditor, audit
from agentrig.audit.sketch import Sketch
from agentrig.audit.verdicts import LINKS
from agentrig.errors import AgentrigError, RunStopped
from agentrig.plan import Plan
from agentrig.run.audit import sources_of
from agentrig.run.files import append_line

log = logging.getLogger(__name__)

FIRST = 2
"""So many first steps of a run, or of a resumed one, are audited, whatever it takes."""

SHARE = 0.02
"""Of the run's time: what the audits of later steps may take."""


class Auditing:
    """Audits the first steps of a run, and then as many as a share of its time allows.

    Args:
        run: The run directory.
        plan: The run's plan; task set and reward are built once more from it.
        first: The first step, of a resumed run too.
        on: Whether to audit at all.
    """

    def __init__(self, run: Path, plan: Plan, *, first: int = 1, on: bool = True) -> None:
        self._run, self._plan, self._on, self._sure = run, plan, on, first + FIRST
        self._auditor: Auditor | None = None
        self._sketch: Sketch | None = None
        self._start, self._spent, self._last = time.monotonic(), 0.0, 0.0
        self._seen: list[Audited] = []

    def sketch(self, step: int) -> Sketch | None:
        """Return the sketch of a step that is to be audited; None for other steps."""
        self._sketch = Sketch(step) if self._due(step) else None
        return self._sketch

    def _due(self, step: int) -> bool:
        """Return whether the audit of a step, if it takes as long as the last one, stays within the share."""
        if not self._on or step < self._sure:
            return self._on
        return self._spent + self._last <= SHARE * (time.monotonic() - self._start)

    def end(self, step: int, line: Mapping[str, Any]) -> None:
        """Audit a step whose sketch was asked for, or one of the first.

        Raises:
            RunStopped: A link does not hold.
        """
        sketch, self._sketch = self._sketch, None
        if not self._on or (sketch is None and step >= self._sure):
            return
        if sketch is not None:
            sketch.write(self._run)
        try:
            if self._auditor is None:
                self._auditor = Auditor(self._run, sources_of(self._plan))
            found = audit(self._auditor, step, sketch, line)
        except AgentrigError as error:
            log.warning("step %d is not audited: %s", step, error)
            return
        self._last = found.seconds
        if step >= self._sure:
            self._spent += found.seconds
        self._seen.append(found)
        (self._run / "audit").mkdir(exist_ok=True)
        append_line(self._run / "audit" / "verdicts.jsonl", json.dumps(found.as_dict()))
        log.info("step %d audited in %.1f s: %d of %d links", step, found.seconds, len(found.looked), len(LINKS))
        if found.faults:
            raise RunStopped(found.words(self._run), cause="audit")

    def summary(self) -> dict[str, Any]:
        """Return the entry of `summary.json`: links that were looked at, why others were not, steps and faults."""
        unseen = {v.link: v.detail for found in self._seen for v in found.verdicts if v.result == "not looked at"}
        looked = set().union(*(found.looked for found in self._seen))
        return {
            "links": len(looked),
            "of": len(LINKS),
            "steps": [found.step for found in self._seen],
            "not_looked_at": {link: why for link, why in unseen.items() if link not in looked},
            "seconds": sum(found.seconds for found in self._seen),
            "faults": [f"{v.link}: {v.detail}" for found in self._seen for v in found.faults],
        }
