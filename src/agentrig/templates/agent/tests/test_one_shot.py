"""Tests what `one-shot` does."""

import sqlite3
from contextlib import closing
from pathlib import Path

from agentrig_one_shot import Agent, Config

from agentrig.testing.scripted import ScriptedServer


def test_the_schema_is_in_the_prompt(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    database = str(tmp_path / "shop.sqlite")
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE bike (model TEXT, price INTEGER)")
    scripted_server.script = " SELECT model FROM bike\n"
    answer = Agent(Config(max_tokens=7))(
        {"database": database, "question": "Which models?"}, scripted_server.endpoint()
    )
    assert answer == "SELECT model FROM bike"
    (body,) = scripted_server.bodies()
    assert body["messages"][0]["content"] == "table bike: model price\nWhich models?"
    assert body["max_tokens"] == 7
