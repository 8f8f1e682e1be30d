"""The command line: it starts fast, every command has an example, and errors have no traceback."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import click
import httpx
import psutil
import pytest
from click.testing import CliRunner, Result
from model_server import ModelServer

from agentrig.cli.commands.dev import answering
from agentrig.cli.commands.eval import Predictions
from agentrig.cli.entry import main
from agentrig.cli.options import names_model
from agentrig.cli.progress import Progress
from agentrig.errors import AgentrigError
from agentrig.plan import resolve
from agentrig.rows import read_rows
from agentrig.tasks import input_key
from agentrig.testing.run_directory import rollout_of, write_run

HEAVY = (
    "torch", "agentlightning", "transformers", "langchain", "langchain_core", "langgraph", "verl", "vllm", "ray",
    "numpy", "pandas", "pyarrow", "matplotlib",
)  # fmt: skip


def commands(group: click.Group = main, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, name
        found.append((*path, name))
        if isinstance(command, click.Group):
            found += commands(command, (*path, name))
    return found


def invoke(*words: str, **options: Any) -> Result:
    return CliRunner().invoke(main, words, **options)


# --- help ---


@cache
def help_of(*path: str) -> str:
    result = invoke(*path, "--help")
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_every_command_has_an_example_of_options_that_exist(path: tuple[str, ...]) -> None:
    page = help_of(*path)
    assert f"agentrig {' '.join(path)}" in page  # the usage line says `main` here
    assert "\\b" not in page
    used = {w for line in page.splitlines() if "agentrig " in line for w in re.findall(r"--[a-z-]+", line)}
    pages = [help_of(*other) for other in commands() if other[: len(path)] == path]
    known = {w for page in pages for w in re.findall(r"--[a-z-]+", page[page.index("Options:") :])}
    assert used <= known


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_numbers_of_options_are_finite(number: str) -> None:
    asked = 0
    for path in commands():
        command: Any = main
        for name in path:
            command = command.get_command(click.Context(command), name)
        for option in command.params:
            if isinstance(option.type, click.types.FloatParamType):
                with pytest.raises(click.BadParameter, match=r"not (a finite number|in the range)"):
                    option.type.convert(number, option, None)
                asked += 1
    assert asked >= 6


def test_the_list_of_commands_is_grouped() -> None:
    lines = invoke("--help").stdout.splitlines()
    heads = [line for line in lines if line in ("Start:", "Look:", "Extend:", "Operate:")]
    assert heads == ["Start:", "Look:", "Extend:", "Operate:"]
    listed = [line.split()[0] for line in lines[lines.index("Start:") :] if re.match(r"  [a-z]", line)]
    assert listed == main.list_commands(click.Context(main))
    assert (
        lines.index("Look:")
        < next(i for i, line in enumerate(lines) if line.startswith("  why "))
        < lines.index("Extend:")
    )


def test_the_list_of_plugins_is_grouped_by_kind(toy_file: str) -> None:
    lines = invoke("plugins", "--plugin", toy_file).stdout.splitlines()
    heads = [line for line in lines if not line.startswith(" ")]
    assert [head.partition(": ")[0] for head in heads[:3]] == ["tasks", "agent", "reward"]
    assert heads[-1] == "plugins"
    adapters = "adapter: chooses which of the agent's calls to the model are trained on"
    rewards = lines[lines.index("reward: scores each answer") + 1 : lines.index(adapters)]
    assert {line.split()[0] for line in rewards} >= {"own", "judge", "toy-parity"}
    assert [line for line in lines[lines.index("plugins") :] if line.startswith("    agentrig ") and "  ok  " in line]


def test_the_keys_that_recipes_set_are_shown_first() -> None:
    shown = "plugins", "show", "grpo", "--kind", "algorithm"
    lines = invoke(*shown).stdout.splitlines()
    keys = [line.split()[0] for line in lines if " = " in line]
    assert set(keys[:6]) >= {"model", "lr", "steps"}
    assert keys.index("temperature") > 6
    (described,) = json.loads(invoke(*shown, "--json").stdout)
    assert set(described["settings"]) == set(keys)


def test_an_algorithm_shows_the_credit_of_a_run_that_names_none() -> None:
    for name, credit in (("grpo", "dr-grpo"), ("gepa", "")):
        shown = "plugins", "show", name, "--kind", "algorithm"
        assert json.loads(invoke(*shown, "--json").stdout)[0]["credit"] == credit
        assert (f"its credit, if a run names none (--credit NAME): {credit}\n" in invoke(*shown).stdout) == bool(credit)


def test_a_kind_shows_its_components() -> None:
    lines = invoke("plugins", "show", "credit").stdout.splitlines()
    assert lines[0] == "credit: says what each of the agent's calls is worth, from the rewards"
    assert lines[-1] == "The keys of one: agentrig plugins show NAME --kind credit"
    described = json.loads(invoke("plugins", "show", "credit", "--json").stdout)
    assert [each["name"] for each in described] == [line.split()[0] for line in lines[1:-1]]
    assert {each["kind"] for each in described} == {"credit"}


def cpu_of(*words: str) -> float:
    """Return the CPU seconds of a run of the command line."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "agentrig", *words], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_takes_less_than_half_a_second() -> None:
    assert any(cpu_of("--help") < 0.5 for _ in range(3))


