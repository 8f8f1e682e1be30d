"""Names that are imported from verl are found in its source without importing it."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from agentrig_verl import schema, symbols


def test_what_the_plugin_imports_is_read_from_its_own_source() -> None:
    wanted = symbols.wanted()
    assert "PPOTrainerSync" in wanted["verl.trainer.ppo.v1.trainer_sync"]
    assert "ActorRolloutRefWorker" in wanted["verl.workers.engine_workers"]
    assert all(module.partition(".")[0] == "verl" for module in wanted)


@pytest.mark.filterwarnings("ignore")  # warnings of verl
@pytest.mark.usefixtures("needs_verl")
def test_the_installed_verl_has_every_name_and_importing_agrees() -> None:
    assert symbols.lacking() == []
    for module, names in symbols.wanted().items():
        if ".vllm_rollout" in module and importlib.util.find_spec("vllm") is None:
            continue  # cannot be imported without vLLM; only vLLM's own workers do
        for name in names:
            assert hasattr(importlib.import_module(module), name) or importlib.import_module(f"{module}.{name}")


@pytest.mark.skipif(not schema.installed(), reason="verl is not installed; see docs/gpu.md")
def test_nothing_heavy_is_imported_to_find_out() -> None:
    code = "import sys; from agentrig_verl import symbols; symbols.lacking(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "verl", "ray"} & set(done.stdout.split())


def test_a_module_that_is_gone_and_a_name_that_is_gone_are_both_named(tmp_path: Path) -> None:
    root = tmp_path / "verl"
    for module in symbols.wanted():
        file = root.joinpath(*module.split(".")[1:], "__init__.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("from elsewhere import *\n")
    assert symbols.lacking(root) == []
    (root / "utils" / "tracking" / "__init__.py").write_text("class Trackers: ...\n")
    (root / "workers" / "engine_workers" / "__init__.py").unlink()
    assert symbols.lacking(root) == ["verl.utils.tracking.Tracking", "verl.workers.engine_workers"]
