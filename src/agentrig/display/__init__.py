"""Terminal output: the live display of a run, and the span tree of a rollout."""

from agentrig.display.live import LiveDisplay
from agentrig.display.tree import span_text, span_tree

__all__ = ["LiveDisplay", "span_text", "span_tree"]