@pytest.mark.parametrize("words", [["train", "--help"], ["plugins", "--json"]])
def test_nothing_heavy_is_imported(words: Sequence[str]) -> None:
    source = (
        "import sys\nfrom agentrig.cli.entry import main\n"
        f"try:\n    main({list(words)!r})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "HEAVY []", done.stdout[-300:] + done.stderr[-2000:]


def test_the_first_word_of_a_run_is_its_folder_before_anything_heavy_is_imported(here: Path) -> None:
    """So it comes within a second on a quiet machine (tests/benchmarks/start.md); nothing else is said before."""
    command = [sys.executable, "-X", "importtime", "-m", "agentrig", "train", "mini", "run.name=one"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        imported = set()
        for line in run.stdout:
            if not line.startswith("import time:"):
                break
            imported.add(line.rpartition("|")[2].strip())
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=60)
    assert line.startswith("run runs/one: starting the agent, the model's server and the learner …")
    assert "click" in imported
    assert imported & set(HEAVY) <= {"langchain_core"}  # the agent's graph
    assert not (here / "runs").exists(), "Ctrl-C in the start leaves nothing"


# --- errors ---


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "mimi-no-such"], 'there is no recipe called "mimi-no-such"'),
        (["train", "dates"], "A file is read only if it is named: add --plugin FILE.py"),
        (["train", "absent.toml"], "there is no run file absent.toml"),
        (["dev", "tasks.file=b.csv", "mini"], '"mini" comes after a setting: write the recipe, or the run file, first'),
        (["train", "run.seed=1", "algorithm.lr"], '"algorithm.lr" is not an override'),
        (["train", "mini", "algorithm.model", "models/a b"], "has no value: write algorithm.model='models/a b'"),
        (["train", "algorithm.steps", "3"], "write algorithm.steps=3"),
        (["train", "toy", "algorithm.setps=3"], 'has no key "setps". Did you mean "steps"?'),
        (["train", "toy", "--reward", "toy-partiy"], 'no reward called "toy-partiy". Did you mean "toy-parity"?'),
        (["train", "toy", "--hardware", "cpuu"], 'Did you mean "cpu"?'),
        (["train", "toy", "--plugin", "absent.py"], "there is no file"),
        (["train", "toy", "--resume", "."], "a resumed run keeps its configuration"),
        (["train", "--resume", ".", "--active-agent", "x"], "a resumed run keeps its configuration"),
        (["train", "--resume", ".", "--observer", "toy-notes"], "a resumed run keeps its configuration"),
        (["eval", "toy", "--checkpoint", ".", "--model", "m"], "the run's algorithm serves --checkpoint"),
        (["eval", "toy", "--model", "m"], "--model needs a server"),
        (["eval", "toy", "--checkpoint", "."], "is neither a Hugging Face directory"),
        (["eval", "toy", "--split", "tst"], 'there is no split "tst". Did you mean "test"?'),
        (["eval", "toy", "--endpoint", "http://127.0.0.1:9/v1"], "http://127.0.0.1:9/v1 does not answer"),
        (["dev", "toy", "--endpoint", "ftp//nowhere"], "ftp//nowhere is no address of a server: write http://HOST"),
        (["plugins", "show", "toy-agnt"], 'there is no component called "toy-agnt"'),
        (["plugins", "show", "cpu", "--kind", "reward"], "cpu is of the kind hardware, not reward:\n  agentrig"),
        (["plugins", "show", "cpu", "--graph"], "hardware cpu has no graph to show"),
    ],
)
def test_an_error_ends_in_status_1_without_a_traceback(
    tmp_path: Path, toy_file: str, words: list[str], said: str
) -> None:
    asks_plugins = words[0] in ("train", "eval", "dev") and "--resume" not in words
    more = ["--plugin", toy_file] if asks_plugins else []
    result = invoke(*words, *more, env={"OPENAI_BASE_URL": "", "OPENAI_API_BASE": ""})
    assert result.exit_code == 1, result.output
    assert any(line.startswith("agentrig: ") for line in result.stderr.splitlines())
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


OF_RUNS = ("train --resume", "train --start", "eval --checkpoint", "watch", "report", "compare", "why", "audit")


