"""The embedded LLM server: OpenAI's chat completions over a small continuous-batching engine.

How a request goes, by module:
    connections (limits) → access (key, Host, Origin) → app (HTTP) → protocol (checks) → chat (template,
    token ids) → engine (batching) → decoder (the model) and sampling → chat (text) → protocol (response)
How weights come: handle (the run) → transfer (memory) → channel → engine → parameters.
`handle` is the parent's side: it starts the server as a process, gives it new weights and stops it. On Linux the
kernel ends the process with the thread that started it, whatever it computes.
"""

from __future__ import annotations
