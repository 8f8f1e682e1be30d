"""A learner of adapters that computes with its server's own frozen weights, as rows of the matrices that it joins."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import attrs
import pytest
import torch
from agentrig_grpo import algorithm, checkpoint, lent, naming, planning
from agentrig_grpo.algorithm import Grpo
from agentrig_grpo.config import EmbeddedConfig, GrpoConfig
from agentrig_grpo.learner import Learner
from agentrig_grpo.lora import factors
from agentrig_grpo.server.handle import Embedded
from proof_runs import ProofSession, run
from samples import samples_of

from agentrig.delivery.digests import FUSED, copies, digests, held
from agentrig.errors import AgentrigError, ConfigError, RunStopped
from agentrig.hardware import Cpu
from agentrig.hardware.memory import DeviceMemory
from agentrig.servers import ServerMemory, ServerPlan

CONFIG = GrpoConfig(lora_rank=2, lora_alpha=6, lr=1e-2)

KINDS = {
    "tied": ("qwen2", {}),
    "a head of its own": ("qwen2", {"tie_word_embeddings": False}),
    "norms of heads": ("qwen3", {"head_dim": 8}),
    "scaled frequencies": (
        "llama",
        {
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
            "tie_word_embeddings": False,
        },
    ),
}


class Server:
    """Holds a directory's weights as vLLM does: layers joined, a vocabulary of a multiple of 64 rows."""

    def __init__(self, directory) -> None:
        state = {}
        for name, tensor in checkpoint.weights(checkpoint.load_model(directory, dtype=torch.bfloat16)).items():
            if "embed_tokens" in name or "lm_head" in name:
                rows = -(-len(tensor) // 64) * 64
                tensor = torch.cat([tensor, torch.zeros(rows - len(tensor), tensor.shape[1], dtype=tensor.dtype)])
            state[name] = tensor
        for joined, parts in FUSED.items():
            for name in [name for name in state if f".{parts[0]}." in name]:
                state[name.replace(parts[0], joined)] = torch.cat([state.pop(name.replace(parts[0], p)) for p in parts])
        self.parameters = state

    def lend(self, shapes):
        return dict(copies(self.parameters, shapes))


class Unlike(Server):
    """Lends all but one tensor, or one of another dtype."""

    def __init__(self, directory, dtype) -> None:
        super().__init__(directory)
        self.dtype = dtype

    def lend(self, shapes):
        found = super().lend(shapes)
        one = found.pop("model.layers.1.self_attn.k_proj.weight")
        return found if self.dtype is None else {**found, "model.layers.1.self_attn.k_proj.weight": one.to(self.dtype)}


@pytest.fixture(params=KINDS)
def directory(request, tmp_path, make_model, tokenizer):
    kind, more = KINDS[request.param]
    checkpoint.save(make_model(kind, **more), tokenizer, tmp_path, dtype=torch.bfloat16)
    return tmp_path


@pytest.fixture
def plain(tmp_path, make_model, tokenizer):
    checkpoint.save(make_model(), tokenizer, tmp_path, dtype=torch.bfloat16)
    return tmp_path


def borrowed(directory, server, config=CONFIG):
    """Return a learner that computes with a server's weights."""
    model, stated = lent.load_model(directory, server, dtype=torch.bfloat16, device="cpu", attention="sdpa")
    return Learner(model, config, dtype="bfloat16", seed=3, frozen_exact=True, lent=stated)


def owning(directory, config=CONFIG):
    """Return a learner that has a copy of its own."""
    model = checkpoint.load_model(directory, dtype=torch.bfloat16, attention="sdpa")
    return Learner(model, config, dtype="bfloat16", seed=3, frozen_exact=True)


def updated(learner):
    """Return each gradient that the optimizer got in two updates, and their figures."""
    gradients, figures = [], []
    learner.optimizer.register_step_pre_hook(
        lambda *_: gradients.append({name: p.grad.clone() for name, p in learner.trained.items()})
    )
    for step in (1, 2):
        found = learner.update(samples_of(), step=step)
        figures.append({name: value for name, value in found.items() if not name.endswith("_per_s")})
    return gradients, figures


@pytest.mark.parametrize("more", [{}, {"kl_loss_coef": 0.1, "gradient_checkpointing": True}])
def test_gradients_weights_and_scores_are_those_of_a_base_of_its_own(directory, more) -> None:
    config, server = attrs.evolve(CONFIG, **more), Server(directory)
    before = {name: tensor.clone() for name, tensor in server.parameters.items()}
    one, other = borrowed(directory, server, config), owning(directory, config)
    for ours, theirs in zip(updated(one)[0], updated(other)[0], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert any(gradient.abs().max() > 0 for gradient in ours.values())
    ids = [5, 6, 7, 8, 9, 10]
    assert one.logprobs(ids) == other.logprobs(ids)
    assert one.spread(ids, "bfloat16") == other.spread(ids, "bfloat16")
    ours, theirs = (checkpoint.weights(learner.model) for learner in (one, other))
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert one.fingerprint() == other.fingerprint()
    assert all(torch.equal(server.parameters[name], tensor) for name, tensor in before.items()), "nobody writes them"


def test_frozen_weights_are_the_servers_memory_and_buffers_those_of_a_loaded_model(directory) -> None:
    server = Server(directory)
    learner, loaded = borrowed(directory, server), checkpoint.load_model(directory, dtype=torch.bfloat16)
    ranges = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in server.parameters.values()]
    frozen = [p for p in learner.model.parameters() if not p.requires_grad]
    assert len(frozen) == len(list(loaded.parameters()))
    assert all(any(begin <= p.data_ptr() and p.data_ptr() + p.nbytes <= end for begin, end in ranges) for p in frozen)
    base = learner.model.get_base_model()
    ours, theirs = dict(base.named_buffers()), dict(loaded.named_buffers())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)
    tied = base.config.tie_word_embeddings
    assert (base.get_output_embeddings().weight is base.get_input_embeddings().weight) is tied
    assert base.generation_config.eos_token_id == loaded.generation_config.eos_token_id


