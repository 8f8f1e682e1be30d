"""Every Python and TOML block of every page: plugins load and register components, scripts run, settings resolve."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pages import PAGES, ROOT, Block, blocks

from agentrig.plan import resolve
from agentrig.plugins.loading import load

PYTHON = [b for b in blocks() if b.language == "python"]
PLUGINS = [b for b in PYTHON if "@hookimpl" in b.text]
SCRIPTS = [b for b in PYTHON if "@hookimpl" not in b.text]
TOML = [b for b in blocks() if b.language == "toml"]

THEIRS = """
from agentlightning import LitAgent, TracerTraceToTriplet
from agentlightning.algorithm.base import Algorithm
from agentlightning.tracer.agentops import AgentOpsTracer
class MyLitAgent(LitAgent): ...
class LitSQLAgent(LitAgent): ...
class MyAlgorithm(Algorithm): ...
"""
"""The code of a user of Agent Lightning, to which docs/lightning.md adds its lines."""

ELSEWHERE = {
    "docs/report.md": "tests/docs/test_report.py runs it on a run directory",
    "plugins/agentrig-langgraph-sql/README.md": "test_langgraph_sql_readme.py runs it against a server",
    "docs/tutorials/read-a-run.md": "tests/docs/test_notebook.py runs the notebook, and compares the page with it",
    "docs/recipes.md": "it trains for five steps; its call is resolved below",
}
"""Pages whose script is not run here, with the reason."""


SHOWN = (
    (r"^tasks → agent", "a drawing of the data flow"),
    (
        r"^agentrig-runs-sql is|^16 passed|^└── score|^measuring held-out|^Successfully built"
        r"|^(retry|short)_sql\.py has|^agent retry_sql\.py|^reward short_sql\.py|^agentrig-shop-assistant is",
        "what the commands of the tutorials print; test_tutorials.py compares it",
    ),
    (r"^queries-cut: finished", "what agentrig why prints; tests/view/test_recorded_runs.py compares it"),
    (r"^prices\.toml:", "a price table; tests/view/test_comparison.py reads such ones"),
    (r"^(algorithm|segments)\.py ", "a list of files"),
    (r"^agent\(task_input, endpoint\) ->", "the form of a call"),
    (r"^sampling   rollouts 1", "a drawing of what runs at the same time"),
    (r"^- min\(π_proximal", "a formula; test_grpo_stale.py compares the loss with it"),
    (r"^step  8/60", "what a run prints"),
    (r"^---\nconfig:", "the reference agent's graph, as Mermaid draws it"),
    (r"^git clone --branch v0.3.0 ", "it needs a network"),
    (r"^for seed in", "a loop of a shell; test_commands.py runs such commands of other pages"),
    (r"^ssh -L|^AGL_STORE_TOKEN=", "it needs another machine"),
    (r"^(\w+=\S+ )?agentrig ", "the examples in a command's help; tests/cli/test_cli.py parses them"),
)
"""The blocks that are not run, by a regular expression on their text, with the reason."""

NOT_PAGES = {
    "CHANGELOG.md": "made by towncrier",
    "CONTRIBUTING.md": "for contributors; the files that its commands name are checked below",
    "README.zh.md": "its blocks are those of README.md, which test_translations.py compares",
    **{
        str(file.relative_to(ROOT)): "a dated record of measurements; the files that it names are checked below"
        for file in ROOT.glob("tests/benchmarks/**/*.md")
        if file.name != "README.md"
    },
    "plugins/agentrig-grpo/training/README.md": "an hour on a GPU; the files that its commands name are checked below",
}
"""Markdown files whose blocks are not run, with the reason."""


def page_of(block: Block) -> str:
    return str(block.page.relative_to(ROOT))


@pytest.mark.parametrize("block", PLUGINS, ids=lambda b: b.id)
def test_a_plugin_loads_and_registers_something(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("my_package", "sql_agent"):  # sql_agent: of Agent Lightning's example
        (tmp_path / f"{module}.py").write_text(THEIRS)
    uses_theirs = page_of(block) in ("docs/lightning.md",)
    file = tmp_path / f"page_{block.line}.py"
    file.write_text((THEIRS if uses_theirs else "") + block.text)
    registry = load(files=[str(file)])
    (plugin,) = [p for p in registry.plugins if p.origin.endswith(file.name)]
    assert plugin.status == "ok", plugin.error
    assert plugin.components or "def on_" in block.text


@pytest.mark.parametrize("block", [b for b in SCRIPTS if page_of(b) not in ELSEWHERE], ids=lambda b: b.id)
def test_a_script_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may import the files that its page tells the reader to save."""
    monkeypatch.syspath_prepend(tmp_path)
    for saved in (b for b in PYTHON if b.page == block.page):
        if named := re.match(r"# (\w+)\.py\n", saved.text):
            (tmp_path / f"{named[1]}.py").write_text(saved.text)
            monkeypatch.delitem(sys.modules, named[1], raising=False)
    exec(compile(block.text, block.id, "exec"), {"__name__": "__main__"})


