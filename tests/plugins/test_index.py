"""The index of published plugins: what ships, and what a registry gives. The registry here is a real HTTP server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attrs
import plugin_index
import pytest
from click.testing import CliRunner

from agentrig.cli.entry import main
from agentrig.plugins import index


@attrs.define
class Registry:
    """A package registry on loopback: PyPI's `/simple/` in its JSON or HTML form, and `/pypi/NAME/json`."""

    url: str = ""
    html: bool = False
    packages: dict[str, Any] = attrs.field(factory=dict)
    asked: list[str] = attrs.field(factory=list)

    def reply(self, path: str, accept: str) -> tuple[int, str, bytes]:
        self.asked.append(path)
        if path == "/simple/":
            names = [*(f"package-{i}" for i in range(20_000)), *self.packages, "agentrig-without-release"]
            if self.html:
                text = "".join(f'<a href="/simple/{name.lower()}/">{name}</a><br/>\n' for name in names)
                return 200, "text/html", text.encode()
            assert "application/vnd.pypi.simple.v1+json" in accept
            body = {"meta": {"api-version": "1.1"}, "projects": [{"name": name} for name in names]}
            return 200, "application/vnd.pypi.simple.v1+json", json.dumps(body).encode()
        name = path.removeprefix("/pypi/").removesuffix("/json")
        found = {key.lower().replace("_", "-"): value for key, value in self.packages.items()}.get(name)
        if found is None:
            return 404, "application/json", b'{"message": "Not Found"}'
        return 200, "application/json", found if isinstance(found, bytes) else json.dumps({"info": found}).encode()


def about(name: str, *, keywords: str | None = "agentrig", **more: Any) -> dict[str, Any]:
    info = {"name": name, "version": "1.0", "summary": f"The package {name}.", "keywords": keywords}
    return {**info, "home_page": None, "project_urls": None, "requires_dist": None, "yanked": False, **more}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    monkeypatch.setenv("AGENTRIG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    served = Registry()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, body = served.reply(self.path, self.headers.get("Accept", ""))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        served.url = f"http://127.0.0.1:{server.server_port}"
        yield served
        server.shutdown()


def search(*words: str) -> Any:
    return CliRunner().invoke(main, ["plugins", "search", *words])


def names(*words: str) -> list[str]:
    return [entry["name"] for entry in json.loads(search(*words, "--json").stdout)]


def test_the_index_that_ships_is_up_to_date() -> None:
    made = json.loads(index.SHIPPED.read_text())["made"]
    assert index.SHIPPED.read_text() == plugin_index.text(made), (
        "run: python tests/support/plugin_index.py --write DATE"
    )


def test_the_index_that_ships_is_searched(registry: Registry) -> None:
    assert names("reward") == ["agentrig-spider"]
    assert names("SQL", "agent") == ["agentrig-langgraph-sql", "agentrig-spider"]  # the one with it in its name first
    printed = search("ascend").stdout
    assert printed.startswith("agentrig-ascend 0.2.0.dev0  (installed: 0.2.0.dev0)\n    ")
    assert "    agentrig<0.3,>=0.2.0.dev0" in printed
    nothing = search("no-such-word")
    assert nothing.exit_code == 1
    assert 'no plugin with "no-such-word" in the index of ' in nothing.stderr
    assert "--refresh asks the registry" in nothing.stderr
    assert registry.asked == []


@pytest.mark.parametrize("html", [False, True])
def test_a_registry_gives_a_new_index(registry: Registry, tmp_path: Path, html: bool) -> None:
    """Packages with the keyword in name and keywords; what the registry says is shown as plain text."""
    registry.html = html
    registry.packages = {
        "agentrig-chess": about(
            "agentrig-chess",
            keywords="agentrig, tasks,chess",
            requires_dist=["agentrig<0.3,>=0.2", "agentrig>=9; extra == 'x'", "not ( a requirement"],
            project_urls={"Source": "https://example.org/chess"},
        ),
        "Agentrig_Go": about("Agentrig_Go", keywords="AGENTRIG go", summary="Go.\x1b[31m\nRed"),
        "agentrig-squatter": about("agentrig-squatter", keywords=None),
        "agentrig-yanked": about("agentrig-yanked", yanked=True),
        "my-agentrig-tools": about("my-agentrig-tools"),
    }
    found = names("agentrig", "--refresh", "--index", f"{registry.url}/simple")
    assert found == ["Agentrig_Go", "agentrig-chess", "my-agentrig-tools"]
    assert "/pypi/agentrig-without-release/json" in registry.asked
    assert not any(path.startswith("/pypi/package-") for path in registry.asked)
    before = len(registry.asked)
    printed = search("chess").stdout
    assert printed == (
        "agentrig-chess 1.0\n    The package agentrig-chess.\n    agentrig<0.3,>=0.2  https://example.org/chess\n"
    )
    assert "Go. [31m Red" in search("go").stdout
    assert search("spider").exit_code == 1  # the new index replaces the one that ships
    assert len(registry.asked) == before, "only --refresh asks"


@pytest.mark.parametrize(
    ("packages", "said"),
    [
        ({"agentrig-x": b"<html>"}, "/pypi/agentrig-x/json is not the JSON of a package registry (JSONDecodeError"),
        ({"agentrig-x": b'{"info": {}}'}, "is not the JSON of a package registry (KeyError: 'name')"),
        ({"agentrig-x": b"[]"}, "is not the JSON of a package registry (TypeError"),
    ],
)
def test_a_registry_that_answers_something_else_is_named(registry: Registry, packages: Any, said: str) -> None:
    registry.packages = packages
    done = search("x", "--refresh", "--index", registry.url)
    assert (done.exit_code, said in done.stderr) == (1, True), done.stderr
    assert not index.refreshed().exists()


def test_a_registry_that_cannot_be_asked_is_named(registry: Registry) -> None:
    done = search("x", "--refresh", "--index", "http://127.0.0.1:9")
    assert done.exit_code == 1
    assert "the registry http://127.0.0.1:9 cannot be asked: " in done.stderr
    assert "Without --refresh, the search uses the index of " in done.stderr
    assert "--index needs --refresh" in search("x", "--index", registry.url).stderr
    index.refreshed().parent.mkdir(parents=True)
    index.refreshed().write_text('{"plugins": [3]}')
    assert "is damaged" in search("x").stderr
