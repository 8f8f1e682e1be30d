from __future__ import annotations

import json
import shutil

import pytest
from agentrig_grpo import checkpoint
from agentrig_grpo.context import check_context, context_of
from agentrig_grpo.server.chat import Chat
from click.testing import CliRunner
from transformers import GPT2Config, MambaConfig, Qwen2Config

from agentrig.cli.entry import main
from agentrig.errors import ConfigError


def copied(model_dir, tmp_path):
    return shutil.copytree(model_dir, tmp_path / "model")


def test_a_context_is_the_models_own_or_a_shorter_one():
    config = Qwen2Config(max_position_embeddings=512)
    assert (context_of(config, 0), context_of(config, 200)) == (512, 200)
    assert context_of(GPT2Config(n_positions=64), 0) == 64
    with pytest.raises(ConfigError, match=r"max_length = 513: this model's context is 512 tokens"):
        context_of(config, 513)


def test_a_stretched_rotary_embedding_stretches_the_context():
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512}
    config = Qwen2Config(max_position_embeddings=512, rope_parameters=rope)
    assert context_of(config, 2048) == 2048
    with pytest.raises(ConfigError, match="2048 tokens"):
        context_of(config, 2049)


LATE = """
from pathlib import Path
from agentrig import AgentSpec, hookimpl

def build(config):
    Path("built").touch()
    return lambda task_input, endpoint: ""

@hookimpl
def register_agents():
    yield AgentSpec(name="late", summary="Says when it is built.", build=build)
"""


@pytest.mark.parametrize("command", ["train", "dev", "forecast"])
def test_a_model_that_is_not_there_is_named_before_a_runner_starts(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "late.py").write_text(LATE)
    words = ["mini", "--plugin", "late.py", "--agent", "late", "algorithm.model=nowhere"]
    result = CliRunner().invoke(main, [command, *words])
    assert result.exit_code == 1
    assert "[algorithm] model = 'nowhere': there is no such directory" in result.stderr
    assert "starting the agent" not in result.stderr
    assert "algorithm.model=DIR, or --model DIR in agentrig run; agentrig warmup makes a small one" in result.stderr
    own = CliRunner().invoke(main, [command, *words[:-1], "algorithm.model=models/nowhere"])
    assert "  agentrig warmup mini --agent late --plugin late.py --until 0.2 --out models/nowhere\n" in own.stderr
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__") == ["late.py"], "nothing has started"


def test_a_reply_must_leave_room_for_a_prompt(model_dir, caplog):
    with pytest.raises(ConfigError, match=r"algorithm\.max_tokens=128 leaves prompts 384; .* with --context TOKENS"):
        check_context(model_dir, max_length=0, max_tokens=512)
    with pytest.raises(ConfigError, match=r"for longer ones, raise algorithm\.max_length"):
        check_context(model_dir, max_length=300, max_tokens=512)
    assert check_context(model_dir, max_length=0, max_tokens=256) == 512
    assert not caplog.text
    assert check_context(model_dir, max_length=300, max_tokens=200) == 300
    assert "leaves prompts 100 of the context's 300 tokens" in caplog.text


def test_an_unknown_context_is_logged(tmp_path, caplog):
    MambaConfig().save_pretrained(tmp_path)
    assert check_context(tmp_path, max_length=0, max_tokens=1) == 4096
    assert "algorithm.max_length sets it" in caplog.text


def test_a_tokenizer_without_a_chat_template_is_named_and_a_template_beside_it_is_taken(model_dir, tmp_path):
    directory = copied(model_dir, tmp_path)
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    template = settings.pop("chat_template", None) or (directory / "chat_template.jinja").read_text()
    file.write_text(json.dumps(settings))
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=r"has no chat template.*instruct variant, or put a chat_template\.jinja"):
        checkpoint.load_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(template)
    assert checkpoint.load_tokenizer(directory).chat_template == template


def test_a_tokenizer_of_another_model_is_refused(make_model, tokenizer):
    with pytest.raises(ConfigError, match=r"tokens up to number 299, and the model's embedding 100 rows"):
        checkpoint.check_vocabulary(make_model(vocab=100), tokenizer)
    checkpoint.check_vocabulary(make_model(vocab=300), tokenizer)


def test_kept_prompts_are_bounded_by_their_tokens(tokenizer, monkeypatch):
    monkeypatch.setattr("agentrig_grpo.server.chat.KEPT_TOKENS", 100)
    chat, rendered = Chat(tokenizer), []
    render = chat.render
    monkeypatch.setattr(chat, "render", lambda text, most: rendered.append(text) or render(text, most))
    for i in range(50):
        messages = [{"role": "user", "content": f"order {i}"}]
        first = chat.prompt_ids(messages)
        assert chat.prompt_ids(messages) == first
        assert sum(map(len, chat._prompts.values())) == chat._kept <= 100
    assert len(rendered) == 50
    assert len(chat._prompts) > 3
