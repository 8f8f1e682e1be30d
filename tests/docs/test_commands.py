"""Every command of every page: all are parsed with every setting, and those that a CPU can run are run.

Commands are collected from the fenced blocks of README, docs/, plugins' and examples' READMEs. Those in `NOT_RUN` are
parsed only, each with a reason. `FEW` is appended to a training command: one step on few tasks.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import chdir
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from pages import ROOT, Command, blocks, commands
from scaffolds import new

from agentrig.cli.entry import main
from agentrig.cli.options import asked
from agentrig.endpoints import Endpoint
from agentrig.hardware import Cpu, HardwareError
from agentrig.plan import Plan, resolve
from agentrig.plugins.specs import RUN_KINDS
from agentrig.servers import ServerPlan

NOT_RUN = (
    (r"^make test$", "it would run this test"),
    (r"^make setup$|^\. \.venv/bin/activate$", "it has made the environment that this test runs in"),
    (r"--resume runs/mini", "a run of one step has no step left to resume; tests/run/test_session.py resumes runs"),
    (r"--hardware cuda|\b(train|doctor) (fast|qwen|llama)\b|--device cuda", "it needs a GPU"),
    (r"\b(train|doctor) npu\b|Ascend|torch_npu|vllm", "it needs an NPU and CANN"),
    (r"^pip install (\. |\./plugins)|^pip check", "it is part of an installation on an NPU, or in an environment"),
    (r"^uvx |--find-links wheels", "tests/test_wheels.py makes the wheels, and runs `agentrig train` from them"),
    (r"^agentrig watch|--watch\b", "it serves until Ctrl-C; tests/view/test_watch.py asks its page"),
    (r"^tensorboard ", "it serves until Ctrl-C"),
    (r"runs-sql|one-query|shop-assistant|^pip install -e|^pytest$|^cd \.\.$", "test_tutorials.py runs the page"),
    (r"^python -m build", "tests/docs/test_tutorials.py runs it"),
    (r"^agentrig validate ", "tests/docs/test_tutorials.py runs those of tutorials; others name files of the reader"),
    (r"^agentrig new ", "the package is there already; tests/test_wheels.py runs it"),
    (r"--resume runs/qwen", "it needs a run that was made on a GPU"),
    (r"modelscope|MODELSCOPE", "it needs a package and a model from a network"),
    (r"algorithm\.model=DIR", "it needs an instruct model, which no package installed here has"),
    (r"make_environment\.sh|^uv ", "it downloads 4 GB"),
    (r"make_mini\.py", "it takes an hour"),
    (r"^cd plugins/agentrig-grpo/training", "nothing of its block is run"),
    (r"^agentrig warmup|algorithm\.model=models/", "it takes minutes; tests/run/test_warmup.py makes a model"),
    (r"examples/programs", "it needs a model or packages; tests/external/test_examples.py runs the programs"),
    (r"agent\.url=", "it needs a service; tests/docs/test_service_page.py runs that of the page"),
    (r"^agentrig data spider", "Spider's download is not included; test_spider_tasks.py converts a copy of its form"),
    (r"agentrig_langgraph_sql|OPENAI_BASE_URL", "test_langgraph_sql_readme.py runs it against a server"),
    (r"^agentrig export-traces .*--otlp", "it needs a collector; tests/otlp has one"),
    (r"credit\.base_url=", "it needs a teacher's server; tests/test_teacher.py has one"),
    (r"^ray start|--runners ray", "it needs the address of a cluster; plugins/agentrig-ray/tests have one"),
    (r"runners\.n=0", "it waits for runners from elsewhere; test_late_runners.py of agentrig-lightning has some"),
    (r"train_sql_agent\.py|tests/upstream|AGENTRIG_AGENT_LIGHTNING", "agentrig-lightning's tests run these files"),
    (r"runs/queries-cut", "tests/view/test_recorded_runs.py asks about that run"),
    (r"--step 12", "the run that the pages share has one step"),
    (r"tasks\.file=orders\.csv", "it needs a file of the reader; tests/test_tables.py reads such files"),
    (r"--prices ", "it needs the reader's prices; tests/view/test_comparison.py has some"),
    (r"--prompts runs/", "it needs a run of the algorithm `prompts`; agentrig-prompts' tests have one"),
    (r"^pip install 'agentrig\[", "agentrig is on no index"),
)
"""What is parsed and not run, by a regular expression on the command, with the reason."""

FEW = ("algorithm.steps=1", "algorithm.tasks_per_step=8", "run.validation_tasks=8", "run.report_tasks=16")
"""Appended to every `agentrig train` that is run: the page's command takes minutes."""

