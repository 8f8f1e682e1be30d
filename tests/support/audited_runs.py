"""Small real runs for the tests of the auditor: runners, server, learner and files, with a tiny random model."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from agentrig_agent_match import AgentMatch
from agentrig_grpo import adapter_files, checkpoint, learner, lora, trainer_files
from agentrig_grpo.loss import LossInputs
from agentrig_grpo.masters import Masters
from audit_faults import Fault

from agentrig import credit
from agentrig.plan import Plan, resolve
from agentrig.run import drawing, loop, session, splits
from agentrig.run.training import train
from agentrig.runners import engine
from agentrig.runners.engine import RolloutEngine
from agentrig.testing.tiny_model import make_model, make_tokenizer

PLUGIN = """
import os

import agentrig
import httpx
from agentrig import AgentSpec, CreditSpec, RewardSpec, Score, Task, TasksSpec, hookimpl


class Words:
    splits = ("train", "dev", "test")
    roles = {"train": "train", "validation": "dev", "report": "test"}

    def load(self, split):
        words = ("count the names", "select a name", "order by the name", "where is the answer", "the question", "and")
        texts = [f"{split} {word}" for word in words]
        root = os.environ.get("AUDIT_ROOT", "/data/words")
        if os.environ.get("AUDIT_EQUAL"):
            texts = texts[:1] * len(texts)
        return [
            Task(
                id=f"{split}-{i}",
                input={"text": text, "database": f"{root}/{len(text)}.db"},
                private={"gold": text.split()[-1]},
                root=root,
            )
            for i, text in enumerate(texts)
        ]


def agent(given, endpoint):
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": given["text"]}], **endpoint.sampling}
    headers = {"Authorization": f"Bearer {endpoint.api_key}", **endpoint.headers}
    with agentrig.span("speak"):
        reply = httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers, timeout=60)
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"]


def letters(task, outcome, budget_s):
    text = str(outcome.answer)
    value = sum("a" <= c <= "m" for c in text) / max(len(text), 1)
    return Score(status="ok", value=value, correct=len(text) % 2 == 0, calls=[value])


@hookimpl
def register_tasks():
    yield TasksSpec(name="words", summary="Six tasks and six to report.", build=lambda config: Words())


@hookimpl
def register_agents():
    yield AgentSpec(name="speaker", summary="One call.", build=lambda config: agent)


def bar(groups):
    for group in groups:
        yield [None if r.value is None else [r.value - 0.4] * len(r.triplets) for r in group]


@hookimpl
def register_credits():
    yield CreditSpec(name="bar", summary="How far a reward is above 0.4.", build=lambda config: bar)


@hookimpl
def register_rewards():
    yield RewardSpec(name="letters", summary="The share of letters a to m.", build=lambda config: letters)
"""

SETTINGS = (
    "adapter.match=", "algorithm.steps=2", "algorithm.tasks_per_step=3", "algorithm.group_size=8",
    "algorithm.max_tokens=8", "algorithm.lr=1e-3", "algorithm.validate_every=0", "algorithm.warmup_steps=0",
    "hardware.threads=1", "runners.n=1", "run.report_tasks=2", 'run.block=["report"]',
)  # fmt: skip
USES = {"tasks": "words", "agent": "speaker", "reward": "letters", "adapter": "agent-match", "algorithm": "grpo",
        "hardware": "cpu"}  # fmt: skip


UPDATE = {"clip_low": 0.2, "clip_high": 0.28, "max_staleness": 0, "kl_loss_coef": 0.0, "temperature": 1.0,
          "loss_agg_mode": "token-mean"}  # fmt: skip
"""What the auditor needs of the settings to compute an update without a run."""


def tiny_model(folder: Path, **shape: Any) -> Path:
    checkpoint.save(make_model(**shape), make_tokenizer(), folder / "model")
    return folder / "model"


def trained(folder: Path, model: Path, *more: str) -> Path:
    """Run; returns the run directory, whatever the run ends with is raised."""
    (folder / "speaker.py").write_text(PLUGIN)
    own = [f"run.directory={folder}", "run.name=run", f"algorithm.model={model}"]
    train(resolve(None, overrides=[*own, *SETTINGS, *more], uses=USES, files=[str(folder / "speaker.py")]))
    return folder / "run"


def verdicts(run: Path) -> dict[int, dict[str, dict[str, Any]]]:
    """Return what the auditor said, by step and link; of a link with several faults, the last."""
    lines = [json.loads(file.read_text()) for file in sorted((run / "audit").glob("verdicts-*.json"))]
    return {line["step"]: {each["link"]: each for each in line["verdicts"]} for line in lines}


def plant(fault: Fault, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault in this process, in the runners, or at the start of the server's."""
    if fault.where == "server":
        (folder / "planted").mkdir()
        code = textwrap.dedent(fault.code)
        guarded = "import sys\nif any('agentrig_grpo.server' in word for word in sys.orig_argv):\n"
        (folder / "planted" / "sitecustomize.py").write_text(guarded + textwrap.indent(code, "    "), "utf-8")
        monkeypatch.setenv("PYTHONPATH", str(folder / "planted"), prepend=os.pathsep)
        return
    if fault.where == "runner":  # where the agent is built
        build = f"\n\ndef planted(config):\n    exec({fault.code!r}, {{}})\n    return agent\n"
        code = PLUGIN.replace("build=lambda config: agent)", "build=planted)") + build
        monkeypatch.setattr(sys.modules[__name__], "PLUGIN", code)
        return
    monkeypatch.delenv("AUDIT_EQUAL", raising=False)
    for owner, names in {
        credit: ("grpo",),
        drawing: ("tasks_of_step",),
        loop.Loop: ("_validate", "_take_best", "_greedy"),
        adapter_files: ("save",),
        checkpoint: ("save",),
        trainer_files: ("write",),
        learner: ("sample_weights", "tokens_in_loss", "build", "learning_rate", "optimizer_of", "token_losses"),
        learner.Learner: ("_batches", "_reference_logprobs"),
        Masters: ("refresh",),
        lora: ("wrap",),
        LossInputs: ("look_up",),
        torch.nn.utils: ("clip_grad_norm_",),
        RolloutEngine: ("run",),
        engine: ("Job",),
        splits: ("read_split",),
        Plan: ("scorer",),
        session.RunSession: ("report", "summary", "_line"),
        AgentMatch: ("_node",),
    }.items():
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))  # put back after the test
    exec(fault.code, {})
