"""The words that `mini` knows as single tokens, taken from the task set itself."""

from __future__ import annotations

import re

from agentrig_spider.tasks.domains import CATEGORIES, NUMBERS, PEOPLE, SEEN, SURNAMES, TITLES, UNSEEN
from agentrig_spider.tasks.wordings import CONDITIONS, INTENTS

_WORD = re.compile(r"[A-Za-z]+")
_GAP = re.compile(r"[<{].*?[>}]")
# ruff: noqa: SIM905 (words read better as a line than as a list)
_REST = """
SELECT FROM WHERE AND GROUP BY ORDER DESC LIMIT HAVING JOIN USING count max min avg sum id table check correct incorrect
Error no such column near syntax error rows shown cut off of ambiguous name misuse aggregate
""".split()


def names() -> list[str]:
    """Return all names of tables and columns, of the seen and the unseen databases."""
    found: dict[str, None] = {}
    for domain in (*SEEN, *UNSEEN):
        for table in (domain.parent, domain.child):
            columns = [table.label, *(c.name for c in table.categories), *(n.name for n in table.numbers)]
            found |= dict.fromkeys([table.name, *columns])
    return list(found)


def values() -> list[str]:
    """Return all words that stand in text columns."""
    return [*PEOPLE, *SURNAMES, *TITLES, *dict.fromkeys(v for c in CATEGORIES.values() for v in c.values)]


def others() -> list[str]:
    """Return the words of the questions, of SQL and of the agent's prompts."""
    texts = [frame for intent in INTENTS for frame in intent.frames]
    texts += [frame for frames in CONDITIONS.values() for frame in frames]
    texts += [category.phrase for category in CATEGORIES.values()]
    texts += [category.plural for category in CATEGORIES.values()]
    texts += [f"{name[:-1]}ies" for name in NUMBERS if name.endswith("y")]
    texts += [f"{n.most} {n.least}" for n in NUMBERS.values()]
    found = [word for text in texts for word in _WORD.findall(_GAP.sub(" ", text))]
    return list(dict.fromkeys([*_REST, *found]))
