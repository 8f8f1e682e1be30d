"""Models with adapters: merged one matrix at a time, with a frozen model in 16 bits; and their checkpoints."""

from __future__ import annotations

import copy
import sys
import weakref

import pytest
import torch
from agentrig_grpo import adapter_files, checkpoint, lora
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.learner import Learner
from agentrig_grpo.memory import Counter
from agentrig_grpo.model_files import ModelError
from agentrig_grpo.naming import model_directory
from agentrig_grpo.server.transfer import Sender
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from samples import samples_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from agentrig.delivery.digests import digests
from agentrig.errors import AgentrigError, CheckpointDamaged, ConfigError
from agentrig.run.checkpoints import verify, write_list

ADAPTED = {"every linear layer": {}, "a head": {"lora_targets": "q_proj,lm_head"}, "embeddings": {
    "lora_targets": "v_proj,embed_tokens"}}  # fmt: skip


def trained(model, dtype="float32", /, **settings):
    """Return a learner whose adapters have moved far."""
    config = GrpoConfig(**{"lora_rank": 2, "lr": 1e-2, **settings})
    made = Learner(model, config, dtype=dtype, seed=0)
    for step in range(2):
        made.update(samples_of(), step=step)
    return made


def rounded(model):
    """Return a model whose weights are those of a file in bfloat16, in fp32."""
    return model.to(torch.bfloat16).to(torch.float32)


