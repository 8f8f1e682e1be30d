"""The hardware interface: what a backend declares, and the methods that a run calls."""

from __future__ import annotations

import abc
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Literal

import attrs

from agentrig.errors import AgentrigError
from agentrig.hardware.versions import Override, Stack


class HardwareError(AgentrigError):
    """The requested hardware is not available or broken, or `auto` finds more than one."""


@attrs.frozen(kw_only=True)
class Device:
    """One device: its name and its memory in bytes (None when unknown)."""

    name: str
    memory: int | None = None


@attrs.frozen(kw_only=True)
class Probe:
    """What a probe found, and how.

    Attributes:
        available: Whether a run could use it now.
        devices: In the order of their ids; only those that the environment lets a run see.
        evidence: What was checked and what was found, one line each.
        problems: What is there but broken, one line each, as `what: cure` (the last colon separates). A probe that
            is not available but has problems is a *broken* accelerator: `--hardware auto` stops on it.
    """

    available: bool
    devices: Sequence[Device] = ()
    evidence: Sequence[str] = ()
    problems: Sequence[str] = ()


@attrs.frozen(kw_only=True)
class Context:
    """The process that an environment is for.

    Attributes:
        role: `driver` (the process of `agentrig train`), `worker` (trains) or `rollout` (serves the model).
        versions: Installed versions by distribution, as `agentrig.hardware.installed` returns them;
            settings that apply only to other versions are left out.
    """

    role: Literal["driver", "worker", "rollout"] = "driver"
    versions: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Symptom:
    """A known failure, recognised by the text of its error.

    Attributes:
        pattern: Regular expression, searched in the error's text.
        cause: What is wrong, in one sentence.
        cure: What to do.
    """

    pattern: str
    cause: str
    cure: str


@attrs.frozen(kw_only=True)
class Hardware(abc.ABC):
    """What `HardwareSpec.build` returns; a backend subclasses it and overrides the defaults.

    Do not derive one of the names below from another: ROCm has torch device `cuda`, Ray
    resource `GPU` and verl platform `amd`.

    Attributes:
        name: As in `--hardware NAME`; the spec's name.
        torch_device: `torch.device` type: `cpu`, `cuda`, `npu`.
        visible_devices: The environment variable that hides devices; None when there is none.
        visible_order: `any`, or `ascending` when the ids in that variable must ascend.
        ray_resource: `CPU` and `GPU` are Ray's own, every other name is a custom resource.
        ray_noset: The variable that stops Ray from setting `visible_devices` for its workers.
        verl_platform: verl's name for the platform; None when verl has none.
        dtypes: Names of torch dtypes that a model may train in, the preferred one first.
        attention: transformers' `attn_implementation` choices, the preferred one first.
        flash_attention: The module whose kernels transformers' `flash_attention_2` runs on here.
        algorithms: Names of the algorithms that it supports; empty for all.
        torch_cure: What to install when torch was built without this device.
        symptoms: Known failures, for the doctor.
    """

    name: str
    torch_device: str
    visible_devices: str | None = None
    visible_order: Literal["any", "ascending"] = "any"
    ray_resource: str = "CPU"
    ray_noset: str | None = None
    verl_platform: str | None = None
    dtypes: Sequence[str] = ("float32",)
    attention: Sequence[str] = ("sdpa", "eager")
    flash_attention: str = "flash_attn"
    algorithms: Sequence[str] = ()
    torch_cure: str = "install the torch build that its vendor names"
    symptoms: Sequence[Symptom] = attrs.field(default=(), repr=False)

    @abc.abstractmethod
    def probe(self) -> Probe:
        """Look for devices with device files, tools and metadata; fast, and never imports torch."""

    def environment(self, context: Context | None = None) -> Mapping[str, str]:
        """Return the environment variables to set, where unset, before torch is imported.

        Args:
            context: The process that it is for; None for the driver, with unknown versions.
        """
        return {}

    @property
    def memory_limit(self) -> int:
        """Bytes of one device that a run may take, `memory_gib` of the settings; 0 for the whole device."""
        return int(getattr(getattr(self, "config", None), "memory_gib", 0.0) * (1 << 30))

    def best_attention(self) -> str:
        """Return the first of `attention` that can run here; imports nothing."""
        kernels = importlib.util.find_spec(self.flash_attention) is not None
        return next((a for a in self.attention if a != "flash_attention_2" or kernels), "sdpa")

    def carries(self, algorithm: str) -> bool:
        """Whether it supports the algorithm of that name."""
        return not self.algorithms or algorithm in self.algorithms

    def overrides(self, versions: Mapping[str, str]) -> Sequence[Override]:
        """Return the changes to verl's configuration that these installed versions need, in order."""
        return [o for o in self.all_overrides() if o.holds(versions)]

    def all_overrides(self) -> Sequence[Override]:
        """Return every change that any version needs; `overrides` picks among them."""
        return ()

    def worker_setup(self, versions: Mapping[str, str]) -> str | None:
        """Return `package:function`, to be called once in every Ray worker before anything else.

        It runs after a hook that is already set.
        """
        return None

    def host_versions(self) -> Mapping[str, str]:
        """Return versions that no Python distribution has: `driver`, `cann`; named as in `Stack.versions`."""
        return {}

    def stacks(self) -> Sequence[Stack]:
        """Return the sets of versions that are known to work together, the newest last."""
        return ()
