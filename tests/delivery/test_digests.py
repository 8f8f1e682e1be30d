"""Digests of tensors: they distinguish tensors, and do not depend on how they are computed."""

from __future__ import annotations

import pytest
import torch

from agentrig.delivery.digests import Digests, digests

KNOWN = {
    (0, torch.float32): "00000000000000000000000000000000",
    (3, torch.float32): "000000000000000c51f9b98ef1b1dec0",
    (5, torch.bfloat16): "000000000000000a55836d940c31dec0",
    (1021 * 8, torch.int64): "21f355c7917c880c275cc1cb467eef68",
    (1021 * 40 + 17, torch.float32): "7606340501015a64532d9ee5170eb998",
    (300 * 257, torch.bfloat16): "b4ef38adea9eafca84a907848a5a1cf7",
}
"""Of `arange`, by length and dtype: the digests that runs have recorded."""


def digest(tensor: torch.Tensor) -> str:
    return digests([("", tensor)])[""]


@pytest.mark.parametrize(("length", "dtype"), KNOWN)
def test_a_tensors_digest_stays_the_same(length: int, dtype: torch.dtype) -> None:
    assert digest(torch.arange(length).to(dtype)) == KNOWN[length, dtype]


def shapes() -> list[torch.Tensor]:
    """Return tensors of many shapes and dtypes, some of them slices and transposed ones, several of each shape."""
    chance = torch.Generator().manual_seed(0)
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool):
        for shape in ((), (1,), (3,), (7, 5), (8, 16), (1021, 8), (2 * 1021 * 16 + 3,), (300, 257), (0,), (4, 0)):
            for _ in range(3):
                made = (100 * torch.rand(shape, generator=chance)).to(dtype)
                found += [made] if made.ndim < 2 else [made, made.T, made[1:], made[:, 1:]]
    return found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tensors_of_many_shapes_have_the_digests_of_their_bytes(dtype: torch.dtype | None) -> None:
    named = {f"tensor {i}": tensor for i, tensor in enumerate(shapes())}
    rounded = {n: t.to(dtype) if dtype is not None and t.is_floating_point() else t for n, t in named.items()}
    expected = {n: digest(t.contiguous().clone()) for n, t in rounded.items()}
    assert list(digests(named.items(), dtype).items()) == list(expected.items()), "in the same order"


def test_a_tensor_whose_memory_is_used_again_keeps_its_digest() -> None:
    found, buffer = Digests(), torch.ones(1024)
    found.add("first", buffer)
    buffer.zero_()
    found.add("second", buffer)
    assert found.result() == {"first": digest(torch.ones(1024)), "second": digest(torch.zeros(1024))}


@pytest.mark.parametrize("shape", [(40,), (64, 64), (1021, 16), (2042, 33)])
def test_each_change_of_a_tensor_changes_its_digest(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    flat = tensor.reshape(-1)
    changed = []
    for place in {0, 1, len(flat) // 2, len(flat) - 1}:
        other = flat.clone()
        other[place] = torch.nextafter(other[place], torch.tensor(9.0))
        changed.append(other)
    changed += [flat.flip(0), flat.roll(1), flat.roll(2 * 1021), flat[:-1], torch.cat([flat, torch.zeros(1)])]
    changed += [tensor.T.reshape(-1)] if tensor.ndim == 2 else []
    found = digests([(str(i), each) for i, each in enumerate([flat, *changed])])
    assert len(set(found.values())) == len(found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_gpu_gives_the_digests_of_a_cpu(dtype: torch.dtype | None) -> None:
    made = [*shapes(), torch.randn(500_000), torch.randn(3000, 1021)]
    named = {f"tensor {i}": tensor for i, tensor in enumerate(made)}
    there = {name: tensor.cuda() if tensor.is_contiguous() else tensor.cuda().clone() for name, tensor in named.items()}
    assert digests(there.items(), dtype) == digests(named.items(), dtype)
