"""The recorded log-probabilities of calls are compared with the learner's before the first update."""

from __future__ import annotations

import attrs
import pytest
import torch
from agentrig_grpo import learner as learner_module
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.learner import Learner
from recorded_steps import sampled_by

from agentrig.delivery import Delivery
from agentrig.errors import RunStopped


def learner_of(model, dtype="float32", **settings):
    return Learner(model, GrpoConfig(**{"lr": 1e-3, "tokens_per_batch": 64, **settings}), dtype=dtype, seed=0)


def two_steps(learner):
    return [learner.update(sampled_by(learner.model, step), step=step) for step in (1, 2)]


def check_sampled(line, folder, dtype="float32"):
    """Look at the recorded log-probabilities as a run without the proof of delivery does."""
    Delivery(folder, on=False).sampled(step=1, difference=line["sampled_difference"], dtype=dtype)


def test_samples_of_another_policy_are_named(make_model, tmp_path) -> None:
    learner = learner_of(make_model(), temperature=0.8)  # the server sampled, and answered, with 1
    line = learner.update(sampled_by(learner.model, 1), step=1)
    with pytest.raises(RunStopped, match=r"step 1: what is trained is not what was sampled\. .* differ from the"):
        check_sampled(line, tmp_path)


def test_responses_in_the_place_of_others_are_named(make_model, tmp_path, monkeypatch) -> None:
    right = learner_module.collate

    def wrong(*args, **more):
        made = right(*args, **more)
        return attrs.evolve(made, targets=made.targets.roll(1))

    monkeypatch.setattr(learner_module, "collate", wrong)
    learner = learner_of(make_model())
    line = learner.update(sampled_by(learner.model, 1), step=1)
    with pytest.raises(RunStopped, match=r"step 1: what is trained is not what was sampled\."):
        check_sampled(line, tmp_path)


def test_log_probabilities_that_the_learner_filled_in_say_nothing_of_what_was_sampled(make_model) -> None:
    """With several updates it computes those that are missing itself."""
    learner = learner_of(make_model(), ppo_epochs=2)
    metrics = learner.update([attrs.evolve(s, logprobs=None) for s in sampled_by(learner.model, 1)], step=1)
    assert "sampled_difference" not in metrics


HEALTHY = {
    "plain": {},
    "lora with kl": {"lora_rank": 2, "kl_loss_coef": 0.1},
    "epochs and mini-batches": {"ppo_epochs": 3, "mini_batches": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "off policy": {"lr": 0.05, "ppo_epochs": 4, "clip_low": 0.05},
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_updates_are_compared_with_the_weights_that_sampled(kind, make_model, tmp_path) -> None:
    learner = learner_of(make_model(), **HEALTHY[kind])
    for line in two_steps(learner):
        assert 0 < line["sampled_difference"] < 1e-5
        check_sampled(line, tmp_path)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_other_models_and_bfloat16_are_healthy(kind, make_model, tmp_path) -> None:
    learner = learner_of(make_model(kind, tie_word_embeddings=False), dtype="bfloat16")
    for line in two_steps(learner):
        assert line["updates"] == 1
        check_sampled(line, tmp_path, dtype="bfloat16")


def with_dropout(kind):
    """Return a tiny model whose files ask for dropout of a half, everywhere."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "eos_token_id": 1, "bos_token_id": 1, "pad_token_id": 0}
    if kind == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.5)
        config = transformers.GPT2Config(**sizes, **dropout, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        return transformers.GPT2LMHeadModel(config).eval()
    dropout = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.5)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
    config = transformers.OPTConfig(**sizes, **dropout, **shape, max_position_embeddings=64, word_embed_proj_dim=32)
    return transformers.OPTForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_a_model_with_dropout_is_trained_without_it(kind, tmp_path) -> None:
    learner = learner_of(with_dropout(kind), gradient_checkpointing=True)
    metrics = learner.update(sampled_by(with_dropout(kind), 1), step=1)
    assert metrics["sampled_difference"] < 1e-5
    check_sampled(metrics, tmp_path)
