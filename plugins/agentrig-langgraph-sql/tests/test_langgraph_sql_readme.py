from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from agentrig_langgraph_sql.__main__ import main
from agentrig_langgraph_sql.agent import SqlAgentConfig
from agentrig_langgraph_sql.graph import build_graph, mermaid

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.M | re.S)


def block(kind: str) -> str:
    (text,) = [text for found, text in BLOCKS if found == kind]
    return str(text)


def test_the_picture_is_the_graphs() -> None:
    assert block("mermaid").strip() == mermaid(build_graph()).strip()


def test_the_settings_are_the_agents_with_their_defaults() -> None:
    section = tomllib.loads(block("toml"))["agent"]
    assert section.pop("use") == "langgraph-sql"
    assert SqlAgentConfig(**section) == SqlAgentConfig()


def test_the_command_answers(
    chat_server: Any, zoo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    export, command = block("bash").replace("http://127.0.0.1:8000/v1", chat_server.url).splitlines()
    for word in shlex.split(export)[1:]:
        monkeypatch.setenv(*word.split("=", 1))
    words = shlex.split(command.replace("shop.sqlite", str(zoo)))
    assert words[:3] == ["python", "-m", "agentrig_langgraph_sql"]
    chat_server.replies = ["```sql\nSELECT 1\n```", "VERDICT: CORRECT"]
    assert main(words[3:]) == 0
    assert capsys.readouterr().out == "SELECT 1\n"
    assert chat_server.headers[0]["authorization"] == "Bearer none"


def test_the_snippet_runs(chat_server: Any, zoo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = block("python").replace("http://127.0.0.1:8000/v1", chat_server.url).replace("shop.sqlite", str(zoo))
    chat_server.replies = ["```sql\nSELECT 7 AS n\n```", "VERDICT: CORRECT"]
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "SELECT 7 AS n n\n7\n"
