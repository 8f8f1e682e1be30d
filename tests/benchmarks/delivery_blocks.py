"""Plugin file for runs whose transfers are proven in every other block of three steps, and what that shows.

Steps with and without the proof of delivery are then measured in one run, a few seconds apart. Only steps whose own
transfer and the one before are of one kind are counted: the proof of a transfer is spread over two steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

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
        begin(self, version=version, **more) if proven(version) else self.settle()

    def prepare_or_not(self: Any, servers: Any, **more: Any) -> None:
        prepare(self, servers, **more) if proven(latest[0] + 1) else self.settle()

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
        self._ids, self._scored = (), None

    Transfers.before = before_or_not  # type: ignore[method-assign]


def figures(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the seconds of the steps with and without proofs: medians, quartiles, and the proofs' own clock."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    own, behind = [], []
    for line in lines:
        step = line["step"]
        if step > WARM_UP and proven(step) == proven(step - 1):
            seconds[proven(step)].append(line["step_s"])
            if proven(step):
                own.append(line["delivery"]["seconds"])
                behind.append(line["delivery"]["background_s"])
    return summary(seconds[True], seconds[False], own, behind)


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
