"""vLLM's engine arguments."""

from __future__ import annotations

import os
from types import SimpleNamespace


class AsyncEngineArgs:
    def __init__(self, args):
        self.args = args

    @classmethod
    def from_cli_args(cls, args):
        return cls(args)

    def create_engine_config(self, usage_context):
        if os.environ.get("STAND_IN_FAILS") == "configure":
            raise ValueError("max_model_len is larger than the model's")
        return SimpleNamespace(args=self.args)