def test_adapters_alone_are_sent_and_the_server_is_proven_to_have_both(plain) -> None:
    server = Server(plain)
    learner = borrowed(plain, server)
    updated(learner)
    sent = dict(learner.weights())
    assert len(sent) == 2 * 7 * 2
    assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}
    one = "model.layers.0.self_attn.q_proj.lora"
    trained = {name.removeprefix("base_model.model.").replace(".default", ""): p for name, p in learner.trained.items()}
    assert torch.equal(sent[f"{one}_A.weight"], trained[f"{one}_A.weight"].bfloat16())
    assert torch.equal(sent[f"{one}_B.weight"], (trained[f"{one}_B.weight"].bfloat16().float() * 3).bfloat16())
    shapes = {name: list(p.shape) for name, p in checkpoint.load_model(plain).named_parameters()}
    shapes |= {name: list(tensor.shape) for name, tensor in sent.items()}
    assert learner.digests("bfloat16") == held({**server.parameters, **sent}, shapes)
    server.parameters["model.layers.1.self_attn.qkv_proj.weight"][40, 1] += 1  # a row of k_proj
    wrong = held({**server.parameters, **sent}, shapes)
    stated = learner.digests("bfloat16")
    assert [name for name in stated if stated[name] != wrong[name]] == ["model.layers.1.self_attn.k_proj.weight"]
    with torch.no_grad():
        next(iter(learner.trained.values())).add_(1)
    assert learner.digests("bfloat16") != stated
    assert owning(plain)._lent is None


def test_the_served_sum_is_that_of_the_merged_weights_but_for_rounding(plain) -> None:
    """What a server computes of plain weights and sent factors, in fp64, is what the merged matrix says."""
    learner = borrowed(plain, Server(plain))
    updated(learner)
    sent, merged, base = (dict(learner.weights()), checkpoint.weights(learner.model), checkpoint.load_model(plain))
    for name, layer in base.named_modules():
        if f"{name}.lora_A.weight" not in sent:
            continue
        first, second = sent[f"{name}.lora_A.weight"].double(), sent[f"{name}.lora_B.weight"].double()
        change = merged[f"{name}.weight"].double() - layer.weight.detach().double()
        assert change.abs().max() > 0
        # Two factors and a scale are rounded to 8 bits, and two products are added.
        assert float((second @ first - change).abs().max()) <= 2 * 3 * 2**-8 * float((second.abs() @ first.abs()).max())


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.gate_up_proj.weight"])
def test_a_server_with_other_weights_than_the_files_is_found_before_anything_is_trained(plain, name) -> None:
    server = Server(plain)
    server.parameters[name].view(-1)[-1] += 1
    part = name.replace("gate_up_proj", "up_proj")
    with pytest.raises(AgentrigError, match=rf"1 of 26 weights .* not those of .*: {part}\. Nothing was trained"):
        borrowed(plain, server)


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_weights_that_the_server_has_otherwise_are_named_with_the_setting(plain, dtype) -> None:
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.k_proj\.weight\. .*lora_base = \"own\""):
        borrowed(plain, Unlike(plain, dtype))


