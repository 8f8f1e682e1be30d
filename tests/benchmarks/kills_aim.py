"""A plugin file that ends its own run at a chosen moment, for `kills.py`; without `KILLS_AIM` it does nothing.

`KILLS_AIM` is JSON: `{"at": NAME OF MOMENTS, "call": N, "delay_s": S, "signal": NUMBER, "hit": FILE}`. At the N-th call
of that function a timer is started that sends the signal to this process S seconds later, so that it strikes inside
the function; FILE is made first. Runners do not get the variable, so only the run's own process strikes itself.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import threading
import time
from pathlib import Path

from agentrig import hookimpl

MOMENTS = {
    "update": ("agentrig_grpo.learner", "Learner.update"),
    "transfer": ("agentrig_grpo.server.handle", "Embedded.swap"),
    "copy": ("agentrig_grpo.learner", "Learner.copied"),
    "checkpoint": ("agentrig.run.checkpoints", "Checkpoints.save"),
    "report": ("agentrig.view.observer", "write_page"),
    "rename": ("os", "replace"),
    "flush": ("os", "fsync"),
    "begin": ("agentrig.run.training", "begin"),
}
"""What can be aimed at: the module, and the function in it."""


def aim(at, call, delay_s, number, hit):
    """Wrap the function so that its N-th call is struck."""
    module_name, path = MOMENTS[at]
    owner = importlib.import_module(module_name)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    function = getattr(owner, name)
    calls = [0]

    def strike():
        time.sleep(delay_s)
        Path(hit).touch()
        os.kill(os.getpid(), number)

    @functools.wraps(function)
    def wrapped(*arguments, **more):
        calls[0] += 1
        if calls[0] == call:
            if delay_s:
                threading.Thread(target=strike, daemon=True).start()
            else:
                strike()
        return function(*arguments, **more)

    setattr(owner, name, wrapped)


@hookimpl
def on_run_end(event):
    """Nothing; a plugin has a hook."""


if "KILLS_AIM" in os.environ:
    wish = json.loads(os.environ["KILLS_AIM"])
    aim(wish["at"], wish["call"], wish["delay_s"], wish["signal"], wish["hit"])
