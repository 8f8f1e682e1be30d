"""Silent faults of an update, each named within two steps; healthy runs raise nothing."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable

import attrs
import pytest
import torch
from agentrig_grpo import learner as learner_module
from agentrig_grpo import proofs
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.learner import Learner, TrainSample
from agentrig_grpo.tables import Table

from agentrig.delivery import Delivery
from agentrig.errors import RunStopped

Plant = Callable[[Learner, pytest.MonkeyPatch], None]


def samples_of(model, step):
    """Return calls as sampled by a server with the model's weights."""
    rng = random.Random(step)
    made = []
    for i in range(12):
        prompt = [5 + i // 4, *range(7, 19)]
        response = [rng.randrange(5, 300) for _ in range(2 + i % 5)]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].float()
        found = torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]
        made.append(
            TrainSample(
                prompt_ids=prompt,
                response_ids=response,
                logprobs=found.tolist(),
                advantage=rng.uniform(-1, 1),
                rollout=i,
                group=f"g{i // 4}",
            )
        )
    return made


def learner_of(model, dtype="float32", **settings):
    return Learner(model, GrpoConfig(**{"lr": 1e-3, "tokens_per_batch": 64, **settings}), dtype=dtype, seed=0)


def two_steps(learner):
    return [learner.update(samples_of(learner.model, step), step=step) for step in (1, 2)]


def skips_a_layer(learner, patch):
    (group,) = learner.optimizer.param_groups
    layer = {id(p) for name, p in learner.trained.items() if "layers.1." in name}
    group["params"] = [p for p in group["params"] if id(p) not in layer]


def detaches_a_layer(learner, patch):
    block = next(m for name, m in learner.model.named_modules() if name.endswith("layers.1.mlp"))
    block.register_forward_hook(lambda module, inputs, output: output.detach())


def flips_the_sign(learner, patch):
    right = learner_module.token_losses

    def wrong(*args, **more):
        found = right(*args, **more)
        return attrs.evolve(found, loss=-found.loss)

    patch.setattr(learner_module, "token_losses", wrong)


def learns_at_rate_0(learner, patch):
    step = learner.optimizer.step

    def idle():
        learner.optimizer.param_groups[0]["lr"] = 0.0
        return step()

    patch.setattr(learner.optimizer, "step", idle)


def steps_twice(learner, patch):
    step = learner.optimizer.step
    patch.setattr(learner.optimizer, "step", lambda: (step(), step()))


def shuffles_advantages(learner, patch):
    right = Table.look_up

    def wrong(table, batch):
        behaviour, advantage, weight = right(table, batch)
        return behaviour, advantage.roll(7), weight

    patch.setattr(Table, "look_up", wrong)


def keeps_gradients(learner, patch):
    patch.setattr(learner.optimizer, "zero_grad", lambda set_to_none=True: None)


def clips_to_0(learner, patch):
    right = torch.nn.utils.clip_grad_norm_
    patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda parameters, most: right(parameters, 0.0))


def counts_a_batch_twice(learner, patch):
    right = learner_module.packed

    def wrong(*args, **more):
        packs = list(right(*args, **more))
        assert len(packs) > 1
        return [*packs, packs[0]]

    patch.setattr(learner_module, "packed", wrong)


def forgets_a_batch(learner, patch):
    right = learner_module.packed
    patch.setattr(learner_module, "packed", lambda *args, **more: list(right(*args, **more))[:-1])


def mixes_responses(learner, patch):
    right = learner_module.collate

    def wrong(*args, **more):
        made = right(*args, **more)
        return attrs.evolve(made, targets=made.targets.roll(1))

    patch.setattr(learner_module, "collate", wrong)


def always_ratio_1(learner, patch):
    right = learner_module.token_losses
    patch.setattr(
        learner_module, "token_losses", lambda now, before, *args, **more: right(now, now.detach(), *args, **more)
    )


