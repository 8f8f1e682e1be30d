from __future__ import annotations

import pytest
from agentrig_langgraph_sql.prompts import FIELDS, FULL, PRESETS, SHORT
from agentrig_langgraph_sql.replies import verdict_of
from agentrig_spider.queries import sql_of

VALUES = {name: f"<{name} {{x}}>" for name in FIELDS}


@pytest.mark.parametrize(
    ("reply", "query"),
    [
        ("SELECT 1", "SELECT 1"),
        ("  SELECT 1;\n", "SELECT 1;"),
        ("```sql\nSELECT 1\n```", "SELECT 1"),
        ("```\nSELECT 1\n```", "SELECT 1"),
        ("```SELECT 1```", "SELECT 1"),
        ("```sql SELECT 1```", "SELECT 1"),
        ("```SELECT\n 1```", "SELECT\n 1"),
        ("```SQLite\r\nSELECT 1\r\n```", "SELECT 1"),
        ("First:\n```sql\nSELECT 1\n```\nbetter:\n```sql\nSELECT 2\n```\nDone.", "SELECT 2"),
        ("Cut off:\n```sql\nSELECT 1 FROM", "SELECT 1 FROM"),
        ("```sql\nSELECT 1\n```\n```", "SELECT 1"),
        ("", ""),
    ],
)
def test_a_written_query_is_the_last_block_else_the_whole_reply(reply: str, query: str) -> None:
    assert sql_of(reply) == query


@pytest.mark.parametrize(
    ("reply", "accepted"),
    [
        ("All good.\nVERDICT: CORRECT", True),
        ("VERDICT: INCORRECT", False),
        ("VERDICT: INCORRECT\nNo, wait.\nVERDICT: CORRECT", True),
        ("VERDICT: CORRECT\nNo, wait.\nVERDICT: INCORRECT.", False),
        ("**VERDICT: CORRECT**", True),
        ("The verdict: correct", False),
        ("VERDICT: CORRECTED", False),
        ("It is correct.", False),
        ("", False),
    ],
)
def test_the_last_exact_phrase_is_the_verdict(reply: str, accepted: bool) -> None:
    assert verdict_of(reply) is accepted


@pytest.mark.parametrize(("reply", "accepted"), [("correct", True), ("incorrect", False), ("yes", False), ("", False)])
def test_the_short_verdict_is_one_word(reply: str, accepted: bool) -> None:
    assert verdict_of(reply, SHORT) is accepted


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda p: p.name)
def test_templates_fill_every_gap_and_leave_braces_in_values_alone(preset: object) -> None:
    for template in (preset.write, preset.check, preset.rewrite):  # type: ignore[attr-defined]
        messages = template.messages(**VALUES)
        assert all(set(m) == {"role", "content"} for m in messages)
        assert messages[-1]["role"] == "user"
        assert "<question {x}>" in messages[-1]["content"]


def test_the_full_prompts_ask_for_the_phrases_that_are_parsed() -> None:
    assert "```sql" in FULL.write.messages(**VALUES)[0]["content"]
    assert "```sql" in FULL.rewrite.messages(**VALUES)[0]["content"]
    check = FULL.check.messages(**VALUES)[0]["content"]
    assert FULL.correct in check
    assert FULL.incorrect in check


def test_a_missing_field_is_named() -> None:
    with pytest.raises(KeyError, match="schema"):
        FULL.write.messages(question="How many?", dialect="SQLite", db_id="zoo")
