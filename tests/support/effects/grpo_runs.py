"""The keys of `grpo` that change a run, observed in two real runs of the shipped model and in two served models."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
import torch
from agentrig_grpo.algorithm import Grpo
from agentrig_grpo.naming import model_directory
from agentrig_grpo.server.handle import Embedded
from safetensors.torch import load_file

from agentrig.hardware import Cpu, CpuConfig
from agentrig.plan import resolve
from agentrig.run.checkpoints import Checkpoints
from agentrig.run.drawing import RULES, Group
from agentrig.run.loop import Loop
from agentrig.run.training import train
from agentrig.tasks import Task
from effects import Elsewhere, Flip, Settings, Together, config_of, folder, free_port
from effects.run import OWN, overrides

PLACE = "algorithm.grpo"
SECTIONS = ["tasks.use=effects-names", "agent.use=effects-writer", "reward.use=own", "hardware.use=cpu"]


@cache
def other_model() -> str:
    """Return a copy of the shipped model that takes 500 tokens."""
    made = Path(shutil.copytree(model_directory("mini"), folder() / "other"))
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 500}))
    return str(made)


def run(settings: Settings) -> Mapping[str, Any]:
    """Return what a whole run left behind."""
    name = f"steps-{settings['steps']}"
    mine = {key: value for key, value in settings.items() if key != "delivery"}
    own = [
        *SECTIONS,
        'adapter.match="write"',
        "hardware.threads=1",
        f'run.directory="{folder()}/runs"',
        f"run.name={name}",
        f"run.delivery={json.dumps(settings['delivery'])}",
        "run.validation_tasks=4",
        'run.block=["report"]',
        "run.report_tasks=2",
        "runners.n=1",
        "algorithm.use=grpo",
        "algorithm.lr=1e-3",
        "server.use=embedded",
        "server.kv_cache_mb=16",
    ]
    saved: list[int] = []
    save = Checkpoints.save

    def noted(self: Checkpoints, step: int, *more: Any, **options: Any) -> Path:
        saved.append(step)
        return save(self, step, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", noted)
        train(resolve("mini", overrides=[*own, *overrides("algorithm", mine)], files=[OWN]))
    path = folder() / "runs" / name
    rows = [row for file in sorted((path / "rollouts").glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    checkpoints = sorted(p for p in (path / "checkpoints").iterdir() if p.is_dir() and not p.is_symlink())
    last = checkpoints[-1]
    kept = torch.load(last / "trainer" / "learner.pt", weights_only=True)["kept"]
    served = load_file(last / "model.safetensors")
    return {
        "lines": [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()],
        "train": [row for row in rows if row["mode"] == "train"],
        "measured": [row for row in rows if row["mode"] != "train"],
        "validated": sorted({row["step"] for row in rows if row["mode"] == "validation"}),
        "saved": list(dict.fromkeys(saved)),
        "kept": [int(p.name.rpartition("-")[2]) for p in checkpoints if (p / "keep").exists()],
        "context": json.loads((last / "config.json").read_text())["max_position_embeddings"],
        "ends_with_best": bool(kept) and all(torch.equal(served[n], t) for n, t in kept.items()),
    }


def asked(rows: list[dict[str, Any]], field: str) -> set[Any]:
    """Return the values of a field in all requests of these rollouts."""
    spans = [span for row in rows for span in json.loads(row["spans"])]
    return {s["attributes"]["request"].get(field) for s in spans if "request" in s["attributes"]}


RUNS = Together(run)


def serve(settings: Settings) -> Mapping[str, Any]:
    """Return how a served model handles eight short requests at once, eight long ones, and one that is sent twice."""
    hardware = Cpu(config=CpuConfig(threads=1))
    own = {key: value for key, value in settings.items() if key != "max_length"}
    make = partial(Embedded, config_of("server.embedded", own))
    algorithm = Loop(Grpo(config_of(PLACE, {"max_length": settings["max_length"]})))
    with algorithm.serve(hardware=hardware, checkpoint=None, server=make) as endpoint:
        url = endpoint.base_url.removesuffix("/v1")
        with httpx.Client(timeout=60, headers={"Authorization": f"Bearer {endpoint.api_key}"}) as client:

            def health() -> dict[str, Any]:
                found: dict[str, Any] = client.get(f"{url}/health").json()
                return found

            def ask(content: str, n: int, most: int) -> list[int]:
                body = {"model": endpoint.model, "messages": [{"role": "user", "content": content}], "n": n}
                more = {"max_tokens": most, "return_token_ids": True, "temperature": 2.0, "seed": 3}
                reply = client.post(f"{url}/v1/chat/completions", json={**body, **more}).json()
                return [len(choice["token_ids"]) for choice in reply["choices"]]

            def counted(content: str, n: int, most: int) -> tuple[list[int], Counter[str]]:
                before = Counter(health()["counts"])
                lengths = ask(content, n, most)
                return lengths, Counter(health()["counts"]) - before

            short, long = counted("one", 8, 12), counted("two", 8, 300)
            before = Counter(health()["counts"])
            for _ in range(2):
                ask("three", 1, 2)
            again = (Counter(health()["counts"]) - before)["prefills"]
            models = client.get(f"{url}/v1/models").json()["data"]
            return {
                "host": httpx.URL(url).host,
                "port": httpx.URL(url).port,
                "context": models[0]["max_model_len"],
                "threads": health()["threads"],
                "short": at_once(*short),
                "long": at_once(*long),
                "prefills": again,
            }


def at_once(lengths: list[int], counts: Counter[str]) -> str:
    """Return `all`, `one` or `some`: how many of the requests were decoded together, by the number of decode steps."""
    alone = sum(n - 1 for n in lengths)
    return "all" if counts["steps"] == max(lengths) - 1 else "one" if counts["steps"] == alone else "some"


TASKS = [Task(id=str(i), input={}) for i in range(6)]


def drawn(settings: Settings) -> float:
    """Return the share of odd tasks in steps of three. Even ones are always solved, with equal rewards."""
    config = config_of(PLACE, {"tasks_per_step": 3, **settings})
    draws, odd = RULES[config.task_sampling](TASKS, config, 0), list[bool]()
    for step in range(1, 41):
        seen = [(task.id, bool(int(task.id) % 2)) for task in draws.draw(step)]
        draws.see(Group(task=name, values=[1.0, 0.0 if hard else 1.0], solved=not hard) for name, hard in seen)
        odd += [hard for _, hard in seen]
    return sum(odd) / len(odd)


PORT = free_port()
SERVED = Together(serve)
TABLE = {
    "model": RUNS.exact("model", "mini", other_model(), lambda r: r["context"], (512, 500)),
    "steps": RUNS.exact("steps", 2, 4, lambda r: [line["step"] for line in r["lines"]], ([1, 2], [1, 2, 3, 4])),
    "tasks_per_step": RUNS.exact(
        "tasks_per_step",
        2,
        3,
        lambda r: {len({row["group"] for row in r["train"] if row["step"] == line["step"]}) for line in r["lines"]},
        ({2}, {3}),
    ),
    "task_sampling": Flip(
        a="uniform",
        b="by-difficulty",
        look=lambda settings: (drawn(settings), drawn({"task_sampling": "skip-solved"})),
        shows=lambda a, b: a[0] == 0.5 and min(a[1], b[0]) > 0.6,
    ),
    "recheck_every": Flip(
        a=2, b=8, look=drawn, shows=lambda a, b: 0.5 < a < b - 0.1, beside={"task_sampling": "skip-solved"}
    ),
    "group_size": RUNS.exact(
        "group_size",
        5,
        4,
        lambda r: set(Counter((row["step"], row["group"]) for row in r["train"]).values()),
        ({5}, {4}),
    ),
    "temperature": RUNS.exact(
        "temperature",
        1.0,
        1.5,
        lambda r: (
            asked(r["train"], "temperature"),
            max(x["algorithm"].get("sampled_difference", 0.0) for x in r["lines"]) < 0.01,
        ),
        (({1.0}, True), ({1.5}, True)),
    ),
    "top_p": RUNS.exact(
        "top_p",
        1.0,
        0.999,
        lambda r: (asked(r["train"], "top_p"), asked(r["measured"], "top_p")),
        (({1.0}, {1.0}), ({0.999}, {1.0})),
    ),
    "max_tokens": RUNS.flip(
        "max_tokens",
        9,
        11,
        lambda r: (asked(r["train"], "max_tokens"), max(row["response_tokens"] for row in r["train"])),
        lambda a, b: a[0] == {9} and b[0] == {11} and a[1] <= 9 and b[1] <= 11,
    ),
    "val_temperature": RUNS.exact(
        "val_temperature", 0.0, 0.5, lambda r: asked(r["measured"], "temperature"), ({0.0}, {0.5})
    ),
    "validate_every": RUNS.exact("validate_every", 1, 2, lambda r: r["validated"], ([0, 1, 2], [0, 2, 4])),
    "save_every": RUNS.exact("save_every", 1, 2, lambda r: r["saved"], ([1, 2], [2, 4])),
    "keep_every": RUNS.exact("keep_every", 0, 2, lambda r: r["kept"], ([], [2, 4])),
    "final": RUNS.exact("final", "last", "best", lambda r: r["ends_with_best"], (False, True)),
    "max_length": SERVED.exact("max_length", 0, 400, lambda seen: seen["context"], (512, 400)),
    "max_staleness": Elsewhere(
        "tests/run/test_overlap.py::test_rollouts_run_while_the_step_before_is_learned",
        "with 1, in a run, each batch of rollouts ends before the step before does; other runs' begin after it",
    ),
    "server_sleep": Elsewhere(
        "plugins/agentrig-grpo/tests/test_grpo_embedded.py::test_server_sleep_frees_memory_before_each_update",
        "on a CPU the memory goes back to the same machine; it shows in what the server has to compute again",
    ),
}

SERVER_TABLE = {
    "batch": SERVED.exact("batch", 64, 3, lambda seen: seen["short"], ("all", "some")),
    "kv_cache_mb": SERVED.exact("kv_cache_mb", 64, 1, lambda seen: seen["long"], ("all", "one")),
    "prompt_cache_mb": SERVED.exact("prompt_cache_mb", 64, 0, lambda seen: seen["prefills"], (1, 2)),
    "threads": SERVED.exact("threads", 1, 2, lambda seen: seen["threads"]),
    "host": SERVED.exact("host", "127.0.0.1", "127.0.0.2", lambda seen: seen["host"]),
    "port": SERVED.flip("port", 0, PORT, lambda seen: seen["port"], lambda a, b: b == PORT != a),
}

RUN_TABLE = {
    "delivery": RUNS.flip(
        "delivery",
        True,
        False,
        lambda r: [line.get("delivery") is not None for line in r["lines"]],
        lambda a, b: all(a) and not any(b),
    )
}
