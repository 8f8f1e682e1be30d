"""A real Ray that is told it has two NPUs: its workers' environment, compared with what the plugin expects."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SCRIPT = """
import json, os
import ray
from agentrig_verl.workers import ray_environment
from agentrig_ascend import Ascend

ascend = Ascend()
runtime = ray_environment(ascend, {"verl": "0.5.0", "vllm": "0.9.2", "vllm-ascend": "0.9.2rc1"}, {
    "env_vars": {"KEPT": "yes"}, "worker_process_setup_hook": "set_up_before.go"})
for attempt in range(4):
    try:
        ray.init(num_cpus=2, resources={ascend.ray_resource: 2}, include_dashboard=False, log_to_driver=False,
                 runtime_env=runtime)
        break
    except Exception as error:  # Ray gives its own processes 30 s to start: not enough on a busy machine
        if "timed out during startup" not in str(error) or attempt == 3:
            raise
        ray.shutdown()

@ray.remote
class Worker:
    def see(self, *names):
        return [os.environ.get(name) for name in names]

def start(n, **more):
    return Worker.options(num_cpus=0, resources={ascend.ray_resource: n}, **more).remote()

ask = (ascend.visible_devices, "HCCL_HOST_SOCKET_PORT_RANGE", "VLLM_ASCEND_ENABLE_NZ", "KEPT", "SET_UP")
pair = [start(1), start(1)]
singles = ray.get([w.see.remote(*ask) for w in pair])
for worker in pair:
    ray.kill(worker)
both = start(2)
together = ray.get(both.see.remote(*ask))
ray.kill(both)
kept = start(1, runtime_env={"env_vars": {ascend.ray_noset: "1", ascend.visible_devices: "0,1"}})
print(json.dumps({"singles": singles, "together": together, "kept": ray.get(kept.see.remote(*ask))[0],
                  "expected": {ascend.visible_devices: "0,1"}}))
ray.shutdown()
"""


PATCHES = "import os; os.environ['SET_UP'] = os.environ.get('SET_UP', '') + {name!r}"


def stand_ins(folder: Path) -> None:
    """Write an existing set-up hook, and a vllm_ascend with patches; each records its call."""
    patch = folder / "vllm_ascend" / "patch"
    patch.mkdir(parents=True)
    (folder / "vllm_ascend" / "__init__.py").touch()
    (patch / "__init__.py").touch()
    for name in ("platform", "worker"):
        (patch / f"{name}.py").write_text(PATCHES.format(name=f" {name}"))
    (folder / "set_up_before.py").write_text("def go():\n    " + PATCHES.format(name="before"))


@pytest.mark.slow
def test_ray_assigns_npus_and_sets_workers_up_as_the_plugin_expects(tmp_path: Path) -> None:
    # pytest's own folders are too deep: the path of a socket may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="rig") as short:
        stand_ins(tmp_path)
        own = {"HOME": short, "RAY_TMPDIR": short, "PYTHONPATH": str(tmp_path)}
        environ = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **own}
        for name in ("ASCEND_RT_VISIBLE_DEVICES", "RAY_ADDRESS"):
            environ.pop(name, None)
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environ, check=False, timeout=280
        )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    rest = ["auto", "0", "yes", "before platform worker"]
    assert sorted(seen["singles"]) == [["0", *rest], ["1", *rest]]
    assert seen["together"] == ["0,1", *rest]
    assert seen["expected"] == {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}
    assert seen["kept"] == "0,1", "with the NOSET variable Ray must leave the value alone"
