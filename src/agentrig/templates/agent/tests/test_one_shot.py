"""Tests what `one-shot` does."""

from pathlib import Path

from agentrig_one_shot import Agent, Config

from agentrig.testing.scripted import ScriptedServer


def test_the_schema_is_in_the_prompt(scripted_server: ScriptedServer, one_table_database: Path) -> None:
    scripted_server.script = " SELECT name FROM animal\n"
    given = {"database": str(one_table_database), "question": "Which names?"}
    assert Agent(Config(max_tokens=7))(given, scripted_server.endpoint()) == "SELECT name FROM animal"
    (body,) = scripted_server.bodies()
    assert body["messages"][0]["content"] == "table animal: id name species kg\nWhich names?"
    assert body["max_tokens"] == 7
