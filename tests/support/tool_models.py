"""A tiny model that has learned by heart when to call a tool, in three forms of chat template, and its server."""

from __future__ import annotations

import asyncio
import copy
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
ARGUMENTS = '{"a": 2, "b": 3}'

_START = "{% if tools %}<|system|>{% for t in tools %}{{ t.function.name }}{% endfor %}<|end|>{% endif %}"
_TURN = "<|{{ m.role }}|>{{ m.content }}"
_GO = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


def _template(calls: str) -> str:
    return _START + "{% for m in messages %}" + _TURN + calls + "<|end|>{% endfor %}" + _GO


TEMPLATES = {
    "hermes": _template(
        '{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", '
        '"arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    ),
    "qwen3-coder": _template(
        "{% for c in m.tool_calls or [] %}<tool_call><function={{ c.function.name }}>"
        "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>{{ v }}</parameter>{% endfor %}"
        "</function></tool_call>{% endfor %}"
    ),
    "llama": _template(
        "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call a message') }}{% endif %}"
        '{% for c in m.tool_calls or [] %}{"name": "{{ c.function.name }}", '
        '"parameters": {{ c.function.arguments | tojson }}}{% endfor %}'
    ),
}
"""Form to a chat template that writes calls so."""

CALLS = {
    "hermes": '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>',
    "qwen3-coder": "<tool_call><function=add><parameter=a>2</parameter><parameter=b>3</parameter></function>"
    "</tool_call>",
    "llama": '<|python_tag|>{"name": "add", "parameters": {"a": 2, "b": 3}}',
}
MALFORMED = {
    "hermes": '<tool_call>{"name": "add", "arguments": {"a": 2</tool_call>',
    "qwen3-coder": "<tool_call><function=add><parameter=a>2</function></tool_call>",
    "llama": '<|python_tag|>{"name": "add", "parameters": {"a": 2',
}
SPECIAL = [
    *("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"),
    *("<tool_call>", "</tool_call>", "<|python_tag|>"),
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def called(text: str) -> list[dict[str, Any]]:
    """Return a conversation in which the tool was called and has answered 5; arguments are an object, for templates."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    answer = {"role": "tool", "tool_call_id": "c", "content": "5"}
    return [user(text), {"role": "assistant", "content": "", "tool_calls": [call]}, answer]


def lessons(form: str) -> list[tuple[list[dict[str, Any]], str]]:
    return [
        ([user("add")], CALLS[form]),
        (called("add"), "it is 5"),
        ([user("talk")], "hello there"),
        ([user("broken")], f"so {MALFORMED[form]}" if form != "llama" else MALFORMED[form]),
        ([user("twice")], f"both {CALLS[form]}\n{CALLS[form]} ok" if form != "llama" else f"{CALLS[form]}; {{}}"),
    ]


@attrs.frozen
class ToolModels:
    """The model's directory, and a tokenizer for each form."""

    directory: Path
    tokenizers: dict[str, Any]


def make(directory: Path) -> ToolModels:
    from agentrig_grpo import checkpoint
    from agentrig_grpo.server.chat import Chat
    from agentrig_grpo.warmup import Example, fine_tune, new_model
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([reply for form in TEMPLATES for _, reply in lessons(form)] * 4, trainer)
    plain = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=AddedToken("<|end|>", special=True), pad_token="<|pad|>"
    )
    tokenizers, examples = {}, []
    for form, template in TEMPLATES.items():
        tokenizers[form] = tokenizer = copy.deepcopy(plain)
        # The form's name in the prompt lets one model know all three.
        tokenizer.chat_template = f"<|pad|>{form}" + template
        chat = Chat(tokenizer)
        for messages, reply in lessons(form):
            ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
            examples.append(Example(chat.prompt_ids(messages, tools=[TOOL]), [*ids, tokenizer.eos_token_id]))
    config = Qwen2Config(
        vocab_size=len(plain),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model = new_model(config, plain, seed=0)
    fine_tune(model, examples, epochs=90, lr=1e-2, tokens_per_batch=1024, log=None)
    checkpoint.save(model, tokenizers["hermes"], directory)
    return ToolModels(directory, tokenizers)


@contextmanager
def served(models: ToolModels, form: str) -> Iterator[str]:
    """Serve the model with one form's template; yield the base URL."""
    import torch
    import uvicorn
    from agentrig_grpo.server.app import Api
    from agentrig_grpo.server.chat import Chat
    from agentrig_grpo.server.engine import Engine
    from agentrig_grpo.server.loading import build_decoder

    decoder, length = build_decoder(models.directory, device="cpu", dtype=torch.float32, slots=4, max_length=0)
    tokenizer = models.tokenizers[form]
    api = Api(Engine(decoder, eos=[tokenizer.eos_token_id], slots=4), Chat(tokenizer), model="tiny", max_length=length)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(api.app(), log_level="warning", access_log=False, lifespan="off"))

    async def main() -> None:
        driving = asyncio.create_task(api.drive())
        await server.serve(sockets=[listener])
        driving.cancel()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