CHEAP = re.compile(r"^agentrig (plugins|dev|doctor(?! mini$)|data)\b")
"""Commands that the default tests run too, each in a test of its own."""

PAGES_FILES = {"README.md": "my_agent.py"}
"""Files whose content is a page's first Python block; other blocks name their file in their first line."""

BLOCKS = [block for block in blocks() if block.is_shell]
COMMANDS = [command for block in BLOCKS for command in commands(block)]
DIFFERENT = list({(c.text, c.folder, tuple(c.variables.items())): c for c in COMMANDS}.values())
"""Those that another page does not have too."""


def why_not(command: Command) -> str:
    """Return why a command is not run; empty when it is."""
    return next((reason for pattern, reason in NOT_RUN if re.search(pattern, command.text)), "")


def is_cheap(command: Command) -> bool:
    return bool(CHEAP.match(command.text)) and "pip install" not in command.block.text


RUN = [command for command in COMMANDS if not why_not(command)]
ONCE = list({command.text: command for command in RUN if is_cheap(command)}.values())
"""The cheap commands without duplicates: all run in one folder, where equal texts have equal effects."""
SCRIPTS = list(
    {
        script: pytest.param(script, id=block.id)
        for block in BLOCKS
        if (script := "\n".join(command.text for command in RUN if command.block is block))
    }.values()
)
"""What is run of each block, without duplicates: a page and its translation have the same."""


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what the pages assume: the repository's folders, the files that they show, a small database."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("tests", "plugins", "examples", "src", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".examples").mkdir()  # what `pip install ./examples/…` would install, for commands that are parsed
    path = list(sys.path)
    sys.path += map(str, ROOT.glob("examples/*/src"))  # for those that have several modules
    with chdir(folder):
        for name in ("my-reward", "runs-sql"):
            new("reward", name)
        new("agent", "one-query")
        new("domain", "shop-assistant")
    for file in (
        *ROOT.glob("examples/*/src/*/__init__.py"),
        *ROOT.glob("src/agentrig/templates/*/src/*/__init__.py"),
        *folder.glob("agentrig-*/src/*/__init__.py"),
    ):
        shutil.copyfile(file, folder / ".examples" / f"{file.parent.name}.py")
    for block in blocks():
        page = str(block.page.relative_to(ROOT))
        if block.language == "python":
            named = re.match(r"# (\w+\.py)\n", block.text)
            name = named[1] if named else PAGES_FILES.get(page, "")
            if name and not (folder / name).exists():
                (folder / name).write_text(block.text)
            if edited := re.match(r"# src/(\w+)/__init__.py\n", block.text):
                (folder / ".examples" / f"{edited[1]}.py").write_text(block.text)
    theirs = "import agentlightning\n\n\nclass LitSQLAgent(agentlightning.LitAgent): ...\n"
    (folder / "sql_agent.py").write_text(theirs)  # of Agent Lightning's example, which docs/lightning.md registers
    database = folder / "spider" / "database" / "shop" / "shop.sqlite"
    database.parent.mkdir(parents=True)
    with sqlite3.connect(database) as connection:
        connection.executescript(
            "CREATE TABLE item (id INTEGER, name TEXT); INSERT INTO item VALUES (1, 'a'), (2, 'b');"
        )
    connection.close()
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)
    sys.path[:] = path  # plugin files add their folder
    sys.path[:] = [p for p in sys.path if not p.startswith(str(ROOT / "examples"))]


def test_every_pattern_of_not_run_matches_a_command() -> None:
    for pattern, _ in NOT_RUN:
        assert any(re.search(pattern, c.text) for c in COMMANDS), f"no page has a command like {pattern} any more"
    assert len(RUN) >= 15
    assert len({c.block.page for c in RUN}) >= 8


