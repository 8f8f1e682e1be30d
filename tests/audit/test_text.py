"""Link `text`: what the client got beside the tokens that the server states."""

from __future__ import annotations

from pathlib import Path

import pytest
from agentrig_grpo.own_tokenizer import save_trained

from agentrig.audit.record import Call
from agentrig.audit.text import _reply


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
