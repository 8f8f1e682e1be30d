"""Every import path of 0.1 works until 0.3, and says where the name is now."""

import importlib
import json
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rollouts import rollout

from agentrig._moved import ENDED, MOVED, RENAMED
from agentrig.doctor.situation import Situation
from agentrig.errors import RunStopped
from agentrig.plan import Plan

NAMES = [(old, name, new) for old, names in MOVED.items() for name, new in names.items()]


@pytest.mark.parametrize(("old", "name", "new"), NAMES, ids=[f"{old}.{name}" for old, name, _ in NAMES])
def test_a_former_path_gives_the_same_object_and_a_warning(old: str, name: str, new: str) -> None:
    module = importlib.import_module(old)
    module.__dict__.pop(name, None)  # another test may have asked for it
    with pytest.warns(DeprecationWarning, match=f"{old}.{name} is now {new}.{name}"):
        found = getattr(module, name)
    assert found is getattr(importlib.import_module(new), name)


@pytest.mark.parametrize(("former", "present"), RENAMED.items(), ids=[".".join(f) for f in RENAMED])
def test_a_former_name_gives_the_same_object_and_a_warning(former: tuple[str, str], present: tuple[str, str]) -> None:
    module = importlib.import_module(former[0])
    module.__dict__.pop(former[1], None)
    with pytest.warns(DeprecationWarning, match=f"{'.'.join(former)} is now {'.'.join(present)}"):
        found = getattr(module, former[1])
    assert found is getattr(importlib.import_module(present[0]), present[1])


OF_PLUGINS = {
    ("agentrig_grpo.checkpoint", "TOKENIZER_FILES"): ("agentrig.run.checkpoints", "TOKENIZER_FILES"),
    ("agentrig_verl.algorithm", "attention"): ("agentrig_verl.keys", "attention"),
    ("agentrig_verl.checkpoints", "TOKENIZER"): ("agentrig.run.checkpoints", "TOKENIZER_FILES"),
    ("agentrig_verl.manager", "Loan"): ("agentrig_verl.manager", "ManagerContext"),
    ("agentrig_verl.manager", "lend"): ("agentrig_verl.manager", "manager_context"),
    ("agentrig_verl.tokenizer", "SAMPLE"): ("agentrig.tokenizers", "SAMPLE"),
}
"""Names of plugins' modules that still exist, to the present ones."""


@pytest.mark.parametrize(("former", "present"), OF_PLUGINS.items(), ids=[".".join(f) for f in OF_PLUGINS])
def test_a_former_name_of_a_plugin_gives_the_same_object_and_a_warning(
    former: tuple[str, str], present: tuple[str, str]
) -> None:
    module = pytest.importorskip(former[0], exc_type=ImportError)
    module.__dict__.pop(former[1], None)
    with pytest.warns(DeprecationWarning, match=f"{'.'.join(former)} is now {'.'.join(present)}"):
        found = getattr(module, former[1])
    assert found is getattr(importlib.import_module(present[0]), present[1])
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name


def test_a_from_import_warns_at_the_users_line() -> None:
    code = "import warnings; warnings.simplefilter('always')\nfrom agentrig.config import setting\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "<string>:2: DeprecationWarning: agentrig.config.setting is now agentrig.settings.setting" in done.stderr


def test_an_unknown_name_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="no_such_name"):
        exec("from agentrig.config import no_such_name")


LISTED = Path(__file__).parent / "data" / "public_names_0.1.json"
"""Made by `tests/support/public_names.py`, of version 0.1."""

IMPORT_ALL = """
    import importlib, json, sys, types, warnings

    failed = []
    for module, names in json.loads(sys.stdin.read()).items():
        try:
            with warnings.catch_warnings(action="ignore"):  # of what it imports in turn
                importlib.import_module(module)
        except Exception as error:
            failed.append(f"{module}: {type(error).__name__}: {error}")
            continue
        for name in names:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    warnings.simplefilter("ignore", DeprecationWarning)
                    exec(f"from {module} import {name} as value", space := {})
                if isinstance(space["value"], types.ModuleType):
                    failed.append(f"{module}.{name}: a module hides it")
            except Exception as error:
                failed.append(f"{module}.{name}: {type(error).__name__}: {error}")
    print(json.dumps(failed))
"""


