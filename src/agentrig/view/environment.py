"""The templates of the views, for the file and for the live page."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from agentrig.figures import percent
from agentrig.view.svg import svg
from agentrig.view.text import count, duration, figure

if TYPE_CHECKING:
    from jinja2 import Environment


def templates(*packages: str) -> Environment:
    """Return Jinja's environment: the views' templates and those of more packages; all values are escaped."""
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
