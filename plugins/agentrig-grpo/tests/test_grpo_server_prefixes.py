from __future__ import annotations

import random

import pytest
import torch
from agentrig_grpo.server import decoder as decoding
from agentrig_grpo.server import prefixes
from agentrig_grpo.server.decoder import Known, LlamaDecoder
from agentrig_grpo.server.engine import Engine, Request
from agentrig_grpo.server.prefixes import BLOCK, Prefixes


def test_tokens_whose_marks_collide_are_compared(monkeypatch):
    monkeypatch.setattr(prefixes, "hash", lambda _: 1, raising=False)
    index = Prefixes()
    index.add((1,) * BLOCK)
    assert index.longest((2,) * BLOCK + (3,)) is None


def decoder_of(model):
    return LlamaDecoder(model.config, model.state_dict(), device="cpu", dtype=torch.float32, slots=8, max_length=200)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("most", [1 << 25, 100])
def test_a_known_beginning_gives_the_same_prompt(make_model, monkeypatch, kind, most):
    monkeypatch.setattr(decoding, "MASKED", most)
    decoder = decoder_of(make_model(kind))
    rng = random.Random(0)
    first = [rng.randrange(300) for _ in range(120)]
    texts = [[*first[:same], *(rng.randrange(300) for _ in range(more))] for same, more in ((100, 3), (40, 60), (0, 9))]
    texts.append([*first, 7])
    (kept,) = decoder.prefill([first])
    # The third one is new, and the last one is the kept one and one more token.
    known = [Known(kept, 100), Known(kept, 40), None, Known(kept, 120)]
    for text, full, short in zip(texts, decoder.prefill(texts), decoder.prefill(texts, known), strict=True):
        assert short.length == len(text)
        torch.testing.assert_close(short.logits, full.logits, atol=1e-5, rtol=1e-5)
        for a, b in zip(short.kv, full.kv, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def sampled(engine, prompt):
    request = Request(prompt, 8, temperature=1.0, seed=1)
    engine.submit(request)
    while engine.busy:
        engine.tick()
    return request.tokens, engine.counts["reused_prompt_tokens"]


def test_shared_tokens_are_computed_once_until_the_weights_change(make_model):
    one, two = make_model(seed=1), make_model(seed=2)
    history = tuple(range(20, 80))
    later = (*history, *range(100, 110))
    engine = Engine(decoder_of(one), eos=[1], slots=4)
    sampled(engine, history)
    assert sampled(engine, later) == (sampled(Engine(decoder_of(one), eos=[1], slots=4), later)[0], 60)
    engine.swap(two.state_dict(), 1, lambda error: None)
    fresh = sampled(Engine(decoder_of(two), eos=[1], slots=4), later)[0]
    assert sampled(engine, later) == (fresh, 60), "nothing of the old weights is reused"
