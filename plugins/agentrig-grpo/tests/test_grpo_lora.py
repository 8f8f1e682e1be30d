"""The weights that a model computes with."""

from __future__ import annotations

import sys

import pytest
import torch
from agentrig_grpo.lora import live_weights


def test_a_model_without_adapters_is_read_without_peft(make_model, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    for name in [name for name in sys.modules if name.split(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "peft", None)  # its import fails
    found = dict(live_weights(model))
    expected = model.state_dict()
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
