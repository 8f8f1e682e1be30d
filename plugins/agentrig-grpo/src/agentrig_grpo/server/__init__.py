"""The embedded LLM server: OpenAI's chat completions over a small continuous-batching engine.

How a request goes, by module:
    app (HTTP) → protocol (checks) → chat (template, token ids) → engine (batching) → decoder (the
    model) and sampling → chat (text) → protocol (response)
`handle` is the parent's side: it starts the server as a process, swaps its weights and stops it.
"""

from __future__ import annotations
