from __future__ import annotations

import pytest
import torch
from agentrig_grpo.warmup import Example, fine_tune, new_model
from transformers import AutoConfig


@pytest.fixture(scope="module")
def data(tokenizer):

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return [Example(ids(f"name {i}"), [*ids(f"select {chr(97 + i)}"), tokenizer.eos_token_id]) for i in range(6)]


def test_training_learns_and_is_reproducible(tokenizer, model_dir, data):
    def run(seed):
        model = new_model(AutoConfig.from_pretrained(model_dir), tokenizer, seed=seed)
        stats = fine_tune(model, data, epochs=60, lr=3e-3, tokens_per_batch=64, seed=seed, log=None)
        return model, stats

    model, stats = run(1)
    assert stats.losses[-1] < 0.1 < stats.losses[0]
    assert len(stats.losses) == 60
    assert stats.completion_tokens == 60 * sum(len(e.response_ids) for e in data)
    prompt = torch.tensor([data[3].prompt_ids])
    out = model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True) == "select d"
    again, other = run(1), run(2)
    assert again[1].losses == stats.losses
    assert other[1].losses != stats.losses


def test_the_loss_is_on_the_completion_only(make_model):
    example = Example([5, 6, 7], [8, 9])
    model = make_model()
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7, 8, 9]])).logits[0]
        expected = torch.nn.functional.cross_entropy(logits[2:4], torch.tensor([8, 9]))
    stats = fine_tune(make_model(), [example], log=None)
    assert stats.losses[0] == pytest.approx(float(expected), rel=1e-5)


def test_mistakes_are_named(tokenizer, make_model):
    with pytest.raises(ValueError, match="no examples"):
        fine_tune(make_model(), [])
    with pytest.raises(ValueError, match="vocab_size is 100"):
        new_model(make_model(vocab=100).config, tokenizer, seed=0)
