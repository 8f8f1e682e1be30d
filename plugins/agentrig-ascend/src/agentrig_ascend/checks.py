"""The doctor's checks of torch_npu and of NPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from agentrig.findings import Finding, Situation
from agentrig.hardware.tools import ask
from agentrig_ascend.probe import SET_ENV, cann_home, cann_version, driver_version

LOADS = """
import json
import torch
import torch_npu
print(json.dumps({"torch": torch.__version__, "torch_npu": torch_npu.__version__, "devices": torch.npu.device_count()}))
"""


def check_torch_npu(situation: Situation) -> Iterator[Finding]:
    """Does torch_npu load? Checked on every host: a broken one breaks `import torch` for all."""
    version = situation.versions.get("torch_npu")
    if version is None:
        if situation.uses("ascend"):
            cure = "pip install the torch_npu of one stack in docs/hardware.md"
            yield Finding.problem("torch_npu", "not installed", cure=cure)
        return
    torch = situation.versions.get("torch", "none")
    number, other = (re.split(r"[+]|\.post|\.dev|rc", v)[0] for v in (version, torch))
    if number != other:
        yield Finding(
            check="torch_npu",
            result="problem" if situation.uses("ascend") else "warning",
            evidence=f"torch_npu {version} beside torch {torch}: it is built against the torch of its own number",
            cure=f"install torch {number}, or another torch_npu",
        )
    answer = ask(LOADS, environ=situation.environ)
    if answer.ok:
        yield Finding.ok("torch_npu", f"torch_npu {version} loads; {answer.data['devices']} device(s)")
    else:
        cure = f"{SET_ENV}, or pip uninstall torch_npu"
        yield situation.failure("torch_npu", f"torch_npu {version} does not load", answer, cure=cure)


def check_cann(situation: Situation) -> Iterator[Finding]:
    """Is CANN installed and sourced, and is the driver mounted?"""
    if not situation.uses("ascend"):
        return
    home = cann_home(situation.environ)
    if home is None or not home.is_dir():
        yield Finding.problem("CANN", f"ASCEND_HOME_PATH is {home or 'not set'}", cure=SET_ENV)
    else:
        version = cann_version(home)
        library = home / "lib64" / "libhccl.so"
        if version is None or not library.exists():
            evidence = (
                f"{home}: version {version or 'unknown'}, {library} {'is there' if library.exists() else 'missing'}"
            )
            yield Finding.problem("CANN", evidence, cure="install the CANN toolkit and kernels")
        else:
            yield Finding.ok("CANN", f"{version} at {home}")
    if "ATB_HOME_PATH" not in situation.environ:
        evidence = "ATB_HOME_PATH is not set: vllm-ascend needs the transformer boost library"
        yield Finding.warning("CANN nnal", evidence, cure="source /usr/local/Ascend/nnal/atb/set_env.sh")
    driver = driver_version()
    if driver:
        yield Finding.ok("NPU driver", driver)
    else:
        evidence = "no /usr/local/Ascend/driver/version.info"
        yield Finding.problem("NPU driver", evidence, cure="mount /usr/local/Ascend/driver into the container")


def check_hccl_ports(situation: Situation) -> Iterator[Finding]:
    """Are HCCL's port ranges well-formed, and outside the range that the system assigns itself?"""
    if not situation.uses("ascend"):
        return
    for name in ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"):
        value = situation.environ.get(name) or situation.setting("hardware", "socket_ports", "auto")
        if value == "auto":
            yield Finding.ok("HCCL ports", f"{name}: auto")
            continue
        spans = [re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip()) for part in value.split(",")]
        ports = [(int(m[1]), int(m[2] or m[1])) for m in spans if m]
        if len(ports) != len(spans) or any(not 1023 < low <= high <= 65535 for low, high in ports):
            evidence = f"{name}={value} is not a list of ports and ranges between 1024 and 65535"
            yield Finding.problem("HCCL ports", evidence, cure="auto, or such as 60000-60050")
            continue
        low_system, high_system = ephemeral_ports()
        clash = [f"{low}-{high}" for low, high in ports if low <= high_system and high >= low_system]
        if clash:
            yield Finding.warning(
                "HCCL ports",
                f"{name}={value} overlaps the system's own {low_system}-{high_system}",
                cure=f"sysctl -w net.ipv4.ip_local_reserved_ports={','.join(clash)}",
            )
        else:
            yield Finding.ok("HCCL ports", f"{name}={value}")


def ephemeral_ports(path: str = "/proc/sys/net/ipv4/ip_local_port_range") -> tuple[int, int]:
    """Return the lowest and highest port that the kernel assigns to outgoing connections."""
    if not os.path.exists(path):
        return 32768, 60999
    with open(path, encoding="ascii") as file:
        low, high = file.read().split()
    return int(low), int(high)
