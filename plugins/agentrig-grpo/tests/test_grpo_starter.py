"""The model that `agentrig warmup` begins with: small, served with tools, able to copy, and made by its script."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tool_models
from agentrig_grpo import checkpoint
from agentrig_grpo.context import context_of
from agentrig_grpo.naming import SHIPPED, model_directory
from agentrig_grpo.server.chat import Chat
from openai import OpenAI

from .conftest import training_scripts

STARTER = model_directory("starter")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return checkpoint.load_tokenizer(STARTER)


@pytest.fixture(scope="module")
def scripts() -> Any:
    with training_scripts("make_starter", "starter_examples", "starter_tokenizer") as found:
        yield found


@pytest.fixture(scope="module")
def client(tokenizer: Any) -> Any:
    models = tool_models.ToolModels(STARTER, {"starter": tokenizer})
    with (
        tool_models.served(models, "starter") as url,
        OpenAI(base_url=url, api_key="none", max_retries=0) as found,
    ):
        yield found


def test_all_shipped_models_together_are_small() -> None:
    def size(folder: Path) -> int:
        return sum(file.stat().st_size for file in folder.iterdir())

    assert sorted(folder.name for folder in SHIPPED.iterdir()) == ["mini", "starter"]
    assert size(STARTER) <= 5_000_000
    model = checkpoint.load_model(STARTER)
    assert sum(p.numel() for p in model.parameters()) < 1_500_000
    assert context_of(model.config, 0) == 2048


def asked(client: OpenAI, messages: Any, tools: Any) -> tuple[str | None, list[tuple[str, Any]]]:
    """Return what the model says greedily: the text, and calls with their arguments as objects."""
    reply = client.chat.completions.create(
        model="tiny", messages=messages, tools=tools, temperature=0, max_tokens=64
    ).choices[0]
    calls: Any = reply.message.tool_calls or ()
    return reply.message.content, [(c.function.name, json.loads(c.function.arguments)) for c in calls]


def test_it_calls_a_tool_and_copies_a_value_out_of_the_answer(client: OpenAI) -> None:
    """Nothing here is of a domain: the names are made up, and the script never saw this conversation."""
    parameters = {"type": "object", "properties": {"name": {"type": "string"}}}
    about = {"get_glimber": "Return the glimber of a plonk.", "get_drossel": "Return the drossel of a plonk."}
    tools = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}
        for name, text in about.items()
    ]
    messages: list[Any] = [{"role": "user", "content": "what is the drossel of marvet?"}]
    _, calls = asked(client, messages, tools)
    assert calls == [("get_drossel", {"name": "marvet"})]
    made = {"name": "get_drossel", "arguments": '{"name": "marvet"}'}
    for value in (4817, 203, "QX-71", "vellow"):
        again = [
            *messages,
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": made}]},
            {"role": "tool", "tool_call_id": "c", "content": json.dumps({"drossel": value})},
        ]
        assert asked(client, again, tools) == (str(value), [])


def test_its_tokenizer_is_the_one_that_the_script_makes(scripts: Any, tmp_path: Path) -> None:
    scripts.starter_tokenizer.save(tmp_path, 2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (STARTER / name).read_text(), name


def test_the_server_renders_prompts_as_in_training(tokenizer: Any, scripts: Any) -> None:
    rng, chat = random.Random(1), Chat(tokenizer)
    for _ in range(60):
        found = scripts.starter_examples.conversation(rng, 1.0)
        (ids, weights), parts = scripts.make_starter.encoded([found], tokenizer.backend_tokenizer)[0], [*found.messages]
        assert parts[-1]["role"] == "assistant"
        taught = ids[: len(ids) - _last(weights, scripts.make_starter.REPLY)].tolist()
        assert taught == [*chat.prompt_ids(parts[:-1], tools=found.tools)]


def _last(weights: Any, reply: int) -> int:
    """Return the number of tokens of the last reply."""
    count = 0
    while weights[len(weights) - 1 - count] == reply:
        count += 1
    return count


def test_what_is_put_into_calls_has_been_read_before(scripts: Any) -> None:
    """So that copying is what is learned, and no fact: each value of a call is in the conversation before it."""
    rng, values = random.Random(2), 0
    for _ in range(200):
        found = scripts.starter_examples.conversation(rng, 1.0, ["choose", "tools", "act"])
        before = ""
        for message in found.messages:
            for call in message.get("tool_calls", ()):
                for value in call["function"]["arguments"].values():
                    values += 1
                    assert scripts.starter_examples.shown(value) in before, found
            before += message["content"]
    assert values > 400


@pytest.mark.slow
def test_the_script_makes_a_model(scripts: Any, tmp_path: Path) -> None:
    words = "--steps 12 --width 32 --layers 2 --inner 64 --context 512 --tokens 1024 --level 0.1 --longest 400"
    figures = scripts.make_starter.main(
        ["--out", str(tmp_path), *words.split(), "--families", "copy,act", "--held-out", "8"]
    )
    assert set(figures) == {"copy", "act"}
    model, tokenizer = checkpoint.load_model(tmp_path), checkpoint.load_tokenizer(tmp_path)
    assert (model.config.hidden_size, model.config.num_hidden_layers, len(tokenizer)) == (32, 2, 1024)
    assert context_of(model.config, 0) == 512
