"""The log-probabilities that replace flash-attn's: the same numbers and gradients as verl's own."""

from __future__ import annotations

import pytest
import torch
from agentrig_verl import logprobs
from agentrig_verl.logprobs import token_logprobs


def batch(tokens: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(tokens, vocabulary, generator=generator) * 4).to(dtype).requires_grad_()
    return logits, torch.randint(vocabulary, (tokens,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_values_and_gradients_are_those_of_log_softmax(monkeypatch, chunk):
    monkeypatch.setattr(logprobs, "CHUNK", chunk)
    logits, labels = batch(23, 50)
    weights = torch.linspace(-1, 1, 23)
    expected = torch.log_softmax(logits, dim=-1).gather(-1, labels[:, None]).squeeze(-1)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), logits)
    found = token_logprobs(logits, labels)
    (got,) = torch.autograd.grad((found * weights).sum(), logits)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(got, wanted)


def test_bfloat16_logits_lose_no_further_precision():
    logits, labels = batch(64, 300, torch.bfloat16)
    found = token_logprobs(logits, labels)
    exact = torch.log_softmax(logits.detach().double(), dim=-1).gather(-1, labels[:, None]).squeeze(-1)
    assert found.dtype == torch.float32
    assert float((found.detach().double() - exact).abs().max()) < 1e-5
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert gradient.dtype == torch.bfloat16


def test_the_shape_of_the_labels_is_kept():
    logits, labels = batch(12, 9)
    found = token_logprobs(logits.view(3, 4, 9), labels.view(3, 4))
    torch.testing.assert_close(found.view(-1), token_logprobs(logits, labels))


@pytest.mark.filterwarnings("ignore")  # warnings of verl
def test_verls_engine_uses_them_where_it_has_no_kernel(needs_verl, monkeypatch):
    from verl.utils import torch_functional
    from verl.workers.engine.fsdp import transformer_impl

    own = transformer_impl.logprobs_from_logits
    monkeypatch.setattr(transformer_impl, "logprobs_from_logits", own)
    logits, labels = batch(23, 50)
    torch.testing.assert_close(token_logprobs(logits, labels), torch_functional.logprobs_from_logits_v2(logits, labels))
    kernel = torch.zeros(23)
    monkeypatch.setattr(torch_functional, "logprobs_from_logits", lambda logits, labels, inplace_backward: kernel)
    ours = token_logprobs(logits, labels)
    for there, switched_off, found in [(False, "0", ours), (True, "0", kernel), (True, "1", ours)]:
        monkeypatch.setattr(torch_functional, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", there)
        monkeypatch.setenv("VERL_DISABLE_FLASH_ATTN_CE", switched_off)
        assert logprobs.install()
        assert transformer_impl.logprobs_from_logits(logits, labels).equal(found)
    monkeypatch.setattr(torch_functional, "NPU_CROSS_ENTROPY_LOSS_AVAILABLE", True)
    monkeypatch.setattr(transformer_impl, "logprobs_from_logits", own)
    assert not logprobs.install()
    assert transformer_impl.logprobs_from_logits is own
