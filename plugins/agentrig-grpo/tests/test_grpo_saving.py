"""What is written is the learner as it was when it was copied, however far it has trained on meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import logging

import pytest
import torch
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.host_copy import HostCopy
from agentrig_grpo.learner import Learner
from safetensors.torch import load_file
from samples import samples_of

KINDS = {
    "all weights": ("float32", {}),
    "16-bit copies": ("bfloat16", {}),
    "adapters": ("float32", {"lora_rank": 32}),
    "16-bit adapters": ("bfloat16", {"lora_rank": 32}),
    "a reference": ("float32", {"kl_loss_coef": 0.1}),
    "adapters and a reference": ("float32", {"lora_rank": 32, "kl_loss_coef": 0.1}),
    "8-bit moments": ("float32", {"optimizer": "adamw8bit"}),
    "the best weights": ("float32", {"final": "best"}),
}


@pytest.fixture
def trained(make_model, tokenizer, request):
    """A learner of each kind after two updates, and its tokenizer."""
    dtype, settings = KINDS[request.param]
    if "optimizer" in settings:
        pytest.importorskip("bitsandbytes")
    config = GrpoConfig(lr=1e-2, tokens_per_batch=64, mini_batches=2, **settings)
    learner = Learner(make_model(), config, dtype=dtype, seed=0, tokenizer=tokenizer)
    for step in range(2):
        learner.update(samples_of(step), step=step)
        if settings.get("final") == "best" and not step:
            learner.keep()
    return learner


def files_of(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def learned(folder):
    return torch.load(folder / "trainer" / "learner.pt", weights_only=True)


def flat(value, name=""):
    """Every tensor and number of a state by its place in it."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {place: each for key, inner in items for place, each in flat(inner, f"{name}.{key}").items()}
    return {name: value}


def assert_equal(first, second):
    one, two = flat(first), flat(second)
    assert one.keys() == two.keys()
    for name, value in one.items():
        same = torch.equal(value, two[name]) if isinstance(value, torch.Tensor) else value == two[name]
        assert same, name


@pytest.mark.parametrize("trained", KINDS, indirect=True)
def test_a_copy_is_written_as_the_learner_was_although_it_trains_on(trained, tmp_path):
    size = trained.plan_saving()
    at_once, later, again = tmp_path / "at-once", tmp_path / "later", tmp_path / "again"
    for folder in (at_once, later, again):
        folder.mkdir()
    trained.save(at_once)
    before, write = trained.fingerprint(), trained.copied()
    trained.keep()
    trained.update(samples_of(2), step=2)
    assert trained.fingerprint() != before
    write(later)

    assert files_of(later) == files_of(at_once)
    weights = "adapter_model.safetensors" if trained.config.lora_rank else "model.safetensors"
    assert (later / weights).read_bytes() == (at_once / weights).read_bytes()
    assert_equal(learned(at_once), learned(later))
    assert (later / "config.json").read_text() == (at_once / "config.json").read_text()
    written = sum(f.stat().st_size for f in later.rglob("*") if f.suffix in (".pt", ".safetensors"))
    assert size == pytest.approx(written, rel=0.25), "the estimate of what a checkpoint takes"

    trained.copied()(again)  # the next copy is the learner as it is now
    assert (again / weights).read_bytes() != (later / weights).read_bytes()
    trained.load(later)
    assert trained.fingerprint() == before


@pytest.mark.parametrize("trained", ["all weights"], indirect=True)
def test_without_memory_for_a_copy_the_run_waits_and_says_so(trained, caplog):
    trained._host_memory = lambda: 1000
    with caplog.at_level(logging.WARNING):
        trained.plan_saving()
    assert "written while the run waits: a copy of what it holds needs" in caplog.text
    assert trained.copied() is None