PLANTED = {
    skips_a_layer: r"step 1, update 1: 12 of 26 trained tensors did not change: model\.layers\.1\.self_attn\.q_proj",
    detaches_a_layer: r"step 2, update 1: 4 of 26 trained tensors got no gradient in 2 updates.*model\.layers\.1\.",
    flips_the_sign: r"step 1, update 1: \d+ of \d+ response tokens have a gradient of the wrong sign.* of rollout \d+",
    learns_at_rate_0: r"step 1, update 1: 26 of 26 trained tensors did not change.*learning rate 0\.001",
    steps_twice: r"step 1, update 1: 26 of 26 trained tensors changed by a step other than AdamW's",
    shuffles_advantages: r"step 1, update 1: \d+ of \d+ response tokens have a gradient that does not follow",
    keeps_gradients: r"step 2, update 1: the gradient of an earlier update is still there, in model\.",
    clips_to_0: r"step 1, update 1: 26 of 26 trained tensors did not change.*clipped to norm 1",
    counts_a_batch_twice: r"step 1, update 1: \d+ of \d+ response tokens are counted more than once, the first",
    forgets_a_batch: r"step 1, update 1: \d+ of \d+ response tokens are left out of the gradient",
    mixes_responses: r"step 1, update 1: \d+ response tokens are not those of their sample",
    always_ratio_1: r"step 1, update 2: \d+ of \d+ response tokens have a gradient that does not",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_fault_of_an_update_is_named(plant: Plant, make_model, monkeypatch) -> None:
    learner = learner_of(make_model(), ppo_epochs=2 if plant is always_ratio_1 else 1)
    plant(learner, monkeypatch)
    with pytest.raises(RunStopped, match=re.compile(PLANTED[plant], re.DOTALL)):
        two_steps(learner)


def test_an_optimizer_whose_state_was_not_restored_is_named(make_model, monkeypatch) -> None:
    first = learner_of(make_model())
    two_steps(first)
    second = learner_of(make_model())
    monkeypatch.setattr(second.optimizer, "load_state_dict", lambda state: None)
    second.load_state(first.state())
    with pytest.raises(
        RunStopped, match=r"step 3, update 1: this is update 3 of the run, and the optimizer has made 0"
    ):
        second.update(samples_of(second.model, 3), step=3)


def check_sampled(learner, folder, dtype="float32"):
    """Look at the recorded log-probabilities as a run without the proof of delivery does."""
    difference, sample = learner.furthest
    Delivery(folder, on=False).sampled(step=1, difference=difference, call=f"rollout {sample.rollout}", dtype=dtype)


def test_samples_of_another_policy_are_named(make_model, tmp_path) -> None:
    learner = learner_of(make_model(), temperature=0.8)  # the server sampled, and answered, with 1
    learner.update(samples_of(learner.model, 1), step=1)
    with pytest.raises(RunStopped, match=r"step 1: what is trained is not what was sampled\. .* rollout \d+ differ"):
        check_sampled(learner, tmp_path)


HEALTHY = {
    "plain": {},
    "lora": {"lora_rank": 2, "lora_alpha": 4},
    "lora with kl": {"lora_rank": 2, "kl_loss_coef": 0.1},
    "kl": {"kl_loss_coef": 0.2},
    "epochs and mini-batches": {"ppo_epochs": 3, "mini_batches": 2},
    "sequence mean": {"loss_agg_mode": "seq-mean-token-mean"},
    "small steps": {"lr": 1e-7, "warmup_steps": 50},
    "decay": {"weight_decay": 0.1, "max_grad_norm": 1e-3, "beta1": 0.0},
    "checkpointing": {"gradient_checkpointing": True},
    "off policy": {"lr": 0.05, "ppo_epochs": 4, "clip_low": 0.05},
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_updates_raise_nothing(kind, make_model, tmp_path) -> None:
    learner = learner_of(make_model(), **HEALTHY[kind])
    lines = two_steps(learner)
    check_sampled(learner, tmp_path)
    resumed = learner_of(make_model(), **HEALTHY[kind])
    resumed.load_state(copy.deepcopy(learner.state()))
    lines.append(resumed.update(samples_of(resumed.model, 3), step=3))
    for line in lines:
        assert line["updates"] >= 1
        assert line["token_error"] < proofs.TOKEN_BOUND / 5
        assert line["step_error"] < 1


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_other_models_and_bfloat16_are_healthy(kind, make_model, tmp_path) -> None:
    learner = learner_of(make_model(kind, tie_word_embeddings=False), dtype="bfloat16")
    for line in two_steps(learner):
        assert line["token_error"] < proofs.TOKEN_BOUND / 5
        check_sampled(learner, tmp_path, dtype="bfloat16")


def test_an_unused_part_of_the_model_is_warned_of_once(make_model, caplog) -> None:
    model = make_model()
    model.model.layers[0].spare = torch.nn.Linear(4, 4)
    learner = learner_of(model)
    for step in range(1, 5):
        learner.update(samples_of(learner.model, step), step=step)
    assert caplog.text.count("the model does not use model.layers.0.spare.weight") == 1


def test_copies_that_are_not_those_of_the_trained_weights_are_named(make_model, monkeypatch) -> None:
    learner = learner_of(make_model(), dtype="bfloat16", lr=0.1)
    monkeypatch.setattr(learner._masters, "refresh", lambda: None)
    with pytest.raises(RunStopped, match=r"step 1, update 1: the model does not compute with the weights that were"):
        two_steps(learner)


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
    metrics = learner.update(samples_of(with_dropout(kind), 1), step=1)
    assert metrics["sampled_difference"] < 1e-5
    check_sampled(learner, tmp_path)
