"""The templates of the pages, for the file and for the live page, and where their links lead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

import attrs

from agentrig.figures import count, duration, figure, percent
from agentrig.ledger import REASONS
from agentrig.text import printable
from agentrig.view.svg import key, points_of, svg

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


@cache
def templates(*packages: str) -> Environment:
    """Return Jinja's environment: the pages' templates and those of more packages; all values are escaped.

    Control characters, and what turns the direction of text, are escapes too, as in a terminal.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    found = ("agentrig.view", *packages)
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("agentrig.view.watch", "static"), *map(PackageLoader, found)]),
        autoescape=True,
        finalize=lambda value: printable(value.replace("\r\n", "\n")) if type(value) is str else value,
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
        key=key,
        points=points_of,
        explained=explained,
        commands=commands,
        look=lambda status: {"finished": "good", "running": "running", "stopped": ""}.get(status, "bad"),
        split=lambda mode: "held out" if mode == "report" else mode,
        path=lambda text: quote(str(text), safe=""),
    )
    return environment


def explained(text: str) -> Markup:
    """Return a text in which the ledger's reasons say on a page what they mean."""
    from markupsafe import Markup, escape

    parts = re.split(rf"\b({'|'.join(sorted(REASONS, key=len, reverse=True))})\b", printable(text))
    return Markup("").join(
        Markup('<abbr title="{}">{}</abbr>').format(REASONS[part], part) if part in REASONS else escape(part)
        for part in parts
    )


def commands(text: str) -> Markup:
    """Return a text in which a command, which always ends its line, is set as code."""
    from markupsafe import Markup, escape

    parts = re.split(r"(?m)(?<=: )(agentrig [a-z].*)$", printable(text))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part) for i, part in enumerate(parts)
    )


@attrs.frozen
class Links:
    """Where a page's links lead: on the live page of a `run`, in a file to the `anchors` of rollouts; '' for none."""

    run: str = ""
    anchors: Mapping[str, str] = attrs.field(factory=dict)

    def rollout(self, id: str) -> str:
        """Return where a rollout is shown."""
        if self.run:
            return f"{self.run}/rollout/{quote(str(id), safe='')}"
        return f"#{self.anchors[id]}" if id in self.anchors else ""

    def both(self, one: str, other: str) -> str:
        """Return where two rollouts are shown side by side."""
        return f"{self.rollout(one)}?{urlencode({'against': other})}" if self.run else ""

    def task(self, id: str) -> str:
        """Return where a task's rollouts are shown."""
        return f"{self.run}/traces?task={quote(str(id), safe='')}" if self.run else ""
