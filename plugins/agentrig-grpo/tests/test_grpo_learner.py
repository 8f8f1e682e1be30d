from __future__ import annotations

import copy
import json
import math
import random
import sys
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.learner import Learner, TrainSample
from agentrig_grpo.loss import sample_weights
from agentrig_grpo.masters import Masters
from agentrig_grpo.optimizers import optimizer_bytes

from agentrig.audit.adamw import adamw, learning_rate
from agentrig.audit.sketch import Sketch
from agentrig.credit import LARGEST
from agentrig.errors import AgentrigError, ConfigError, RunStopped
from agentrig.ledger import Call

GOLDEN = Path(__file__).parent / "golden_losses.json"


def samples_of(n=12, seed=0, *, logprobs=True, vocab=300):
    rng = random.Random(seed)
    made = []
    for i in range(n):
        group = i // 4
        tail = [] if i % 3 else [rng.randrange(5, vocab)]
        response = [rng.randrange(5, vocab) for _ in range(rng.randrange(2, 9))]
        made.append(
            TrainSample(
                prompt_ids=[5 + group, 7, 9 + group, *tail],
                response_ids=response,
                logprobs=[-5.0 + rng.random() for _ in response] if logprobs else None,
                advantage=rng.uniform(-1, 1),
                rollout=i // 2,
                group=f"g{group}",
            )
        )
    return made


def learner_of(model, **settings):
    return Learner(model, GrpoConfig(lr=1e-3, tokens_per_batch=64, **settings), dtype="float32", seed=0)


def logprobs_of(model, sample, temperature=1.0):
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]