def test_a_server_that_lends_nothing_is_refused(plain) -> None:
    with pytest.raises(ConfigError, match=r"no method lend\. .*lora_base = \"own\""):
        borrowed(plain, object())


REFUSED = {
    "no server": ({}, 0, "no weights on the learner's device"),
    "a rank": ({"lora_rank": 64}, 32, "rank 32 at most"),
    "a head": ({"lora_targets": "q_proj, lm_head"}, 512, "no adapters of lm_head"),
    "fp32": ({"dtype": "float32"}, 512, "must have bfloat16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_weights_that_cannot_be_lent_are_refused_with_the_reason(plain, case) -> None:
    settings, lends, why = REFUSED[case]
    config = GrpoConfig(model=str(plain), **{"lora_rank": 2, "lora_base": "server", **settings})
    says = ServerMemory(sequences=4, lends=lends)
    dtype = config.dtype if config.dtype != "auto" else "bfloat16"
    assert why in planning.why_not_lent(plain, config, dtype, says)
    if dtype == "float32":
        with pytest.raises(ConfigError, match=rf'lora_base = "server": .*{why}.* set "own"'):
            Grpo(config).fit(ServerPlan(model=plain, name="policy", hardware=Cpu()), session_of(says))


def test_other_models_and_files_keep_a_copy_of_the_learners_own(make_model, tokenizer, tmp_path) -> None:
    config, says = GrpoConfig(lora_rank=2), ServerMemory(sequences=4, lends=512)
    for folder, kind, dtype, why in (
        ("gpt", "gpt2", torch.bfloat16, "of a GPT2LMHeadModel, server and learner may name"),
        ("fp32", "qwen2", torch.float32, "must have bfloat16"),
        ("fits", "qwen2", torch.bfloat16, ""),
    ):
        checkpoint.save(make_model(kind), tokenizer, tmp_path / folder, dtype=dtype)
        assert why in (found := planning.why_not_lent(tmp_path / folder, config, "bfloat16", says))
        assert bool(found) is bool(why)


def session_of(says, **more):
    return SimpleNamespace(
        hardware=Cpu(), calls=4, server_memory=says, seed=3, note=print, record=lambda *_: None, train_tasks=[], **more
    )


def test_a_run_serves_the_starting_model_and_its_learner_borrows_it(plain, tmp_path, monkeypatch) -> None:
    """With `lora_base`; on a made-up device."""
    config = GrpoConfig(model=str(plain), lora_rank=2, lora_base="server", max_tokens=8, max_length=64, lora_alpha=6)
    monkeypatch.setattr(algorithm, "check_device", lambda hardware, dtype: "bfloat16")
    monkeypatch.setattr(planning, "measured", lambda *_: DeviceMemory(name="cpu", total=8 << 30))
    made, session = algorithm.Grpo(config), session_of(ServerMemory(sequences=4, lends=512))
    asked = ServerPlan(model=plain, name="policy", hardware=session.hardware, dtype="bfloat16")
    plan = made.fit(asked, session)
    assert (plan.model, plan.adapters, plan.sleeps) == (plain, 2, False)
    server = Server(plain)
    made.borrow(server)
    learner = made.learner(session)
    updated(learner)
    begins = {t.data_ptr() for t in server.parameters.values()}
    assert learner.model.get_base_model().model.layers[1].mlp.down_proj.base_layer.weight.data_ptr() in begins
    assert all(".lora_" in name for name, _ in learner.weights())
    own = algorithm.Grpo(attrs.evolve(config, lora_base="own"))
    own.fit(asked, session)
    own.borrow(server)
    other = own.learner(session)
    updated(other)
    assert not begins & {p.data_ptr() for p in other.model.parameters()}
    assert other.fingerprint() == learner.fingerprint()


class Serving(Embedded):
    """A real server that holds frozen weights for both: it samples with adapters that it has merged by itself."""

    sent: dict = {}  # noqa: RUF012
    wrong = ""

    def __init__(self, config, plan) -> None:
        super().__init__(config, plan)
        assert (plan.adapters, plan.dtype) == (2, "bfloat16")
        self.own = Server(plan.model)

    def lend(self, shapes):
        self.shapes = shapes
        return self.own.lend(shapes)

    def take(self, weights, version):
        self.sent = dict(weights)
        found = dict(copies(self.own.parameters, self.shapes))
        for name in [name for name in self.sent if ".lora_A." in name]:
            plain = name.replace(".lora_A", "")
            change = self.sent[name.replace("_A.", "_B.")].float() @ self.sent[name].float()
            found[plain] = found[plain].float() + change
        super().take(found.items(), version)
        if self.wrong == "frozen" and version == 1:
            self.own.parameters["model.norm.weight"][3] *= 2
        if self.wrong == "adapter" and version == 1:
            next(iter(self.sent.values())).mul_(2)

    def held(self):
        shapes = {**self.shapes, **{name: list(tensor.shape) for name, tensor in self.sent.items()}}
        return [held({**self.own.parameters, **self.sent}, shapes)]


@pytest.mark.parametrize("wrong", ["", "frozen", "adapter"])
def test_each_delivery_of_a_run_is_proven_adapters_and_frozen_weights(plain, tmp_path, monkeypatch, wrong) -> None:
    monkeypatch.setattr(algorithm, "check_device", lambda hardware, dtype: "bfloat16")
    monkeypatch.setattr(planning, "measured", lambda *_: DeviceMemory(name="cpu", total=8 << 30))
    session = ProofSession(tmp_path / "run")
    session.calls, session.server_memory = 4, ServerMemory(sequences=4, lends=512)
    begin = session.delivery.begin  # not of what it loaded: this server's answers have digests of merged weights
    monkeypatch.setattr(session.delivery, "begin", lambda *, loaded=False, **of: None if loaded else begin(**of))
    session.make = partial(type("Told", (Serving,), {"wrong": wrong}), EmbeddedConfig(batch=8))
    settings = {"lora_rank": 2, "lora_base": "server", "lr": 1e-2}
    if wrong:
        name = r"model\.norm\.weight" if wrong == "frozen" else r"q_proj\.lora_A\.weight"
        with pytest.raises(RunStopped, match=rf"step 1: .*\n.* 1 of 54 tensors differ from the learner's: .*{name}"):
            run(tmp_path / "run", plain, session, steps=2, **settings)
        return
    run(tmp_path / "run", plain, session, steps=2, **settings)
    proven = session.delivery.summary()
    assert (proven["proofs"], proven["arrived"], proven["tensors"]) == (3, 3, 26 + 28)
    assert 0 < proven["difference"] <= proven["bound"] < 1
    merged = checkpoint.load_model(naming.plain(session.saved[2]), dtype=torch.bfloat16).state_dict()
    began = checkpoint.load_model(plain, dtype=torch.bfloat16).state_dict()
    changed = {name for name in merged if not torch.equal(merged[name], began[name])}
    assert changed
    assert all("_proj.weight" in name for name in changed)


def test_files_that_name_the_weights_differently_are_refused(plain) -> None:
    with pytest.raises(ConfigError, match=r"lack model\.other\.weight"):
        lent.digests_of(plain, ["model.norm.weight", "model.other.weight"], dtype=torch.bfloat16, device="cpu")


def test_a_learner_that_goes_on_from_a_checkpoint_sends_the_same(plain, tokenizer, tmp_path) -> None:
    one = borrowed(plain, Server(plain))
    updated(one)
    one.tokenizer = tokenizer
    one.save(tmp_path / "saved")
    again = borrowed(plain, Server(plain))
    assert digests(factors(again.model, torch.bfloat16)) != digests(one.weights())
    again.load(tmp_path / "saved")
    assert digests(factors(again.model, torch.bfloat16)) == digests(one.weights())
