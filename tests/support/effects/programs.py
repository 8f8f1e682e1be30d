"""The keys of the agents that are programs: `command`, and `agent-lightning-1`."""

from __future__ import annotations

import atexit
import json
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from agentrig_lightning.v1.agent import build
from agentrig_lightning.v1.config import LightningV1Config

from agentrig import AgentFailure, Endpoint
from agentrig.external.command import CommandAgent
from agentrig.external.config import CommandConfig
from agentrig.external.sandboxes import Place, wrapped
from agentrig.pools import Job
from agentrig.runners.attempt import run_agent
from agentrig.settings import structure
from agentrig.tracing.recording import recording
from effects import Elsewhere, Flip, Settings

ENDPOINT = Endpoint(base_url="http://127.0.0.1:9/v1", model="tiny", api_key="key-1", sampling={"temperature": 0.5})
TASK = {"question": "seven", "gold": {"text": "okok"}}
AGENT_CLASS = """
import os


class {name}:
    def run(self):
        import json, urllib.request

        request = urllib.request.Request(os.environ["AGL_EVENT_URL"], method="POST")
        request.add_header("Authorization", "Bearer " + os.environ["AGL_KEY"])
        request.add_header("Content-Type", "application/json")
        event = {{"event_type": "reward", "data": {{"value": {reward}}}}}
        urllib.request.urlopen(request, json.dumps(event).encode())
"""


@cache
def place() -> Path:
    """Return a folder with two program folders, `one` and `two`; it is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="agentrig-effects-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "own.txt").write_text(json.dumps(name))
    return folder


def run(settings: Settings) -> Any:
    """Return a program's answer, or its failure's kind after an exclamation mark."""
    config = structure(CommandConfig, dict(settings), owner="command", section="agent")
    try:
        return CommandAgent(config)(TASK, ENDPOINT)
    except AgentFailure as failure:
        return f"!{failure.kind}"


def nodes(settings: Settings) -> list[str | None]:
    """Return the names of the nodes in a program's trace."""
    with recording("r", token_ids=True) as recorder:
        run(settings)
    return [span.node for span in recorder.trace().spans if span.node]


def words(settings: Settings) -> list[str]:
    """Return what would be run in a sandbox."""
    config = structure(CommandConfig, dict(settings), owner="command", section="agent")
    inside = Place(folder=Path("/tmp"), reads=[Path(mount) for mount in config.mounts], variables={})
    return list(wrapped(config, config.words, inside).words)


def sh(key: str, a: Any, b: Any, script: str, expected: tuple[Any, Any], **beside: Any) -> Flip:
    """Return the entry of a key that is seen in what a shell script answers."""
    return Flip(
        a=a,
        b=b,
        look=run,
        shows=lambda one, other: (one, other) == expected,
        beside={"command": script, "shell": True, **beside},
    )


def variable(key: str, default: str, value: str) -> Flip:
    return sh(key, default, "OTHER", 'printf %s "${OTHER:-none}"', ("none", value), answer="stdout")


def called_back(key: str, default: str) -> Flip:
    script = 'test -n "$OTHER" && exit 7; exit 0'
    return sh(key, default, "OTHER", script, ("!no-answer", "!seen"), answer="callback", exit_codes={"7": "seen"})