@pytest.mark.parametrize("words", OF_RUNS)
def test_a_run_that_is_not_there_or_a_file_is_named_as_such(words: str) -> None:
    absent = "agentrig: there is no run directory absent; `agentrig train` makes them below runs/\n"
    for place, said in (("absent", absent), (__file__, "is a file")):
        result = invoke(*words.split(), place)
        assert (result.exit_code, said in result.stderr) == (2, True), result.stderr
        assert place != "absent" or result.stderr == absent


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--max-turns", "6"], "agent.max_turns=6"),
        (["--lr=1e-4"], "algorithm.lr=1e-4"),
        (["--report", "--json"], "run.report=VALUE"),
        (["--set", "algorithm.steps=3"], "without dashes: algorithm.steps=3"),
        (["--step", "3"], "without dashes: algorithm.steps=3"),
        (["--set=lr=1e-4"], "without dashes: algorithm.lr=1e-4"),
        (["--waths"], "Did you mean '--watch'?"),
    ],
)
def test_a_setting_as_an_option_is_shown_as_a_setting(option: list[str], said: str) -> None:
    result = invoke("train", "mini", *option)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize("words", [["--credit", "rloo", "--credit", "grpo"], ["--start=.", "--start", "."]])
def test_an_option_of_one_value_that_is_given_twice_is_refused(words: list[str]) -> None:
    result = invoke("train", "mini", *words, "--plugin", "a.py", "--plugin", "b.py", "--json", "--json")
    assert result.exit_code == 2
    name = words[0].partition("=")[0]
    assert f"{name} is given 2 times, and takes one value: leave all but one out" in result.stderr, result.stderr


def test_a_path_that_is_not_there_names_the_nearest_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("numbers.csv", "my_agent.py", "numbers.json", "my.toml"):
        (tmp_path / name).touch()
    (tmp_path / "runs" / "mini-20260101-120000").mkdir(parents=True)
    for words in (["--resume", "runs/mini-20260101-120001"], ["--resume", "runs/mini-nope"]):
        assert 'Did you mean "runs/mini-20260101-120000"?' in invoke("train", *words).stderr
    assert f'Did you mean "{tmp_path / "my_agent.py"}"?' in invoke("train", "toy", "--plugin", "my_agnt.py").stderr
    assert 'Did you mean "my.toml"?' in invoke("train", "mi.toml").stderr
    with pytest.raises(AgentrigError, match=r'Did you mean ".*/numbers\.csv"'):
        read_rows("number.csv")
    assert "Did you mean" not in invoke("train", "toy", "--plugin", "nothing_like_it.py").stderr


def test_errors_of_plugins_are_warnings_of_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toy_file: str, model: ModelServer
) -> None:
    from distributions import install

    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "toy-gone", "import no_such_library\n")
    result = invoke("eval", "toy", "--plugin", toy_file, "--split", "tst")
    assert "agentrig: warning: plugin toy-gone failed to load: ModuleNotFoundError" in result.stderr


# --- commands ---


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


DOES = """
import os, subprocess, sys, threading, time
from agentrig.cli.commands import look
from agentrig.cli.commands.dev import answering
from agentrig.cli.entry import main
from agentrig.cli.progress import Progress

def does(**_given):
    DO

look.why.callback = does
main()
"""


