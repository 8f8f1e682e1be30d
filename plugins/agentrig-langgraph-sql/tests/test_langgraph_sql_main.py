from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agentrig_langgraph_sql.__main__ import main

REPLIES = ["```sql\nSELECT nme FROM animal\n```", "VERDICT: INCORRECT", "```sql\nSELECT name FROM animal\n```"]


@pytest.mark.parametrize("variable", ["OPENAI_BASE_URL", "OPENAI_API_BASE"])
def test_it_answers_at_the_server_of_the_environment(
    chat_server: Any, zoo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str
) -> None:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, chat_server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    chat_server.replies = [*REPLIES, "VERDICT: CORRECT"]
    assert main(["--database", str(zoo), "--model", "m", "Who lives here?"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "SELECT name FROM animal\n"
    assert "--- rewrite_query\nSELECT name FROM animal" in shown.err
    assert "Error: no such column: nme" in shown.err
    assert chat_server.headers[0]["authorization"] == "Bearer sesame"
    assert chat_server.requests[0]["temperature"] == 0.0


def test_it_takes_five_turns_unless_told_otherwise(chat_server: Any, zoo: Path) -> None:
    chat_server.replies = ["SELECT 1"]  # no verdict, so never accepted
    question = ["--database", str(zoo), "--model", "m", "--base-url", chat_server.url, "Who lives here?"]
    assert main(question) == 0
    assert len(chat_server.requests) == 10
    assert main([*question, "--max-turns", "2"]) == 0
    assert len(chat_server.requests) == 14


def test_the_graph_is_printed_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--graph"]) == 0
    assert "write_query --> execute_query" in capsys.readouterr().out


def test_failures_end_with_status_1_and_their_cause(
    chat_server: Any, zoo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat_server.replies = [(401, b'{"error": {"message": "who are you?"}}')]
    where = ["--model", "m", "--base-url", chat_server.url]
    assert main(["--database", str(zoo), *where, "Who?"]) == 1
    assert "who are you?" in capsys.readouterr().err
    assert main(["--database", str(zoo.with_name("gone.sqlite")), *where, "Who?"]) == 1
    assert "gone.sqlite" in capsys.readouterr().err


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["Who?"])
    assert "missing: --database, --model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["Who?", "--database", "x", "--model", "m", "--max-turns", "0"])
    assert "it goes from 1 to 33" in capsys.readouterr().err


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "agentrig_langgraph_sql", "--help"]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert "--database" in run.stdout
