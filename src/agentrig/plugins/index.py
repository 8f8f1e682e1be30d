"""The index of published plugins: a file that ships with agentrig, and a newer one made from a package registry."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrig.errors import AgentrigError
from agentrig.plugins import caches

REGISTRY = "https://pypi.org"
"""The registry that is asked by default."""

KEYWORD = "agentrig"
"""A published plugin has this keyword and has it in its name: `agentrig-exact`."""

SHIPPED = Path(__file__).with_name("index.json")

MOST = 1000
"""Packages of the registry that are looked at, at most."""

TIMEOUT_S = 20.0

NAMES = {"Accept": "application/vnd.pypi.simple.v1+json, text/html;q=0.5"}


def refreshed() -> Path:
    """Return where `refresh` writes: `plugins.json` in `$AGENTRIG_CACHE`, or in the user's cache folder."""
    return caches.folder() / "plugins.json"


def read() -> dict[str, Any]:
    """Return the index: the refreshed one, or that which ships.

    Returns:
        `made` (a date), `source`, and `plugins`: a list of `name`, `version`, `summary`, `keywords`, `agentrig` (the
        range that it declares), `home`.

    Raises:
        AgentrigError: The refreshed file is damaged.
    """
    file = refreshed() if refreshed().is_file() else SHIPPED
    try:
        index: dict[str, Any] = json.loads(file.read_text("utf-8"))
        if not all(isinstance(entry["name"], str) for entry in index["plugins"]):
            raise TypeError("a name is no text")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AgentrigError(
            f"the index of plugins {file} is damaged ({error}): delete it, or search with --refresh"
        ) from None
    return index


def search(index: Mapping[str, Any], words: Sequence[str]) -> list[dict[str, Any]]:
    """Return the entries that have every word in name, summary or keywords, those with it in the name first."""
    wanted = [word.casefold() for word in words]
    found = []
    for entry in index["plugins"]:
        text = " ".join([entry["name"], entry.get("summary") or "", *entry.get("keywords", ())]).casefold()
        if all(word in text for word in wanted):
            found.append(entry)
    return sorted(found, key=lambda entry: (not all(w in entry["name"].casefold() for w in wanted), entry["name"]))


def refresh(registry: str = REGISTRY) -> dict[str, Any]:
    """Make the index from a package registry, write it to `refreshed()`, and return it.

    The registry's list of names (`/simple/`) gives the packages with the keyword in their names; of each its JSON
    (`/pypi/NAME/json`) is read, and it is a plugin if its author gave it the keyword.

    Args:
        registry: Its address, such as `https://pypi.org`; an address that ends in `/simple` is that of a mirror.

    Raises:
        AgentrigError: It cannot be reached, or does not answer as a registry does, or the index cannot be written.
    """
    import httpx

    base = re.sub(r"/simple$", "", registry.rstrip("/"))
    try:
        with httpx.Client(timeout=TIMEOUT_S, follow_redirects=True) as client:
            names = _names(client, f"{base}/simple/")
            plugins = [entry for name in names if (entry := _entry(client, base, name)) is not None]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AgentrigError(
            f"the registry {base} cannot be asked: {error or type(error).__name__}\n"
            f"  Without --refresh, the search uses the index of {read()['made']}; another registry: --index URL"
        ) from None
    index = {"made": time.strftime("%Y-%m-%d"), "source": base, "plugins": plugins}
    _write(refreshed(), json.dumps(index, indent=1))
    return index


def _names(client: Any, url: str) -> list[str]:
    """Return the names with the keyword in the registry's list, which has tens of megabytes: it is read in pieces."""
    found: set[bytes] = set()
    with client.stream("GET", url, headers=NAMES) as reply:
        reply.raise_for_status()
        rest: bytes = b""
        for piece in reply.iter_bytes():
            rest += piece.lower()
            found.update(re.findall(rb"(?<![\w.-])[\w.-]*agentrig[\w.-]*(?=[^\w.-])", rest))
            rest = rest[-200:]  # a name may be cut by the end of a piece
    return sorted({re.sub(r"[-_.]+", "-", name.decode()) for name in found})[:MOST]


def _entry(client: Any, base: str, name: str) -> dict[str, Any] | None:
    """Return a package's entry; None if it is gone, has no keyword, or its only release is yanked."""
    from packaging.requirements import InvalidRequirement, Requirement

    url = f"{base}/pypi/{name}/json"
    reply = client.get(url)
    if reply.status_code == 404:  # the list also names projects without a release
        return None
    reply.raise_for_status()
    try:
        info = reply.json()["info"]
        keywords = [word for word in re.split(r"[,\s]+", info.get("keywords") or "") if word]
        required = info.get("requires_dist") or []
        links = info.get("project_urls") or {}
        entry = {
            "name": plain(info["name"]),
            "version": plain(info["version"]),
            "summary": plain(info.get("summary") or ""),
            "keywords": [plain(word) for word in keywords],
            "home": plain(info.get("home_page") or next(iter(links.values()), "")),
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AgentrigError(f"{url} is not the JSON of a package registry ({type(error).__name__}: {error})") from None
    if KEYWORD not in (word.casefold() for word in keywords) or info.get("yanked"):
        return None

    def ranges() -> Iterator[str]:
        for line in required:
            try:
                requirement = Requirement(line)
            except InvalidRequirement:
                continue  # of another package: what cannot be read is not a range of agentrig
            if requirement.name.lower() == KEYWORD and requirement.marker is None:
                yield str(requirement.specifier)

    return {**entry, "agentrig": ",".join(ranges())}


def plain(text: Any) -> str:
    """Return a registry's text as one printable line: no control character reaches the terminal."""
    return "".join(c if c.isprintable() else " " for c in str(text))[:300].strip()


def _write(file: Path, text: str) -> None:
    try:
        caches.write(file, text)
    except OSError as error:
        raise AgentrigError(
            f"{file} cannot be written: {error.strerror}; set AGENTRIG_CACHE to another folder"
        ) from None