def test_a_model_without_adapters_is_read_without_peft(make_model, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    for name in [name for name in sys.modules if name.split(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "peft", None)  # its import fails
    found = dict(lora.live_weights(model))
    expected = model.state_dict()
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("adapted", ADAPTED)
def test_a_merge_of_one_matrix_at_a_time_is_that_of_the_whole_model(make_model, adapted) -> None:
    learner = trained(make_model(tie_word_embeddings=False), **ADAPTED[adapted])
    whole = copy.deepcopy(learner.model).merge_and_unload(safe_merge=True).state_dict()
    merged = checkpoint.weights(learner.model)
    assert list(merged) == list(whole)
    assert len(merged) == len(whole)
    assert all(torch.equal(merged[name], tensor) for name, tensor in whole.items())
    assert learner.digests("bfloat16") == digests(whole.items(), torch.bfloat16)
    assert sum(not torch.equal(make_model(tie_word_embeddings=False).state_dict()[n], whole[n]) for n in whole) > 1


class Operations(TorchDispatchMode):
    """Names the operations that are called."""

    def __enter__(self):
        self.names = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to")  # peft sets it for each layer
def test_every_kind_of_layer_is_merged_as_peft_does_it_in_two_kernels() -> None:
    torch.manual_seed(0)
    layers = {
        "linear": torch.nn.Linear(6, 8),
        "transposed": Conv1D(8, 8),
        "embedding": torch.nn.Embedding(8, 6),
        "convolution": torch.nn.Conv1d(6, 8, 3),
        "image": torch.nn.Conv2d(6, 8, (3, 2)),
    }
    model = get_peft_model(torch.nn.ModuleDict(layers), LoraConfig(r=2, lora_alpha=3, target_modules=list(layers)))
    for name, factor in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(factor)
    found = lora.MergedWeights(model)
    with Operations() as operations:
        merged = dict(found)
    assert sum(name in ("_to_copy", "addmm_") for name in operations.names) == 2 * len(layers)
    assert set(operations.names) <= {"_to_copy", "addmm_", "t", "view", "transpose", "permute"}, "nothing is read"
    live = dict(lora.live_weights(model))
    whole = copy.deepcopy(model).merge_and_unload().state_dict()
    assert set(merged) == set(live) == set(whole)
    assert all(torch.equal(merged[name], live[name]) for name in whole)
    assert all(torch.allclose(merged[name], tensor, atol=1e-6) for name, tensor in whole.items())


def test_one_merged_matrix_is_in_memory_at_a_time(make_model) -> None:
    learner = trained(make_model())
    own = {tensor.data_ptr() for tensor in learner.model.state_dict().values()}
    alive, most, merged = [], 0, 0

    def watched():
        nonlocal most, merged
        for name, tensor in learner.weights():
            if tensor.data_ptr() not in own:
                merged += 1
                alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor
            most = max(most, sum(ref() is not None for ref in alive))

    class Once:
        """Weights that are merged again whenever they are read."""

        def __iter__(self):
            return watched()

    sender = Sender(torch.bfloat16, "cpu")
    message, descriptor = sender.pack(Once())
    assert (most, merged, descriptor is not None) == (1, 2 * 14, True)  # to lay them out, and to copy them
    found = dict(zip((e["name"] for e in message["tensors"]), sender._entries, strict=True))
    assert sorted(found) == sorted(checkpoint.weights(learner.model))
    again, none = sender.pack(Once())
    assert (again, none, merged) == ({"tensors": message["tensors"]}, None, 3 * 14)


def test_adapters_that_cannot_be_merged_are_named(make_model) -> None:
    learner = trained(make_model())
    name = next(name for name in learner.trained if "q_proj.lora_B" in name)
    with torch.no_grad():
        learner.trained[name].fill_(float("inf"))
    with pytest.raises(AgentrigError, match=r"finite, beside model\.layers\.0\.self_attn\.q_proj\.weight\. .*\.lr"):
        learner.weights()


def test_a_frozen_model_with_16_bits_stays_so_and_what_is_served_is_rounded_once(make_model) -> None:
    start = rounded(make_model())
    plain = {name: tensor.clone() for name, tensor in start.state_dict().items()}
    learner = trained(start, "bfloat16")
    assert {p.dtype for p in learner.trained.values()} == {torch.float32}
    assert {p.dtype for p in learner.model.parameters()} == {torch.bfloat16}
    factors = {name.removeprefix("base_model.model.").replace(".default", ""): p for name, p in learner.trained.items()}
    for name, tensor in checkpoint.weights(learner.model).items():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" in factors:
            change = factors[f"{layer}.lora_B.weight"] @ factors[f"{layer}.lora_A.weight"] * (16 / 2)
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, plain[name] + change.detach())
            assert not torch.equal(tensor.bfloat16().float(), plain[name])
        else:
            assert torch.equal(tensor.float(), plain[name])
    assert learner.digests("bfloat16") == {
        **digests(checkpoint.weights(learner.model).items(), torch.bfloat16),
        "lm_head.weight": learner.digests("bfloat16")["model.embed_tokens.weight"],
    }


@pytest.mark.parametrize("tied", [True, False])
def test_a_frozen_embedding_is_not_copied_to_score_in_fp32(make_model, tied) -> None:
    model = rounded(make_model(vocab=4000, hidden=64, layers=1, tie_word_embeddings=tied))
    learner, ids = Learner(model, GrpoConfig(lora_rank=2), dtype="bfloat16", seed=0), [5, 6, 7, 8]
    plain = Learner(copy.deepcopy(learner.model.get_base_model()).float(), GrpoConfig(), dtype="float32", seed=0)
    learner.logprobs(ids, dtype=torch.float32)
    with Counter("cpu") as counter:
        found = learner.logprobs(ids, dtype=torch.float32)
    assert found == plain.logprobs(ids)
    copied = 4 * 4000 * 64  # the output layer's, which is read as a whole
    assert copied < counter.peak < 1.9 * copied


def test_a_frozen_model_with_more_bits_keeps_them(make_model) -> None:
    learner = trained(make_model(), "bfloat16")
    assert learner._masters is None
    assert {p.dtype for p in learner.model.parameters()} == {torch.float32}
    loaded = Learner(
        make_model().to(torch.bfloat16), GrpoConfig(lora_rank=2), dtype="bfloat16", seed=0, frozen_exact=True
    )
    assert {p.dtype for p in loaded.trained.values()} == {torch.float32}
    assert loaded._masters is not None


def test_a_frozen_model_in_16_bits_gives_the_gradient_of_fp32_and_scores_of_the_merged_model(make_model) -> None:
    figures, gradients = [], []
    for dtype in ("float32", "bfloat16"):
        learner = Learner(rounded(make_model()), GrpoConfig(lora_rank=4, lr=1e-3), dtype=dtype, seed=0)
        with torch.no_grad():
            for name, p in learner.trained.items():
                if "lora_B" in name:  # it starts at 0, and then no factor A has a gradient
                    p.copy_(torch.linspace(-0.05, 0.05, p.numel()).view_as(p))
        if learner._masters is not None:
            learner._masters.refresh()
        ids = [5, 6, 7, 8, 9, 10]
        plain = make_model()
        plain.load_state_dict(dict(checkpoint.weights(learner.model)), strict=False)
        merged = Learner(plain, GrpoConfig(), dtype="float32", seed=0).logprobs(ids)
        assert learner.logprobs(ids, dtype=torch.float32) == pytest.approx(merged, abs=1e-3)
        assert max(abs(a - b) for a, b in zip(learner.logprobs(ids), merged, strict=True)) <= (
            1e-3 if dtype == "float32" else learner.spread(ids, "bfloat16")
        )
        seen = {}
        learner.optimizer.register_step_pre_hook(
            lambda *_, learner=learner, seen=seen: seen.update({n: p.grad.clone() for n, p in learner.trained.items()})
        )
        figures.append(learner.update(samples_of(), step=1))
        gradients.append(torch.cat([seen[name].flatten() for name in sorted(seen)]))
    assert figures[0]["loss"] != figures[1]["loss"]
    assert figures[0]["loss"] == pytest.approx(figures[1]["loss"], abs=0.05)
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_in_the_matrix_product_give_what_peft_gives_with_less_rounding(make_model, dtype) -> None:
    learner, ids = trained(rounded(make_model()), dtype, lora_alpha=3), [5, 6, 7, 8, 9, 10]
    layer = learner.model.get_base_model().model.layers[1].self_attn.q_proj
    x = torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype)).requires_grad_()
    inputs = [x, layer.lora_A["default"].weight, layer.lora_B["default"].weight]

    def of(forward, *values):
        """Return the output of a layer and the gradients of its input and of the factors."""
        out = forward(values[0])
        return [out, *torch.autograd.grad(out.double().sin().sum(), values)]

    def errors():
        pairs = zip(of(layer, *inputs), of(reference, *doubles), strict=True)
        return [float(((found - exact).norm() / exact.norm()).detach()) for found, exact in pairs]

    doubles = [value.detach().double().requires_grad_() for value in inputs]
    weight, bias = (parameter.detach().double() for parameter in layer.base_layer.parameters())
    reference = lambda x: x @ (weight + 1.5 * doubles[2] @ doubles[1]).T + bias  # noqa: E731
    theirs, scores = errors(), learner.logprobs(ids, dtype=torch.float32)
    assert lora.fuse(learner.model) == 14
    ours = errors()
    assert ours[0] < theirs[0] or dtype == "float32"
    assert max(ours) < 4 * torch.finfo(x.dtype).eps
    assert learner.logprobs(ids, dtype=torch.float32) == pytest.approx(scores, abs=1e-5)
    with learner.model.disable_adapter():
        assert learner.logprobs(ids, dtype=torch.float32) != pytest.approx(scores, abs=0.01)


