from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from agentrig_grpo.server.decoder import LlamaDecoder
from agentrig_grpo.server.engine import Engine, Request
from agentrig_grpo.server.fallback import TransformersDecoder
from agentrig_grpo.server.sampling import Settings, sample


@pytest.fixture
def engine_of(make_model):
    def make(slots=8, model=None, **more):
        model = model or make_model()
        decoder = LlamaDecoder(
            model.config, model.state_dict(), device="cpu", dtype=torch.float32, slots=slots, max_length=256
        )
        return Engine(decoder, eos=[1], slots=slots, **more)

    return make


def run(engine, requests):
    for request in requests:
        engine.submit(request)
    while engine.busy:
        engine.tick()
    return [r.tokens for r in requests]


def test_a_seeded_request_does_not_depend_on_its_batch(engine_of):
    def asked():
        return [Request(tuple(range(5, 25 + i)), 15, seed=i) for i in range(12)]

    alone = [run(engine_of(), [r])[0] for r in asked()]
    assert run(engine_of(slots=12), asked()) == alone
    # Three rows only, in another order: requests join and leave all the time.
    assert run(engine_of(slots=3), asked()[::-1]) == alone[::-1]
    assert len({tuple(t) for t in alone}) > 6


def test_without_a_seed_a_run_is_reproducible_in_any_order(engine_of):
    def asked():
        return [Request(tuple(range(5, 20 + i % 3)), 10) for i in range(9)]

    def by_prompt(requests):
        run_, found = engine_of(slots=4), {}
        run(run_, requests)
        for r in requests:
            found.setdefault(r.prompt, []).append(tuple(r.tokens))
        return {p: sorted(t) for p, t in found.items()}

    first = by_prompt(asked())
    assert first == by_prompt(asked()[::-1])
    assert all(len(set(group)) == 3 for group in first.values()), "a group's rollouts differ"
    other = engine_of(seed=1)
    assert run(other, asked()) != run(engine_of(seed=0), asked())


def test_a_group_computes_its_prompt_once(engine_of):
    engine = engine_of(slots=4)
    run(engine, [Request(tuple(range(9)), 5) for _ in range(10)])
    assert engine.counts["prefills"] == 1
    assert engine.counts["prompts"] == 10
    small = engine_of(slots=1, prompt_cache_bytes=1)
    run(small, [Request(tuple(range(9)), 2) for _ in range(3)])
    assert small.counts["prefills"] == 3, "a prompt that doesn't fit is not kept"


@pytest.mark.parametrize("fallback", [False, True])
def test_kept_prompts_stay_within_the_memory_limit(make_model, engine_of, fallback):
    engine = engine_of()
    if fallback:
        model = make_model("gpt2", max_position_embeddings=512)
        engine = Engine(TransformersDecoder(model, device="cpu"), eos=[1], slots=8)
    (one,) = engine.decoder.prefill([[7] * 100])
    engine.prompt_cache_bytes = 5 * one.nbytes
    for i in range(20):
        run(engine, [Request((7,) * 99 + (i,), 2)])
        assert sum(p.nbytes for p in engine._prompts.values()) <= 5 * one.nbytes
    assert len(engine._prompts) == 5
    before = engine.counts["prefills"]
    run(engine, [Request((7,) * 99 + (i,), 2) for i in range(15, 20)])
    assert engine.counts["prefills"] == before, "the latest are kept"


def test_requests_wait_for_memory_and_one_always_runs(engine_of):
    model = engine_of().decoder
    engine = engine_of(cache_bytes=3 * 60 * model.token_bytes)
    requests = [Request((9, i), 58, temperature=0.1) for i in range(6)]
    requests += [Request(tuple(range(20, 200)), 20, seed=1)]
    most = 0
    for request in requests:
        engine.submit(request)
    while engine.busy:
        engine.tick()
        lengths = [len(r.prompt) + r.max_tokens for r in engine._running]
        most = max(most, len(lengths))
        assert len(lengths) <= 1 or len(lengths) * max(lengths) <= 3 * 60
    assert most == 3
    assert {r.finish for r in requests} <= {"stop", "length"}


def test_a_swap_waits_for_the_batch_and_delays_waiting_requests(engine_of, make_model):
    engine = engine_of(slots=1)
    new = make_model(seed=9)
    before, after = (Request(tuple(range(40, 60)), 6, temperature=0.0) for _ in range(2))
    engine.submit(before)
    engine.tick()
    errors = []
    engine.submit(after)
    engine.swap(new.state_dict(), 5, errors.append)
    while engine.busy:
        engine.tick()
    assert errors == [None]
    assert (before.version, after.version) == (0, 5)
    expected = run(engine_of(model=new), [Request(tuple(range(40, 60)), 6, temperature=0.0)])
    assert after.tokens == expected[0]
    engine.swap({}, 6, errors.append)
    engine.tick()
    assert "model.layers.0.input_layernorm.weight is missing" in str(errors[1])
    assert engine.version == 5
    assert run(engine, [Request(tuple(range(40, 60)), 6, temperature=0.0)]) == expected


def test_diverged_weights_are_an_error_and_not_a_reply(engine_of):
    engine = engine_of()
    engine.decoder._norm.fill_(float("nan"))
    request = Request(tuple(range(5)), 5)
    run(engine, [request])
    assert request.finish == "error"
    assert "not finite" in request.error
    assert not engine.busy


def test_samples_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0]]).repeat(4000, 1)
    rng = np.random.default_rng(0)
    for temperature in (0.5, 1.0):
        settings = Settings.of([temperature] * 4000, [1.0] * 4000, logits.device)
        tokens, _ = sample(logits, settings, rng.random(4000).tolist())
        counts = Counter(tokens.tolist())
        expected = torch.softmax(logits[0] / temperature, -1)
        for token in range(4):
            assert counts[token] / 4000 == pytest.approx(float(expected[token]), abs=0.03)
        assert counts[2] == 0


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    uniforms = np.linspace(0, 1, 500, endpoint=False).tolist()
    for top_p, kept in ((0.4, {0}), (0.6, {0, 1}), (0.81, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        settings = Settings.of([1.0] * 500, [top_p] * 500, probs.device)
        tokens, logp = sample(probs.log().repeat(500, 1), settings, uniforms)
        assert set(tokens.tolist()) == kept
        torch.testing.assert_close(logp[0].exp(), probs)
    greedy = Settings.of([0.0, 1e-38, 1.0], [1.0] * 3, probs.device)
    assert sample(probs.log().repeat(3, 1), greedy, [0.999] * 3)[0].tolist() == [0, 0, 3]
