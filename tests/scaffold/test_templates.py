"""Every template: a whole package, whose copy has new names everywhere, in a package and in a file."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from click.testing import CliRunner
from quick import quick_first
from scaffolds import new

from agentrig.cli.entry import main
from agentrig.plugins.loading import load
from agentrig.plugins.specs import KINDS
from agentrig.scaffold.templates import DOMAIN, FILLED, FOLDER, TEMPLATES, copy, snake

ROOT = Path(__file__).resolve().parents[2]


def files(folder: Path) -> dict[str, str]:
    found = {str(p.relative_to(folder)): p.read_text("utf-8") for p in folder.rglob("*") if p.is_file()}
    return {name: content for name, content in found.items() if "__pycache__" not in name}


def test_every_kind_has_a_template() -> None:
    assert set(TEMPLATES) == {*KINDS, DOMAIN}
    assert {p.name for p in FOLDER.iterdir() if p.is_dir()} == {*TEMPLATES, "common"}
    names = [template.name for template in TEMPLATES.values()]
    assert not [(a, b) for a in names for b in names if a != b and a in b], "one name would be replaced in another"


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_copy_under_its_own_name_is_the_template(kind: str, tmp_path: Path) -> None:
    template = TEMPLATES[kind]
    copy(template, template.name, tmp_path / "package")
    made = files(tmp_path / "package")
    common, own = files(FOLDER / "common"), files(template.folder)
    assert made.keys() == {name.removesuffix(FILLED) for name in common} | own.keys() | {"LICENSE"}
    assert {name: made[name] for name in own} == own
    assert made["LICENSE"] == (ROOT / "LICENSE").read_text()
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert tomllib.loads(made["pyproject.toml"])["project"]["requires-python"] == said


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_copy_has_its_name_everywhere(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    template = TEMPLATES[kind]
    printed = new(kind, "odd-name2")
    made = files(tmp_path / "agentrig-odd-name2")
    everything = "\n".join(f"{name}\n{content}" for name, content in made.items())
    assert not re.search(f"{template.name}|{snake(template.name)}", everything)
    assert "$" not in made["README.md"] + made["pyproject.toml"]
    project = tomllib.loads(made["pyproject.toml"])
    assert project["project"]["entry-points"]["agentrig"] == {"odd-name2": "agentrig_odd_name2"}
    assert project["project"]["name"] == "agentrig-odd-name2"
    assert set(made) > {"README.md", "LICENSE", "tests/test_odd_name2.py", "src/agentrig_odd_name2/__init__.py"}
    lines = made["src/agentrig_odd_name2/__init__.py"].splitlines()
    assert len(lines) < (200 if kind == DOMAIN else 120), "a few dozen lines"
    # What its use leaves behind is nothing to commit.
    made_later = ["runs/a/metrics.jsonl", "models/a/config.json", "tests/__pycache__/a.pyc", "src/a.egg-info/PKG-INFO"]
    git = ["git", "-C", "agentrig-odd-name2"]
    subprocess.run([*git, "init", "-q"], check=True)
    ignored = subprocess.run([*git, "check-ignore", *made_later], capture_output=True, text=True, check=False).stdout
    assert ignored.split() == made_later
    shutil.rmtree("agentrig-odd-name2/.git")
    # README has the same commands as the message at the end.
    (block,) = re.findall(r"```bash\n(.*?)```", made["README.md"], re.S)
    assert ("For tasks other than SQL" in printed) == (kind in ("tasks", "agent", "reward"))
    told = [line.partition("  # ")[0].strip() for line in printed.splitlines() if line.startswith("  ")]
    assert told == ["cd agentrig-odd-name2", *block.splitlines()]
    # What a longer name does to the form of the code is the same as in this repository.
    monkeypatch.chdir(ROOT)
    check = [sys.executable, "-m", "ruff", "check", "--no-cache", "--ignore", "I001,D103"]
    done = subprocess.run([*check, str(tmp_path / "agentrig-odd-name2")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


distributions = cache(packages_distributions)  # it takes half a second


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_package_requires_what_it_and_its_tests_use(kind: str, tmp_path: Path) -> None:
    copy(TEMPLATES[kind], TEMPLATES[kind].name, tmp_path / "package")
    project = tomllib.loads((tmp_path / "package" / "pyproject.toml").read_text())["project"]
    required = {re.split(r"[><=]", r)[0] for r in [*project["dependencies"], *project["optional-dependencies"]["test"]]}
    source = "\n".join(file.read_text() for file in TEMPLATES[kind].folder.rglob("*.py"))
    named = set(re.findall(r'(?:tasks=|"use": )"([\w-]+)"', source))
    used = {c.distribution for kind in KINDS for c in load().components(kind) if c.spec.name in named}
    tops = set(re.findall(r"^ *(?:from|import) (\w+)", source, re.M)) - sys.stdlib_module_names
    brought = distributions()
    used |= {
        brought[top][0].lower() for top in tops if top in brought and f"agentrig_{snake(TEMPLATES[kind].name)}" != top
    }
    assert used - {project["name"], "agentrig", "safetensors"} <= required  # torch's own format: grpo brings it


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_copy_in_one_file_is_a_plugin(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = f"odd_{kind}.py"
    printed = new(kind, "odd-name3", "--here", file)
    assert f"--plugin {file}" in printed
    assert [p.name for p in tmp_path.iterdir()] == [file]
    (plugin,) = [p for p in load(files=[file]).plugins if p.name == f"odd_{kind}"]
    brought = ["agent", "recipe", "reward", "tasks"] if kind == DOMAIN else [kind]
    assert sorted((c.kind, c.spec.name) for c in plugin.components) == [(each, "odd-name3") for each in brought]
    assert f"agentrig validate {file}" in printed


@pytest.mark.parametrize("kind", quick_first(TEMPLATES, ("recipe",)))
def test_the_validation_that_is_named_passes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of the message, in this process."""
    monkeypatch.chdir(tmp_path)
    printed = new(kind, "odd-name4", "--here", f"checked_{kind}.py")
    (line,) = [line for line in printed.splitlines() if "agentrig validate " in line]
    words = shlex.split(line, comments=True)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("="))
    done = CliRunner().invoke(main, words[1:])
    assert done.exit_code == 0, done.output
    for each in ("tasks", "agent", "play", "reward", "recipe") if kind == DOMAIN else (kind,):
        assert f"{each} checked_{kind}.py:odd-name4" in done.stdout
    assert " passed" in done.stdout


def test_the_wheel_of_agentrig_has_the_templates(tmp_path: Path) -> None:
    """What git has of them, and nothing that was made beside."""
    from hatchling.builders.wheel import WheelBuilder

    builder = WheelBuilder(str(ROOT))
    shipped = {str(f.distribution_path) for f in builder.recurse_included_files()}
    listed = subprocess.run(
        ["git", "ls-files", "src/agentrig/templates"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    wanted = {name.removeprefix("src/") for name in listed}
    assert len(wanted) > 2 * len(TEMPLATES)
    assert {name for name in shipped if name.startswith("agentrig/templates/")} == wanted
