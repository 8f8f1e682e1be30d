"""Callbacks: HTTP addresses of a runner at which an agent outside of it, a service or a program, leaves its answer."""

from __future__ import annotations

from agentrig.callbacks.answers import Answer, Callback
from agentrig.callbacks.listener import Listener

__all__ = ["Answer", "Callback", "Listener"]
