"""Fixtures for the tests of agentrig-lightning."""

from __future__ import annotations

from fixtures import _served, model, spider_dir, toy_file  # noqa: F401
