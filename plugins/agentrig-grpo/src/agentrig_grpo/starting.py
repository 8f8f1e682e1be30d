"""Starting models for `agentrig warmup`: a tokenizer, a size, and how fast to train; `sft` then trains them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentrig_forest.scoring import prepare
from agentrig_forest.sequences import packed
from transformers import Qwen2Config  # noqa: TID253  (imported when a starting model is made only)

from agentrig.demonstrations import StartingModel, StartPlan, Turn
from agentrig.errors import ConfigError
from agentrig.run.checkpoints import verify
from agentrig_grpo import checkpoint, encoding, warmup
from agentrig_grpo.config import LearnerConfig
from agentrig_grpo.context import context_of
from agentrig_grpo.naming import model_directory, shipped
from agentrig_grpo.own_tokenizer import save_trained
from agentrig_grpo.server.chat import Chat

WIDTHS = (32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768)
"""Hidden sizes of new models."""

NEAR = 0.03
"""How far the size of a new model may be from the one that is asked for, relatively."""

LAYERS = 4
HEAD = 32
"""Width of an attention head."""

MOST = 1_000_000
"""Parameters of a new model unless more are asked for: what two cores train by reward in minutes."""

SPEED = 6e9
"""Parameters times tokens that one core trains in a second, about."""

STEPS = 1500
"""Optimizer steps that a warm-up should have at least, where batches are not too small already."""


def make_start(config: LearnerConfig, plan: StartPlan, turns: Sequence[Turn]) -> StartingModel:
    """Choose a model for a warm-up and write it, not trained yet; what `AlgorithmSpec.make_start` of `grpo` is."""
    if plan.model == "new":
        tokenizer = save_trained(
            plan.directory,
            texts=list(_texts(turns)),
            vocabulary=plan.vocabulary if plan.tokenizer == "texts" else 0,
            context=0,
        )
    else:
        source = found_model(plan.model)
        tokenizer = checkpoint.load_tokenizer(source)
    chat = Chat(tokenizer)
    examples = [encode(turn, chat) for turn in turns]
    longest = max(len(e.prompt_ids) + len(e.response_ids) for e in examples)
    tokens = sum(len(e.prompt_ids) + len(e.response_ids) for e in examples)
    if plan.model == "new":
        context = plan.context or max(512, 2 * longest, longest + config.max_tokens, config.max_length)
        _set_context(plan.directory, context)
        tokenizer = checkpoint.load_tokenizer(plan.directory)
        if plan.parameters:
            shape = _asked_for(plan.parameters, len(tokenizer), context)
        else:
            shape = architecture(affordable(plan.minutes, tokens * plan.passes), len(tokenizer), context)
        model = warmup.new_model(shape, tokenizer, seed=plan.seed)
    else:
        model = checkpoint.load_model(source)
        checkpoint.check_vocabulary(model, tokenizer)
        if plan.context:
            _lengthen(model.config, plan.context)
        context = max(context_of(model.config, config.max_length), context_of(model.config, 0))
    check_lengths(examples, context, plan.model)
    width = int(model.config.hidden_size)
    batch = plan.tokens_per_batch or int(min(8192, max(longest, 256, tokens * plan.passes / STEPS)))
    checkpoint.save(model, tokenizer, plan.directory)
    if plan.context:
        _set_context(plan.directory, context)
    return StartingModel(
        directory=plan.directory,
        parameters=sum(p.numel() for p in model.parameters()),
        vocabulary=len(tokenizer),
        context=context,
        longest=longest,
        longest_reply=max(len(e.response_ids) for e in examples),
        lr=plan.lr or (2e-3 if plan.model == "new" else 1e-3) * min(1.0, 128 / width),
        updates=sum(1 for _ in packed(examples, batch, share=prepare(model))),
    )


def found_model(name: str) -> Path:
    """Return the directory of a model to start from.

    Raises:
        ConfigError: There is none.
        CheckpointDamaged: It is a run's checkpoint, and has changed since it was saved.
    """
    try:
        found = model_directory(name)
    except ConfigError as error:
        raise ConfigError(
            f"--model {name}: it is no Hugging Face directory and no shipped model.\n"
            f"  Use new for random weights, {', '.join(shipped())}, or a directory with a config.json"
        ) from error
    verify(found)
    return found


def encode(turn: Turn, chat: Chat) -> warmup.Example:
    """Return a turn's prompt and reply as token ids.

    Raises:
        ConfigError: The model can't read the prompt, or can't say the reply.
    """
    prompt: Any
    reply: Any
    try:
        prompt = encoding.prompt_ids(turn, chat)
    except ValueError as error:
        raise ConfigError(f"the model can't read what the agent sends: {error}") from error
    try:
        reply = encoding.reply_ids(turn, chat)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return warmup.Example(prompt, reply)


def _texts(turns: Sequence[Turn]) -> Iterator[str]:
    """Yield all texts that the tokenizer should know: messages, tools and replies."""
    for turn in turns:
        for message in turn.messages:
            yield str(encoding.message_of(message).get("content") or "")
        yield turn.reply.content
        for value in (*turn.tools, *turn.reply.tool_calls):
            yield json.dumps(value)


def affordable(minutes: float, tokens: float) -> int:
    """Return how many parameters can be trained on that many tokens in that time on one core; at most `MOST`."""
    return int(min(MOST, SPEED * 60 * minutes / max(tokens, 1)))


def architecture(parameters: float, vocabulary: int, context: int) -> Any:
    """Return the Qwen2 of four layers that has about that many weights, or as near as can be, in its most usual shape.

    Its feed-forward layers are half as wide as the hidden size, up to six times; three times is usual.
    """
    made = []
    for width in WIDTHS:
        least, most = _range(width, vocabulary, context)
        rest = parameters - parameters_of(least)
        inner = least.intermediate_size + 8 * round(rest / (3 * width * LAYERS) / 8)
        inner = min(max(inner, least.intermediate_size), most.intermediate_size)
        made.append(_qwen(width, inner, vocabulary, context))

    def unusual(config: Any) -> tuple[float, float]:
        off = abs(parameters_of(config) - parameters) / parameters
        return off if off > NEAR else 0.0, abs(math.log(config.intermediate_size / 3 / config.hidden_size))

    return min(made, key=unusual)


def _asked_for(parameters: int, vocabulary: int, context: int) -> Any:
    """Return the architecture of `--parameters`."""
    found = architecture(parameters, vocabulary, context)
    if abs(parameters_of(found) - parameters) > NEAR * parameters:
        sizes: list[list[int]] = []
        for width in WIDTHS:
            least, most = map(parameters_of, _range(width, vocabulary, context))
            if sizes and least <= sizes[-1][1] * (1 + NEAR):
                sizes[-1][1] = most
            else:
                sizes.append([least, most])
        there = ", ".join(f"{least:,} to {most:,}" for least, most in sizes)
        raise ConfigError(
            f"--parameters {parameters:,}: a new model with {vocabulary} tokens can have {there} parameters. Ask for "
            "one of these, or for another --vocabulary"
        )
    return found


def _range(width: int, vocabulary: int, context: int) -> tuple[Any, Any]:
    """Return the smallest and the largest model of a width."""
    return _qwen(width, width // 2, vocabulary, context), _qwen(width, 6 * width, vocabulary, context)


def parameters_of(config: Any) -> int:
    """Return a configuration's number of weights."""
    width = config.hidden_size
    kept = width * config.num_key_value_heads // config.num_attention_heads
    attention = 2 * width * width + 2 * width * kept + width + 2 * kept
    layer = attention + 3 * width * config.intermediate_size + 2 * width
    return int(config.vocab_size * width + config.num_hidden_layers * layer + width)


