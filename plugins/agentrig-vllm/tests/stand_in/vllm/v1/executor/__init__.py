"""What runs the worker."""

from __future__ import annotations


class Executor:
    @staticmethod
    def get_class(config):
        return Executor
