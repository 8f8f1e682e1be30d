"""A starting model of the Hugging Face hub: downloaded once, from a hub on this machine; kept in the client's cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from agentrig.testing.scripted import LocalServer, QuietHandler, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"

READY = """
import sys
from agentrig.errors import ConfigError
from agentrig_grpo import ready
from agentrig_grpo.config import LearnerConfig
from agentrig_grpo.naming import model_directory
try:
    ready(LearnerConfig(model="acme/tiny"))
    print(model_directory("acme/tiny"))
except ConfigError as error:
    print(error)
"""


@contextlib.contextmanager
def hub(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve the files of a folder as the hub serves `acme/tiny`; yields its URL, and the files that were fetched."""
    fetched: list[str] = []
    files = sorted(file for file in folder.iterdir() if file.is_file())

    class Hub(QuietHandler):
        def answer(self, body: bytes, **headers: str) -> None:
            named = {name.replace("_", "-").lower(): value for name, value in headers.items()}
            if self.command == "GET":
                self.reply(200, body, named)
                return
            self.send_response(200)
            for name, value in {"content-length": str(len(body)), **named}.items():
                self.send_header(name, value)
            self.end_headers()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/acme/tiny/revision/"):
                siblings = [{"rfilename": file.name} for file in files]
                about = {"id": "acme/tiny", "sha": COMMIT, "siblings": siblings}
                self.answer(json.dumps(about).encode(), Content_Type="application/json")
                return
            if path.startswith("/api/models/acme/tiny/tree/"):
                entries = [
                    {
                        "type": "file",
                        "path": f.name,
                        "size": f.stat().st_size,
                        "oid": hashlib.sha1(f.read_bytes()).hexdigest(),
                    }
                    for f in files
                ]
                self.answer(json.dumps(entries).encode(), Content_Type="application/json")
                return
            wanted = [file for file in files if path == f"/acme/tiny/resolve/{COMMIT}/{file.name}"]
            if not wanted:
                self.send_error(404)
                return
            body = wanted[0].read_bytes()
            fetched.extend([wanted[0].name] if self.command == "GET" else [])
            self.answer(body, ETag=f'"{hashlib.sha1(body).hexdigest()}"', X_Repo_Commit=COMMIT)

        do_HEAD = do_GET

    with serving(LocalServer(Hub)) as server:
        yield server.url.removesuffix("/v1"), fetched


def ready(home: Path, url: str) -> tuple[list[str], str]:
    """Make the model ready in another process; return what it prints, and what it tells."""
    environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", READY],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.splitlines(), done.stderr


def test_a_model_of_the_hub_is_downloaded_once(model_dir: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    shutil.copytree(model_dir, there)
    (there / "pytorch_model.bin").write_bytes(b"never")
    with hub(there) as (url, fetched):
        (place, *more), told = ready(tmp_path, url)
    assert not more, (place, more)
    assert "downloading the model acme/tiny from the Hugging Face hub" in told
    assert {"config.json", "model.safetensors"} <= set(fetched)
    assert "pytorch_model.bin" not in fetched
    assert (Path(place) / "model.safetensors").read_bytes() == (model_dir / "model.safetensors").read_bytes()

    again, told = ready(tmp_path, "http://127.0.0.1:9")  # the hub has gone
    assert again == [place]
    assert "downloading" not in told


def test_a_hub_that_does_not_answer_is_named_with_the_command(tmp_path: Path) -> None:
    lines, _ = ready(tmp_path, "http://127.0.0.1:9")
    assert "[algorithm] model = 'acme/tiny': there is no such directory" in lines[0]
    assert lines[1].endswith("; others: a local Hugging Face directory, or OWNER/NAME of the hub:")
    assert "hf download acme/tiny --local-dir models/tiny, then algorithm.model=models/tiny" in lines[2]
    assert lines[3].startswith("  the hub: ")


def test_half_a_model_in_the_cache_is_fetched_again(model_dir: Path, tmp_path: Path) -> None:
    with hub(model_dir) as (url, fetched):
        (place,), _ = ready(tmp_path, url)
        (Path(place) / "model.safetensors").unlink()
        fetched.clear()
        assert ready(tmp_path, url)[0] == [place]
    assert (Path(place) / "model.safetensors").is_file()
