"""Any import of Agent Lightning skips litellm, and its `LLMProxy` is still the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lightning_runs import SITECUSTOMIZE


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Run lines in a new interpreter, in which any use of the network is an error and is printed."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)

    def run(source: str) -> str:
        log = folder / "network.log"
        log.unlink(missing_ok=True)
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("LITELLM", "AGENTOPS"))}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", source],
            env={**keep, "PYTHONPATH": str(folder), "AGENTRIG_TEST_NETWORK_LOG": str(log)},
            capture_output=True,
            text=True,
            timeout=280,
            cwd=folder,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert not log.exists(), log.read_text()
        return done.stdout

    return run


def test_agentrig_alone_does_not_import_it(python: object) -> None:
    source = "import agentrig, agentrig_lightning, sys; print('agentlightning' in sys.modules)"
    assert python(source) == "False\n"  # type: ignore[operator]


def test_every_import_skips_litellm(python: object) -> None:
    source = (
        "import sys, agentrig_lightning, agentlightning\n"
        "import agentrig_lightning.store_run\n"
        "from agentlightning import Trainer, TracerTraceToTriplet\n"
        "heavy = [m for m in sys.modules if m.split('.')[0] == 'litellm']\n"
        "print(agentrig_lightning.store_run.LightningTrainer is Trainer, heavy)\n"
        "print(any(type(f).__module__ == 'agentrig_lightning.imports' for f in sys.meta_path))\n"
        "try:\n    agentlightning.no_such_name\nexcept AttributeError as e:\n    print(e)\n"
    )
    assert python(source).splitlines() == [  # type: ignore[operator]
        "True []",
        "False",
        "module 'agentlightning' has no attribute 'no_such_name'",
    ]


def test_a_script_that_imports_it_first_asks_no_network_under_agentrig_run(python: object, tmp_path: Path) -> None:
    """Without `agentrig run`, litellm asks for its list of prices three times."""
    script = tmp_path / "script.py"
    script.write_text(
        "import agentlightning, sys\nprint('litellm' in sys.modules, agentlightning.Trainer.__module__)\n"
    )
    source = (
        "import sys\nfrom agentrig.cli.entry import main\n"
        f"sys.argv = ['agentrig', 'run', {str(script)!r}]\n"
        "try:\n    main()\nexcept SystemExit:  # the script makes no run\n    pass\n"
    )
    assert python(source) == "False agentrig_lightning.trainer\n"  # type: ignore[operator]


@pytest.mark.slow  # litellm takes a dozen seconds to import, so only this test imports it
def test_the_proxy_is_the_real_one_when_asked_for(python: object) -> None:
    source = (
        "import sys, agentrig_lightning, agentlightning as agl\n"
        "from agentlightning import LLMProxy\n"
        "import inspect, litellm, agentlightning.llm_proxy as module, agentlightning.trainer.trainer as trainer\n"
        "print(LLMProxy is module.LLMProxy is agl.LLMProxy is trainer.LLMProxy)\n"
        "print(litellm is module.litellm, inspect.isfunction(litellm.completion), 'FastAPI' in str(type(module.app)))\n"
    )
    assert python(source).splitlines() == ["True", "True True True"]  # type: ignore[operator]
