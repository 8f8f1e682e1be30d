"""The reference is generated from the code, and the code's lists are compared with its behavior."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import reference
import reference_pages
from model_server import ModelServer

import agentrig
from agentrig import AgentFailure, Endpoint
from agentrig.external.command import CommandAgent
from agentrig.external.config import CommandConfig
from agentrig.pools import Job
from agentrig.runners.attempt import run_agent
from agentrig.runners.reward_process import NOWHERE
from agentrig.traces import ATTRIBUTES
from agentrig.tracing.recording import recording
from agentrig.variables import INTERNAL, VARIABLES

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    [*(f for f in ROOT.glob("src/**/*.py") if "templates" not in f.parts), *ROOT.glob("plugins/*/src/**/*.py")]
)

PREFIXED = re.compile(r"AGENTRIG_\w")
"""A variable of agentrig's; the prefix alone is none."""


def test_the_page_is_up_to_date() -> None:
    assert reference.PAGE.read_text("utf-8") == reference.page(), "run: python tests/support/reference.py"


@pytest.mark.parametrize("path", reference_pages.PAGES, ids=lambda p: p.name)
def test_the_generated_pages_are_up_to_date(path: Path) -> None:
    assert path.read_text("utf-8") == reference_pages.PAGES[path](), "run: python tests/support/reference.py"


def test_the_reference_has_every_command_and_every_components_keys() -> None:
    """The page is compared with what the program itself prints, not with the code that made the page."""
    text = (ROOT / "docs/reference/command-line.md").read_text("utf-8")
    from agentrig.cli.groups import Group

    assert all(f"## `agentrig {name}`" in text for name in Group.lazy)
    assert "`--from-step N`" in text
    text = (ROOT / "docs/reference/configuration.md").read_text("utf-8")
    for component in ("grpo", "verl", "langgraph-sql", "agent-match", "spider-exec", "mini-sql", "cuda", "ascend"):
        assert f'### `use = "{component}"`' in text


def is_environment(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute | ast.Name) and getattr(node, "attr", getattr(node, "id", "")) == "environ"


def variables_of(file: Path) -> Iterator[str]:
    """Yield the environment variables that a file names: reads and writes of `os.environ`, and names of agentrig's."""
    tree = ast.parse(file.read_text("utf-8"))
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        name: ast.expr | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_environment(node.func.value):
            name = node.args[0] if node.func.attr in ("get", "setdefault", "pop") else None
        elif isinstance(node, ast.Subscript) and is_environment(node.value):
            name = node.slice
        elif isinstance(node, ast.Compare) and any(is_environment(c) for c in node.comparators):
            name = node.left
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PREFIXED.match(node.value):
            name = node
        value = constants.get(name.id) if isinstance(name, ast.Name) else getattr(name, "value", None)
        if isinstance(value, str) and value.replace("_", "").isalnum():
            yield value


def test_every_environment_variable_is_listed() -> None:
    listed = {"src/agentrig/variables.py", "src/agentrig/confine.py"}  # which name them and read none
    found = {v: f for f in SOURCES if str(f.relative_to(ROOT)) not in listed for v in variables_of(f)}
    assert len(found) > 30
    missing = {name: str(file) for name, file in found.items() if name not in {**VARIABLES, **INTERNAL}}
    assert not missing, f"add these to agentrig.variables: {missing}"
    text = "\n".join(f.read_text("utf-8") for f in SOURCES if f.name != "variables.py")
    assert not [name for name in {**VARIABLES, **INTERNAL} if f'"{name}"' not in text], "no file reads these any more"


def test_every_attribute_of_a_span_is_listed(model: ModelServer) -> None:
    import requests
    from langchain_core.language_models import FakeListLLM
    from langchain_core.runnables import RunnableLambda
    from langchain_core.tools import tool

    openai = pytest.importorskip("openai")

    @tool
    def look(table: str) -> str:
        """Look into a table."""
        return "rows"

    def cancel(request: httpx.Request) -> None:
        raise asyncio.CancelledError

    with recording("r", token_ids=True, base_url=model.url) as recorder:
        for url in (model.url, "http://127.0.0.1:9/v1"):
            with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client, agentrig.span("write"):
                for stream in (False, True):
                    try:
                        reply: Any = client.chat.completions.create(
                            model="m", messages=[{"role": "user", "content": "?"}], stream=stream
                        )
                        list(reply)
                    except openai.APIConnectionError:
                        assert url != model.url
                    else:
                        agentrig.reward(0.5, feedback="half of it")
        stops = httpx.Client(event_hooks={"request": [cancel]})
        with suppress(asyncio.CancelledError), stops as client:
            client.post(f"{model.url}/chat/completions", json={"messages": []})
        RunnableLambda(lambda x: look.invoke({"table": x})).invoke("t")
        FakeListLLM(responses=["odd"]).invoke("?")
        requests.post(f"{model.url}/chat/completions", json={"messages": [{"content": "?"}]}, timeout=20)
        programs = [
            CommandConfig(command="echo note >&2; sleep 99 & echo 1", shell=True),
            CommandConfig(command="yes", output_mb=0.1),
        ]
        for config in programs:
            with suppress(AgentFailure):
                CommandAgent(config)({}, Endpoint(base_url=model.url, model="m"))
    recorder.join((), cut=1)
    given = run_agent(lambda task, endpoint: "answer", Job(id="r", input={}, endpoint=NOWHERE)).trace.spans
    seen = {name for span in (*recorder.trace().spans, *given) for name in span.attributes}
    assert seen == set(ATTRIBUTES)


LIGHTNING = {file.name: file.read_text("utf-8") for file in ROOT.glob("plugins/agentrig-lightning/tests/**/test_*.py")}


def unproved(page: str) -> list[str]:
    """Return the features of Agent Lightning without a verdict, or without a test of agentrig-lightning that exists."""
    found = []
    for feature, verdict, proof in re.findall(r"^\| (?!feature|---)(.*) \| (.*) \| (.*) \|$", page, re.M):
        tests = re.findall(r"(\w+\.py)::(\w+)(?:\[([\w-]+)\])?", proof)
        named = [
            (LIGHTNING.get(file, ""), (f"def {name}(", *([f'"{case}"'] if case else []))) for file, name, case in tests
        ]
        proved = named and all(word in source for source, words in named for word in words)
        if not proved or not verdict.startswith(("works", "does not work: ")):
            found.append(feature)
    return found


def test_a_feature_of_agent_lightning_needs_a_verdict_and_a_test_that_exists() -> None:
    page = (ROOT / "docs/reference/agent-lightning.md").read_text("utf-8")
    assert page.count("| works") > 40
    assert unproved(page) == []
    rows = [
        "| a | works | `test_lightning.py::test_their_adapter` |",
        "| b | maybe | `test_lightning.py::test_their_adapter` |",
        "| c | works with care |  |",
        "| d | does not work: no | `test_lightning.py::test_gone`, `test_lightning.py::test_their_adapter` |",
        "| e | works | `test_upstream.py::test_an_example_gives_what_agent_lightning_gives[no-case]` |",
    ]
    assert unproved("\n".join(rows)) == ["b", "c", "d", "e"]