@pytest.fixture
def start(make_model, tokenizer, tmp_path):
    """Returns a function that makes a starting model's directory, with its weights stored in a dtype."""

    def made(stored="float32", **shape):
        checkpoint.save(make_model(**shape), tokenizer, tmp_path / "start", dtype=getattr(torch, stored))
        return tmp_path / "start"

    return made


def saved(source, folder, dtype="float32", **settings):
    """Return a trained learner of a directory's model and its checkpoint, with the list of its files."""
    short = dtype == "bfloat16" and settings.pop("short", False)
    model = checkpoint.load_model(source, dtype=torch.bfloat16 if short else torch.float32)
    learner = trained(model, dtype, model=str(source), **settings)
    learner.tokenizer = checkpoint.load_tokenizer(source)
    learner.save(folder)
    write_list(folder)
    return learner


def listed_again(folder):
    (folder / ".files.json").unlink()
    write_list(folder)


WRITTEN = {
    "float32": ("float32", "float32", {}, {}),
    "a model with more bits": ("float32", "bfloat16", {}, {}),
    "16 bits": ("bfloat16", "bfloat16", {"short": True}, {}),
    "16-bit files, learned in fp32": ("bfloat16", "float32", {}, {}),
    "a head": ("float32", "float32", {"lora_targets": "q_proj,lm_head"}, {"tie_word_embeddings": False}),
    "embeddings": ("float32", "float32", {"lora_targets": "v_proj,embed_tokens"}, {"tie_word_embeddings": False}),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_the_model_made_of_a_checkpoint_of_adapters_is_what_was_delivered_bit_for_bit(start, tmp_path, kind) -> None:
    stored, dtype, settings, shape = WRITTEN[kind]
    folder = tmp_path / "step"
    learner = saved(start(stored, **shape), folder, dtype, **settings)
    assert not (folder / "model.safetensors").exists()
    made = model_directory(str(folder))
    assert made == folder / ".model"
    found, delivered = load_file(made / "model.safetensors"), dict(learner.weights())
    assert found.keys() == delivered.keys()
    assert all(torch.equal(found[name], tensor.to(getattr(torch, dtype))) for name, tensor in delivered.items())
    verify(folder)  # what is made of it is not part of it
    inode = made.stat().st_ino
    assert model_directory(str(folder)).stat().st_ino == inode, "it is made once"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft, with transformers 5
def test_peft_reads_a_checkpoint_of_adapters(start, tmp_path) -> None:
    from peft import PeftModel

    learner = saved(start(), tmp_path / "step")
    model = PeftModel.from_pretrained(checkpoint.load_model(start()), str(tmp_path / "step"))
    found = model.merge_and_unload().state_dict()
    assert all(torch.allclose(found[name], tensor, atol=1e-6) for name, tensor in learner.weights())


def test_a_starting_model_may_move_within_its_name_but_not_change(start, tokenizer, make_model, tmp_path) -> None:
    source, folder = start(), tmp_path / "step"
    learner = saved(source, folder)
    source.rename(tmp_path / "away")
    with pytest.raises(ConfigError, match=r"step holds adapters of .*start, and that model is not there any more"):
        model_directory(str(folder))
    (tmp_path / "start").symlink_to("away")
    moved = trained(checkpoint.load_model(tmp_path / "away"), model=str(tmp_path / "away"))
    moved.load(folder)
    assert moved.fingerprint() == learner.fingerprint()

    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"][3] += 1
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    other = r"step holds adapters of .*start as it was when the run began, and .* has other weights"
    with pytest.raises(ConfigError, match=other):
        model_directory(str(folder))
    with pytest.raises(ConfigError, match=other):
        trained(checkpoint.load_model(source), model=str(source)).load(folder)
    assert sorted(f.name for f in folder.glob(".model*")) == [".model.lock"]


def test_a_damaged_checkpoint_of_adapters_and_a_damaged_model_of_it_are_named(start, tmp_path) -> None:
    source = start()
    for name in ("one", "two"):
        saved(source, tmp_path / name)
    file = tmp_path / "one" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointDamaged, match=r"adapter_model\.safetensors has changed since it was saved"):
        model_directory(str(tmp_path / "one"))
    listed_again(tmp_path / "one")
    save_file(dict(list(load_file(file).items())[1:]), file)
    listed_again(tmp_path / "one")
    with pytest.raises(CheckpointDamaged, match=r"does not fit \(ValueError: they are of other layers"):
        model_directory(str(tmp_path / "one"))

    made = model_directory(str(tmp_path / "two")) / "model.safetensors"
    made.write_bytes(made.read_bytes()[:-1] + b"x")
    adapter_files._verify_once.cache_clear()  # as another process
    with pytest.raises(ModelError, match=r"\.model is damaged: .*\. Remove this folder: it is made again"):
        model_directory(str(tmp_path / "two"))


def test_a_folder_that_takes_no_model_is_named_with_the_command_that_writes_it_elsewhere(start, tmp_path) -> None:
    saved(start(), tmp_path / "step")
    (tmp_path / "step" / ".model.lock").mkdir()  # nothing can be opened there, whoever runs this
    with pytest.raises(ModelError, match=r"cannot be written there \(.*\)\. Write it elsewhere: agentrig export "):
        model_directory(str(tmp_path / "step"))
