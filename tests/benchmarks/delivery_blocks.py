"""Plugin file for runs whose transfers are proven in every other block of three steps, and what that shows.

Steps with and without the proof of delivery are then measured in one run, a few seconds apart. Only steps whose own
transfer and the one before are of one kind are counted: the proof of a transfer is spread over two steps.

On a CPU that the rollouts keep busy, what runs in the background delays them. There the CPU seconds of the run and all
its processes say more than the clock: they are written into `cpu.jsonl` of the run directory at each transfer.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from agentrig import hookimpl

BLOCK = 3
WARM_UP = 3
"""Steps that are not counted: the first ones choose the probe and measure the bound."""


def proven(version: int) -> bool:
    """Return whether the transfer of this version is proven."""
    return version // BLOCK % 2 == 0


def install() -> None:
    """Leave out the proofs of every other block, with the embedded server and with verl."""
    from agentrig.delivery import Delivery

    begin, prepare = Delivery.begin, Delivery.prepare
    latest = [-1]

    def begin_or_not(self: Any, *, version: int, **more: Any) -> None:
        latest[0] = version
        with (self._file.parent / "cpu.jsonl").open("a") as file:
            file.write(json.dumps({"version": version, "cpu_s": cpu_seconds()}) + "\n")
        begin(self, version=version, **more) if proven(version) else self.settle()

    def prepare_or_not(self: Any, servers: Any) -> None:
        prepare(self, servers) if proven(latest[0] + 1) else self.settle()

    Delivery.begin, Delivery.prepare = begin_or_not, prepare_or_not  # type: ignore[method-assign]


def install_verl() -> None:
    """Do the same where verl's actors score the probe."""
    from agentrig_verl.delivery import Transfers

    install()
    before, count = Transfers.before, [-1]

    def before_or_not(self: Any) -> None:
        count[0] += 1
        if proven(count[0]):
            before(self)
            return
        self._delivery.settle()
        self._workers.set_probe([], "")
        self._ids = []

    Transfers.before = before_or_not  # type: ignore[method-assign]


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its children so far."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def figures(lines: Iterable[Mapping[str, Any]], cpu: Path | None = None) -> dict[str, Any]:
    """Return the seconds of the steps with and without proofs: medians, quartiles, and the proofs' own clock.

    Args:
        lines: Of `metrics.jsonl`.
        cpu: `cpu.jsonl` of the run.
    """
    counted = [each for each in lines if each["step"] > WARM_UP and proven(each["step"]) == proven(each["step"] - 1)]
    kinds: dict[bool, list[Mapping[str, Any]]] = {True: [], False: []}
    for line in counted:
        kinds[proven(line["step"])].append(line)
    found = summary(
        *([line["step_s"] for line in kinds[kind]] for kind in (True, False)),
        [line["delivery"]["seconds"] for line in kinds[True]],
        [line["delivery"]["background_s"] for line in kinds[True]],
    )
    found["share_by_regression"] = share(counted, [line["step_s"] for line in counted])
    if cpu is not None and cpu.is_file():
        at = {each["version"]: each["cpu_s"] for each in map(json.loads, cpu.read_text("utf-8").splitlines())}
        # verl calls the proof only where there is one: its other steps are not in the file.
        known = [line for line in counted if {line["step"], line["step"] - 1} <= set(at)]
        if len(known) == len(counted):
            spent = [at[line["step"]] - at[line["step"] - 1] for line in known]
            found["cpu_s"] = round(statistics.mean(spent), 3)
            found["cpu_share_by_regression"] = share(known, spent)
    return found


def share(lines: list[Mapping[str, Any]], cost: list[float]) -> list[float]:
    """Return what a proof adds to the cost of a step, as a share of it, and the standard error of that.

    Least squares: a step's cost is linear in its calls, its sampled tokens and its number, and in whether it is proven.
    """
    calls = [line["rollouts"] * line["transitions_per_rollout"] for line in lines]
    tokens = [n * line["response_tokens"] for n, line in zip(calls, lines, strict=True)]
    columns = [[1.0] * len(lines), [float(proven(line["step"])) for line in lines]]
    columns += [each for each in (calls, tokens, [float(line["step"]) for line in lines]) if max(each) > min(each)]
    given, wanted = np.array(columns).T, np.array(cost)
    scale = np.abs(given).max(0)
    weights, _, rank, _ = np.linalg.lstsq(given / scale, wanted, rcond=None)
    if len(wanted) <= rank:
        return [float("nan"), float("nan")]
    noise = ((wanted - given / scale @ weights) ** 2).sum() / (len(wanted) - rank)
    error = (noise * np.linalg.pinv((given / scale).T @ (given / scale))[1, 1]) ** 0.5
    return [round(float(weights[1] / wanted.mean()), 5), round(float(error / wanted.mean()), 5)]


def summary(with_s: list[float], without_s: list[float], own_s: list[float], behind_s: list[float]) -> dict[str, Any]:
    """Return medians and quartiles of steps, and what the run waited for proofs as a share of a step."""
    middle = statistics.median(without_s)
    return {
        "step_s_with": spread(with_s),
        "step_s_without": spread(without_s),
        "waited_ms": round(1000 * statistics.median(own_s), 1),
        "background_ms": round(1000 * statistics.median(behind_s), 1),
        "share_waited": round(statistics.median(own_s) / middle, 5),
        "share_by_medians": round(statistics.median(with_s) / middle - 1, 5),
        "steps": [len(with_s), len(without_s)],
    }


def spread(values: list[float]) -> list[float]:
    """Return lower quartile, median and upper quartile."""
    found = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return [round(value, 4) for value in found]


@hookimpl
def on_run_start(event: Any) -> None:
    """Begin to leave out proofs, as a plugin file of a run."""
    install()
