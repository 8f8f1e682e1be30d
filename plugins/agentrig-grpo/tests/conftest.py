"""A tiny tokenizer and tiny random models for the tests of agentrig-grpo."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from agentrig.testing.tiny_model import make_tokenizer


def make_model(kind: str = "qwen2", *, vocab: int = 300, hidden: int = 32, layers: int = 2, seed: int = 0, **more):
    """Return a random model and set its special tokens."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    settings = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": 512,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        **more,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**settings)).eval()
    with torch.no_grad():  # biases start at zero, which would hide an error in them
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    return model


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
