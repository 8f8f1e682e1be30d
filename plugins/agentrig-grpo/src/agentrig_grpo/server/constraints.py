"""Constrained sampling: which tokens may come next so that a reply is JSON of a schema, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from threading import Lock
from typing import Any

import torch  # noqa: TID253  (imported in the server process only)

KEPT = 256
"""Compiled schemas that are kept."""

FORMAT: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""llguidance's options: with free whitespace, a model may write spaces until its tokens end. A schema's own
`x-guidance` comes first."""


class ConstraintError(ValueError):
    """A schema can't be compiled, or a reply got too complex for it."""


class Constraint:
    """What one reply may go on with.

    Args:
        matcher: An `llguidance.LLMatcher` at its start.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> torch.Tensor:
        """Return which tokens may come next, bool [vocabulary]; after the JSON's end only the end of the reply.

        Raises:
            ConstraintError: The state is too complex for llguidance's limits.
        """
        mask = self._matcher.compute_logit_bias()
        self._check()
        return torch.frombuffer(bytearray(mask), dtype=torch.uint8) > 0

    def accept(self, token: int) -> None:
        """Go on by a token that was allowed; see `allowed` for the errors."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(f"the schema's constraint failed: {_said(self._matcher.get_error())}")


class Constraints:
    """The schemas of one model's server, compiled once each; may be used in any thread.

    Args:
        tokenizer: A fast Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._own: Any = None
        self._compiled = lru_cache(KEPT)(self._compile)
        self._lock = Lock()

    def constraint(self, schema: Mapping[str, Any]) -> Constraint:
        """Return the constraint of a new reply.

        Raises:
            ConstraintError: llguidance can't compile the schema, or can't read the tokenizer.
        """
        with self._lock:
            return Constraint(self._compiled(json.dumps(schema)).deep_copy())

    def _compile(self, schema: str) -> Any:
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        if self._own is None:
            try:
                self._own = from_tokenizer(self._tokenizer, n_vocab=self._vocabulary)
            except Exception as error:
                raise ConstraintError(
                    f"llguidance can't read this model's tokenizer, so no schema can be enforced: {_said(error)}"
                ) from error
        options: Any = dict(FORMAT)
        matcher = LLMatcher(self._own, LLMatcher.grammar_from_json_schema(schema, defaults=options), log_level=0)
        if matcher.is_error():
            raise ConstraintError(f"this schema can't be enforced: {_said(matcher.get_error())}")
        matcher.compute_logit_bias()
        if matcher.is_error():  # some schemas compile, and allow no first token: {"$ref": "#"}
            raise ConstraintError(
                "this schema can't be enforced: no text fits it. Does it refer to itself with nothing in between, as "
                '{"$ref": "#"} does?'
            )
        return matcher


def _said(error: object) -> str:
    words = " ".join(str(error).partition("<state>")[0].split())  # what follows is the parser's own state
    return words[:300] or type(error).__name__