def failed_imports(names: dict[str, list[str]]) -> list[str]:
    """Import each name of each module in a process of its own; return what went wrong."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(IMPORT_ALL)],
        input=json.dumps(names), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    failed: list[str] = json.loads(done.stdout.splitlines()[-1])
    return failed


REDESIGNED = {
    "agentrig_grpo.scoring": {"PLAIN_FAMILIES", "response_logits", "shares_prompts", "to_device"},
    "agentrig_grpo.sequences": {"ROW_LIMIT", "Row", "batches_of", "rows_of"},
}
"""How the embedded learner made rows of samples with the same prompt; forests replace it, and no page named it."""


def test_every_public_name_of_0_1_can_be_imported() -> None:
    """With a DeprecationWarning at most, in the core and in all plugins; no module hides one of its name."""
    names = json.loads(LISTED.read_text())
    assert (len(names), sum(map(len, names.values()))) == (148, 851)
    names = {module: [n for n in some if n not in REDESIGNED.get(module, ())] for module, some in names.items()}
    assert {name.partition(".")[0] for name in names} > {"agentrig", "agentrig_grpo", "agentrig_verl"}
    names["agentrig_spider.rewards.worker"].remove("guard")  # it was a module in 0.1 too
    assert failed_imports(names) == []


def test_a_missing_name_and_a_hidden_one_are_seen() -> None:
    names = {"agentrig.tasks": ["Task", "no_such"], "agentrig.no_such": ["x"], "agentrig.cli": ["groups"]}
    missing = ["agentrig.tasks.no_such", "agentrig.no_such", "agentrig.cli.groups"]
    assert [text.partition(":")[0] for text in failed_imports(names)] == missing


def test_a_command_can_be_imported_before_and_after_its_module() -> None:
    """`from agentrig.cli import train` gives the click command, as in 0.1."""
    code = """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        from agentrig.cli import train as before
        import agentrig.cli.commands.train
        from agentrig.cli import dev, export, report, train, data
        assert before is train
        print(*(command.name for command in (train, dev, export, report, data)))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["train", "dev", "export", "report", "data"]


@pytest.fixture
def ended() -> Callable[[str, str], Any]:
    def get(module: str, name: str) -> Any:
        found = importlib.import_module(module)
        found.__dict__.pop(name, None)
        with pytest.warns(DeprecationWarning, match=f"{module}.{name} works until agentrig 0.3: ") as warned:
            value = getattr(found, name)
        advice = str(warned[0].message).partition("0.3: ")[2]
        assert advice == ENDED[module, name]
        for path in (word for word in advice.split() if word.startswith("agentrig")):  # what it names is there
            where, _, of = path.rpartition(".")
            try:
                holder = importlib.import_module(where)
                assert hasattr(holder, of) or importlib.import_module(path)  # a module that nothing has imported yet
            except ModuleNotFoundError:  # a method
                where, _, cls = where.rpartition(".")
                assert hasattr(getattr(importlib.import_module(where), cls), of)
        return value

    return get


@pytest.mark.parametrize(("module", "name"), ENDED, ids=[".".join(e) for e in ENDED])
def test_a_name_without_successor_works_with_advice(ended: Callable[[str, str], Any], module: str, name: str) -> None:
    assert ended(module, name) is getattr(importlib.import_module("agentrig._former"), name)


def test_the_former_guards_stop_as_they_did(ended: Callable[[str, str], Any]) -> None:
    check_weights, check_finite = ended("agentrig.checks", "check_weights"), ended("agentrig.checks", "check_finite")
    check_weights([], step=1)
    check_weights([0.1, 0.0], step=2)
    check_weights([0.0, 0.1, 0.0], step=3)
    with pytest.raises(RunStopped, match="steps 2 and 3 changed no weight"):
        check_weights([0.1, 0.0, 0.0], step=3)
    with pytest.raises(RunStopped, match="step 2: the weight change is nan"):
        check_weights([0.1, float("nan")], step=2)
    assert check_finite({"loss": 1.0, "weight_change": 0.0}, 1, step=2) == 0
    assert check_finite({"gradient_norm": float("inf")}, 0, step=2) == 1
    with pytest.raises(RunStopped, match="steps 2 and 3: loss nan"):
        check_finite({"loss": float("nan")}, 1, step=3)


def test_the_former_accuracy_counts_full_marks(ended: Callable[[str, str], Any]) -> None:
    accuracy_of = ended("agentrig.session", "accuracy_of")
    assert accuracy_of([rollout(1.0), rollout(0.5), rollout(None)]) == 0.5
    assert accuracy_of([rollout(None)]) is None


def test_the_first_ctrl_c_still_ends_the_run_after_its_step(ended: Callable[[str, str], Any]) -> None:
    interrupt_stops = ended("agentrig.run", "interrupt_stops")
    aborted: list[BaseException] = []
    session = SimpleNamespace(stopping=False, begun=True, runtime=SimpleNamespace(abort=aborted.append))
    with interrupt_stops(session):
        signal.raise_signal(signal.SIGINT)
        assert (session.stopping, aborted) == (True, [])
        signal.raise_signal(signal.SIGINT)
    assert isinstance(aborted[0], KeyboardInterrupt)


def test_the_former_audit_reward_and_checks(ended: Callable[[str, str], Any], toy_plan: Callable[..., Plan]) -> None:
    plan = toy_plan("run.audit=toy-parity")
    assert callable(ended("agentrig.run", "audit_reward")(plan))
    situation = Situation(hardware=None, plan=plan)
    assert ended("agentrig.doctor.cluster", "uses_ray")(situation) is False
    limit = ended("agentrig.doctor.place", "open_files")()
    assert limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    (finding,) = ended("agentrig.doctor.place", "check_open_files")(situation)
    assert (finding.check, finding.result) == ("open files", "ok")
    assert ended("agentrig.plugins", "REGISTER_HOOKS")["agent"] == "register_agents"
