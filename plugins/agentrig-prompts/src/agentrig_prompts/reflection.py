"""Reflections: a model reads rollouts with their feedback, and writes a better prompt."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from gepa.strategies.instruction_proposal import InstructionProposalSignature as Signature

from agentrig import Endpoint
from agentrig.algorithms import Session
from agentrig.errors import RunStopped
from agentrig.prompting import fields, misfit
from agentrig_prompts.config import GepaConfig
from agentrig_prompts.record import Record, digest_of
from agentrig_prompts.rollouts import Stopping, waited

log = logging.getLogger(__name__)

TRIES = 2
"""How often a prompt is asked for, if the first reply can't be used."""

ASKED = """An assistant works with this prompt:
```
<curr_param>
```

It is a template: {fields}

These are tasks, what the assistant answered with the prompt, and what a grader says of the answers:
<side_info>

Write a better prompt for the assistant. Work out from the examples what the task is, what makes an answer good, and
which facts and rules the assistant needs but was not told, and put these into the prompt: it will see nothing else.
Reply with the new prompt between two lines of ```, and nothing else between them.{again}"""
"""What the reflecting model is asked; gepa puts prompt and examples in."""


class Reflection:
    """Asks the reflecting model for prompts; what can't be used is refused and counted.

    Args:
        session: The run's.
        endpoint: The agent's model, which reflects if the settings name no other.
        config: The settings.
        record: What was paid before.

    Attributes:
        refused: Replies that were no prompt, or a prompt with other fields.
        calls: Reflections that were asked for.
    """

    def __init__(self, session: Session, endpoint: Endpoint, config: GepaConfig, record: Record) -> None:
        self._session, self._config, self._record = session, config, record
        own = config.reflection_base_url
        key = config.reflection_api_key.reveal() if config.reflection_api_key else "none"
        self._url = f"{(own or endpoint.base_url).rstrip('/')}/chat/completions"
        self._model = config.reflection_model or endpoint.model
        self._headers = {"Authorization": f"Bearer {key if own else endpoint.api_key}"}
        self._asked: Counter[str] = Counter()
        self.refused = 0

    def better(self, prompt: str, name: str, examples: Sequence[Mapping[str, Any]]) -> str | None:
        """Return a new prompt, or None if none could be used."""
        named = ", ".join(f"{{{field}}}" for field in sorted(fields(prompt)))
        about = (
            f"keep the fields {named}, which are filled in, and add none." if named else "it has no fields; add none."
        )
        about += " Write a brace that is text twice: {{ }}."
        again = ""
        for _ in range(TRIES):
            template = ASKED.replace("{fields}", about).replace("{again}", again)
            asked = Signature.prompt_renderer(
                {"current_instruction_doc": prompt, "dataset_with_feedback": examples, "prompt_template": template}
            )
            reply = self._reply(str(asked))
            found = Signature.output_extractor(reply)["new_instruction"] if "```" in reply else ""
            why = misfit(found, prompt) if found else "the reply has no prompt between ```"
            if not why and found != prompt:
                return found
            self.refused += 1
            log.warning(
                "step under way: a new text of the prompt %s is refused: %s", name, why or "nothing is new in it"
            )
            again = f"\n\nYour last reply could not be used: {why or 'it repeats the prompt'}."
        return None

    def _reply(self, asked: str) -> str:
        """Return the model's reply; one that was paid before is taken from the record.

        Raises:
            Stopping: It can't be reached, or refuses the request; or the user asked to end.
        """
        self._asked[asked] += 1
        key = digest_of("reflection", asked, self._asked[asked])
        known = self._record.last(key)
        if known is not None:
            return str(known["reply"])
        try:
            body = self._post(asked)
        except RunStopped as stopped:
            raise Stopping from stopped
        try:
            reply = body["choices"][0]["message"]["content"] or ""
            used = body.get("usage") or {}
            tokens = int(used.get("prompt_tokens") or 0) + int(used.get("completion_tokens") or 0)
        except (LookupError, TypeError, ValueError, AttributeError):
            reply, tokens = "", 0  # refused, as a reply without a prompt is
        self._record.add(key, calls=1, tokens=tokens, settled=True, reply=str(reply))
        return str(reply)

    def _post(self, asked: str) -> Any:
        """Send a request, again while the server is away or busy.

        Raises:
            RunStopped: It stays so, or refuses the request.
        """
        messages = [{"role": "user", "content": asked}]
        body = {"model": self._model, "messages": messages, "temperature": self._config.reflection_temperature}
        replies: list[httpx.Response] = []

        def ask() -> httpx.Response:
            replies.append(httpx.post(self._url, json=body, headers=self._headers, timeout=600))
            return replies[-1]

        waited(ask, f"the reflecting model at {self._url}", self._session, self._config.patience_s)
        reply = replies[-1]
        if reply.status_code >= 400:
            raise RunStopped(
                f"the reflecting model at {self._url} refuses the request: {reply.status_code} {reply.text[:200]}. Set "
                f"algorithm.reflection_base_url, reflection_model and reflection_api_key. {self._session.resumes}",
                cause="model-down",
            )
        try:
            return reply.json()
        except ValueError:
            return None
