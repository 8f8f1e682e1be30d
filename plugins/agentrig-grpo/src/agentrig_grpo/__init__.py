"""The algorithm `grpo`: group-relative policy optimization in torch, with its own LLM server."""

from __future__ import annotations
