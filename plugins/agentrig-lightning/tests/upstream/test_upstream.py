"""The examples of Agent Lightning 0.3.0, unmodified: agentrig's Trainer gives what Agent Lightning's own gives.

    plugins/agentrig-lightning/tests/upstream/setup.sh /some/folder/venv
    export AGENTRIG_AGENT_LIGHTNING=/path/to/agent-lightning-0.3.0
    /some/folder/venv/bin/python -m pytest -m slow plugins/agentrig-lightning/tests/upstream

`AGENTRIG_AGENT_LIGHTNING` names a checkout of tag v0.3.0. Both runs use the same environment and the same scripted
model server, and must have made the same requests and the same rollouts.
"""

from __future__ import annotations

import collections
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer, scripted_server

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
LIMIT_S = 900
"""Seconds for one run; Agent Lightning's own takes most of them waiting between its polls."""

SLOW_TOOL = "Timed out while waiting for response"
"""What the calculator's client prints if there is no answer within 5 s on a busy machine; such a run does not count."""

CRITIC = "gpt-5-mini"
"""The model that APO asks for critiques."""

EXAMPLES = {
    "sql-dev": "spider",
    "sql-modes": "spider",
    "calc-x": "calc_x",
    "rooms": "apo",
    "math": "unsloth",
    "first-algorithm": "apo",
    "baseline": "apo",
    "apo": "apo",
}

NEEDS = {"calc-x": "autogen_ext", "math": "agents", "apo": "poml"}
"""Scenario to a module that only the environment of setup.sh has."""

CALC = [
    {"id": "1", "question": "What is 12 multiplied by 15?", "chain": "", "result": "180", "source": "debug"},
    {"id": "2", "question": "What is the square root of 256?", "chain": "", "result": "16", "source": "debug"},
    {"id": "3", "question": "What is 7 plus 8?", "chain": "", "result": "15", "source": "debug"},
]
EXPRESSIONS = {CALC[0]["question"]: "12 * 15", CALC[1]["question"]: "256 ** 0.5", CALC[2]["question"]: "7 + 9"}


def spider_rows(spider: Path) -> dict[str, list[dict[str, Any]]]:
    """Return a few real rows: training rows, validation rows and test rows."""
    import pandas as pd

    def read(name: str, n: int, **more: str) -> list[dict[str, Any]]:
        found = pd.read_parquet(spider / name).head(n).to_dict(orient="records")
        return [{**json.loads(json.dumps(row)), **more} for row in found]

    return {
        "train": read("train_spider.parquet", 4),
        "val": read("test_dev_500.parquet", 3, mode="val"),
        "test": read("test.parquet", 3, mode="test"),
        "dev": read("dev.parquet", 10),
    }


def sql_answers(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return scripted queries: every third answer is wrong, and half of those are never corrected."""
    answers = {}
    for i, row in enumerate(rows):
        wrong = "SELECT 1 WHERE 0"
        answers[row["question"]] = [row["query"] if i % 3 else wrong, wrong if i % 6 == 3 else row["query"]]
    return answers


def gsm_expressions(example: Path) -> dict[str, str]:
    """Return scripted expressions for the math agent: the answer of the data, and every third one wrong."""
    if not (example / "data_gsmhard.jsonl").is_file():
        return {}
    rows = [json.loads(line) for line in (example / "data_gsmhard.jsonl").read_text().splitlines()]
    return {row["input"]: f"{row['target']!r} + {i % 3 // 2}" for i, row in enumerate(rows)}


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_gives_what_agent_lightning_gives(
    name: str, checkout: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Every request to a model, every rollout with its mode, status and reward, and the best prompt are the same."""
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed; setup.sh beside this file makes an environment that has it")
    spider = request.getfixturevalue("spider_dir") if EXAMPLES[name] == "spider" else tmp_path
    theirs = run_scenario(name, "upstream", checkout, tmp_path, spider)
    ours = run_scenario(name, "agentrig", checkout, tmp_path, spider)
    assert theirs["rollouts"]
    assert ours["rollouts"] == theirs["rollouts"]
    assert ours["requests"] == theirs["requests"]
    assert (ours["best"], ours["printed"]) == (theirs["best"], theirs["printed"])


def run_scenario(name: str, which: str, checkout: Path, folder: Path, spider: Path) -> dict[str, Any]:
    """Run a scenario; return its outcome and the requests of its models. A run whose tools were too slow runs again."""
    for attempt in range(3):
        made = run_once(name, which, checkout, folder / f"{which}-{attempt}", spider)
        if not made.pop("slow"):
            return made
    raise AssertionError(f"{name} by {which}: the machine was too busy for the example's tools, three times")


def run_once(name: str, which: str, checkout: Path, folder: Path, spider: Path) -> dict[str, Any]:
    """Run a scenario in a copy of its example's folder."""
    example = folder / "example"
    shutil.copytree(checkout / "examples" / EXAMPLES[name], example)
    rows = spider_rows(spider) if EXAMPLES[name] == "spider" else {"train": CALC}
    (example / "rows.json").write_text(json.dumps(rows))
    script = {
        "sql": sql_answers([row for split in rows.values() for row in split]) if EXAMPLES[name] == "spider" else {},
        "calculator": {**EXPRESSIONS, **gsm_expressions(example)},
    }
    out = folder / "outcome.json"
    with scripted_server(script) as server:
        done = subprocess.run(
            [sys.executable, str(HERE / "drive.py"), name, which, str(out)],
            cwd=example,
            env={
                **os.environ,
                **({"AGL_SERVER_PORT": str(free_port())} if which == "upstream" else {}),
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "OPENAI_BASE_URL": server.url,
                "OPENAI_API_BASE": server.url,
                "OPENAI_API_KEY": "none",
                "VERL_SPIDER_DATA_DIR": str(spider),
            },
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        made: dict[str, Any] = json.loads(out.read_text())
        made["requests"] = requests(server)
        made["slow"] = SLOW_TOOL in done.stdout + done.stderr
        made["printed"] = re.findall(r"Best prompt found.*?reward [\d.]+", re.sub(r"\s+", " ", done.stdout))
    return made


def free_port() -> int:
    """Return a port that nobody listens on; Agent Lightning's own default is 4747 for everyone."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def requests(server: ScriptedServer) -> dict[str, int]:
    """Return what the models were asked, and how often: the messages, tools and temperature of each request.

    APO sends its critic the spans of its rollouts, with their ids and times; these requests are counted only.
    """
    keys = ("model", "messages", "tools", "temperature")
    asked = [
        "critic" if body["model"] == CRITIC else json.dumps({k: body.get(k) for k in keys}, sort_keys=True)
        for body in server.requests
    ]
    return dict(sorted(collections.Counter(asked).items()))