@pytest.mark.parametrize("command", DIFFERENT, ids=lambda c: c.id)
def test_a_command_parses(command: Command, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place / command.folder)
    for name, value in command.variables.items():
        monkeypatch.setenv(name, value)
    program, *words = command.words
    checks = {
        "agentrig": parse_agentrig,
        "make": parse_make,
        "pytest": parse_pytest,
        "python": parse_python,
        "pip": parse_pip,
        "uv": parse_files,
        "uvx": parse_uvx,
        "cd": parse_folder,
        ".": parse_activate,
        "ray": parse_ray,
    }
    if program in ("export", "source", "modelscope", "tensorboard"):  # not of agentrig
        return
    if program in checks:
        checks[program](list(words))
    else:
        parse_script(list(command.words))


def parse_agentrig(words: list[str]) -> None:
    """The subcommand, its options and arguments exist; recipe, components, sections, keys and values resolve."""
    command: click.Command = main
    context: click.Context | None = None
    name, rest = "agentrig", words
    while True:
        context = click.Context(command, info_name=name, parent=context)
        with context:
            parser = command.make_parser(context)
            options, arguments, _ = parser.parse_args(list(rest))
        if not isinstance(command, click.Group) or not arguments:
            break
        found, below, rest = command.resolve_command(context, arguments)
        assert below is not None, f"there is no command {found}"
        name, command = found or "", below
    if command.name in ("train", "dev", "eval", "forecast", "doctor"):
        given = {k: options.get(k) for k in ("active_agent", *RUN_KINDS)}
        given["observers"] = options.get("observers") or ()
        given |= {"files": options.get("files") or (), "strict_plugins": False}
        if not options.get("resume"):
            words = options.get("words")
            check_together(resolved(list(words) if isinstance(words, tuple) else [], given))


def resolved(words: list[str], options: dict[str, Any]) -> Plan:
    wanted = asked(words, options)
    examples = next(p for p in (Path(".examples"), Path("../.examples")) if p.is_dir())  # there after a `cd`
    wanted["files"] = [*wanted["files"], *map(str, sorted(examples.resolve().glob("*.py")))]
    try:
        plan = resolve(**wanted)
        plan.build("hardware")
    except HardwareError:  # `auto`, and this host has no GPU for a recipe that needs one
        return resolve(**{**wanted, "uses": {**wanted["uses"], "hardware": "cuda"}})
    return plan


def check_together(plan: Plan) -> None:
    """Check as a run does before it looks for the device."""
    hardware: Any = plan.build("hardware")
    algorithm: Any = plan.components["algorithm"].spec
    assert not algorithm.hardware or hardware.name in algorithm.hardware
    assert hardware.carries(algorithm.name)
    model = getattr(plan.configs["algorithm"], "model", "")
    assert not model.startswith("NAME-"), "this recipe needs algorithm.model=DIR"


