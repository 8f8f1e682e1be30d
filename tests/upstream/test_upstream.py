"""The examples of Agent Lightning 0.3.0, unmodified: agentrig's Trainer gives what Agent Lightning's own gives.

    tests/upstream/setup.sh /some/folder/venv
    export AGENTRIG_AGENT_LIGHTNING=/path/to/agent-lightning-0.3.0
    /some/folder/venv/bin/python -m pytest -m slow tests/upstream

`AGENTRIG_AGENT_LIGHTNING` names a checkout of tag v0.3.0. Both runs use the same environment and the same scripted
model server, and must have made the same requests and the same rollouts.
"""

from __future__ import annotations

import collections
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer, scripted_server

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
CHECKOUT = "AGENTRIG_AGENT_LIGHTNING"
LIMIT_S = 280

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


def run_scenario(name: str, which: str, checkout: Path, folder: Path, spider: Path) -> dict[str, Any]:
    """Run a scenario in a copy of its example's folder; return its outcome and the requests of its models."""
    example = folder / f"{name}-{which}"
    shutil.copytree(checkout / "examples" / EXAMPLES[name], example)
    rows = spider_rows(spider) if EXAMPLES[name] == "spider" else {"train": CALC}
    (example / "rows.json").write_text(json.dumps(rows))
    if name == "baseline":  # its command-line option chooses the part that has a Trainer
        text = (example / "apo_debug.py").read_text().replace('default="runner"', 'default="trainer"')
        (example / "apo_debug_trainer.py").write_text(text)
    script = {
        "sql": sql_answers([row for split in rows.values() for row in split]) if EXAMPLES[name] == "spider" else {},
        "calculator": {**EXPRESSIONS, **gsm_expressions(example)},
    }
    out = folder / f"{name}-{which}.json"
    with scripted_server(script) as server:
        done = subprocess.run(
            [sys.executable, str(HERE / "drive.py"), name, which, str(out)],
            cwd=example,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "OPENAI_BASE_URL": server.url,
                "OPENAI_API_BASE": server.url,
                "OPENAI_API_KEY": "none",
                "VERL_SPIDER_DATA_DIR": str(spider),
                "AGENTRIG_RUNS": str(folder / "runs"),
            },
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        made: dict[str, Any] = json.loads(out.read_text())
        made["requests"] = requests(server)
        if os.environ.get("AGENTRIG_UPSTREAM_SHOW"):
            print(done.stdout, done.stderr)
        made["printed"] = re.findall(r"Best prompt found.*?reward [\d.]+", re.sub(r"\s+", " ", done.stdout))
    return made


def requests(server: ScriptedServer) -> dict[str, int]:
    """Return what the models were asked, and how often: the messages, tools and temperature of each request."""
    keys = ("model", "messages", "tools", "temperature")
    asked = [json.dumps({k: body.get(k) for k in keys}, sort_keys=True) for body in server.requests]
    return dict(sorted(collections.Counter(asked).items()))
