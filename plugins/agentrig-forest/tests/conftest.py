"""Settings and fixtures for the tests of agentrig-forest."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from fixtures import make_model_fixture  # noqa: F401
