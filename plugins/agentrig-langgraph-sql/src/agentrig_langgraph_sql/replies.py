"""Parses the model's replies: the query and the verdict."""

from __future__ import annotations

import re

from agentrig_langgraph_sql.prompts import FULL, Prompts

_FENCE = "```"
_STATEMENT = re.compile(r"(?i)\s*(select|with|values|explain|insert|update|delete|create|drop|alter|pragma|replace)\b")
_TAG_LINE = re.compile(r"[ \t]*[\w+#.-]+[ \t]*\r?\n")
_TAG_WORD = re.compile(r"(?i)[ \t]*sql(?:ite3?)?\s+")


def sql_of(reply: str, former: str | None = None) -> str:
    r"""Return the query in a reply: its last fenced code block that is not empty.

    An unclosed block at the end counts too, because stop strings and token limits can cut it off.

    Args:
        reply: The model's reply.
        former: The query to keep when the reply has no block; None takes the whole reply instead.

    Returns:
        The query without surrounding space; may be empty.

    Example:
        >>> sql_of("Sure:\n```sql\nSELECT 1\n```\nDone.")
        'SELECT 1'
    """
    blocks = [block for part in reply.split(_FENCE)[1::2] if (block := _without_tag(part).strip())]
    if blocks:
        return blocks[-1]
    return reply.strip() if former is None else former


def _without_tag(block: str) -> str:
    """Drop the language name of a code block: a separate line, or `sql` before the query."""
    if _STATEMENT.match(block):
        return block
    tag = _TAG_LINE.match(block) or _TAG_WORD.match(block)
    return block[tag.end() :] if tag else block


def verdict_of(reply: str, prompts: Prompts = FULL) -> bool:
    """Return whether a check's reply accepts the query.

    Args:
        reply: The model's reply. Only the exact phrases count (case included, and not as part of a
            longer word); if there are several, the last one applies; a reply without any refuses.
        prompts: The preset with the phrases.
    """
    # The longer phrase first: one may be part of the other.
    phrases = sorted((prompts.correct, prompts.incorrect), key=len, reverse=True)
    found = re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, phrases))})(?!\w)", reply)
    return bool(found) and found[-1] == prompts.correct
