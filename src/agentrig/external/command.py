"""The agent `command`: runs a program for each rollout, and returns its answer."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrig.endpoints import Endpoint
from agentrig.errors import AgentFailure, AgentrigError
from agentrig.external import answers
from agentrig.external.config import CommandConfig
from agentrig.external.running import CannotStart, Ending, SupervisionFailed, run
from agentrig.external.sandboxes import Sandbox
from agentrig.pools import Job
from agentrig.text import cut, storable
from agentrig.traces import ADDRESS
from agentrig.tracing.recorder import OUTPUT_LIMIT, current, opened

if TYPE_CHECKING:
    from agentrig.external.callbacks import Callback

INPUT_FILE = "agentrig-input.json"

TEMPORARY = ".tmp"
"""Where the program's temporary files are, in its working directory: they count towards its limit."""

log = logging.getLogger(__name__)


class CommandAgent:
    """Runs a program for each rollout; several threads may call it.

    Args:
        config: The agent's keys.
        callback: Makes the callback of a rollout whose program answers by one; its answer is read when the program
            has ended. None for one of its own: the program then ends soon after its answer.
    """

    def __init__(self, config: CommandConfig, callback: Callable[[Job], Callback] | None = None) -> None:
        if sys.platform != "linux":
            raise AgentrigError(
                "[agent] the agent `command` needs Linux, to end all that a program starts: use a container or WSL"
            )
        self.config, self._make_callback = config, callback
        self._folder = Path(config.folder).expanduser().absolute() if config.folder else None
        self._words = [word.replace("{folder}", str(self._folder)) for word in config.words]
        reads = [Path(path).expanduser().absolute() for path in (config.folder, *config.mounts) if path]
        for path in reads:
            if not path.exists():
                raise AgentrigError(f"[agent] there is no folder {path}")
        self._sandbox = Sandbox(config, reads)
        if config.sandbox != "none":
            with working_folder() as trial:
                self._sandbox.check(trial)
        self._check_program()

    def _check_program(self) -> None:
        if self.config.sandbox in ("docker", "podman"):
            return  # it is in the image
        program = self._words[0]
        path = self.config.variables.get("PATH", os.environ.get("PATH"))
        place = self._folder / program if self._folder and self.config.copy and "/" in program else program
        if shutil.which(place, path=path) is None:
            raise AgentrigError(
                f"[agent] command: there is no program {program} here, or it is not executable. Install it, write its "
                "whole path, or write {folder}/NAME and set folder"
            )

    def __call__(self, task_input: Mapping[str, Any], endpoint: Endpoint) -> Any:
        """Run the program on one input, as `run_job` does."""
        return self.run_job(Job(id=f"program-{uuid.uuid4().hex[:8]}", input=task_input, endpoint=endpoint))

    def run_job(self, job: Job) -> Any:
        """Run the program on one rollout; return its answer, or raise the failure that it ended with."""
        config = self.config
        with ExitStack() as stack:
            folder = stack.enter_context(working_folder(self._folder if config.copy else None))
            variables = self._variables(job, folder)
            callback = stack.enter_context(self._callback(job)) if config.answer == "callback" else None
            if callback is not None:
                variables[config.answer_url_variable] = callback.url
                variables[config.answer_key_variable] = callback.key
            attributes = {"agent.name": config.node, "command": cut(storable(" ".join(self._words)), 500)}
            with opened("program", attributes) as span_id:
                if (recorder := current()) is not None and span_id is not None:
                    recorder.outside_in = span_id
                    if config.base_url_variable:
                        names = [config.base_url_variable, *filter(None, [config.api_key_variable])]
                        recorder.about[ADDRESS] = f"{' and '.join(names)} of its environment"
                waits = None if self._make_callback else callback
                ending = self._run(job, folder, variables, lambda: waits is not None and waits.arrived is not None)
                attributes.update(_facts(ending))
                return self._answer(ending, folder, callback)

    def _callback(self, job: Job) -> Callback:
        from agentrig.external.callbacks import Callback

        if self._make_callback:
            return self._make_callback(job)
        return Callback(job.id, attempt=job.attempt, one_answer=True)

    def _variables(self, job: Job, folder: Path) -> dict[str, str]:
        """Return the variables that the agent sets."""
        config, endpoint = self.config, job.endpoint
        found = {"PWD": str(folder), "TMPDIR": str(folder / TEMPORARY)}
        if config.sandbox != "none":
            found["HOME"] = str(folder)
        found |= config.variables
        for name, path in config.input_variables.items():
            found[name] = _as_text(_part(job.given, path, name))
        for name, value in (
            (config.base_url_variable, endpoint.base_url),
            (config.api_key_variable, endpoint.api_key),
            (config.model_variable, endpoint.model),
            ("AGENTRIG_SAMPLING", json.dumps(dict(endpoint.sampling))),
            ("AGENTRIG_HEADERS", json.dumps(dict(endpoint.headers))),
        ):
            if name:
                found[name] = value
        if config.input == "environment":
            found["AGENTRIG_INPUT"] = json.dumps(job.given)
        elif config.input == "file":
            (folder / INPUT_FILE).write_text(json.dumps(job.given), "utf-8")
            found["AGENTRIG_INPUT"] = str(folder / INPUT_FILE)
        return found

    def _run(self, job: Job, folder: Path, variables: Mapping[str, str], finished: Callable[[], bool]) -> Ending:
        config = self.config
        words, container = self._sandbox.wrapped(self._words, folder, variables)
        try:
            return run(
                words,
                container=container,
                folder=folder,
                environment={**os.environ, **variables},
                stdin=json.dumps(job.given).encode() + b"\n" if config.input == "stdin" else b"",
                limits=config,
                finished=finished,
            )
        except CannotStart as error:
            raise AgentFailure(str(error), kind="cannot-start") from None
        except SupervisionFailed as error:
            raise AgentFailure(str(error), kind="infrastructure") from None
        finally:
            if container is not None:
                Path(container.id_file).unlink(missing_ok=True)

    def _answer(self, ending: Ending, folder: Path, callback: Callback | None) -> Any:
        """Return the answer of a program that has ended; raise if it failed, did not answer, or answered twice."""
        from agentrig.external.callbacks import returned

        config = self.config
        answered = callback.arrived if callback is not None else None
        answers.check_ending(ending, config, answered=answered is not None)
        try:
            if callback is not None:
                if callback.repeated:
                    raise AgentFailure(
                        f"the program answered {1 + callback.repeated} times, and differently", kind="answered-twice"
                    )
                if answered is None:
                    why = f"what it posted to {config.answer_url_variable} was refused: {callback.refused}"
                    if callback.malformed:
                        raise AgentFailure(why, kind="bad-answer")
                    raise LookupError(why if callback.refused else f"it posted nothing to {config.answer_url_variable}")
                return returned(answered)
            if config.answer == "file":
                return answers.from_file(folder, config.answer_file)
            return answers.from_stdout(ending.stdout, json_line=config.answer == "json-line")
        except LookupError as reason:
            return answers.none(str(reason.args[0]), required=config.answer_required)


