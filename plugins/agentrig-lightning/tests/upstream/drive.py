"""Runs an example of Agent Lightning 0.3 by Agent Lightning's own Trainer, or by agentrig's, and writes its outcome.

    python plugins/agentrig-lightning/tests/upstream/drive.py SCENARIO upstream|agentrig OUTCOME.json

It runs in a copy of the example's folder. The example's files are used as they are. The outcome has every rollout of
the run's store: mode, status, input and final reward.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, os.getcwd())  # the example's folder, as `python example.py` has it

WHICH = sys.argv[2] if len(sys.argv) > 2 else "agentrig"
if WHICH == "agentrig":
    import agentrig_lightning.store_run  # noqa: F401  (before `script` replaces the Trainer that it uses)
    from agentrig_lightning import Trainer
else:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    from agentlightning import Trainer

import agentlightning as agl  # noqa: E402

TRAINERS: list[Any] = []


class Recorded(Trainer):
    """The Trainer under test; keeps itself, so that its store can be read when the script has ended."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        TRAINERS.append(self)


def script(name: str, *options: str) -> Callable[[], None]:
    """Run a script of the example as its main program, with the Trainer under test as the one that it imports."""

    def run() -> None:
        agl.Trainer = Recorded
        sys.argv[:] = [name, *options]
        runpy.run_path(name, run_name="__main__")

    return run


def llm(temperature: float = 0.0) -> dict[str, Any]:
    """Return the resources of an agent that needs one model."""
    url = os.environ["OPENAI_BASE_URL"]
    return {"main_llm": agl.LLM(endpoint=url, model="scripted", sampling_parameters={"temperature": temperature})}


def rows() -> dict[str, list[Any]]:
    """Return the rows that the test prepared: split to rows."""
    return json.loads(Path("rows.json").read_text())


@agl.algo
async def modes(*, store: Any, train_dataset: Any, val_dataset: Any, initial_resources: Any) -> None:
    """Run every row once: the training rows as `train`, the others in the mode that the row names."""
    resources = await store.add_resources(initial_resources)
    todo = [("train", row) for row in train_dataset] + [(row["mode"], row) for row in val_dataset]
    ids = [
        (await store.enqueue_rollout(input=row, mode=mode, resources_id=resources.resources_id)).rollout_id
        for mode, row in todo
    ]
    while len(await store.wait_for_rollouts(rollout_ids=ids, timeout=0.1)) < len(ids):
        await asyncio.sleep(0.2)


def sql_modes() -> None:
    """LitSQLAgent in train, validation and test."""
    from sql_agent import LitSQLAgent

    data = rows()
    trainer = Recorded(algorithm=modes, n_runners=2, initial_resources=llm(0.7), adapter={"agent_match": "write"})
    trainer.fit(LitSQLAgent(), data["train"], val_dataset=[*data["val"], *data["test"]])


def calc_x() -> None:
    """The Calc-X agent (AutoGen, with tools over MCP), on Baseline."""
    from calc_agent import calc_agent

    trainer = Recorded(algorithm=agl.Baseline(polling_interval=0.2), n_runners=2, initial_resources=llm())
    trainer.fit(calc_agent, rows()["train"])


def rooms() -> None:
    """The room selector (prompt template), in `dev`."""
    from room_selector import load_room_tasks, prompt_template_baseline, room_selector

    trainer = Recorded(n_runners=1, initial_resources={"prompt": prompt_template_baseline()})
    trainer.dev(room_selector, load_room_tasks()[:4])


SCENARIOS: dict[str, Callable[[], None]] = {
    "sql-dev": script("sql_agent.py"),
    "sql-modes": sql_modes,
    "calc-x": calc_x,
    "rooms": rooms,
    "math": script("math_agent.py"),
    "first-algorithm": script("apo_custom_algorithm_trainer.py"),
    "baseline": script("apo_debug.py", "--mode", "trainer"),
    "apo": script("room_selector_apo.py"),
}


async def outcome(store: Any) -> list[dict[str, Any]]:
    """Return what the store has of every rollout, in an order that does not depend on time."""
    found = []
    for rollout in await store.query_rollouts(limit=-1):
        spans = await store.query_spans(rollout.rollout_id, limit=-1)
        found.append(
            {
                "mode": rollout.mode,
                "status": rollout.status,
                "input": rollout.input,
                "reward": agl.find_final_reward(list(spans)),
            }
        )
    return sorted(found, key=lambda r: json.dumps(r, sort_keys=True))


def seed_apo() -> None:
    """Give APO random numbers of its own: other parts of a process use the common ones, at times of their own."""
    from agentlightning.algorithm import utils
    from agentlightning.algorithm.apo import apo

    utils.random, apo.random = random.Random(7), random.Random(7)


def main() -> None:
    """Run one scenario and write its outcome."""
    logging.getLogger("agentlightning").setLevel(logging.INFO)
    name, target = sys.argv[1], Path(sys.argv[3])
    if name == "apo":
        seed_apo()
    SCENARIOS[name]()
    (trainer,) = TRAINERS
    best = getattr(trainer.algorithm, "_history_best_prompt", None)
    made = {
        "rollouts": asyncio.run(outcome(trainer.store)),
        "best": None if best is None else [best.template, trainer.algorithm._history_best_score],
    }
    target.write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