def _qwen(width: int, inner: int, vocabulary: int, context: int) -> Any:
    heads = width // HEAD
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        intermediate_size=inner,
        tie_word_embeddings=True,
        max_position_embeddings=context,
        # With the usual 0.02, meant for widths of thousands, a narrow model attends to nothing for a long time.
        initializer_range=width**-0.5,
    )


def check_lengths(examples: Sequence[warmup.Example], context: int, model: str) -> None:
    """Make sure that every demonstration fits into the context."""
    lengths = [len(e.prompt_ids) + len(e.response_ids) for e in examples]
    long = [n for n in lengths if n > context]
    if long:
        owner = "the new model (--context)" if model == "new" else model
        raise ConfigError(
            f"{len(long)} of {len(lengths)} demonstrated calls do not fit into the context of {context} tokens of "
            f"{owner}: the longest prompt and reply have {max(long)} tokens.\n  Let the agent send less, start from "
            "--model new, or give it a longer context (--context)"
        )


def _lengthen(config: Any, context: int) -> None:
    """Let a model read more tokens than before; the warm-up trains it at the new positions.

    Raises:
        ConfigError: Its positions are not rotary ones without a scale, which are defined for any length.
    """
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") != "default":
        raise ConfigError("--context: only models with plain rotary positions (RoPE) can be given a longer context")
    config.max_position_embeddings = max(context, config.max_position_embeddings)


def _set_context(directory: Path, context: int) -> None:
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**settings, "model_max_length": context}, indent=2) + "\n", "utf-8")
