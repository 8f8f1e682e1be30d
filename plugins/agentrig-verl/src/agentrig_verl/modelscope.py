"""Models from ModelScope: verl's and vLLM's own switches, the cache, and the checks of both."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

from agentrig.findings import Finding, ModelHub, Situation

SWITCHES = ("VERL_USE_MODELSCOPE", "VLLM_USE_MODELSCOPE")
"""verl's switch (training) and vLLM's (serving). `true`, in any case, turns a switch on; `1` does not."""

PASSED = (*SWITCHES, "MODELSCOPE_CACHE", "MODELSCOPE_ENDPOINT", "MODELSCOPE_DOMAIN")
"""The variables that workers need to load a model from ModelScope, except the token, which is a secret."""

TOKEN = "MODELSCOPE_API_TOKEN"


def is_on(name: str, environ: Mapping[str, str]) -> bool:
    """Whether a switch is on, by the rule that verl and vLLM share."""
    return environ.get(name, "").lower() == "true"


def endpoint(environ: Mapping[str, str]) -> str:
    """Return the address that models are downloaded from."""
    return environ.get("MODELSCOPE_ENDPOINT") or f"https://{environ.get('MODELSCOPE_DOMAIN') or 'modelscope.cn'}"


def cached_model(model: str, environ: Mapping[str, str]) -> Path | None:
    """Return the folder of a model in ModelScope's cache, or None; imports nothing.

    The present layout is `models/OWNER--NAME/snapshots/REVISION`; older ones write `OWNER/NAME`, a dot as `___`.
    """
    home = Path(environ.get("HOME") or Path.home())
    root = Path(environ.get("MODELSCOPE_CACHE") or home / ".cache" / "modelscope").expanduser()
    owner, _, name = model.partition("/")
    older = name.replace(".", "___")
    folders = [*(root / "models" / f"{owner}--{name}" / "snapshots").glob("*")]
    folders += [base / "models" / owner / older for base in (root, root / "hub")]
    found = [f for f in folders if (f / "config.json").is_file()]
    return max(found, key=lambda p: p.stat().st_mtime, default=None)


def hub(environ: Mapping[str, str]) -> ModelHub | None:
    """Return ModelScope, if both switches are on; the doctor then looks for a model there."""
    if not all(is_on(name, environ) for name in SWITCHES):
        return None
    return ModelHub(
        address=endpoint(environ), mirror="MODELSCOPE_ENDPOINT", cached=lambda model: cached_model(model, environ)
    )


def check_modelscope(situation: Situation) -> Iterator[Finding]:
    """If a ModelScope switch is set: are both on, and is the package installed?"""
    environ = situation.environ
    given = [name for name in SWITCHES if environ.get(name)]
    if not given:
        return
    odd = [name for name in given if environ[name].lower() not in ("true", "false")]
    on = [name for name in given if is_on(name, environ)]
    both = " ".join(f"{name}=True" for name in SWITCHES)
    for name in odd:
        evidence = f"{name}={environ[name]} counts as off: only `true` turns it on"
        yield Finding.problem("modelscope", evidence, cure=f"export {both}")
    if on and importlib.util.find_spec("modelscope") is None:
        evidence = f"{', '.join(on)} is on, and the package modelscope is not installed: verl and vLLM will fail"
        yield Finding.problem("modelscope", evidence, cure="pip install modelscope")
    model = situation.setting("algorithm", "model", "")
    if len(on) == 1 and not odd and not Path(model).expanduser().is_dir():
        (off,) = set(SWITCHES) - set(on)
        evidence = f"{on[0]} is on and {off} is not: one of verl and vLLM would look for {model} on the Hub"
        yield Finding.problem("modelscope", evidence, cure=f"export {both}")
    elif len(on) == 2:
        evidence = f"names of models are ModelScope's ({endpoint(environ)}); both switches reach the workers"
        yield Finding.ok("modelscope", evidence)
