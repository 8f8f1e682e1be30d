"""A small model, and vLLM's process with the stand-in for vLLM."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from agentrig_vllm import transfer
from agentrig_vllm.config import VllmConfig
from agentrig_vllm.handle import VllmServer

from agentrig.hardware.cpu import Cpu
from agentrig.servers import ServerPlan

STAND_IN = Path(__file__).parent / "stand_in"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random Qwen2 whose vocabulary is no multiple of 64, and its directory as `name_or_path`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    made = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=True)).eval()
    directory = tmp_path_factory.mktemp("model")
    made.save_pretrained(directory)
    made.directory = directory
    return made


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the server's process import the stand-in, and share a buffer by a file instead of a CUDA handle."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]))

    def shared(buffer: Any) -> dict[str, Any]:
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(buffer.numpy().tobytes())
        buffer.set_(torch.from_file(file.name, shared=True, size=buffer.numel(), dtype=torch.uint8))
        return {"file": file.name, "size": buffer.numel()}

    def opened(message: Any, device: int) -> Any:
        return torch.from_file(message["file"], shared=True, size=message["size"], dtype=torch.uint8)

    monkeypatch.setattr(transfer, "shared", shared)
    monkeypatch.setattr(transfer, "opened", opened)
    with tempfile.TemporaryDirectory() as folder:  # a buffer has 512 MB
        monkeypatch.setenv("STAND_IN_FOLDER", folder)
        yield


Start = Callable[..., VllmServer]


@pytest.fixture
def server(stand_in: None, model: Any, tmp_path: Path) -> Iterator[Start]:
    """Return what makes a server with the stand-in; all are ended."""
    made = []

    def make(*, sleeps: bool = True, dtype: str = "bfloat16", adapters: int = 0, **settings: Any) -> VllmServer:
        plan = ServerPlan(
            model=model.directory, name="policy", hardware=Cpu(), dtype=dtype, context=48,
            log=tmp_path / "server.log", sleeps=sleeps, seed=7, adapters=adapters,
        )  # fmt: skip
        made.append(VllmServer(plan, VllmConfig(**{"chunk_mb": 1, **settings})))
        return made[-1]

    yield make
    for each in made:
        each.__exit__(None, None, None)
