"""Where the links of the views lead: nowhere by default, to anchors in a file, to addresses of the live page."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


class Links:
    """Gives the views an address for each thing; an empty one leaves the link out."""

    def rollout(self, id: str) -> str:
        """Return where a rollout is shown."""
        return ""

    def task(self, id: str) -> str:
        """Return where a task's rollouts are shown."""
        return ""


@attrs.frozen
class Anchors(Links):
    """Links within one file.

    Attributes:
        rollouts: The anchor of each rollout that the file has, by id.
    """

    rollouts: Mapping[str, str]

    def rollout(self, id: str) -> str:
        """Return a rollout's place in the file, if it has one."""
        return f"#{self.rollouts[id]}" if id in self.rollouts else ""
