"""The buffer that new weights go through."""

from __future__ import annotations

import pytest
import torch
from agentrig_vllm import transfer
from agentrig_vllm.handle import devices

from agentrig.errors import ConfigError
from agentrig.processes.servers import ServerError

CPU = torch.device("cpu")


@pytest.fixture
def announced(monkeypatch):
    """Return the sizes of the buffers that were shared, in a list that grows."""
    found: list[int] = []
    monkeypatch.setattr(transfer, "shared", lambda buffer: found.append(buffer.numel()) or {"size": buffer.numel()})
    return found


def received(sender: transfer.Sender, weights) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Read each message when it comes, as the server does: the next one overwrites the buffer."""
    found, sizes = {}, []
    for message in sender.messages(weights, CPU):
        sizes.append(len(message["tensors"]))
        for entry in message["tensors"]:
            found[entry["name"]] = transfer.view_of(sender._buffer, entry).clone()
    return found, sizes


def test_tensors_arrive_rounded_whatever_their_sizes(announced):
    torch.manual_seed(0)
    weights = {f"t{i}": torch.randn(3 + i, 7) for i in range(9)}
    weights |= {"big": torch.randn(50, 50), "scalar": torch.tensor(3.0), "numbers": torch.arange(5)}
    weights["turned"] = torch.randn(6, 4).T
    sender = transfer.Sender(torch.bfloat16, 2048)
    found, sizes = received(sender, weights.items())
    assert list(found) == list(weights)
    for name, tensor in weights.items():
        expected = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name], expected), name
    assert max(sizes) > 1
    assert sender.shapes == {name: list(tensor.shape) for name, tensor in weights.items()}
    assert announced == [2048, 5120], "a larger tensor makes the buffer larger; nothing else shares it again"
    received(sender, weights.items())
    assert len(announced) == 2


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_named(announced, number):
    weights = {"good": torch.randn(5, 5), "bad": torch.randn(5, 5), "whole": torch.arange(3)}
    weights["bad"][2, 3] = number
    with pytest.raises(ServerError, match=r"numbers that are not finite: bad$"):
        received(transfer.Sender(torch.bfloat16, 2048), weights.items())


@pytest.mark.parametrize(
    ("visible", "own", "other", "expected"),
    [
        (None, 0, -1, "0"),
        (None, 0, 0, "0"),
        (None, 0, 3, "3,0"),
        ("4,5", 0, -1, "4"),
        ("4, 5", 0, 1, "5,4"),
        ("GPU-aa,GPU-bb", 1, 0, "GPU-aa,GPU-bb"),
    ],
)
def test_the_server_sees_its_gpu_first_and_the_learners_too(visible, own, other, expected):
    assert devices(visible, own=own, other=other) == expected


def test_a_gpu_that_is_not_there_is_an_error():
    with pytest.raises(ConfigError, match=r"\[server\] device = 2: the run sees 2 GPUs"):
        devices("0,1", own=0, other=2)
