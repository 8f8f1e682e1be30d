"""The keys of the agents `command` and `http`, and of the server `endpoint`; every command imports this."""

from __future__ import annotations

import itertools
import re
import shlex
from typing import Any
from urllib.parse import urlsplit

import attrs

from agentrig.errors import FAILURE_KIND
from agentrig.secrets import Secret, http_address
from agentrig.settings import setting

INPUTS = ("stdin", "file", "environment")
"""How a program gets the task's input."""

ANSWERS = ("json-line", "stdout", "file", "callback")
"""Where a program's answer is read."""

SANDBOXES = ("none", "bubblewrap", "docker", "podman")

ENVIRONMENT = (
    "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_API_VERSION", "DOCKER_TLS*", "DOCKER_CERT_PATH",
    "CONTAINER_HOST", "CONTAINER_CONNECTION", "CONTAINER_SSHKEY", "CONTAINERS_CONF*", "CONTAINERS_STORAGE_CONF",
)  # fmt: skip
"""Variables of docker and podman that say which daemon, or which settings, they use."""

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _command(config: Any, attribute: Any, value: Any) -> None:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise ValueError(f'command is {value!r:.80}; write a text ("node agent.mjs") or a list of words')
    if not isinstance(value, str):
        return
    try:
        if not shlex.split(value):
            raise ValueError("it is empty")
    except ValueError as error:
        raise ValueError(f"command = {value!r:.80} cannot be split into words: {error}") from None


def _variable(config: Any, attribute: Any, value: str) -> None:
    if value and not VARIABLE.fullmatch(value):
        raise ValueError(f"{attribute.name} = {value!r:.60} is no name of an environment variable")


def _variables(config: Any, attribute: Any, value: dict[str, str]) -> None:
    for name in value:
        if not VARIABLE.fullmatch(name):
            raise ValueError(f"{attribute.name}: {name!r:.60} is no name of an environment variable")


def _exit_codes(config: Any, attribute: Any, value: dict[str, str]) -> None:
    for code, kind in value.items():
        if not code.isdigit() or not 0 < int(code) < 256:
            raise ValueError(f"exit_codes: {code!r:.20} is no exit code of a failure; they are 1 to 255")
        if kind != "answer" and not FAILURE_KIND.fullmatch(kind):
            raise ValueError(
                f"exit_codes: {kind!r:.60} is no failure kind: letters, digits, -, _ and ., at most 40; "
                '"answer" means that its answer counts'
            )


@attrs.frozen(kw_only=True)
class CommandConfig:
    """Keys of `command`."""

    command: Any = setting(
        validator=_command,
        help="the program and its words: a text, split as a shell does, or a list; {folder} is replaced",
    )
    shell: bool = setting(False, help="run a text by `sh -c` instead of splitting it")
    folder: str = setting("", help="the program's folder; {folder} in the command is its path")
    copy: bool = setting(False, help="start each rollout in a copy of the folder, not in an empty working directory")
    input: str = setting(
        "stdin", choices=INPUTS,
        help="where the task's input is: JSON on stdin; JSON in the file that AGENTRIG_INPUT names; or AGENTRIG_INPUT "
        "is the JSON itself",
    )  # fmt: skip
    input_variables: dict[str, str] = setting(
        dict, validator=_variables,
        help='more variables with parts of the input: NAME = "question"; dots for inner keys, "" for all of it',
    )  # fmt: skip
    base_url_variable: str = setting("OPENAI_BASE_URL", validator=_variable, help="variable with the model's address")
    api_key_variable: str = setting("OPENAI_API_KEY", validator=_variable, help="variable with the rollout's key")
    model_variable: str = setting("OPENAI_MODEL", validator=_variable, help="variable with the model's name")
    variables: dict[str, str] = setting(dict, validator=_variables, help="more variables: NAME = VALUE")
    answer: str = setting(
        "json-line", choices=ANSWERS,
        help="the last line of stdout that is JSON, all of stdout as text, a file, or what is posted to a callback",
    )  # fmt: skip
    answer_file: str = setting(
        "answer.json", help="with answer = file: its name in the working directory; JSON if it ends in .json, else text"
    )
    answer_url_variable: str = setting(
        "AGENTRIG_ANSWER_URL", validator=_variable, help="with answer = callback: variable with the address to post to"
    )
    answer_key_variable: str = setting(
        "AGENTRIG_ANSWER_KEY", validator=_variable, help="with answer = callback: variable with its bearer key"
    )
    answer_required: bool = setting(
        True, help="an end without an answer is the failure no-answer; false: its answer is null"
    )
    exit_codes: dict[str, str] = setting(
        dict, validator=_exit_codes,
        help='exit code to failure kind; "answer" if the answer counts all the same. Others are agent-error',
    )  # fmt: skip
    node: str = setting("program", help="the node that all its calls are under; adapters match its name")
    time_s: float = setting(100.0, help="seconds until the failure deadline; 0 for none but runners.deadline_s", ge=0)
    memory_mb: float = setting(2048.0, help="MiB of all its processes until memory-limit; 0 for no limit", ge=0)
    output_mb: float = setting(10.0, help="MiB on stdout, and on stderr, until output-limit", gt=0)
    disk_mb: float = setting(1024.0, help="MiB in its working directory until disk-limit; 0 for no limit", ge=0)
    processes: int = setting(256, help="processes at once until process-limit; 0 for no limit", ge=0)
    sandbox: str = setting("none", choices=SANDBOXES, help="what the program runs in")
    image: str = setting("", help="with docker or podman: the image")
    mounts: list[str] = setting(list, help="in a sandbox: more folders that it may read, at their own paths")

    def __attrs_post_init__(self) -> None:
        """Reject keys that contradict each other."""
        if self.shell and not isinstance(self.command, str):
            raise ValueError("shell = true needs a command that is one text")
        if self.copy and not self.folder:
            raise ValueError("copy = true needs a folder")
        if not self.folder and any("{folder}" in word for word in self.words):
            raise ValueError("the command has {folder}, but folder is empty: name the program's folder")
        if self.image and self.sandbox not in ("docker", "podman"):
            raise ValueError(f'image is for the sandboxes docker and podman, and sandbox = "{self.sandbox}"')
        if not self.image and self.sandbox in ("docker", "podman"):
            raise ValueError(f'sandbox = "{self.sandbox}" needs an image')
        if self.mounts and self.sandbox == "none":
            raise ValueError('mounts are for a sandbox, and sandbox = "none"')
        names = [*self.variables, *self.input_variables]
        keys = ["base_url_variable", "api_key_variable", "model_variable"]
        own = [n for n in (getattr(self, key) for key in keys) if n in names]
        if own:
            raise ValueError(f"{own[0]} has the model's address, key or name: leave it out of the other variables")
        keys += ["answer_url_variable", "answer_key_variable"] if self.answer == "callback" else []
        for one, other in itertools.combinations(keys, 2):
            if {one, other} == {"api_key_variable", "answer_key_variable"}:
                continue  # programs of Agent Lightning 1.x have one variable for both keys
            if (name := getattr(self, one)) == getattr(self, other):
                raise ValueError(f"{one} and {other} are both {name}: give each its own variable")

    @property
    def words(self) -> list[str]:
        """The command's words, before {folder} is replaced."""
        if self.shell:
            return ["sh", "-c", self.command]
        return shlex.split(self.command) if isinstance(self.command, str) else list(self.command)


