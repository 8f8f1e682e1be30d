"""Fixtures for the tests of agentrig-lightning."""

from __future__ import annotations

import agentrig_lightning  # noqa: F401  (first: then Agent Lightning comes without litellm)
from fixtures import _served, model, spider_dir, toy_file  # noqa: F401
