"""Starting models of `agentrig warmup`: tokenizer, size, what is learned, and mistakes."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from agentrig_grpo import checkpoint
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.learner import Learner
from agentrig_grpo.naming import model_directory
from agentrig_grpo.own_tokenizer import save_trained
from agentrig_grpo.server.chat import Chat
from agentrig_grpo.starting import affordable, architecture, encode, make_start, parameters_of
from agentrig_grpo.warmup import new_model

from agentrig.demonstrations import Reply, StartingModel, StartPlan, Turn
from agentrig.errors import AgentrigError, ConfigError
from agentrig.plan import resolve
from agentrig.run import warmup

COLORS = str(Path(__file__).resolve().parents[3] / "tests" / "support" / "warmup_plugin.py")


def turn(i: int) -> Turn:
    return Turn(messages=[{"role": "user", "content": f"sort 3{i}2"}], reply=Reply(content=f"sorted: 2 3 {i}"))


TURNS = [turn(i) for i in range(4, 10)]


def made(folder: Path, turns: Any = TURNS, **more: Any) -> StartingModel:
    plan = StartPlan(directory=folder, **{"parameters": 215_000, **more})
    return make_start(GrpoConfig(max_tokens=16), plan, turns)


def trained(folder: Path, turns: Any = TURNS, **more: Any) -> StartingModel:
    """Make a model, and let a run of `sft` train it; the agent plays no part."""
    plan = resolve("colors", overrides=["algorithm.max_tokens=16"], files=[COLORS])
    wanted = StartPlan(directory=folder, **{"parameters": 215_000, **more})
    return warmup.make_start(plan, wanted, warmup.choose_labels(plan, 4, seed=0), turns)


def test_a_new_model_has_the_context_that_the_run_asks_for(tmp_path: Path) -> None:
    """Else `agentrig warmup` makes a model that its own recipe refuses."""
    config = GrpoConfig(max_tokens=16, max_length=900)
    plan = StartPlan(directory=tmp_path / "own", parameters=215_000, passes=1.0)
    assert make_start(config, plan, TURNS).context == 900


@pytest.mark.slow
def test_a_new_model_learns_its_demonstrations_in_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, had, update = torch.get_num_threads(), set[int](), Learner.update

    def updated(self: Any, samples: Any, **more: Any) -> Any:
        had.add(torch.get_num_threads())
        return update(self, samples, **more)

    monkeypatch.setattr(Learner, "update", updated)
    torch.set_num_threads(2)
    try:
        found = trained(tmp_path / "a", passes=200.0, lr=5e-3)
        short = [trained(tmp_path / name, passes=3.0).losses for name in ("b", "c")]
    finally:
        torch.set_num_threads(threads)
    assert had == {1}
    assert found.losses[-1] < 0.1 < found.losses[0]
    assert (len(found.losses), found.steps, len(short[0])) == (50, 200, 3)
    assert short[0] == short[1]
    steps = [made(tmp_path / f"{n}", passes=1.0, tokens_per_batch=n).updates for n in (40, 1000)]
    assert steps[0] > steps[1] == 1
    assert (found.context, found.parameters < 250_000) == (512, True)
    model, tokenizer = checkpoint.load_model(tmp_path / "a"), checkpoint.load_tokenizer(tmp_path / "a")
    # The server reads the same prompt as the warm-up.
    prompt = Chat(tokenizer).prompt_ids([{"role": "user", "content": "sort 372"}])
    assert prompt == encode(turn(7), Chat(tokenizer)).prompt_ids
    out = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
    assert tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True) == "sorted: 2 3 7"


@pytest.mark.slow
def test_a_model_that_diverged_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(AgentrigError, match=r"has diverged, .*smaller learning rate than --lr 1e\+300"):
        trained(tmp_path / "a", lr=1e300, passes=4.0)


@pytest.mark.slow
def test_a_narrow_model_soon_copies_what_it_reads(tmp_path: Path) -> None:
    """Not only the form of a reply: a guess of each word costs 1.3 nats a token."""
    words = ("pens", "cups", "lamps", "books", "chairs", "plants", "towels", "clocks", "bags", "boards", "desks")
    days = ("monday", "tuesday", "wednesday", "thursday", "friday")
    orders = random.Random(0).sample(list(itertools.product(words, range(1, 10), days)), 150)
    turns = [
        Turn(messages=[{"role": "user", "content": f"{n} {word} on {day}"}], reply=Reply(content=f"{day} {word} {n}"))
        for word, n, day in orders
    ]
    threads = torch.get_num_threads()
    try:
        assert trained(tmp_path / "a", turns, passes=20.0, tokens_per_batch=256).losses[-1] < 0.3
    finally:
        torch.set_num_threads(threads)


def test_a_shipped_model_learns_its_demonstrations(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        found = trained(tmp_path / "a", model="mini", passes=4.0, tokens_per_batch=300)
    finally:
        torch.set_num_threads(threads)
    assert found.losses[-1] < found.losses[0]
    model, shipped = checkpoint.load_model(tmp_path / "a"), checkpoint.load_model(model_directory("mini"))
    assert model.config.hidden_size == shipped.config.hidden_size
    assert (found.parameters, found.context) == (shipped.num_parameters(), 512)
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), shipped.parameters(), strict=True)]
    assert all(moved), "all of it is trained, from the shipped weights"
    assert (
        checkpoint.load_tokenizer(tmp_path / "a").get_vocab()
        == checkpoint.load_tokenizer(model_directory("mini")).get_vocab()
    )


def test_tokenizers_write_any_text_and_calls_of_tools(tmp_path: Path) -> None:
    call = {"name": "add", "arguments": {"a": 1, "b": [2]}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    before: Any = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: Any = [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": "1 + 2"},
        {"role": "assistant", "content": None, "tool_calls": [before]},
        {"role": "tool", "content": "3", "tool_call_id": "x"},
    ]
    for vocabulary in (0, 400):
        tokenizer = save_trained(tmp_path / str(vocabulary), texts=["sort 312"] * 9, vocabulary=vocabulary, context=64)
        assert len(tokenizer) <= 400
        text = "unseen: žluť 猫 \n\t{}"
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        example = encode(Turn(messages=messages, tools=tools, reply=Reply(tool_calls=[call])), Chat(tokenizer))
        reply = tokenizer.decode(example.response_ids)
        form = Chat(tokenizer).tool_form
        assert not isinstance(form, str)
        (read,) = form.read(reply.removesuffix("<|end|>"), tools).calls
        assert (read.name, json.loads(read.arguments)) == (call["name"], call["arguments"])
        assert reply == '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call><|end|>'
        prompt = tokenizer.decode(example.prompt_ids)
        assert (
            '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|end|><|tool|>3<|assistant|>' in prompt
        )
        assert prompt.startswith('<|tools|>{"name": "add"')
    assert len(tokenizer("sort 312")["input_ids"]) < len("sort 312")


def test_the_size_follows_the_budget(tmp_path: Path) -> None:
    assert affordable(minutes=3, tokens=1e5) == 1_000_000
    assert affordable(minutes=1, tokens=1e6) == 360_000
    for vocabulary, wanted in (
        (265, 6e4),
        (265, 4e5),
        (1024, 4e5),
        (1024, 1e6),
        (1024, 2.5e6),
        (8192, 1e6),
        (8192, 2e7),
    ):
        assert parameters_of(architecture(wanted, vocabulary, 512)) == pytest.approx(wanted, rel=0.03)
    assert architecture(1, 1024, 512).hidden_size == 32
    model = new_model(
        architecture(4e5, 1024, 512), save_trained(tmp_path, texts=["a"], vocabulary=0, context=0), seed=0
    )
    assert parameters_of(model.config) == sum(p.numel() for p in model.parameters())


def test_a_size_that_no_new_model_has_is_refused(tmp_path: Path) -> None:
    for wanted in (1000, 10**9):
        with pytest.raises(ConfigError, match=r"--parameters 1,.* with 265 tokens can have 31,680 to 49,761,792 p"):
            made(tmp_path / str(wanted), tokenizer="bytes", parameters=wanted)


def test_a_model_with_rotary_positions_gets_a_longer_context(tmp_path: Path) -> None:
    long = Turn(messages=[{"role": "user", "content": "7 " * 600}], reply=Reply(content="8"))
    found = made(tmp_path / "a", [*TURNS, long], model="mini", context=2048, passes=1.0)
    model, tokenizer = checkpoint.load_model(found.directory), checkpoint.load_tokenizer(found.directory)
    assert (found.context, model.config.max_position_embeddings, tokenizer.model_max_length) == (2048, 2048, 2048)
    assert made(tmp_path / "b", model=str(found.directory), context=512, passes=1.0).context == 2048
    settings = json.loads((found.directory / "config.json").read_text())
    settings["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    (found.directory / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="only models with plain rotary positions"):
        made(tmp_path / "c", model=str(found.directory), context=4096)


def test_mistakes_are_named(tmp_path: Path) -> None:
    long = Turn(messages=[{"role": "user", "content": "7 " * 600}], reply=Reply(content="8"))
    with pytest.raises(
        ConfigError, match=r"1 of 7 demonstrated calls do not fit into the context of 512 tokens of mini"
    ):
        made(tmp_path / "a", [*TURNS, long], model="mini")
    with pytest.raises(ConfigError, match=r"context of 600 tokens of the new model \(--context\)"):
        made(tmp_path / "b", [*TURNS, long], context=600, tokenizer="bytes")
    with pytest.raises(ConfigError, match=r"--model maxi: .*\n.*mini"):
        made(tmp_path / "c", model="maxi")