def test_a_tensor_that_comes_twice_is_copied_once():
    tensor = torch.arange(6.0)
    state = {"a": tensor, "b": [tensor, 3], "none": torch.empty(0), "view": tensor[1:]}
    made = HostCopy(torch.device("cpu")).take(state)
    assert made["a"] is made["b"][0]
    assert made["a"] is not tensor
    tensor.zero_()
    assert (made["a"].tolist(), made["view"].tolist()) == ([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    assert (made["b"][1], made["none"].numel()) == (3, 0)


class FakeDevice:
    """What `HostCopy` calls of `torch.cuda` or `torch.npu`, in the order of the calls."""

    def __init__(self):
        self.calls = []

    def Stream(self, device):
        return self

    def current_stream(self, device):
        return self

    def wait_stream(self, stream):
        self.calls.append("the copies wait for the device")

    @contextlib.contextmanager
    def stream(self, stream):
        self.calls.append("copies begin")
        yield
        self.calls.append("copies are queued")

    def record_event(self):
        return self

    def wait_event(self, event):
        self.calls.append("the device waits for the copies")

    def synchronize(self):
        self.calls.append("the host waits for the copies")


@pytest.mark.filterwarnings("ignore")
def test_an_accelerators_copies_are_ordered_and_their_buffers_are_kept(tmp_path):
    """The order of calls, and the buffers, with a device that is the CPU; a GPU's are tested in the test below."""
    host, device = HostCopy(torch.device("cpu")), FakeDevice()
    host._module = device
    host.before_change()
    assert device.calls == [], "nothing was copied yet"
    host.reserve(1000)
    tensors = {"large": torch.randn(300, 70), "small": torch.arange(3), "none": torch.empty(0), "one": torch.ones(())}
    first = host.take(tensors)
    host.before_change()
    held, where = {n: t.clone() for n, t in tensors.items()}, {n: t.data_ptr() for n, t in first.items()}
    assert device.calls == [
        *("the copies wait for the device", "copies begin", "copies are queued", "the device waits for the copies")
    ]
    for tensor in tensors.values():
        tensor.add_(1)
    assert_equal(first, held)
    torch.save(first, tmp_path / "file")
    assert (tmp_path / "file").stat().st_size < 300 * 70 * 4 + 3000, "a buffer is saved without those beside it"
    host.wait()
    assert device.calls[-1] == "the host waits for the copies"
    pieces = len(host._slabs)
    second = host.take(tensors)
    assert_equal(second, tensors)
    assert {n: t.data_ptr() for n, t in second.items()} == where
    assert len(host._slabs) == pieces
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in second.values() if t.numel())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_moments_in_host_memory_are_copied_once_the_device_has_written_them():
    host, device = HostCopy(torch.device("cpu")), FakeDevice()
    host._device = torch.device("meta")
    host._module = device
    moments, count = torch.randn(5000), torch.tensor(3.0)
    made = host.take({"moments": moments, "more": moments.clone(), "step": count})
    assert device.calls[:3] == ["the copies wait for the device", "copies begin", "the host waits for the copies"]
    held = moments.clone()
    moments.zero_()
    assert torch.equal(made["moments"], held)
    again = host.take({"moments": held + 1, "more": held, "step": count})
    assert again["moments"].data_ptr() == made["moments"].data_ptr(), "the buffer is kept"
    assert torch.equal(again["moments"], held + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("settings", [{}, {"lora_rank": 8}, {"kl_loss_coef": 0.1}])
def test_a_copy_from_a_gpu_is_written_as_the_learner_was(make_model, tokenizer, tmp_path, settings):
    """Large enough that copies are under way when the next update changes the weights."""
    model = make_model(vocab=4000, hidden=1024, layers=8).to("cuda")
    config = GrpoConfig(lr=1e-2, tokens_per_batch=512, **settings)
    learner = Learner(model, config, dtype="bfloat16", seed=0, tokenizer=tokenizer)
    learner.plan_saving()
    for step in range(4):
        learner.update(samples_of(step), step=step)
        at_once, later = tmp_path / f"{step}-at-once", tmp_path / f"{step}-later"
        at_once.mkdir()
        later.mkdir()
        learner.save(at_once)
        write = learner.copied()
        learner.update(samples_of(step + 10), step=step)
        write(later)
        assert_equal(learned(at_once), learned(later))
        weights = "adapter_model.safetensors" if "lora_rank" in settings else "model.safetensors"
        assert_equal(*(load_file(folder / weights) for folder in (later, at_once)))
    assert all(tensor.is_pinned() for tensor in learner._host._buffers.values() if tensor.numel())
