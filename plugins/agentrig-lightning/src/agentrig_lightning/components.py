"""The components of a `Trainer`, in each form that Agent Lightning takes: instance, class, function, path or dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def problems_of(strategy: Any, environment: Mapping[str, str], serve: str) -> list[str]:
    """Return what a strategy and the variables `AGL_...` ask for that is not available here; `serve` is the cure."""
    problems = []
    kind, options = _strategy(strategy)
    if strategy is not None and kind not in _known().values():
        problems.append(f'strategy={strategy!r:.80}: agents always run in processes of the run. Leave it out, or "cs"')
    role = options.get("role") or "both"
    if role != "both":
        problems.append(f"the strategy's role {role!r}: a script is algorithm and runner; {serve}")
    if environment.get("AGL_CURRENT_ROLE") == "runner":
        problems.append(f"AGL_CURRENT_ROLE=runner: a script is the algorithm's side; {serve}")
    if environment.get("AGL_MANAGED_STORE", "1").lower() in ("0", "false", "no", "off"):
        problems.append(f"AGL_MANAGED_STORE=0: a run has a store of its own; {serve}")
    return problems


def runners_of(strategy: Any) -> int | None:
    """Return the number of runners that a strategy names itself."""
    number = _strategy(strategy)[1].get("n_runners")
    return int(number) if number is not None else None


def port_of(strategy: Any) -> int | None:
    """Return the port that a strategy given as a dict names for its store."""
    port = _strategy(strategy)[1].get("server_port")
    return int(port) if port is not None else None


def _strategy(strategy: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the class that a strategy is given by, and its arguments."""
    options: Mapping[str, Any] = {}
    if isinstance(strategy, Mapping):
        options, strategy = strategy, strategy.get("type", strategy.get("name"))
    elif type(strategy) in _known().values():
        return type(strategy), {"role": getattr(strategy, "role", "both"), "n_runners": strategy.n_runners}
    if isinstance(strategy, str):
        from agentlightning.trainer.init_utils import load_class

        strategy = _known().get(strategy) or load_class(strategy)
    return strategy, options


def _known() -> Mapping[str, type]:
    from agentlightning.execution import ClientServerExecutionStrategy, SharedMemoryExecutionStrategy

    return {"cs": ClientServerExecutionStrategy, "shm": SharedMemoryExecutionStrategy}


def make_tracer(spec: Any) -> Callable[[], Any] | None:
    """Return what makes the tracer in a runner process, or None for agentrig's own."""
    if spec is None:
        return None
    return _Tracer(spec)


class _Tracer:
    """Makes a tracer; travels to the runner processes."""

    def __init__(self, spec: Any) -> None:
        from agentlightning.tracer import Tracer

        self._spec = spec
        if not isinstance(spec, Tracer):
            self()  # a wrong one is an error of the script's process

    def __call__(self) -> Any:
        """Return the tracer."""
        from agentlightning.tracer import Tracer
        from agentlightning.trainer.init_utils import build_component

        return build_component(self._spec, expected_type=Tracer, spec_name="tracer")


def make_adapter(spec: Any) -> Any:
    """Return the adapter."""
    from agentlightning.adapter import TraceAdapter, TracerTraceToTriplet
    from agentlightning.trainer.init_utils import build_component

    return build_component(
        spec,
        expected_type=TraceAdapter,
        spec_name="adapter",
        default_factory=TracerTraceToTriplet,
        dict_requires_type=False,
        dict_default_cls=TracerTraceToTriplet,
    )


def make_algorithm(spec: Any) -> Any:
    """Return the algorithm, or None."""
    from agentlightning.algorithm import Algorithm
    from agentlightning.trainer.init_utils import build_component

    return build_component(spec, expected_type=Algorithm, spec_name="algorithm", allow_none=True)


def make_hooks(hooks: Any) -> Sequence[Any]:
    """Return the hooks as a tuple."""
    from agentlightning.types import Hook

    return () if hooks is None else (hooks,) if isinstance(hooks, Hook) else tuple(hooks)


def make_proxy(spec: Any) -> Any:
    """Return the LLM proxy, or None; it imports litellm only if there is one. Its store comes with the run."""
    if spec is None:
        return None
    from agentlightning import LLMProxy
    from agentlightning.trainer.init_utils import build_component

    return build_component(spec, expected_type=LLMProxy, spec_name="llm_proxy", allow_none=True)