def ended(here: Path, do: str) -> subprocess.CompletedProcess[str]:
    """Run a command in which a plugin does this."""
    command = [sys.executable, "-c", DOES.replace("DO", do), "why", str(here)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize("taken", ["sys.stdout", "sys.stdout = sys.stderr"])
def test_a_command_whose_standard_output_was_taken_away_says_so(here: Path, taken: str) -> None:
    done = ended(here, f"{taken} = None")
    assert done.returncode == 1
    assert "has set sys.stdout to None" in done.stderr


@pytest.mark.parametrize("status", [0, 3])
def test_a_thread_of_a_plugin_does_not_keep_a_command_from_ending(here: Path, status: int) -> None:
    """It waited for it, without a word."""
    done = ended(here, f"threading.Thread(target=time.sleep, args=(100,), name='poll').start(); sys.exit({status})")
    assert done.stderr == "agentrig: threads of a plugin still run, and this command ends without them: 'poll'\n"
    assert done.returncode == status


FORKS = """
    child = os.fork() or time.sleep(100)
    away = subprocess.DEVNULL
    print(child, subprocess.Popen(["sleep", "100"], stdout=away, stderr=away).pid)
"""


def test_what_a_plugin_has_forked_ends_with_the_command(here: Path) -> None:
    """It stayed, with the command's locks and pipes; a program, such as a tracker's service, may stay."""
    done = ended(here, FORKS)
    child, program = map(int, done.stdout.split())
    assert done.stderr == "agentrig: 1 process that a plugin has forked still ran: ended with this command\n"
    assert not psutil.pid_exists(child)
    os.kill(program, signal.SIGKILL)
    assert done.returncode == 0


def test_a_pool_that_a_plugin_has_left_open_ends_with_the_command(here: Path) -> None:
    """Its killed workers were replaced, the command waited for them for ever, and they printed its own errors."""
    done = ended(here, """
    import multiprocessing
    global pool
    pool = multiprocessing.get_context("fork").Pool(2)
    pool.apply(len, ("x",))
    print(*(child.pid for child in multiprocessing.active_children()))
""")  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    workers = [*map(int, done.stdout.split())]
    assert [psutil.pid_exists(worker) for worker in workers] == [False, False]


STARTS = """
    from agentrig.run.splits import read_split
    class Tasks:
        splits = ["train"]
        def load(self, split):
            away = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
            print(subprocess.Popen(["sleep", "100"], **away).pid, subprocess.Popen(["true"], **away).pid)
            if JOINED:
                import multiprocessing
                process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(100,))
                process.start()
                print(process.pid)
            return []
    read_split(Tasks(), "train", who="task set mine")
"""


@pytest.mark.parametrize("joined", [False, True])
def test_what_a_task_set_has_started_ends_with_the_command(here: Path, joined: bool) -> None:
    """It stayed without a word; and Python waited at the end for a process of `multiprocessing` that is no daemon."""
    done = ended(here, STARTS.replace("JOINED", str(joined)))
    left, _, *more = map(int, done.stdout.split())
    said = "agentrig: `load` of task set mine left a process running: {}: ended with this command"
    names = re.sub(r"python[\d.]*", "python", done.stderr).splitlines()
    assert names == [said.format(each) for each in (*(f"python ({pid})" for pid in more), f"sleep ({left})")]
    assert not any(map(psutil.pid_exists, [left, *more]))
    assert done.returncode == 0


@pytest.mark.parametrize(("section", "key"), [("run", "failure_limit"), ("runners", "deadline_s")])
def test_the_sections_without_a_component_show_their_settings(section: str, key: str) -> None:
    text = invoke("plugins", "show", section)
    assert text.exit_code == 0, text.output
    assert f"    {key} = " in text.stdout
    (shown,) = json.loads(invoke("plugins", "show", section, "--json").stdout)
    assert (shown["kind"], shown["name"], shown["distribution"]) == ("section", section, "agentrig")
    assert shown["settings"][key]["type"] == "a number"
    assert 'Did you mean "runners"?' in invoke("plugins", "show", "runnerss").stderr


FAULTY = """
from agentrig import HardwareSpec, hookimpl
from agentrig.hardware import Hardware

class Faulty(Hardware):
    def probe(self):
        raise KeyError("firmware")

@hookimpl
def register_hardware():
    yield HardwareSpec(name="faulty", summary="", build=lambda config: Faulty(name="faulty", torch_device="npu"))
    yield HardwareSpec(name="unmade", summary="", build=lambda config: 1 / 0)
"""


def test_broken_hardware_under_auto_does_not_end_a_command(
    here: Path, toy_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrig.doctor.devices import check_hardware

    (here / "faulty.py").write_text(FAULTY)
    plan = resolve("toy", overrides=["hardware.use=auto"], files=[toy_file, "faulty.py"])
    assert plan.use_hardware().name == "cpu"
    monkeypatch.setattr("agentrig.doctor.examination.CHECKS", (check_hardware,))
    looked = invoke("doctor", "toy", "--plugin", toy_file, "--plugin", "faulty.py", "--hardware", "cpu", "--json")
    lines = {f["check"]: f for f in json.loads(looked.stdout)["findings"]}
    assert lines["faulty devices"]["result"] == lines["unmade devices"]["result"] == "warning"
    assert "KeyError" in lines["faulty devices"]["evidence"]
    assert "ZeroDivisionError" in lines["unmade devices"]["evidence"]


@pytest.mark.parametrize(("recipe", "name"), [("fast", "eval"), pytest.param("qwen", "dev", marks=pytest.mark.slow)])
def test_a_given_server_needs_no_gpu_on_this_host(here: Path, model: ModelServer, recipe: str, name: str) -> None:
    """The dry run before GPU hours: the recipe's agent, tasks, reward and adapter, with any server."""
    words = [recipe, "--tasks", "mini-sql", "--endpoint", model.url, "runners.n=1", "--json", "--limit", "1"]
    done = invoke(name, *words)
    assert done.stdout.startswith(("[", "{")), done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 1 if name == "dev" else found["n"] == 1
    assert model.requests
    assert "hardware" not in done.stderr


def test_without_a_given_server_the_hardware_is_needed(here: Path) -> None:
    result = invoke("dev", "qwen", "--tasks", "mini-sql")
    assert result.exit_code == 1
    assert "none of the hardware that this algorithm can run on is there" in result.stderr
    assert "agentrig run SCRIPT --algorithm grpo --model DIR" in result.stderr


def test_train_prints_its_summary(
    here: Path, model: ModelServer, toy_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["toy", f"algorithm.endpoint={model.url}", "algorithm.steps=1", "run.name=one", "--plugin", toy_file]
    result = invoke("train", *words, "--json", "--active-agent", "write")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary == json.loads((here / "runs" / "one" / "summary.json").read_text())
    assert 'match = "write"' in (here / "runs" / "one" / "config.toml").read_text()
    again = invoke("train", *words, "--json")
    assert (again.exit_code, "continue it with --resume" in again.stderr) == (1, True)

    told = list[str]()
    monkeypatch.setattr(Progress, "tell_what", lambda self, what, spent_s=None: told.append(what))
    exported = invoke("export", "runs/one", "model")
    assert exported.exit_code == 0, exported.output
    assert [what.partition(" ")[0] for what in told] == ["loading", "comparing"], "on a busy machine each takes long"
    assert (here / "model" / "number.json").is_file()
    assert invoke("export", "runs/one", "model").exit_code == 1

    report = invoke("report", "runs/one", "--json")
    assert report.exit_code == 0, report.output
    assert json.loads(report.stdout)["run"] == "one"


def test_a_run_that_ends_itself_says_the_first_cause_that_why_names(
    here: Path, model: ModelServer, toy_file: str
) -> None:
    words = ["toy", f"algorithm.endpoint={model.url}", "run.name=none", "--plugin", toy_file, "algorithm.report=false"]
    ended = invoke("train", *words, "reward.right=0", "algorithm.tasks=36")
    assert ended.exit_code == 1
    assert ended.stderr.count("so every advantage is zero") == 1
    (cause,) = json.loads(invoke("why", "runs/none", "--json").stdout)["problems"]
    assert f"  why: {cause['cause']}: {cause['text']}\n" in ended.stderr
    assert f"  settings: {', '.join(cause['settings'])}\n  more: agentrig why runs/none\n" in ended.stderr


@pytest.mark.slow
def test_the_page_of_a_run_is_served_until_ctrl_c(here: Path, model: ModelServer, toy_file: str) -> None:
    keyboard, terminal = pty.openpty()
    words = [
        "toy",
        f"algorithm.endpoint={model.url}",
        "algorithm.steps=1",
        'run.block=["report"]',
        "--plugin",
        toy_file,
    ]
    run = subprocess.Popen(
        [sys.executable, "-m", "agentrig", "train", *words, "--watch"],
        **{"stdin": terminal, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": here},
    )
    try:
        assert run.stdout is not None
        said = []
        for line in run.stdout:
            said.append(line)
            if "Ctrl-C ends it" in line:
                break
        link = re.search(r"watching .*: (http\S+)", "".join(said))
        assert link is not None, said
        assert "1 step in" in "".join(said)
        assert httpx.get(link[1], follow_redirects=True).status_code == 200
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=60) == 0, run.stdout.read()
        with pytest.raises(httpx.ConnectError):
            httpx.get(link[1])
    finally:
        run.kill()
        run.communicate()
        os.close(keyboard)
        os.close(terminal)


def test_eval_measures_the_server_of_the_environment(here: Path, model: ModelServer, toy_file: str) -> None:
    environment = {"OPENAI_BASE_URL": model.url + "/", "OPENAI_API_KEY": "key-3"}
    words = ["eval", "toy", "--plugin", toy_file, "--limit", "8"]
    result = invoke(*words, "--json", "--save", "predictions.jsonl", env=environment)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    figures = {"accuracy", "ci95", "reward", "n", "failures", "wall_s", "rollouts_per_s", "slices", "wrong", "by_turn"}
    assert set(found) == figures | {"components", "calls"}
    # test-200 to test-207: a slice with one class says nothing
    assert found["slices"] == {"half": {"first": {"accuracy": 0.5, "n": 4}, "second": {"accuracy": 0.5, "n": 4}}}
    assert (found["accuracy"], found["n"], found["failures"]) == (0.5, 8, {})
    assert found["ci95"] == pytest.approx([0.2152, 0.7848], abs=1e-4)
    saved = [json.loads(line) for line in (here / "predictions.jsonl").read_text().splitlines()]
    assert len(saved) == 8
    assert {p["answer"] for p in saved} == {"odd"}
    assert {p["value"] for p in saved} == {0.0, 1.0}
    assert [(len(p["replies"]), sorted(p["input"])) for p in saved] == [(1, ["do", "marker", "number"])] * 8
    (_, headers, body) = model.requests[0]
    assert headers["authorization"] == "Bearer key-3"
    few = [*words[:4], "run.report_tasks=3", "--json"]
    for more, n in (([], 3), (["--split", "train", "--limit", "4"], 4), (["--limit", "5"], 5)):
        found = invoke(*few, *more, env=environment)
        assert json.loads(found.stdout)["n"] == n
        assert ("run.report_tasks limits it" in found.stderr) == (n == 3)
    assert (body["temperature"], body["model"]) == (0.0, "toy-model")
    assert "return_token_ids" not in body  # nothing is learned, and not every server knows it


def test_a_file_of_predictions_is_replaced_by_a_whole_one_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, rollout = tmp_path / "p.jsonl", rollout_of(0, right=True, mode="report", step=0)

    def measured(n: int, error: type[BaseException] | None) -> None:
        with suppress(KeyboardInterrupt), Predictions(file) as predictions:
            for _ in range(n):
                predictions.write(rollout)
            if error is not None:
                raise error

    for n in (0, 1):  # Ctrl-C before the first rollout, and after it
        file.write_text("earlier\n")
        measured(n, KeyboardInterrupt)
        assert file.read_text() == "earlier\n"
        assert len(list(tmp_path.iterdir())) == 1 + n
    assert f"the predictions of this measurement are in {tmp_path}/.p.jsonl.part" in capsys.readouterr().err
    measured(2, None)
    assert (len(file.read_text().splitlines()), list(tmp_path.iterdir())) == (2, [file])


def test_eval_says_which_of_its_tasks_the_model_was_warmed_up_on(tmp_path: Path) -> None:
    file = str(Path(__file__).parents[1] / "support" / "warmup_plugin.py")
    tasks = resolve("colors", files=[file]).tasks().load("test")
    (tmp_path / "warmup.json").write_text(json.dumps({"inputs": [input_key(task) for task in tasks[:3]]}))
    words = ["eval", "colors", "--plugin", file, f"algorithm.model={tmp_path}"]
    found = invoke(*words, "--save", "/proc/x.jsonl")  # it ends before it measures
    assert "3 of 12 tasks were labels of the warm-up that made the starting model" in found.stderr


def test_a_measurement_survives_a_file_that_cannot_be_written(here: Path, model: ModelServer, toy_file: str) -> None:
    words = ["eval", "toy", "--plugin", toy_file, "--limit", "4", "--endpoint", model.url]
    full = invoke(*words, "--save", "/dev/full")
    assert full.exit_code == 1
    assert "accuracy 50.0%" in full.output
    assert "--save /dev/full cannot be written: No space left on device. It has 0 of 4 predictions" in full.output
    model.requests.clear()
    nowhere = invoke(*words, "--save", "/proc/x.jsonl")
    assert nowhere.exit_code == 1
    assert "--save /proc/x.jsonl cannot be written: No such file or directory; nothing was measured" in nowhere.output
    assert model.requests == []


CHATTY = """
import atexit, os
from agentrig import AgentSpec, RewardSpec, Score, Task, TasksSpec, hookimpl

atexit.register(print, "and when it ends")

class Tasks:
    splits = ("train", "validation", "test")
    roles = {"train": "train", "validation": "validation", "report": "test"}

    def __init__(self, config):
        print("its task set")

    def load(self, split):
        print("and what that loads")
        return [Task(id=f"{split}-{i}", input={"number": i}, private={"parity": "odd", "gold": ""}) for i in range(2)]

def agent(task_input, endpoint):
    print("an agent that prints")
    os.system("echo as do its programs")
    return "odd"

@hookimpl
def register_agents():
    print("and its module")
    yield AgentSpec(name="toy-chatty", summary="", build=lambda config: agent)

@hookimpl
def register_tasks():
    yield TasksSpec(name="chatty-tasks", summary="", build=Tasks)

def reward(task, outcome, budget_s):
    os.system("echo a reward that prints")
    return Score.ok(1.0)

@hookimpl
def register_rewards():
    yield RewardSpec(name="chatty-reward", summary="", build=lambda config: reward)
"""


@pytest.mark.parametrize("command", ["eval", "dev", "forecast"])
def test_stdout_has_only_json_whatever_plugins_print(
    here: Path, model: ModelServer, toy_file: str, command: str
) -> None:
    (here / "chatty.py").write_text(CHATTY)
    words = [command, "toy", "--plugin", toy_file, "--plugin", "chatty.py", "--agent", "toy-chatty"]
    words += ["--tasks", "chatty-tasks", "--reward", "chatty-reward", "--limit", "2", "--json"]
    model_of = ["algorithm.endpoint=" if command == "forecast" else "--endpoint", model.url]
    words += ["".join(model_of)] if command == "forecast" else model_of
    done = subprocess.run([sys.executable, "-m", "agentrig", *words], capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert {"eval": lambda: found["n"], "dev": lambda: len(found), "forecast": lambda: found["tasks"]}[command]() == 2
    loads = ("its task set", "and what that loads", "and when it ends")
    for said in ("an agent that prints", "as do its programs", "a reward that prints", "and its module", *loads):
        assert said in done.stderr


PARTS = """
from agentrig import RewardSpec, Score, hookimpl

def reward(task, outcome, budget_s, trace):
    value = float(task.id.endswith("0"))
    return Score.ok(value, match=value, form=0.5, calls=[value for _ in trace.llm_calls()])

@hookimpl
def register_rewards():
    yield RewardSpec(name="in-parts", summary="", build=lambda config: reward, sees_trace=True)
"""


def test_eval_shows_parts_of_the_reward_and_scores_of_calls(here: Path, model: ModelServer, toy_file: str) -> None:
    (here / "parts.py").write_text(PARTS)
    words = ["eval", "toy", "--plugin", toy_file, "--plugin", "parts.py", "--reward", "in-parts", "--limit", "4"]
    shown = invoke(*words, "--endpoint", model.url)
    assert shown.exit_code == 0, shown.output
    assert "\nparts of the reward: form 0.5\ncalls scored below 1: 3 of 4\n" in shown.stdout


def test_eval_says_why_rollouts_failed_and_is_an_error_if_all_did(
    here: Path, model: ModelServer, toy_file: str
) -> None:
    words = ["eval", "toy", "--plugin", toy_file, "--endpoint", model.url, "--split", "train", "--limit", "4"]
    result = invoke(*words, "tasks.do=['raise']", "--json")
    assert result.exit_code == 1
    assert "4 x agent-error: for example ValueError" in result.stderr
    assert "no rollout has a reward: all 4 failed, so nothing was measured" in result.stderr
    assert "No call to the model was recorded" not in result.stderr, "they ended before they asked"
    assert json.loads(result.stdout)["accuracy"] is None
    some = invoke(*words, "tasks.do=['', 'raise']")
    assert some.exit_code == 0
    assert "2 x agent-error: for example ValueError" in some.stderr
    assert "n = 2" in some.stdout


def test_eval_of_an_agent_whose_calls_do_not_count_warns(
    here: Path, model: ModelServer, toy_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["eval", "toy", "--plugin", toy_file, "--endpoint", model.url, "--split", "train", "--limit", "4"]
    result = invoke(*words, "tasks.do=['no-call']")
    assert result.exit_code == 0
    assert "No call to the model was recorded" in caplog.text
    caplog.clear()
    assert invoke(*words, "tasks.do=['', 'no-call']").exit_code == 0
    assert "No call" not in caplog.text


def test_dev_shows_every_span(here: Path, model: ModelServer, toy_file: str, caplog: Any) -> None:
    words = ["dev", "toy", "--plugin", toy_file, "--endpoint", model.url, "--limit", "2"]
    result = invoke(*words, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [r["task_id"] for r in rows] == ["validation-100", "validation-101"]
    assert "openai.chat.completion" in rows[0]["spans"]
    text = invoke(*words, env={"COLUMNS": "200"})
    assert text.exit_code == 0, text.output
    learned = "1 call, which training with the run's own model would learn from"
    for seen in ("write_query", "Is 100 odd?", "odd", learned):
        assert seen in text.stdout
    right = sum(bool(r["correct"]) for r in rows)
    assert text.stdout.splitlines()[-1] == f"{right} of 2 rollouts right"
    assert re.match(rf"2 tasks of split validation, answered by \S+ of {model.url}: starting the agent …", text.stderr)
    assert "would be trained on" not in text.stderr
    assert "would end" not in text.stderr
    cold = invoke(*words, "--split", "train", "tasks.do=['cold']").stderr
    assert "train` would end in its first step: 2 of 2 calls were sampled with temperature 0.1, the run's is 1" in cold
    served = ["dev", "toy", "--plugin", toy_file, f"algorithm.endpoint={model.url}", "--limit", "2"]
    asked = invoke(*served, "--split", "train", "tasks.do=['as-run']")  # 1 as the run; the server's is 0.8
    assert asked.exit_code == 0, asked.output
    assert "the run's is" not in asked.stderr + caplog.text
    assert not (here / "runs").exists()
    assert "gold-" not in text.stdout + result.stdout


@pytest.mark.parametrize("command", ["dev", "eval"])
def test_a_model_that_the_command_names_wins_over_the_environment(
    here: Path, model: ModelServer, toy_file: str, command: str
) -> None:
    words = [command, "toy", "--plugin", toy_file, "--limit", "2"]
    down = invoke(*words, env={"OPENAI_API_BASE": "http://127.0.0.1:9/v1"})
    assert down.exit_code == 1
    assert "http://127.0.0.1:9/v1 (from $OPENAI_API_BASE) does not answer: " in down.stderr
    used = invoke(*words, env={"OPENAI_BASE_URL": model.url})
    assert re.search(rf"toy-model (of|at) {model.url} \(from \$OPENAI_BASE_URL\)", used.stderr), used.stderr
    named = invoke(*words, f"algorithm.endpoint={model.url}", env={"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"})
    assert named.exit_code == 0, named.output
    assert "$OPENAI" not in named.stderr
    assert command == "eval" or "1 call, which training would learn from" in " ".join(named.stdout.split())
    assert names_model(["shop", "algorithm.model=models/shop"], {})
    assert names_model(["shop"], {"server": "vllm"})
    assert not names_model(["shop", "algorithm.lr=1"], {"server": None})


def test_dev_ends_with_the_command_that_trains(here: Path, model: ModelServer, toy_file: str) -> None:
    own = resolve("mini", overrides=["algorithm.model=models/own"])
    assert answering(own, None, None) == "algorithm.model = models/own"
    shipped = "the shipped model mini, trained for SQL (algorithm.model names another)"
    assert answering(resolve("mini"), None, None) == shipped
    keys = [f"algorithm.endpoint={model.url}", "tasks.do=['', '']"]
    words = ["toy", "--plugin", toy_file, "--adapter", "agent-match"]
    result = invoke("dev", *words, "--limit", "8", *keys)
    assert result.exit_code == 0, result.output
    assert ", answered by the model of toy-number: starting the agent and the model's server" in result.stderr
    said, _, command = result.stdout.splitlines()[-1].partition("; next: agentrig train ")
    assert re.fullmatch(r"[1-8] of 8 rollouts right", said)
    assert sorted(shlex.split(command)) == sorted([*words, *keys])


def test_a_failed_rollout_sets_the_exit_status_of_dev(here: Path, model: ModelServer, toy_file: str) -> None:
    words = ["dev", "toy", "--plugin", toy_file, "--endpoint", model.url, "--limit", "2", "--split", "train"]
    result = invoke(*words, "tasks.do=['', 'raise']")
    assert result.exit_code == 1
    assert "this agent cannot count" in result.stdout
    assert result.stdout.endswith(" of 2 rollouts right, 1 failed\n")


def test_dev_says_when_the_agent_returns_nothing(here: Path, model: ModelServer, toy_file: str) -> None:
    words = ["dev", "toy", "--plugin", toy_file, "--endpoint", model.url, "--limit", "3", "--split", "train"]
    result = invoke(*words, "adapter.match=", "tasks.do=['nothing', 'nothing', '']", env={"COLUMNS": "200"})
    assert "warning: the agent returned None in 2 of 3 rollouts" in result.stderr
    assert "Does the agent `return` its answer?" in result.stderr
    result = invoke(*words, "adapter.match=", "tasks.do=['nothing', '', '']", env={"COLUMNS": "200"})
    assert "returned None" not in result.stderr
    assert result.exit_code == 0
    assert invoke(*words, "adapter.match=", "tasks.do=['nothing', 'nothing', 'nothing']").exit_code == 1


def test_dev_says_when_no_call_would_be_trained_on(here: Path, model: ModelServer, toy_file: str) -> None:
    words = ["dev", "toy", "--plugin", toy_file, "--endpoint", model.url, "--limit", "12"]
    result = invoke(*words, "adapter.match=check", env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "1 call, training with the run's own model would learn from 0" in result.stdout
    assert "warning: no call of this agent would be trained on" in result.stderr
    assert "kept none of 12 calls. They were made under these nodes: write_query (12)" in result.stderr


WITHOUT = "import sys\nsys.modules[sys.argv.pop(1)] = None\nfrom agentrig.cli.entry import main\nmain(sys.argv[1:])"


def without(package: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command where a package is not installed that the core alone does not bring."""
    command = [sys.executable, "-c", WITHOUT, package, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(
    ("absent", "words", "said"),
    [
        ("agentrig_lightning", ["run", "script.py"], "agentrig run needs agentrig-lightning: pip install"),
        ("agentrig_lightning", ["runner", "--store", "x"], "agentrig runner needs agentrig-lightning: pip install"),
        ("opentelemetry.sdk", ["train", "mini", "--otlp", "http://127.0.0.1:1"], "pip install 'agentrig[otlp]'"),
    ],
)
def test_what_is_not_installed_is_named_with_its_cure(absent: str, words: list[str], said: str, here: Path) -> None:
    done = without(absent, *words)
    assert (done.returncode, said in done.stderr) == (1, True), done.stderr


@pytest.mark.slow
def test_a_report_without_matplotlib_has_no_images(ended_run: Callable[..., Path], tmp_path: Path) -> None:
    done = without("matplotlib", "report", str(ended_run()), "--out", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    assert "has no images, because matplotlib is not installed: pip install 'agentrig[plots]'" in done.stderr
    assert "<svg" in (tmp_path / "page.html").read_text("utf-8")
    assert not (tmp_path / "plots").exists()


def test_why_and_report_without_a_run_are_about_the_newest_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command, status, said in (
        ("why", 2, "there is no run in the folder runs: name one, agentrig why RUN"),
        ("report", 2, "there is no run in the folder runs: name one, agentrig report RUN"),
        ("watch", 2, "there is no run in the folder runs: name one, agentrig watch RUN"),
        ("compare", 2, "name the runs to compare: agentrig compare RUN RUN (of one run: agentrig report)"),
    ):
        none = CliRunner().invoke(main, [command])
        assert (none.exit_code, said in none.output) == (status, True), none.output
    for age, name in ((100, "old"), (0, "new"), (50, "older")):
        run = write_run(tmp_path / "runs" / name, steps=3)
        os.utime(run / "manifest.json", (time.time() - age,) * 2)
    assert CliRunner().invoke(main, ["why"]).output.startswith("new: ")
    told = CliRunner().invoke(main, ["report"]).output
    assert "report: runs/new/report.html" in told
    assert re.search(r"\+[\d.]+ points: of 40 held-out tasks measured at both ends, .* \(sign test p", told)
