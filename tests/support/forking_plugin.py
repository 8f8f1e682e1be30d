"""Code that forks wherever agentrig calls it, and lets the child come back; or changes the current directory."""

from __future__ import annotations

import os

from agentrig import AdapterSpec, CreditSpec, ObserverSpec, Task, TasksSpec, hookimpl


def fork(place):
    if os.environ.get("MOVES") == place:
        os.chdir("/")
    if os.environ.get("FORKS") == place:
        os.fork()


fork("import")


class Tasks:
    splits = ("train",)
    roles = {"train": "train"}  # noqa: RUF012

    def __init__(self, config):
        fork("build")

    def load(self, split):
        fork("load")
        return [Task(id="a", input={"q": "a"}, private={"a": "a"})]


def adapter(trace):
    fork("adapter")
    return []


def credit(groups):
    fork("credit")
    return [[0.0 for _ in group] for group in groups]


class Observer:
    def on_run_end(self, event):
        fork("observer")


@hookimpl
def register_tasks():
    yield TasksSpec(name="forks", summary="", build=Tasks)


@hookimpl
def register_adapters():
    yield AdapterSpec(name="forks", summary="", build=lambda config: adapter)


@hookimpl
def register_credits():
    yield CreditSpec(name="forks", summary="", build=lambda config: credit)


@hookimpl
def register_observers():
    yield ObserverSpec(name="forks", summary="", build=lambda config: Observer())