def _address(_config: Any, field: Any, value: str) -> None:
    """Reject what is no address of a service."""
    http_address(_config, field, value)
    if urlsplit(value).path.endswith("/chat/completions"):
        raise ValueError(f"{field.name} = {value!r} is a model's address; the agent `http` needs that of your agent")


@attrs.frozen(kw_only=True)
class HttpConfig:
    """Keys of `http`."""

    url: str = setting(help="the address that gets each task by POST", validator=_address)
    api_key: Secret | None = setting(None, secret=True, help="the service's key")
    key_header: str = setting(
        "Authorization", help="the header with the service's key: `Bearer KEY` in Authorization, else the key alone"
    )
    timeout_s: float = setting(
        40.0, help="seconds for a rollout, with all tries; with restart_s below runners.deadline_s", gt=0
    )
    connect_s: float = setting(5.0, help="seconds for one connection to the service", gt=0)
    retries: int = setting(2, help="how often a request that was lost or refused for the moment is sent again", ge=0)
    restart_s: float = setting(
        15.0,
        help="how long rollouts wait for a service that can't be reached, as while it restarts, in seconds; this does "
        "not count for timeout_s",
        ge=0,
    )
    idempotent: bool = setting(
        True,
        help="the service runs a rollout once for each Idempotency-Key; false: only requests that certainly did not "
        "reach it are sent again",
    )
    reply_mb: int = setting(16, help="longest reply in MiB", ge=1, le=1024)
    callback: bool = setting(True, help="let the service answer 202 and post its answer to an address of the runner")
    callback_host: str = setting("127.0.0.1", help="the address at which runners take callbacks")
    callback_name: str = setting(
        "", help="the name by which the service reaches that host, if it is another one: host.docker.internal"
    )
    health: str = setting("", help="the address that `agentrig doctor` asks; by default url", validator=_address)


@attrs.frozen(kw_only=True)
class EndpointConfig:
    """Keys of the server `endpoint`."""

    base_url: str = setting(help="its address, up to and including /v1", validator=http_address)
    model: str = setting(help="the model's name there")
    api_key: Secret | None = setting(None, secret=True, help="its key")
    token_ids: bool = setting(False, help="it takes `return_token_ids`, as vLLM does: calls are recorded with them")


def key_headers(config: HttpConfig) -> dict[str, str]:
    """Return the headers with the service's key; none if it has no key."""
    if config.api_key is None:
        return {}
    bearer = "Bearer " if config.key_header.lower() == "authorization" else ""
    return {config.key_header: bearer + config.api_key.reveal()}
