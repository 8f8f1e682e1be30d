"""Every import path of 0.1 works until 0.3, and says where the name is now."""

import importlib
import subprocess
import sys

import pytest

from agentrig._moved import MOVED, RENAMED

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


def test_a_from_import_warns_at_the_users_line() -> None:
    code = "import warnings; warnings.simplefilter('always')\nfrom agentrig.config import setting\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "<string>:2: DeprecationWarning: agentrig.config.setting is now agentrig.settings.setting" in done.stderr


def test_a_name_that_never_was_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="no_such_name"):
        exec("from agentrig.config import no_such_name")
