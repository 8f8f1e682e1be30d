"""A tiny tokenizer and tiny random models for the tests of agentrig-grpo."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from fixtures import small_disk  # noqa: F401

from agentrig.testing.tiny_model import make_model, make_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session", name="make_model")
def make_model_fixture():
    import torch

    torch.set_num_threads(1)
    return make_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """A Hugging Face directory with a tiny random Qwen2."""
    from agentrig_grpo import checkpoint

    directory = tmp_path_factory.mktemp("model")
    checkpoint.save(make_model(), tokenizer, directory)
    return directory
