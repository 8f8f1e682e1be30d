"""Parses the verdict in the model's replies."""

from __future__ import annotations

import re

from agentrig_langgraph_sql.prompts import FULL, Prompts


def verdict_of(reply: str, prompts: Prompts = FULL) -> bool:
    """Return whether a check's reply accepts the query.

    Only the exact phrases count (case included, and not as part of a longer word); if there are several, the last one
    applies; a reply without any refuses.
    """
    # The longer phrase first: one may be part of the other.
    phrases = sorted((prompts.correct, prompts.incorrect), key=len, reverse=True)
    found = re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, phrases))})(?!\w)", reply)
    return bool(found) and found[-1] == prompts.correct
