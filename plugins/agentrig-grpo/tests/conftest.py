"""A tiny tokenizer and a tiny random model's directory for the tests of agentrig-grpo."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from fixtures import make_model_fixture, small_disk  # noqa: F401

from agentrig.testing.tiny_model import make_model, make_tokenizer


@contextmanager
def training_scripts(*names: str) -> Iterator[SimpleNamespace]:
    """Import scripts of the folder `training`, which is no package, and forget them at the end."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "training")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in set(sys.modules) - before:
        if "/training/" in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """A Hugging Face directory with a tiny random Qwen2."""
    from agentrig_grpo import checkpoint

    directory = tmp_path_factory.mktemp("model")
    checkpoint.save(make_model(), tokenizer, directory)
    return directory