@pytest.mark.parametrize("loss", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("kl_loss_coef", [0.0, 0.2])
def test_an_update_is_that_of_a_loop_over_tokens(make_model, loss, kl_loss_coef):
    model, by_hand = make_model(), make_model()
    samples = samples_of()
    learner = learner_of(model, loss_agg_mode=loss, kl_loss_coef=kl_loss_coef, temperature=0.9, max_grad_norm=0.5)
    with torch.no_grad():  # a policy that differs from its reference
        for m in (model, by_hand):
            m.model.norm.weight.mul_(1.1)
    metrics = learner.update(samples, step=1)

    reference, optimizer = make_model(), torch.optim.AdamW(by_hand.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.0)
    weights = sample_weights([len(s.response_ids) for s in samples], [s.rollout for s in samples], loss)
    total, clipped, tokens, ratios = 0.0, 0, 0, []
    for sample, weight in zip(samples, weights, strict=True):
        new = logprobs_of(by_hand, sample, 0.9)
        ref = logprobs_of(reference, sample, 0.9).detach()
        for t in range(len(sample.response_ids)):
            ratio = torch.exp(new[t] - sample.logprobs[t])
            cut = torch.clamp(ratio, 0.8, 1.28) * sample.advantage
            total = total - weight * torch.minimum(ratio * sample.advantage, cut)
            total = total + weight * kl_loss_coef * (torch.exp(ref[t] - new[t]) - (ref[t] - new[t]) - 1)
            clipped += int(cut < ratio * sample.advantage)
            tokens += 1
            ratios.append(float(ratio.detach()))
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5)
    optimizer.step()

    assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["clip_fraction"] == pytest.approx(clipped / tokens)
    assert metrics["ratio_max"] == pytest.approx(max(ratios), rel=1e-4)
    assert metrics["kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / tokens, rel=1e-3, abs=1e-7)
    assert metrics["kl_k1"] == pytest.approx(-sum(math.log(r) for r in ratios) / tokens, rel=1e-3, abs=1e-7)
    assert metrics["trained_tokens"] == tokens
    assert ("kl_reference" in metrics) == bool(kl_loss_coef)
    change = 0.0
    for (name, a), b, c in zip(model.named_parameters(), by_hand.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3, msg=name)
        start = c * 1.1 if name == "model.norm.weight" else c
        change += float((a - start).detach().norm() ** 2)
    assert metrics["weight_change"] == pytest.approx(change**0.5, rel=1e-3)


def test_a_prompt_longer_than_the_context_is_not_tokenized(make_model, tokenizer):
    """Ten million characters held the interpreter for minutes: no deadline and no Ctrl-C had an effect."""
    learner = Learner(make_model("llama"), GrpoConfig(), dtype="float32", seed=0, tokenizer=tokenizer)
    assert learner.prompt("a short one")
    assert learner.prompt("ab " * 3_000_000) == []


@pytest.mark.parametrize(("field", "token"), [("prompt_ids", 10**9), ("response_ids", -5)])
def test_a_token_that_the_model_lacks_is_named_with_its_call(make_model, field, token):
    """It was an IndexError of torch, which says neither what nor whose."""
    learner = learner_of(make_model())
    first, second, *others = samples_of()
    wrong = attrs.evolve(second, call=Call("r-7", "c-1"), **{field: [*getattr(second, field)[:-1], token]})
    with pytest.raises(RunStopped) as raised:
        learner.update([first, wrong, *others], step=3)
    name, most = field.removesuffix("_ids"), learner.model.config.vocab_size - 1
    said = f"step 3: the {name} of call c-1 of rollout r-7 has the token {token}, and the model has the tokens 0 to"
    assert str(raised.value).startswith(f"{said} {most}.")


def test_samples_without_advantage_only_count_in_the_weights(make_model):
    samples = [attrs.evolve(s, advantage=0.0) if s.group == "g1" else s for s in samples_of()]
    metrics = learner_of(make_model()).update(samples, step=1)
    assert metrics["trained_tokens"] == sum(len(s.response_ids) for s in samples if s.advantage)
    others = learner_of(make_model()).update([s for s in samples if s.advantage], step=1)
    share = metrics["trained_tokens"] / sum(len(s.response_ids) for s in samples)
    assert metrics["loss"] == pytest.approx(others["loss"] * share, rel=1e-4)
    nothing = learner_of(make_model()).update([attrs.evolve(s, advantage=0.0) for s in samples], step=1)
    assert (nothing["weight_change"], nothing["updates"]) == (0.0, 0.0)
    assert learner_of(make_model()).update([], step=1)["weight_change"] == 0.0


@pytest.mark.parametrize("updates", [1, 4])
def test_missing_logprobs_are_computed_before_the_update(make_model, updates):
    samples = samples_of(logprobs=False)
    with torch.no_grad():
        known = [attrs.evolve(s, logprobs=logprobs_of(make_model(), s).tolist()) for s in samples]
    some = [k if i % 2 else s for i, (k, s) in enumerate(zip(known, samples, strict=True))]
    results = [
        learner_of(make_model(), ppo_epochs=updates // 2 or 1, mini_batches=min(updates, 2)).update(given, step=1)
        for given in (samples, some, known)
    ]
    assert results[0]["updates"] == updates
    for other in results[1:]:
        assert results[0]["loss"] == pytest.approx(other["loss"], abs=1e-4)
        assert results[0]["weight_change"] == pytest.approx(other["weight_change"], rel=1e-3)
    if updates == 1:
        assert results[0]["ratio_max"] == 1.0


def test_a_resumed_learner_continues_like_an_uninterrupted_one(make_model, tmp_path):
    samples = [samples_of(seed=i) for i in range(4)]
    settings = {"mini_batches": 2, "warmup_steps": 5}
    whole = learner_of(make_model(), **settings)
    first = learner_of(make_model(), **settings)
    for step in range(2):
        whole.update(samples[step], step=step)
        first.update(samples[step], step=step)
    torch.save(first.state(), tmp_path / "state.pt")
    second = learner_of(make_model(seed=5), **settings)
    second.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    for step in range(2, 4):
        ours, theirs = (learner.update(samples[step], step=step) for learner in (whole, second))
        for figure in ("loss", "grad_norm", "lr", "weight_change"):
            assert ours[figure] == pytest.approx(theirs[figure], rel=1e-6)
    for a, b in zip(whole.trained.values(), second.trained.values(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(AgentrigError, match="LoRA"):
        learner_of(make_model(), lora_rank=2).load_state(first.state())


def test_a_resumed_learner_uses_the_current_settings(make_model):
    first = learner_of(make_model())
    first.update(samples_of(), step=0)
    second = learner_of(make_model(), weight_decay=0.1, beta1=0.5, beta2=0.8)
    second.load_state(first.state())
    assert {(g["betas"], g["weight_decay"]) for g in second.optimizer.param_groups} == {((0.5, 0.8), 0.1)}


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_of_tied_weights_are_refused(make_model, target):
    with pytest.raises(ConfigError, match=rf"lora_targets has (model\.)?{target}, whose weights"):
        learner_of(make_model(), lora_rank=2, lora_targets=f"q_proj,{target}")
    learner_of(make_model(tie_word_embeddings=False), lora_rank=2, lora_targets=target)


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (
            "query",
            r"'query' matches no module of this model\.\n  modules that can be adapted: embed_tokens, q_proj, k_proj",
        ),
        ("q_proj, v_prj", r"'v_prj' matches no module of this model\. Did you mean \"v_proj\"\?"),
        ("q_proj,", r"'' matches no module"),
        ("self_attn", r"'self_attn' is a Qwen2Attention, no linear layer"),
        ("proj", r"'proj' matches no module"),
    ],
)
def test_adapters_for_unknown_modules_are_refused(make_model, targets, words):
    with pytest.raises(ConfigError, match=words):
        learner_of(make_model(tie_word_embeddings=False), lora_rank=2, lora_targets=targets)


def test_the_largest_allowed_rewards_give_finite_numbers(make_model):
    samples = [attrs.evolve(s, advantage=LARGEST * (1 if i % 2 else -1)) for i, s in enumerate(samples_of())]
    metrics = learner_of(make_model()).update(samples, step=1)
    assert all(math.isfinite(value) for value in metrics.values())


def test_bfloat16_computes_nearly_the_same_and_keeps_fp32_weights(make_model):
    figures = []
    for dtype in ("float32", "bfloat16"):
        model = make_model()
        learner = Learner(model, GrpoConfig(lr=1e-3), dtype=dtype, seed=0)
        figures.append(learner.update(samples_of(), step=1))
        assert all(p.dtype == torch.float32 for p in learner.trained.values())
        assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
        for name, copy_ in model.named_parameters():
            assert torch.equal(copy_, learner.trained[name].to(copy_.dtype)), name
    assert figures[0]["loss"] != figures[1]["loss"]
    assert figures[0]["loss"] == pytest.approx(figures[1]["loss"], abs=0.05)


def test_golden_losses(make_model):
    learner = Learner(
        make_model(vocab=64, hidden=16, layers=2),
        GrpoConfig(lr=3e-3, ppo_epochs=1, kl_loss_coef=0.05, tokens_per_batch=128),
        dtype="float32",
        seed=0,
    )
    got = [learner.update(samples_of(16, seed=i, vocab=64), step=i)["loss"] for i in range(3)]
    assert got == pytest.approx(json.loads(GOLDEN.read_text())["losses"], abs=1e-5)


def test_a_gradient_that_is_not_finite_changes_no_weight_and_is_reported(make_model):
    learner = learner_of(make_model(), mini_batches=2)
    broken = next(iter(learner.trained.values())).register_hook(lambda gradient: gradient * float("nan"))
    before = copy.deepcopy(learner.state())
    metrics = learner.update(samples_of(), step=1)
    assert math.isnan(metrics["grad_norm"])
    assert (metrics["weight_change"], metrics["updates"]) == (0.0, 0.0)
    after = learner.state()
    assert all(torch.equal(after["trained"][name], tensor) for name, tensor in before["trained"].items())
    for state in (before, after):
        assert not any(t.any() for moments in state["optimizer"]["state"].values() for t in moments.values())
    broken.remove()
    metrics = learner.update(samples_of(), step=2)
    assert math.isfinite(metrics["grad_norm"])
    assert metrics["weight_change"] > 0


def test_gradients_of_many_passes_add_up_in_fp32():
    """A sum in 16 bits would lose what each of them adds."""
    layer = torch.nn.Linear(2, 2)
    masters = Masters(layer, torch.bfloat16)
    for size in (1.0, *[2**-9] * 64):
        (layer.weight * size).sum().backward()
        masters.collect()
    assert layer.weight.grad is None
    assert masters.trained["weight"].grad.dtype == torch.float32
    assert masters.trained["weight"].grad.tolist() == [[1.125, 1.125], [1.125, 1.125]]
    assert masters.trained["bias"].grad is None


def chat_of(turns, *, prompt, answer, new, rng):
    """Return the calls of a rollout: each prompt is the one before with its answer and new tokens."""
    history, calls = prompt, []
    for _ in range(turns):
        said = [rng.randrange(5, 300) for _ in range(answer)]
        calls.append((history, said))
        history = [*history, *said, *(rng.randrange(5, 300) for _ in range(new))]
    return calls


@pytest.mark.parametrize(("turns", "sizes"), [(1, (4, 4)), (1, (1, 2, 7)), (6, (3, 1))])
def test_the_tokens_computed_fall_as_the_forest_predicts(make_model, turns, sizes):
    """Each group's prompt once, and each rollout's history once; without sharing every call in full."""
    rng, made, rollout = random.Random(0), [], 0
    for group, size in enumerate(sizes):
        prompt = [5 + group, *(rng.randrange(5, 300) for _ in range(30 + group))]
        for _ in range(size):
            rollout += 1
            for history, said in chat_of(turns, prompt=prompt, answer=4, new=3, rng=rng):
                made.append(
                    TrainSample(
                        prompt_ids=history,
                        response_ids=said,
                        logprobs=None,
                        advantage=rng.choice([-1.0, 1.0]),
                        rollout=rollout,
                        group=str(group),
                    )
                )
    learner = Learner(make_model(), GrpoConfig(tokens_per_batch=100_000), dtype="float32", seed=0)
    metrics = learner.update(made, step=1)
    prompts = sum(31 + group for group in range(len(sizes)))
    assert metrics["computed_tokens"] == prompts + rollout * (turns * 4 + (turns - 1) * 3 - 1)
    assert metrics["traced_tokens"] == sum(len(s.prompt_ids) + len(s.response_ids) - 1 for s in made)
    assert metrics["repeated_tokens"] == 0
    cut = Learner(make_model(), GrpoConfig(tokens_per_batch=64), dtype="float32", seed=0).update(made, step=1)
    assert cut["repeated_tokens"] == cut["computed_tokens"] - metrics["computed_tokens"]
    assert (cut["repeated_tokens"] > 0) == (turns > 1), "groups that fit into a pass are not cut"
    plain = Learner(make_model(), GrpoConfig(tokens_per_batch=100_000), dtype="float32", seed=0)
    plain.share = False
    assert plain.update(made, step=1)["computed_tokens"] == metrics["traced_tokens"]


@pytest.mark.parametrize("passes", [{}, {"ppo_epochs": 2}])
@pytest.mark.parametrize("logprobs", [True, False])
def test_groups_without_advantage_cost_nothing(make_model, logprobs, passes):
    """No token of them goes through the model, also where log-probabilities are missing."""
    samples = [attrs.evolve(s, advantage=0.0) if s.group == "g1" else s for s in samples_of(logprobs=logprobs)]
    with_them = learner_of(make_model(), **passes).update(samples, step=1)
    without = learner_of(make_model(), **passes).update([s for s in samples if s.advantage], step=1)
    assert with_them["computed_tokens"] == without["computed_tokens"]
    assert with_them["traced_tokens"] == without["traced_tokens"]
    nothing = [attrs.evolve(s, advantage=0.0) for s in samples]
    idle = learner_of(make_model(), **passes).update(nothing, step=1)
    counts = {"updates", "trained_tokens", "computed_tokens", "traced_tokens", "repeated_tokens", "weight_change"}
    assert idle == {**dict.fromkeys(counts, 0.0), "sharing": 1.0}, "nothing is measured: no entropy, no gradient norm"


def learner_in_8_bits(model, **settings):
    pytest.importorskip("bitsandbytes")
    return learner_of(model, optimizer="adamw8bit", **settings)


def step_error(seen, settings, *, update):
    """Return the largest difference of a tensor's elements from AdamW's step, as a share of its bound."""
    given = (np.array(seen[name] or [0.0] * len(seen["at"])) for name in ("weights", "gradients", "means", "squares"))
    rate = learning_rate(settings, step=update, update=update)
    should = adamw(*given, made=seen["made"], rate=rate, settings=settings)
    return float((np.abs(np.array(seen["after"]) - np.array(seen["weights"]) - should.change) / should.bound).max())


def test_adamw_in_8_bits_learns_nearly_the_same_and_every_step_follows_from_its_moments(make_model):
    shape = {"vocab": 2000, "hidden": 64}  # moments of small tensors stay in fp32
    found = []
    for make in (learner_of, learner_in_8_bits):
        model = make_model(**shape)
        learner = make(model, warmup_steps=2, weight_decay=0.1)
        for step in range(1, 5):
            sketch = Sketch(step)
            learner.update(samples_of(seed=step), step=step, sketch=sketch)
            (update,) = sketch.updates
            settings = attrs.asdict(learner.config)
            worst = max(step_error(seen, settings, update=step) for seen in update["tensors"].values())
            assert 0 < worst < 0.75, "from the moments that were stored, as a share of the bound"
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    start = torch.cat([p.detach().flatten() for p in make_model(**shape).parameters()])
    assert float((found[0] - found[1]).norm()) < 0.1 * float((found[0] - start).norm())
    state = [t for s in learner.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    held = sum(t.numel() * t.element_size() for t in state)
    assert held == optimizer_bytes(list(learner.trained.values()), "adamw8bit")
    assert held < 0.31 * optimizer_bytes(list(learner.trained.values()), "adamw")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_learner_in_8_bits_goes_on_bit_for_bit(make_model, tmp_path, dtype):
    pytest.importorskip("bitsandbytes")
    shape = {"vocab": 2000, "hidden": 64}

    def new(seed):
        config = GrpoConfig(lr=1e-3, tokens_per_batch=64, optimizer="adamw8bit")
        return Learner(make_model(seed=seed, **shape), config, dtype=dtype, seed=0)

    whole, first = new(0), new(0)
    for step in range(2):
        for learner in (whole, first):
            learner.update(samples_of(seed=step), step=step)
    torch.save(first.state(), tmp_path / "state.pt")
    second = new(5)
    second.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    for step in range(2, 4):
        ours, theirs = (learner.update(samples_of(seed=step), step=step) for learner in (whole, second))
        assert ours == {**theirs, "learner_tokens_per_s": ours["learner_tokens_per_s"]}
    for a, b in zip(whole.trained.values(), second.trained.values(), strict=True):
        assert torch.equal(a, b)


def test_another_optimizer_than_the_checkpoints_is_refused(make_model):
    first = learner_of(make_model())
    first.update(samples_of(), step=1)
    with pytest.raises(AgentrigError, match=r'optimizer = "adamw", and this run has "adamw8bit": resume with the one'):
        learner_in_8_bits(make_model()).load_state(first.state())


def test_without_bitsandbytes_the_message_says_what_to_install(make_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        ConfigError, match=r'"adamw8bit" needs bitsandbytes (.*\n.*)*pip install .agentrig-grpo\[8bit\]'
    ):
        learner_of(make_model(), optimizer="adamw8bit")
