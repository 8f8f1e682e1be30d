"""Imports Agent Lightning without litellm, which is two thirds of its import time and is not used here.

Importing Agent Lightning 0.3 also imports litellm and its whole proxy server, only for the class `LLMProxy`.
That takes 12 of 17 CPU seconds on two slow cores, and makes a network request. During the import an empty class
stands for `LLMProxy`, and the instrumentation of litellm counts as not installed. The first access to `LLMProxy`
imports the real one, with litellm.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from types import ModuleType
from typing import Any

from agentrig.errors import AgentrigError

QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise the import downloads a price list
    "AGENTOPS_TELEMETRY": "False",
    "AGENTOPS_LOGGING_TO_FILE": "False",  # agentops.log in the current directory
    "AGENTOPS_LOG_LEVEL": "CRITICAL",  # otherwise one line per rollout, with a link to a service that is not used
    "AGENTOPS_LOG_SESSION_REPLAY_URL": "False",
}
"""Set before Agent Lightning is imported, unless the user has set them."""

_PROXY = "agentlightning.llm_proxy"
_VERL = "agentlightning.algorithm.verl"
_INSTRUMENTATION = "agentlightning.instrumentation.litellm"


def _real_proxy(name: str) -> Any:
    """Import the parts that need litellm; the `__getattr__` of the package `agentlightning`."""
    if name not in ("LLMProxy", "llm_proxy"):
        raise AttributeError(f"module 'agentlightning' has no attribute {name!r}")
    module = importlib.import_module(_PROXY)
    instrumentation: Any = sys.modules["agentlightning.instrumentation"]
    instrumentation.litellm = importlib.import_module(_INSTRUMENTATION)
    instrumentation.LITELLM_INSTALLED = True
    trainer = sys.modules.get("agentlightning.trainer.trainer")
    if trainer is not None:
        trainer.LLMProxy = module.LLMProxy  # type: ignore[attr-defined]  # its isinstance checks
    package = sys.modules["agentlightning"]
    package.LLMProxy, package.llm_proxy = module.LLMProxy, module  # type: ignore[attr-defined]
    return getattr(package, name)


def _import_without_litellm(package: ModuleType, run: Callable[[ModuleType], None]) -> None:
    """Run the package's own import, without network access."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    content: Any = package
    stubs: dict[str, Any] = {}
    if "litellm" not in sys.modules:
        stubs = {_PROXY: ModuleType(_PROXY), _INSTRUMENTATION: None}  # None: the import of that name fails
        stubs[_PROXY].LLMProxy = type("LLMProxy", (), {})
    sys.modules.update(stubs)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its dependencies warn about each other; a user can't fix that
            run(package)
    finally:
        for name in stubs:
            del sys.modules[name]
    replace_verl()
    if stubs:
        del content.LLMProxy
        content.__getattr__ = _real_proxy


def replace_verl() -> None:
    """Replace `agl.VERL`, if Agent Lightning is imported: its own needs verl 0.5 or 0.6, and can't be imported here.

    The replacement keeps the configuration; `agentrig_lightning.algorithm` maps it to agentrig-verl. Its `Trainer`
    starts nothing in a runner, which imports the script.
    """
    package: Any = sys.modules.get("agentlightning")
    if package is None or hasattr(package.VERL, "agentrig_keeps"):
        return

    class VERL(package.Algorithm):  # known at run time only
        """Stands for Agent Lightning's `VERL`: keeps what it is given."""

        agentrig_keeps = ("config", "trainer_cls", "daemon_cls")

        def __init__(self, config: Mapping[str, Any], trainer_cls: Any = None, daemon_cls: Any = None) -> None:
            super().__init__()
            self.config, self.trainer_cls, self.daemon_cls = config, trainer_cls, daemon_cls

        def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            raise AgentrigError(
                "agl.VERL(config) runs on agentrig-verl, in a run of its own: register "
                'lightning.algorithm(agl.VERL(config), name="mine", summary="..."), then agentrig train '
                "--algorithm mine; or take a recipe (qwen, llama, npu) and set its keys: algorithm.verl.KEY=VALUE"
            )

    for name in ("fit", "dev"):
        setattr(package.Trainer, name, _ending_importers(getattr(package.Trainer, name)))
    package.VERL = sys.modules["agentlightning.algorithm"].VERL = VERL  # type: ignore[attr-defined]
    module: Any = ModuleType(_VERL)
    module.VERL = VERL
    sys.modules.setdefault(_VERL, module)


def _ending_importers(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of Agent Lightning's `Trainer` that ends a runner which imports a script without a main guard."""

    @wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        from agentrig.processes.forks import end_if_importing

        end_if_importing()
        return method(*arguments, **named)

    return call


class _LightningFinder(importlib.abc.MetaPathFinder):
    """Intercepts the first import of Agent Lightning, wherever it comes from (for example a user's file)."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "agentlightning":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name)
        loader: Any = spec.loader if spec else None
        if loader is not None:
            run = loader.exec_module
            loader.exec_module = lambda package: _import_without_litellm(package, run)  # this spec's own loader
        return spec


def skip_litellm() -> None:
    """Make the next import of Agent Lightning skip litellm; imports nothing."""
    if "agentlightning" not in sys.modules and not any(isinstance(f, _LightningFinder) for f in sys.meta_path):
        sys.meta_path.insert(0, _LightningFinder())
