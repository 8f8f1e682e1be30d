"""The templates of the pages, for the file and for the live page, and where their links lead."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import quote

import attrs

from agentrig.figures import percent
from agentrig.view.svg import svg
from agentrig.view.text import count, duration, figure

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def templates(*packages: str) -> Environment:
    """Return Jinja's environment: the pages' templates and those of more packages; all values are escaped."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in ("agentrig.view", *packages)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        count=count,
        seconds=duration,
        percent=percent,
        figure=figure,
        svg=svg,
        path=lambda text: quote(str(text), safe=""),
    )
    return environment


class Links:
    """Gives a page an address for each thing; an empty one leaves the link out."""

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


@attrs.frozen
class Addresses(Links):
    """Links of the live page.

    Attributes:
        run: The address of the run.
    """

    run: str

    def rollout(self, id: str) -> str:
        """Return a rollout's address."""
        return f"{self.run}/rollout/{quote(str(id), safe='')}"

    def task(self, id: str) -> str:
        """Return the address of a task's rollouts."""
        return f"{self.run}/traces?task={quote(str(id), safe='')}"
