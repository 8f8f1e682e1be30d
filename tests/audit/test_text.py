"""Link `text`: what the client got beside the tokens that the server states."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from agentrig_grpo.own_tokenizer import save_trained

from agentrig.audit.record import Call
from agentrig.audit.text import _reply, text


@pytest.mark.parametrize(
    ("sampled", "got", "same"),
    [
        ("monday", "monday", True),
        ("<|tools|>", "", True),
        ("mon<|user|>day", "monday", True),
        ("monday", "sunday", False),
        ("<|tools|>", "sunday", False),
    ],
)
def test_a_special_token_inside_of_a_call_is_left_out(sampled: str, got: str, same: bool, tmp_path: Path) -> None:
    tokenizer = save_trained(tmp_path, texts=["deliver monday sunday"], vocabulary=0, context=512)
    text = f'<tool_call>\n{{"name": "deliver", "arguments": {{"day": "{sampled}"}}}}\n</tool_call><|end|>'
    called = {"function": {"name": "deliver", "arguments": f'{{"day": "{got}"}}'}}
    call = Call(
        rollout="r",
        span="s",
        request={},
        response={"choices": [{"message": {"content": "", "tool_calls": [called]}}]},
        prompt=[1],
        reply=tokenizer(text)["input_ids"],
        logprobs=None,
        version=0,
    )
    assert (_reply(call, tokenizer, own=True) == "") is same


@pytest.mark.parametrize(
    "request_",
    [
        {"messages": [5]},
        {"messages": [{"role": "user", "content": [5]}]},
        {"messages": [{"role": "user", "content": "?", "tool_calls": 5}]},
        {"messages": [], "chat_template_kwargs": 5},
        {"messages": [{"role": "user", "content": "?"}], "stop": 5},
    ],
)
def test_a_call_that_a_server_took_in_no_form_of_a_chat_does_not_end_the_link(
    request_: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = save_trained(tmp_path, texts=["monday"], vocabulary=0, context=512)
    (tmp_path / "config.json").write_text("{}")
    asked = [{"role": "user", "content": "when"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    whole = Call(
        rollout="r", span="whole", request={"messages": asked}, prompt=prompt, logprobs=None, version=0,
        reply=tokenizer("monday<|end|>")["input_ids"],
        response={"choices": [{"message": {"content": "monday"}, "finish_reason": "stop"}]},
    )  # fmt: skip
    calls = {"odd": attrs.evolve(whole, span="odd", request=request_), "whole": whole}
    config = {"server": {"use": "embedded"}}
    step: Any = SimpleNamespace(record=SimpleNamespace(model=tmp_path, settings={}, config=config), calls=calls)
    (verdict,) = text(step)
    assert verdict.result == "ok", verdict
    assert verdict.detail.endswith("; 1 not looked at, which are not calls of a chat")
