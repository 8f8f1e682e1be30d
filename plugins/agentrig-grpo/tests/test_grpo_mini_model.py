"""The shipped starting model: small, loadable anywhere, and prompted at run time exactly as in training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agentrig_grpo import checkpoint
from agentrig_grpo.naming import model_directory
from agentrig_grpo.server.chat import Chat

from .conftest import training_scripts

MINI = model_directory("mini")
TRAINING = Path(__file__).parents[1] / "training"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return checkpoint.load_tokenizer(MINI)


@pytest.fixture(scope="module")
def scripts() -> Any:
    with training_scripts("examples", "tokenizer", "words") as found:
        yield found


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from agentrig_spider.tasks.mini_sql import MiniSql, MiniSqlConfig

    return MiniSql(MiniSqlConfig(cache=str(tmp_path_factory.mktemp("cache"))))


def test_it_is_a_qwen2_of_a_million_parameters_in_at_most_5_mb() -> None:
    assert (MINI / "model.safetensors").stat().st_size <= 5_000_000
    config = json.loads((MINI / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["tie_word_embeddings"] is True
    model = checkpoint.load_model(MINI)
    assert sum(p.numel() for p in model.parameters()) < 1_250_000


def test_its_tokenizer_names_a_class_that_every_loader_has() -> None:
    config = json.loads((MINI / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["chat_template"]
    assert config["eos_token"] == "<|end|>"


def test_its_template_writes_calls_of_tools_that_the_server_reads(tokenizer: Any) -> None:
    """So that `agentrig warmup --model mini` can start an agent with tools."""
    form = Chat(tokenizer).tool_form
    assert not isinstance(form, str), form
    call = {"type": "function", "function": {"name": "add", "arguments": {"item": "pens", "count": 2}}}
    text = tokenizer.apply_chat_template([{"role": "assistant", "content": "", "tool_calls": [call]}], tokenize=False)
    assert [(c.name, c.arguments) for c in form.read(text, []).calls] == [("add", '{"item": "pens", "count": 2}')]


def test_transformers_reads_its_replies_without_the_prompt(tokenizer: Any) -> None:
    """As `transformers serve` does, with a model that was exported."""
    prefix = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
    )
    said = tokenizer.parse_response("select name<|end|>", prefix=prefix)
    assert (said["role"], said["content"]) == ("assistant", "select name")
    call = '<tool_call>\n{"name": "add", "arguments": {"item": "pens"}}\n</tool_call><|end|>'
    (made,) = tokenizer.parse_response(call, prefix=prefix)["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": {"item": "pens"}}


def test_its_tokenizer_is_the_one_that_the_script_makes(scripts: Any, tmp_path: Path) -> None:
    scripts.tokenizer.save(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (MINI / name).read_text(), name


def test_every_name_and_value_is_one_token_with_and_without_a_space(tokenizer: Any, scripts: Any) -> None:
    for word in (*scripts.words.names(), *scripts.words.values()):
        assert len(tokenizer(word)["input_ids"]) == 1, word
        assert len(tokenizer(f" {word}")["input_ids"]) == 1, word


def test_the_server_renders_prompts_as_in_training(tokenizer: Any, scripts: Any, tasks: Any) -> None:
    from agentrig_langgraph_sql.database import run_query
    from agentrig_langgraph_sql.prompts import SHORT
    from agentrig_langgraph_sql.recipes import MINI as RECIPE
    from agentrig_langgraph_sql.schema import schema_text

    assert RECIPE.settings["agent"]["execution_truncate"] == scripts.examples.RESULT_LIMIT
    chat = Chat(tokenizer)
    for task in tasks.load("test")[:20]:
        path = task.input["database"]
        query = task.private["gold"]
        fields = {
            "schema": schema_text(path, style=SHORT.schema_style),
            "question": task.input["question"],
            "query": query,
            "result": run_query(path, query).text(scripts.examples.RESULT_LIMIT, header=SHORT.header),
        }
        for template in (SHORT.write, SHORT.check, SHORT.rewrite):
            taught = scripts.examples.encode(tokenizer, scripts.examples.chat(template, query, **fields))
            assert taught.prompt_ids == chat.prompt_ids(template.messages(**fields))
            assert chat.text(taught.response_ids) == query


def test_the_training_data_shows_results_as_the_agent_does(scripts: Any, tasks: Any) -> None:
    import sqlite3

    from agentrig_langgraph_sql.database import run_query
    from agentrig_langgraph_sql.prompts import SHORT
    from agentrig_langgraph_sql.schema import schema_text
    from agentrig_spider.tasks.domains import SEEN

    by_name = {domain.name: domain for domain in SEEN}
    for task in tasks.load("dev")[:20]:
        path = task.input["database"]
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        database = scripts.examples.Database(by_name[task.input["db_id"]], connection)
        assert database.schema == schema_text(path, style=SHORT.schema_style)
        for query in (task.private["gold"], "SELECT nothing FROM nowhere", "SELECT"):
            shown = run_query(path, query).text(scripts.examples.RESULT_LIMIT, header=SHORT.header)
            assert database.run(query)[1] == shown
        connection.close()


@pytest.mark.slow
def test_the_script_makes_a_model(tmp_path: Path) -> None:
    words = [sys.executable, str(TRAINING / "make_mini.py"), "--out", str(tmp_path / "m")]
    words += ["--questions", "48", "--epochs", "0.1", "--labelled", "12", "--passes", "2", "--measured", "8"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert set(figures) == {"dev", "test", "unseen"}
    checkpoint.load_model(tmp_path / "m")