def test_every_block_is_run_or_has_a_reason() -> None:
    """A block is Python, TOML or commands, which tests run; or one of SHOWN."""
    rest = [b for b in blocks() if b.language not in ("python", "toml") and not b.is_shell]
    why = {b.id: next((reason for pattern, reason in SHOWN if re.search(pattern, b.text)), "") for b in rest}
    assert [id_ for id_, reason in why.items() if not reason] == []
    assert set(why.values()) == {reason for _, reason in SHOWN}
    assert all(page_of(b) == "docs/reference/command-line.md" for b in rest if "help" in why[b.id])
    assert len(rest) < len(blocks()) / 4


def test_every_markdown_file_is_a_page_or_has_a_reason() -> None:
    folders = ("docs", "plugins", "examples", "tests", "src")
    found = [*ROOT.glob("*.md"), *(file for folder in folders for file in (ROOT / folder).rglob("*.md"))]
    files = {str(file.relative_to(ROOT)) for file in found}
    assert files - {str(page.relative_to(ROOT)) for page in PAGES} == set(NOT_PAGES)


@pytest.mark.parametrize("file", NOT_PAGES)
def test_files_named_by_commands_elsewhere_exist(file: str) -> None:
    text = (ROOT / file).read_text("utf-8")
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M):
        for path in re.findall(r"(?<![\w/.])(?:tests|plugins|docs|examples)/[\w./-]+\w", block):
            assert (ROOT / path).exists(), path
        assert set(re.findall(r"^make (\w+)", block, re.M)) <= set(targets)


def test_scripts_that_other_tests_run_exist() -> None:
    assert set(ELSEWHERE) == {page_of(b) for b in SCRIPTS} & set(ELSEWHERE)
    assert resolve("mini", overrides=["algorithm.steps=5", "run.seed=1"]).run.seed == 1


@pytest.mark.parametrize("block", TOML, ids=lambda b: b.id)
def test_settings_resolve(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is a run file, or a part of one that extends `mini`; the page shows what it names."""
    content = tomllib.loads(block.text)
    for name in re.findall(r'\b(?:api_key_)?env = "(\w+)"', block.text):
        monkeypatch.setenv(name, "set")
    for name in content.get("run", {}).get("plugins", ()):
        own = [b for b in PYTHON if b.page == block.page and b.text.startswith(f"# {name}\n")]
        readme = [b for b in PYTHON if page_of(b) == "README.md"]
        (tmp_path / name).write_text((own or readme)[0].text)
    file = tmp_path / "run.toml"
    file.write_text(block.text if "recipe" in content else f'recipe = "mini"\n{block.text}')
    verl = content.get("recipe") == "qwen"
    used = [keys["use"] for section, keys in content.items() if section != "recipe" and "use" in keys]
    uses = [name for use in used for name in (use if isinstance(use, list) else [use])]
    shown = [b for b in PLUGINS if b.page == block.page and not b.text.startswith("# ")]
    files = []
    for plugin in (b for b in shown if any(f'name="{name}"' in b.text for name in uses)):
        files.append(str(tmp_path / f"page_{plugin.line}.py"))
        Path(files[-1]).write_text(plugin.text)
    plan: Any = resolve(str(file), uses={"hardware": "cuda"} if verl else {}, files=files)
    for section, keys in content.items():
        if section in ("observer", "trackers"):
            named = [c.spec.name for c, _ in plan.observers if c.spec.tracker == (section == "trackers")]
            assert named == keys["use"]
        elif section != "recipe" and "use" in keys:
            assert plan.components[section].spec.name == keys["use"]
