"""`agentrig validate` on the two example domains: green, and red for six mistakes planted in copies of one package."""

from __future__ import annotations

import gc
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from distributions import install_copy
from quick import quick_first

from agentrig.cli.entry import main

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

Patch = tuple[str, str, str]
"""A file, a text in it, and what replaces it."""

FEW = {
    "units": ("tasks.py", '"train": 1400, "validation": 128, "test": 400', '"train": 24, "validation": 12, "test": 12'),
    "json-repair": (
        "tasks.py",
        '"train": 4000, "validation": 200, "test": 400',
        '"train": 24, "validation": 12, "test": 12',
    ),
}
"""Few tasks: making those of `json-repair` takes seconds."""

PLANTED: dict[str, tuple[Patch, str, str]] = {
    "leaking gold": (
        ("tasks.py", 'input={"question": question}', 'input={"question": question, "hint": private["gold"]}'),
        "tasks.gold-apart",
        'split train: private["gold"] is in the input of 24 of 24 tasks; the first: train-0-0000',
    ),
    "reward always 1": (
        ("reward.py", "return Score.ok(value,", "return Score.ok(1.0,"),
        "reward.tells-apart",
        "no higher values than those of other tasks; values seen: [1.0]",
    ),
    "unmatched node": (
        ("agent.py", 'agentrig.span("assistant")', 'agentrig.span("asistant")'),
        "play.trains",
        "of 6 calls the adapter keeps none; the calls are under: asistant",
    ),
    "endpoint not used": (
        ("agent.py", "OpenAI(base_url=base_url,", 'OpenAI(base_url="http://127.0.0.1:9/v1",'),
        "agent.calls-endpoint",
        "no call of /chat/completions arrived at the endpoint",
    ),
    "a temperature of its own": (
        ("agent.py", "                extra_body=dict(endpoint.sampling),\n", "                temperature=0.2,\n"),
        "agent.sampling",
        "a call with {'temperature': 0.2",
    ),
    "answers that no reward can read": (
        ("agent.py", "                return result\n", '                return f"That makes {result}."\n'),
        "play.readable",
        "the mean reward was 0.0; with nonsense it was 0.0. Task validation-0-0000: the agent answered 'That makes",
    ),
}
"""How a mistake is planted in the domain `units`, the check that finds it, and what that says."""


@pytest.fixture
def validate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """Return a function that installs a patched copy of a domain and runs the command on it."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("AGENTRIG_CACHE", str(tmp_path / "cache"))

    def run(domain: str, patches: list[Patch], *words: str) -> Result:
        install_copy(EXAMPLES / f"agentrig-{domain}", site, *patches)
        return CliRunner().invoke(main, ["validate", f"agentrig-{domain}", *words])

    forget()  # another test of this process may have imported the examples themselves
    yield run
    forget()


def forget() -> None:
    """Let the next import of the examples find the patched copies."""
    for name in [name for name in sys.modules if name.startswith(("agentrig_units", "agentrig_json_repair"))]:
        del sys.modules[name]


def green(result: Result, domain: str, node: str) -> None:
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [r["kind"] for r in found["reports"]] == ["tasks", "agent", "play", "reward", "recipe"]
    results = {r["check"]: r["status"] for report in found["reports"] for r in report["results"]}
    skipped = {check for check, status in results.items() if status == "skipped"}
    assert skipped == {"reward.batch", "reward.monotone"}
    assert set(results.values()) == {"passed", "skipped"}
    (trial,) = found["trials"]
    assert trial["agent"] == trial["reward"] == domain
    assert list(trial["trained_by_node"]) == [node]
    assert trial["reward_mean"]["gold"] > 0.5 > trial["reward_mean"]["nonsense"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("domain", "node"), [("units", "assistant"), ("json-repair", "repair")])
def test_a_whole_domain_is_green(validate: Callable[..., Result], domain: str, node: str) -> None:
    """With all its tasks."""
    green(validate(domain, [], "--json"), domain, node)


@pytest.mark.parametrize("mistake", quick_first(PLANTED, ("leaking gold", "unmatched node")))
def test_a_mistake_in_a_domain_is_red(validate: Callable[..., Result], mistake: str) -> None:
    patch, caught, said = PLANTED[mistake]
    result = validate("units", [FEW["units"], patch], "--only", caught, "--limit", "2")
    assert result.exit_code == 1, result.output
    assert f"failed   {caught}" in result.stdout
    assert said in result.stdout
    assert "why it matters: " in result.stdout
    assert "what to do: " in result.stdout


@pytest.mark.slow
def test_the_readmes_agent_with_its_own_tasks_is_green(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text("utf-8"), re.S)
    (tmp_path / "my_agent.py").write_text(block)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["validate", "my_agent.py", "--limit", "2", "--json"])
    with warnings.catch_warnings():  # the agent keeps its connections until its process ends
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert sorted({report["kind"] for report in found["reports"]}) == ["agent", "play", "recipe", "reward"]
    (trial,) = found["trials"]
    assert trial["reward_mean"] == {"gold": 1.0, "nonsense": 0.0}