def _part(value: Any, path: str, name: str) -> Any:
    """Return a part of the input; '' is all of it."""
    for key in path.split(".") if path else ():
        if not isinstance(value, Mapping) or key not in value:
            raise AgentFailure(f'the input has no "{path}", which the variable {name} should have', kind="wrong-task")
        value = value[key]
    return value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _facts(ending: Ending) -> dict[str, Any]:
    """Return what the trace keeps of a program's end."""
    stderr = storable(ending.stderr.decode("utf-8", "replace"))
    used = {"cpu_s": ending.cpu_s, "peak_mb": round(ending.peak_mb, 1)}
    found: dict[str, Any] = {"exit_code": ending.status, **{name: value for name, value in used.items() if value}}
    if stderr.strip():
        found["stderr"] = cut(stderr, OUTPUT_LIMIT)
    if ending.exceeded:
        found["exceeded"] = ending.exceeded
    elif ending.left:
        found["processes_left"] = ending.left
    return found


@contextmanager
def working_folder(template: Path | None = None) -> Iterator[Path]:
    """Make a working directory, or a copy of a folder, and remove it at the end, whatever is in it."""
    made = Path(tempfile.mkdtemp(prefix="program-")).resolve()
    try:
        if template is not None:
            shutil.copytree(template, made, symlinks=True, dirs_exist_ok=True)
        (made / TEMPORARY).mkdir(exist_ok=True)
        yield made
    finally:
        remove(made)


def remove(folder: Path) -> None:
    """Remove a folder, also one whose parts may not be read or are nested too deep for Python."""
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(folder)
    said = ""
    if folder.exists():
        for words in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            command = [*words, "--", str(folder)]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
            said = cut(storable(done.stderr.partition("\n")[0]), 300)
    if folder.exists():
        log.warning("a program's working directory stays on the disk: %s. Remove %s by hand", said, folder)
