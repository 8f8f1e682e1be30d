from __future__ import annotations

import random

import pytest
import torch
from agentrig_grpo.server.decoder import Known, LlamaDecoder, Prompt, supports
from agentrig_grpo.server.fallback import TransformersDecoder
from fixtures import LLAMA_3

MODELS = {
    "qwen2": ("qwen2", {}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA_3}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "no-gqa": ("llama", {"num_key_value_heads": 4}),
}


def decoder_of(model, slots=8, max_length=200):
    assert supports(model.config) is None
    return LlamaDecoder(
        model.config, model.state_dict(), device="cpu", dtype=torch.float32, slots=slots, max_length=max_length
    )


def reference(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(make_model, name):
    kind, settings = MODELS[name]
    model = make_model(kind, **settings)
    decoder = decoder_of(model)
    rng = random.Random(0)
    texts = [[rng.randrange(300) for _ in range(n)] for n in (3, 90, 17)]
    prompts = decoder.prefill(texts)
    for text, prompt in zip(texts, prompts, strict=True):
        torch.testing.assert_close(prompt.logits, reference(model, text), atol=1e-4, rtol=1e-4)
    decoder.append(prompts)
    for _ in range(4):
        tokens = [rng.randrange(300) for _ in texts]
        texts = [[*t, new] for t, new in zip(texts, tokens, strict=True)]
        for row, logits in enumerate(decoder.step(tokens)):
            torch.testing.assert_close(logits, reference(model, texts[row]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fallback", [False, True])
def test_rows_join_and_leave_and_the_cache_grows(make_model, fallback):
    model = make_model("gpt2", n_embd=32, n_layer=2, n_head=4) if fallback else make_model(layers=1)
    decoder = TransformersDecoder(model, device="cpu") if fallback else decoder_of(model, slots=6, max_length=512)
    rng = random.Random(1)
    texts = []
    for turn in range(30 if fallback else 120):
        if len(texts) < 6 and turn % 3 == 0:
            new = [rng.randrange(300) for _ in range(rng.randrange(1, 250 if turn > 60 else 40))]
            (prompt,) = decoder.prefill([new])
            copies = min(2, 6 - len(texts))
            decoder.append([prompt] * copies)
            texts += [list(new) for _ in range(copies)]
        elif texts and turn % 5 == 0:
            row = rng.randrange(len(texts))
            decoder.remove(row)
            texts[row] = texts[-1]
            texts.pop()
        tokens = [rng.randrange(300) for _ in texts]
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
        logits = decoder.step(tokens)
        row = turn % len(texts)
        assert decoder.rows == len(texts)
        torch.testing.assert_close(logits[row], reference(model, texts[row]), atol=1e-4, rtol=1e-4)


def test_nan_of_one_row_does_not_spread_to_its_place(make_model):
    decoder = decoder_of(make_model())
    (prompt,) = decoder.prefill([[5, 6, 7]])
    broken = Prompt(prompt.length, prompt.logits, tuple(torch.full_like(t, float("nan")) for t in prompt.kv))
    decoder.append([broken])
    assert decoder.step([8]).isnan().all()
    decoder.clear()
    decoder.append(decoder.prefill([[5]]))
    assert decoder.step([8]).isfinite().all()


def test_models_that_are_not_computed_exactly_are_refused(make_model):
    assert "gpt2" in supports(make_model("gpt2", n_embd=32, n_layer=1, n_head=4).config)
    sliding = make_model(use_sliding_window=True, sliding_window=8)
    assert supports(sliding.config) == "sliding-window attention"
    # Its angles change where a sequence passes the original context; ours are those of the greatest length.
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    assert "longrope" in supports(make_model("llama", rope_parameters=rope).config)


def test_a_model_without_a_cache_is_refused(make_model):
    with pytest.raises(ValueError, match="type mamba return no past_key_values"):
        TransformersDecoder(make_model("mamba"), device="cpu")


def test_a_prompt_after_a_known_beginning_never_has_all_scores_at_once(make_model):
    decoder = decoder_of(make_model("qwen2"))
    (known,) = decoder.prefill([list(range(60))])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        decoder.prefill([list(range(80))], [Known(known, 60)])
    used = {event.name for event in profile.events()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in used
    assert not {name for name in used if "_scaled_dot_product_attention_math" in name}
