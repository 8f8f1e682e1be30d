"""Make the virtual environment of `make setup`: what the lock names, linked from a cache where it was built before.

    python3.11 requirements/environment.py .venv

The cache is the folder agentrig/environments in $XDG_CACHE_HOME or ~/.cache. An entry holds one complete environment,
and is named by a digest of the lock, of this file and of the interpreter. It is written beside and then renamed, so
that an interrupted build leaves none; one whose files have changed since is deleted. Only Python's own library is used.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
UV = "uv==0.13.8"
KEPT = 3  # entries; each takes about 3 GB
# Half of what is installed: pip has compiled it already, or no run imports it.
UNCOMPILED = (
    r"/(torch|sympy|networkx|mpmath|pip)/|/(pandas|matplotlib|fontTools|verl|ray|sqlalchemy|azure)/"
    r"|/(litellm|langchain_community|langchain_classic|mypy|mypyc)/|/transformers/models/(?!auto/|qwen2/)|/tests?/"
)


def cache() -> Path:
    """Return the folder of the entries."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrig" / "environments"


def key() -> str:
    """Return the name of the entry for this lock, this recipe and this interpreter."""
    digest = hashlib.sha256(f"{sys.version} {sys.base_prefix} {platform.machine()}".encode())
    for file in (HERE / "cpu.lock", HERE / "torch.txt", Path(__file__)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def build(venv: Path) -> None:
    """Install the locked packages; an environment that exists keeps what it has beside them."""
    python = str(venv / "bin" / "python")
    torch = [line for line in (HERE / "torch.txt").read_text("utf-8").split() if line.startswith("torch==")]
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    # torch comes first and alone: the version is the one whose CPU build is known to work here. The rest is the exact
    # set of the lock, installed without resolution because agentops and TransferQueue disagree on `packaging`.
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", UV, *torch], check=True)
    locked = ["--no-deps", "-r", str(HERE / "cpu.lock")]
    subprocess.run([str(venv / "bin" / "uv"), "pip", "install", "-q", "--python", python, *locked], check=True)
    # Agent Lightning imports about 3000 modules; compiled once here, not at the first start of every process. A package
    # may ship a file that does not compile.
    compiled = ["-qq", "-j", "0", "-x", UNCOMPILED, str(venv / "lib")]
    subprocess.run([python, "-m", "compileall", *compiled], check=False)


def link(source: str, target: str) -> None:
    """Make a file by a hard link, or by a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def digest(folder: Path) -> str:
    """Return a digest of the path, size and time of every file in a folder: an edit changes it."""
    found = hashlib.sha256()
    for place, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            path = os.path.join(place, name)
            state = os.lstat(path)
            found.update(f"{os.path.relpath(path, folder)} {state.st_size} {state.st_mtime_ns}\n".encode())
    return found.hexdigest()


def store(venv: Path, entry: Path) -> None:
    """Keep an environment as an entry, and delete the oldest ones."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=entry.parent) as place:
        made = Path(place, "entry")
        shutil.copytree(venv, made / "venv", symlinks=True, copy_function=link)
        (made / "path").write_text(str(venv), "utf-8")
        (made / "digest").write_text(digest(made / "venv"), "utf-8")
        if not entry.exists():
            made.rename(entry)
    for old in sorted(entry.parent.iterdir(), key=os.path.getmtime, reverse=True)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def restore(entry: Path, venv: Path) -> bool:
    """Make an environment from an entry, and return whether there was one; a damaged one is deleted.

    The file pyvenv.cfg comes last: an environment without it is not complete.
    """
    if not entry.is_dir():
        return False
    if (entry / "digest").read_text("utf-8") != digest(entry / "venv"):
        print(f"{entry} has changed since it was stored: it is deleted, and built again")
        shutil.rmtree(entry)
        return False
    os.utime(entry)
    shutil.rmtree(venv, ignore_errors=True)
    shutil.copytree(
        entry / "venv", venv, symlinks=True, copy_function=link, ignore=shutil.ignore_patterns("pyvenv.cfg")
    )
    shutil.copy2(entry / "venv" / "pyvenv.cfg", venv / "pyvenv.new")
    former = (entry / "path").read_bytes()
    for file in [*(venv / "bin").iterdir(), venv / "pyvenv.new"]:
        if file.is_file() and not file.is_symlink() and former in (text := file.read_bytes()):
            mode = file.stat().st_mode
            file.unlink()  # the entry has the same file
            file.write_bytes(text.replace(former, str(venv).encode()))
            file.chmod(mode)
    (venv / "pyvenv.new").rename(venv / "pyvenv.cfg")
    return True


def main() -> None:
    """Make or update the environment."""
    venv, entry = Path(sys.argv[1]).absolute(), cache() / key()
    if (venv / "pyvenv.cfg").is_file():
        build(venv)
        return
    try:
        if restore(entry, venv):
            print(f"the packages come from {entry}")
            return
    except (OSError, shutil.Error) as error:
        print(f"{entry} could not be used: {error}")
        shutil.rmtree(venv, ignore_errors=True)
    build(venv)
    try:
        store(venv, entry)
    except (OSError, shutil.Error) as error:
        print(f"the environment could not be kept in {entry}: {error}")


if __name__ == "__main__":
    main()
