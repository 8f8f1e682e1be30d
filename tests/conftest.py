"""Fixtures for the tests of the core."""

from __future__ import annotations

from fixtures import _served, ended_run, model, quick_images, small_disk, spider_dir, toy_file, toy_plan  # noqa: F401
