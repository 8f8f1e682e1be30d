from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from agentrig_grpo import checkpoint
from agentrig_grpo.model_files import INDEX, ModelError, weight_files
from agentrig_grpo.naming import model_directory
from agentrig_grpo.server.handle import ServerError
from agentrig_grpo.server.loading import build_decoder, read_weights
from embedded_servers import embedded
from safetensors.torch import load_file, save_file

from agentrig.errors import ConfigError


@pytest.fixture
def copy(model_dir, tmp_path):
    return shutil.copytree(model_dir, tmp_path / "model")


def sharded(copy, names):
    """Give a model's directory an index over these shards, the first of which is its file."""
    state = read_weights(copy)
    (copy / "model.safetensors").rename(copy / "first.safetensors")
    places = dict.fromkeys(state, "first.safetensors")
    places |= dict(zip(list(state)[: len(names)], names, strict=True))
    (copy / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return copy


def damage(copy, kind):
    weights = copy / "model.safetensors"
    if kind == "cut off":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "no header":
        weights.write_bytes(b"\xff" * 64)
    elif kind == "empty":
        weights.write_bytes(b"")
    elif kind == "missing":
        weights.unlink()
    elif kind == "fifo":
        weights.unlink()
        os.mkfifo(weights)
    elif kind == "device":
        weights.unlink()
        weights.symlink_to("/dev/zero")
    elif kind == "config":
        (copy / "config.json").write_text("{")
    elif kind == "tokenizer":
        (copy / "tokenizer.json").write_text("{}")
    elif kind == "tokenizer-fifo":
        (copy / "tokenizer.json").unlink()
        os.mkfifo(copy / "tokenizer.json")
    else:
        names = {"outside": "../secret.safetensors", "absolute": "/etc/passwd", "fifo-shard": "pipe", "lost": "lost"}
        sharded(copy, [names[kind]])
        if kind == "fifo-shard":
            os.mkfifo(copy / "pipe")


DAMAGES = [
    ("cut off", r"model\.safetensors is damaged or cut off .*; copy it again"),
    ("no header", r"model\.safetensors is damaged"),
    ("empty", r"model\.safetensors is damaged"),
    ("missing", r"holds no model\.safetensors"),
    ("fifo", r"model\.safetensors is a FIFO; a model's directory must hold regular files"),
    ("device", r"model\.safetensors is a device"),
    ("config", r"cannot be loaded: .*copy the model again"),
    ("tokenizer", r"the tokenizer in .* cannot be loaded"),
    ("tokenizer-fifo", r"tokenizer\.json is a FIFO"),
    ("outside", r"index\.json names '\.\./secret\.safetensors', which lies outside"),
    ("absolute", r"names '/etc/passwd', which lies outside"),
    ("fifo-shard", r"pipe is a FIFO"),
    ("lost", r"lost is missing; copy the model again"),
]


@pytest.mark.parametrize(("kind", "words"), DAMAGES, ids=[kind for kind, _ in DAMAGES])
def test_a_damaged_model_is_named_by_its_file(copy, kind, words):
    damage(copy, kind)
    load = checkpoint.load_tokenizer if "tokenizer" in kind else checkpoint.load_model
    with pytest.raises(ModelError, match=f"(?s){words}") as found:
        load(copy)
    assert str(copy) in str(found.value)


def decoder_of(directory):
    return build_decoder(directory, device="cpu", dtype=torch.float32, slots=1, max_length=0)


def test_a_model_that_has_diverged_needs_no_other_copy(copy):
    state = load_file(copy / "model.safetensors")
    next(iter(state.values()))[0] = float("nan")
    save_file(state, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"holds NaN or infinity: these weights have diverged") as found:
        decoder_of(copy)
    assert str(found.value).endswith(
        "make the model again with a smaller learning rate, or copy it again if another copy of it is good"
    )


@pytest.mark.slow
def test_the_server_does_not_start_from_a_damaged_model(copy):
    damage(copy, "cut off")
    said = pytest.raises(ServerError, match=f"could not start: .*{dict(DAMAGES)['cut off']}")
    with said, embedded(copy) as server:
        server.ready()


def test_links_as_the_hugging_face_cache_makes_them_are_followed(copy, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(copy.iterdir())):
        file.rename(blobs / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    assert checkpoint.load_model(snapshot).config.model_type == "qwen2"
    assert len(read_weights(snapshot)) > 10
    assert len(checkpoint.load_tokenizer(snapshot)) == 300
    decoder_of(snapshot)


def test_shards_are_read_together(copy):
    whole = read_weights(copy)
    sharded(copy, [])
    assert read_weights(copy).keys() == whole.keys()
    for broken in ("{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[" * 100_000):
        (copy / INDEX).write_text(broken)
        with pytest.raises(ModelError, match=r"index\.json is damaged"):
            weight_files(copy)


def test_weights_that_do_not_fit_the_configuration_are_named(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    with pytest.raises(ModelError, match=r"gate_proj\.weight has the shape \[64, 32\]; the model's is \[48, 32\]"):
        decoder_of(copy)


CLOSED = """
import os, sys
from pathlib import Path
from agentrig_grpo import checkpoint
from agentrig_grpo.naming import model_directory
from agentrig.errors import AgentrigError
import transformers, safetensors, tokenizers, torch, difflib, getpass
from transformers import AutoTokenizer, AutoModelForCausalLM, PreTrainedTokenizerFast
os.chdir("/")
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for directory in sys.argv[1:]:
    for load in (lambda p: model_directory(p), checkpoint.load_tokenizer, checkpoint.load_model):
        try:
            load(directory)
        except AgentrigError as error:
            print(error)
"""


@pytest.mark.slow
def test_a_file_without_read_permission_is_named(model_dir):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as place:  # every start of pytest closes the parent of `tmp_path` to others
        os.chmod(place, 0o755)
        closed, holds_closed = (shutil.copytree(model_dir, Path(place) / name) for name in ("closed", "holds"))
        closed.chmod(0o700)
        holds_closed.chmod(0o755)
        (holds_closed / "model.safetensors").chmod(0o700)
        command = [sys.executable, "-c", CLOSED, str(closed), str(holds_closed)]
        *lines, last = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 3
    assert all("uid 65534" in line and str(closed) in line for line in lines)
    assert str(holds_closed) in last
    assert "model.safetensors may not be read by this user (uid 65534)" in last


def test_a_missing_directory_differs_from_one_without_a_model(tmp_path):
    with pytest.raises(ConfigError, match="there is no such directory"):
        model_directory(str(tmp_path / "none"))
    with pytest.raises(ModelError, match="there is no such directory"):
        checkpoint.load_model(tmp_path / "none")
    with pytest.raises(ModelError, match=r"it has no config\.json"):
        checkpoint.load_model(tmp_path)
    with pytest.raises(ModelError, match=r"no tokenizer_config\.json"):
        checkpoint.load_tokenizer(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="it is a file"):
        checkpoint.load_model(tmp_path / "file")


def test_a_saved_model_is_as_readable_as_its_other_files(model_dir, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    checkpoint.save(model, tokenizer, tmp_path / "saved")
    modes = {name: (tmp_path / "saved" / name).stat().st_mode for name in ("model.safetensors", "config.json")}
    assert modes["model.safetensors"] == modes["config.json"]


def test_a_model_of_the_hub_is_named_with_the_command_that_fetches_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"hf download Qwen/Qwen2.5-0.5B --local-dir models/Qwen2.5-0.5B, then"):
        model_directory("Qwen/Qwen2.5-0.5B")
    with pytest.raises(ConfigError, match=r"no such directory\. Name a .* your tasks with agentrig warmup$"):
        model_directory("models/tiny")
    (tmp_path / "models").mkdir()
    with pytest.raises(ConfigError) as caught:
        model_directory("models/tiny")  # a folder of one's own
    assert "hf download" not in str(caught.value)
    (tmp_path / "models" / "hard").mkdir()
    with pytest.raises(ConfigError, match=r'no such directory\. Did you mean "models/hard"\? Name a local'):
        model_directory("models/hrad")