TABLE: dict[str, Flip | Elsewhere] = {
    "command": Flip(a="echo 1", b=["echo", "2"], look=run, shows=lambda a, b: (a, b) == (1, 2)),
    "shell": Flip(
        a=False, b=True, look=run, shows=lambda a, b: (a, b) == ("!no-answer", 2), beside={"command": "echo $((1+1))"}
    ),
    "folder": Flip(
        a=str(place() / "one"),
        b=str(place() / "two"),
        look=run,
        shows=lambda a, b: (a, b) == ("one", "two"),
        beside={"command": "cat {folder}/own.txt"},
    ),
    "copy": sh("copy", False, True, "cat own.txt || echo 0", (0, "one"), folder=str(place() / "one")),
    "input": sh(
        "input",
        "stdin",
        "environment",
        'printf %s "${AGENTRIG_INPUT:-none}"',
        ("none", json.dumps(TASK)),
        answer="stdout",
    ),
    "input_variables": sh(
        "input_variables", {}, {"Q": "question"}, 'printf %s "${Q:-none}"', ("none", "seven"), answer="stdout"
    ),
    "base_url_variable": variable("base_url_variable", "OPENAI_BASE_URL", ENDPOINT.base_url),
    "api_key_variable": variable("api_key_variable", "OPENAI_API_KEY", ENDPOINT.api_key),
    "model_variable": variable("model_variable", "OPENAI_MODEL", ENDPOINT.model),
    "variables": sh("variables", {}, {"MODE": "fast"}, 'printf %s "${MODE:-none}"', ("none", "fast"), answer="stdout"),
    "answer": sh("answer", "json-line", "stdout", "echo no; echo 1", (1, "no\n1")),
    "answer_file": sh(
        "answer_file", "one.json", "two.json", "echo 1 > one.json; echo 2 > two.json", (1, 2), answer="file"
    ),
    "answer_url_variable": called_back("answer_url_variable", "AGENTRIG_ANSWER_URL"),
    "answer_key_variable": called_back("answer_key_variable", "AGENTRIG_ANSWER_KEY"),
    "answer_required": sh("answer_required", True, False, "true", ("!no-answer", None)),
    "exit_codes": sh("exit_codes", {}, {"3": "mine"}, "exit 3", ("!agent-error", "!mine")),
    "node": Flip(
        a="program",
        b="player",
        look=nodes,
        shows=lambda a, b: "program" in a and "player" in b and "player" not in a,
        beside={"command": "echo 1"},
    ),
    "time_s": sh("time_s", 0.3, 30.0, "sleep 1; echo 1", ("!deadline", 1)),
    "memory_mb": Flip(
        a=60.0,
        b=0.0,
        look=run,
        shows=lambda a, b: (a, b) == ("!memory-limit", 1),
        beside={"command": [sys.executable, "-c", "x = bytearray(150 << 20); import time; time.sleep(1); print(1)"]},
    ),
    "output_mb": sh("output_mb", 0.1, 1.0, "head -c 300000 /dev/zero | tr '\\0' ' '; echo 1", ("!output-limit", 1)),
    "disk_mb": sh("disk_mb", 1.0, 10.0, "head -c 3000000 /dev/zero > f; sleep 1; echo 1", ("!disk-limit", 1)),
    "processes": sh(
        "processes", 3, 100, "for i in 1 2 3 4 5 6; do sleep 1 & done; wait; echo 1", ("!process-limit", 1)
    ),
    "sandbox": Flip(
        a="none",
        b="bubblewrap",
        look=words,
        shows=lambda a, b: a == ["echo", "1"] and b[0] == "bwrap" and b[-2:] == ["echo", "1"],
        beside={"command": "echo 1"},
    ),
    "image": Flip(
        a="alpine:3",
        b="debian:13",
        look=words,
        shows=lambda a, b: "alpine:3" in a and "debian:13" in b and "alpine:3" not in b,
        beside={"command": "echo 1", "sandbox": "podman"},
    ),
    "mounts": Flip(
        a=[],
        b=["/srv"],
        look=words,
        shows=lambda a, b: "/srv" not in " ".join(a) and "/srv" in " ".join(b),
        beside={"command": "echo 1", "sandbox": "bubblewrap"},
    ),
}


def rewarded(settings: Settings) -> Any:
    """Return the reward that an agent of Agent Lightning 1.x posted, or `!` and its failure's kind."""
    for name, reward in (("one", 0.25), ("two", 0.75)):
        text = "".join(AGENT_CLASS.format(name=each, reward=r) for each, r in (("Agent", reward), ("Best", 1.0)))
        (place() / name / "their_agent.py").write_text(text)
    config = structure(LightningV1Config, dict(settings), owner="agent-lightning-1", section="agent")
    outcome = run_agent(build(config), Job(id="r", input=TASK, endpoint=ENDPOINT)).outcome
    return outcome.own_reward if outcome.failure is None else f"!{outcome.failure}"


POSTED = (
    "import json, os, urllib.request as u; r = u.Request(os.environ['AGL_EVENT_URL'], method='POST'); "
    "r.add_header('Authorization', 'Bearer ' + os.environ['AGL_KEY']); "
    "r.add_header('Content-Type', 'application/json'); "
    "u.urlopen(r, json.dumps({'event_type': 'reward', 'data': {'value': float(os.environ.get('R', '0.5'))}}).encode())"
)
COMMAND = [sys.executable, "-c", POSTED]
OTHER = [sys.executable, "-c", POSTED.replace("'0.5'", "'0.125'")]
LIGHTNING_V1: dict[str, Flip | Elsewhere] = {
    "agent_class": Flip(
        a="their_agent.Agent",
        b="their_agent:Best",
        look=rewarded,
        shows=lambda a, b: (a, b) == (0.25, 1.0),
        beside={"folder": str(place() / "one")},
    ),
    "folder": Flip(
        a=str(place() / "one"),
        b=str(place() / "two"),
        look=rewarded,
        shows=lambda a, b: (a, b) == (0.25, 0.75),
        beside={"agent_class": "their_agent.Agent"},
    ),
    "command": Flip(a=COMMAND, b=OTHER, look=rewarded, shows=lambda a, b: (a, b) == (0.5, 0.125)),
    "env_map": Flip(
        a={}, b={"R": "0.875"}, look=rewarded, shows=lambda a, b: (a, b) == (0.5, 0.875), beside={"command": COMMAND}
    ),
    "python": Elsewhere(
        "plugins/agentrig-lightning/tests/test_lightning_v1.py::test_an_agent_does_the_same_under_the_installed_agent_lightning",
        "it needs a Python with other packages",
    ),
    "time_s": Flip(
        a=0.3,
        b=30.0,
        look=rewarded,
        shows=lambda a, b: (a, b) == ("!deadline", 0.5),
        beside={"command": [sys.executable, "-c", f"import time; time.sleep(1); {POSTED}"]},
    ),
}
