"""The keys of the agents that are programs: `command`, and `agent-lightning-1`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from agentrig_lightning.v1.agent import build
from agentrig_lightning.v1.config import LightningV1Config

from agentrig import AgentFailure, Endpoint
from agentrig.external.command import CommandAgent
from agentrig.external.config import CommandConfig
from agentrig.external.sandboxes import Sandbox
from agentrig.pools import Job
from agentrig.runners.attempt import run_agent
from agentrig.settings import structure
from agentrig.tracing.recording import recording
from effects import Elsewhere, Flip, Settings, exact, shown_by

ENDPOINT = Endpoint(base_url="http://127.0.0.1:9/v1", model="tiny", api_key="key-1", sampling={"temperature": 0.5})
TASK = {"question": "seven", "gold": {"text": "okok"}}


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
    sandbox = Sandbox(config, [Path(mount) for mount in config.mounts])
    found, _ = sandbox.wrapped(config.words, Path("/tmp"), {})
    return list(found)


def sh(key: str, a: Any, b: Any, script: str, expected: tuple[Any, Any], **beside: Any) -> Flip:
    """Return the entry of a key that is seen in what a shell script answers."""
    return Flip(
        a=a,
        b=b,
        look=run,
        shows=lambda one, other: (one, other) == expected,
        beside={"command": script, "shell": True, **beside},
    )


def called_back(key: str, default: str) -> Flip:
    script = 'test -n "$OTHER" && exit 7; exit 0'
    return sh(key, default, "OTHER", script, ("!no-answer", "!seen"), answer="callback", exit_codes={"7": "seen"})


TESTS = {
    "test_the_input_comes_on_stdin_in_a_file_or_in_variables": ("input", "input_variables"),
    "test_variables_have_the_models_address_under_settable_names": (
        *("base_url_variable", "api_key_variable", "model_variable", "variables"),
    ),
    "test_the_answer_is_read_on_stdout_or_in_a_file": ("answer", "answer_file", "answer_required"),
    "test_exit_codes_are_failure_kinds_by_a_table": ("exit_codes",),
    "test_each_rollout_has_a_folder_of_its_own_that_is_removed": ("folder", "copy"),
}
FAULTS = {
    "test_each_fault_is_a_typed_failure": (*("time_s", "output_mb", "memory_mb", "disk_mb", "processes"),),
}
TABLE: dict[str, Flip | Elsewhere] = {
    **shown_by("tests/external/test_command.py", TESTS),
    **shown_by("tests/external/test_faults.py", FAULTS),
    "command": exact("echo 1", ["echo", "2"], run, (1, 2)),
    "shell": exact(False, True, run, ("!no-answer", 2), beside={"command": "echo $((1+1))"}),
    "answer_url_variable": called_back("answer_url_variable", "AGENTRIG_ANSWER_URL"),
    "answer_key_variable": called_back("answer_key_variable", "AGENTRIG_ANSWER_KEY"),
    "node": Flip(
        a="program",
        b="player",
        look=nodes,
        shows=lambda a, b: "program" in a and "player" in b and "player" not in a,
        beside={"command": "echo 1"},
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
V1 = "plugins/agentrig-lightning/tests/test_lightning_v1.py"
LIGHTNING_V1: dict[str, Flip | Elsewhere] = {
    **dict.fromkeys(
        ("agent_class", "folder", "env_map"),
        Elsewhere(f"{V1}::test_a_class_gets_its_variables_and_its_last_reward_counts", "its own test shows it"),
    ),
    "command": exact(COMMAND, OTHER, rewarded, (0.5, 0.125)),
    "python": Elsewhere(
        f"{V1}::test_an_agent_does_the_same_under_the_installed_agent_lightning",
        "it needs a Python with other packages",
    ),
    "time_s": exact(
        0.3,
        30.0,
        rewarded,
        ("!deadline", 0.5),
        beside={"command": [sys.executable, "-c", f"import time; time.sleep(1); {POSTED}"]},
    ),
}