def parse_make(words: list[str]) -> None:
    done = subprocess.run(["make", "-n", *words], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def parse_python(words: list[str]) -> None:
    """The script or module exists, and its source has every option that is given."""
    if words[0] == "-m":
        spec = find_spec(words[1])
        if spec is not None and spec.submodule_search_locations:
            spec = find_spec(f"{words[1]}.__main__")
        assert spec, f"there is no module {words[1]}"
        assert spec.origin
        source, rest = Path(spec.origin), words[2:]
    else:
        source, rest = Path(words[0]), words[1:]
    text = source.read_text("utf-8")
    for word in rest:
        if word.startswith("--"):
            assert f'"{word.partition("=")[0]}"' in text, f"{source} has no option {word}"


def parse_pytest(words: list[str]) -> None:
    """In the folder of a package with tests."""
    assert words == []
    assert Path("tests").is_dir()


def parse_pip(words: list[str]) -> None:
    assert words[0] in ("install", "check")
    for word in words[1:]:
        if word.startswith("."):
            word = word.partition("[")[0]
            assert (Path(word) / "pyproject.toml").is_file() or word == ".", f"there is no package in {word}"
        else:
            name, _, extra = word.strip("'").partition("[")
            known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert not name.startswith("agentrig") or extra.rstrip("]") in known, (
                f"{word} is on no index: name its folder"
            )


def parse_uvx(words: list[str]) -> None:
    """A tool of its own, or a command of agentrig from a distribution."""
    if words[0] == "pip":
        parse_files(words[1:])
        return
    parse_pip(["install", words[words.index("--from") + 1]])
    parse_agentrig(words[words.index("agentrig") + 1 :])


def parse_files(words: list[str]) -> None:
    for word in words:
        if "/" in word and not word.startswith("-"):
            assert Path(word).exists(), word


def parse_folder(words: list[str]) -> None:
    assert Path(words[0]).is_dir()


def parse_activate(words: list[str]) -> None:
    """The environment is where `make setup` makes it."""
    folder, _, rest = words[0].partition("/")
    assert rest == "bin/activate"
    assert f"VENV := {folder}\n" in (ROOT / "Makefile").read_text()


def parse_ray(words: list[str]) -> None:
    from ray.scripts.scripts import cli

    cli.commands[words[0]].make_context(f"ray {words[0]}", words[1:])


def parse_script(words: list[str]) -> None:
    """A script of the repository, or Python of an environment that such a script makes in a folder of the reader's."""
    if words[0].startswith("/some/folder/") and words[0].endswith("/bin/python"):
        parse_python(words[1:])
        return
    if words[0].endswith("/.venv/bin/pip"):  # of an environment that the line before it makes
        parse_files(words[2:])
        return
    assert os.access(words[0], os.X_OK), f"{words[0]} is an unknown program; add it here if a page uses it"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which `agentrig train` takes few steps and `pip install` uses a separate folder."""
    folder = tmp_path_factory.mktemp("tools")
    site = folder / "site"
    few = f'if [ "$1" = train ]; then set -- "$@" {" ".join(FEW)}; fi'
    scripts = {
        "agentrig": f'{few}\nexec {sys.executable} -m agentrig "$@"',
        "python": f'exec {sys.executable} "$@"',
        "pip": f"shift\nexec {sys.executable} -m pip install --no-deps --no-build-isolation --no-index "
        f'--disable-pip-version-check -q --target {site} "$@"',
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}


def run(script: str, place: Path, tools: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=place, env=tools, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def of_a_plugin(command: Command) -> bool:
    return command.words[:2] == ("agentrig", "dev") and "--plugin" in command.words


def last(command: Command) -> Any:
    """Return the parameter of a command; `agentrig dev` starts a server and runners."""
    return pytest.param(command, marks=[pytest.mark.slow] * (command.words[:2] == ("agentrig", "dev")))


@pytest.mark.parametrize("command", [last(c) for c in ONCE if not of_a_plugin(c)], ids=lambda c: c.id)
def test_a_cheap_command_runs(command: Command, place: Path, tools: dict[str, str]) -> None:
    run(command.text, place, tools)


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[Endpoint]:
    """The model of the recipe `mini`, served once."""
    from agentrig_grpo.config import EmbeddedConfig
    from agentrig_grpo.server.handle import Embedded

    model = ROOT / "plugins" / "agentrig-grpo" / "src" / "agentrig_grpo" / "models" / "mini"
    plan = ServerPlan(model=model, name="policy", hardware=Cpu(), log=place / "server.log")
    with Embedded(EmbeddedConfig(), plan) as server:
        (endpoint,) = server.endpoints
        yield endpoint


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in ONCE if of_a_plugin(c)], ids=lambda c: c.id)
def test_a_plugin_of_a_page_runs(command: Command, served: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process and with one server for all; `agentrig dev mini` above has its own."""
    monkeypatch.setenv("OPENAI_BASE_URL", served.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", served.api_key)
    done = CliRunner().invoke(main, list(command.words[1:]))
    assert done.exit_code == 0, done.output
    assert "rollout ro-" in done.output


@pytest.fixture(scope="module")
def runs(place: Path, tools: dict[str, str]) -> None:
    """A run of three steps, under every name that the pages use for an existing run."""
    run("agentrig train mini run.name=mini-20260101-120000", place, tools)
    for name in ("one", "other", "qwen-20260101-120000"):
        shutil.copytree(place / "runs" / "mini-20260101-120000", place / "runs" / name)
    (place / "RUN").symlink_to("runs/mini-20260101-120000")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_block_runs(script: str, place: Path, tools: dict[str, str]) -> None:
    run(script, place, tools)
