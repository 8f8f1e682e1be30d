"""Runs a script that was written for Agent Lightning's `Trainer`, unchanged, with agentrig's in its place."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrig.errors import ConfigError
from agentrig_lightning.imports import import_lightning
from agentrig_lightning.trainer import Trainer


def launch(script: Path, arguments: Sequence[str], *, algorithm: str = "", settings: Sequence[str] = ()) -> None:
    """Run a script as `python SCRIPT ARGUMENTS` would, in this process.

    Args:
        script: The script.
        arguments: Its own arguments.
        algorithm: An algorithm of agentrig that runs in the place of `agl.VERL`; '' for none.
        settings: Settings of its runs, as on the command line.

    Raises:
        ConfigError: There is no such script, or it has ended without a call to `fit` or `dev`.
    """
    if not script.is_file():
        raise ConfigError(f"there is no script {script} (looked in {Path.cwd()})")
    package: Any = import_lightning()
    import agentrig_lightning.store_run  # noqa: F401  (it keeps Agent Lightning's own Trainer, which is replaced below)

    class ScriptTrainer(Trainer):
        other, more, shows = algorithm, tuple(settings), True
        made: list[Trainer] = []  # noqa: RUF012  (shared by all instances)

        def _run(self, *arguments: Any) -> None:
            self.made.append(self)
            super()._run(*arguments)

    package.Trainer = package.trainer.Trainer = ScriptTrainer
    sys.argv[:] = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")
    if not ScriptTrainer.made:
        raise ConfigError(
            f"{script} has ended without a run: it called neither fit nor dev of Agent Lightning's Trainer. Does it "
            "take arguments, or import another Trainer?"
        )
