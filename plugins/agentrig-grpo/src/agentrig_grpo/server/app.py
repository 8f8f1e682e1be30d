"""The HTTP side: routes, streaming, and the loop that drives the engine."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agentrig.http_server import Refused, openai_error
from agentrig_grpo.server import completions, protocol, replies
from agentrig_grpo.server.chat import Chat, TooLong
from agentrig_grpo.server.constraints import Constraint, ConstraintError, Constraints
from agentrig_grpo.server.engine import Engine, Request, Score
from agentrig_grpo.server.protocol import ChatRequest

log = logging.getLogger(__name__)

MOST_WAITING = 4096
"""Most choices that may wait for a row, or run; more are refused with status 429."""


class Api:
    """The routes of one server.

    Args:
        model: The name that requests must ask for.
        max_length: The model's context in tokens.
    """

    def __init__(self, engine: Engine, chat: Chat, *, model: str, max_length: int) -> None:
        self.engine, self.chat, self.model, self.max_length = engine, chat, model, max_length
        self._wake = asyncio.Event()
        self._open = 0
        self._asleep = False
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
        self._rendering: dict[str, asyncio.Future[tuple[int, ...]]] = {}

    @cached_property
    def _constraints(self) -> Constraints:
        return Constraints(self.chat.tokenizer, self.engine.decoder.vocabulary)

    def app(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/chat/completions", _guarded(self.completions), methods=["POST"]),
                Route("/v1/completions", _guarded(self.text_completions), methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/tokenize", _guarded(self.tokenize), methods=["POST"]),
                Route("/health", self.health),
            ],
            exception_handlers={HTTPException: _http_error},
        )

    async def drive(self) -> None:
        """Run the engine for ever; between two steps the event loop takes in requests and sends responses."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self.engine.busy:
                self.engine.tick()
                # One turn reads sockets and starts handlers, the next runs them up to `submit`.
                for _ in range(3):
                    await asyncio.sleep(0)

    async def completions(self, http: HttpRequest) -> Response:
        """Answer a chat completion."""
        self._check_awake()
        request = protocol.parse(await http.body(), model=self.model)
        self._check_room(request.n)
        self._open += request.n
        try:
            constraints = await self._constraints_of(request)
            prompt = await self._prompt(request)
        finally:
            self._open -= request.n
        choices = protocol.requests_of(request, prompt, self.chat, max_length=self.max_length, constraints=constraints)
        if request.stream:
            return StreamingResponse(self._stream(request, choices), media_type="text/event-stream")
        await self._until_done(choices, http)
        _raise_failures(choices)
        body = replies.response(request, choices, self.chat, model=self.model)
        return Response(body, media_type="application/json")

    async def tokenize(self, http: HttpRequest) -> Response:
        """Return the token ids of a text, or of a chat completion's prompt, as vLLM does."""
        body = await http.body()
        text = completions.text_of(body, model=self.model)
        prompt = await self._prompt(protocol.parse(body, model=self.model)) if text is None else self.chat.ids(text)
        return _json({"count": len(prompt), "max_model_len": self.max_length, "tokens": prompt})

    async def text_completions(self, http: HttpRequest) -> Response:
        """Answer a completion of token ids; its prompt's scores and its tokens come from one version of the weights."""
        self._check_awake()
        request = completions.parse(await http.body(), model=self.model, vocabulary=self.engine.decoder.vocabulary)
        self._check_room(1)
        while True:
            choice = completions.request_of(request, max_length=self.max_length)
            score = await self._score(request.prompt) if request.prompt_logprobs is not None else None
            await self._until_done([choice], http)
            if score is None or score.version == choice.version:
                break
        _raise_failures([choice])
        body = completions.response(request, choice, score, self.chat, self.engine.decoder, model=self.model)
        return Response(body, media_type="application/json")

    def _check_room(self, choices: int) -> None:
        if self._open + choices > MOST_WAITING:
            raise Refused("too many requests are waiting; try again later", status=429, code="rate_limit_exceeded")

    def _check_awake(self) -> None:
        if self._asleep:
            raise Refused(
                "the server sleeps, or has no weights yet: its run sends them before it asks",
                status=503,
                code="no_weights",
            )

    async def _score(self, tokens: Sequence[int]) -> Score:
        done: asyncio.Future[Score | Exception] = asyncio.get_running_loop().create_future()
        self.engine.score(tokens, done.set_result)
        self._wake.set()
        found = await done
        if isinstance(found, Exception):
            raise Refused(f"the model failed: {type(found).__name__}: {found}", status=500)
        return found

    async def _prompt(self, request: ChatRequest) -> tuple[int, ...]:
        """Return the prompt's token ids; a thread beside the event loop makes them, once for all who ask the same."""
        called = any("tool_calls" in message for message in request.messages)
        if (request.tools or called) and isinstance(self.chat.tool_form, str):
            named = "tools" if request.tools else "messages"
            raise Refused(self.chat.tool_form, param=named, code="unsupported_value")
        options = {} if request.add_generation_prompt else {"add_generation_prompt": False}
        if request.continue_final_message:
            options["continue_final_message"] = True
        conversation = self.chat.conversation(request.messages, request.tools, **options)
        ids = self.chat.kept(conversation)
        if ids is not None:
            return ids
        made = self._rendering.get(conversation)
        if made is None:
            loop = asyncio.get_running_loop()
            made = loop.run_in_executor(self._threads, self.chat.render, conversation, self.max_length)
            self._rendering[conversation] = made
            made.add_done_callback(lambda _: self._rendering.pop(conversation, None))
        try:
            # One who hangs up must not take the prompt away from the others.
            ids = await asyncio.shield(made)
        except TooLong as error:
            raise protocol.too_long(f"at least {error.tokens}", request, self.max_length) from None
        except ValueError as error:
            raise Refused(str(error), param="messages") from None
        self.chat.keep(conversation, ids)
        return ids

    async def _constraints_of(self, request: ChatRequest) -> list[Constraint]:
        """Return a constraint for each choice, or none; a thread beside the event loop compiles a new schema."""
        if not request.response_format:
            return []
        loop, schema = asyncio.get_running_loop(), request.response_format
        make = self._constraints.constraint
        try:
            return [await loop.run_in_executor(self._threads, make, schema) for _ in range(request.n)]
        except ConstraintError as error:
            raise Refused(str(error), param="response_format") from None

    def _submit(self, choices: list[Request]) -> None:
        self._open += len(choices)
        for choice in choices:
            self.engine.submit(choice)
        self._wake.set()

    async def _until_done(self, choices: list[Request], http: HttpRequest) -> None:
        """Wait for all choices; when the client hangs up first, give their rows back."""
        done = asyncio.get_running_loop().create_future()

        def changed() -> None:
            if not done.done() and all(c.finish is not None for c in choices):
                done.set_result(None)

        for choice in choices:
            choice.changed = changed
        self._submit(choices)
        gone = asyncio.ensure_future(http.receive())
        try:
            await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise ClientDisconnect
        finally:
            gone.cancel()
            self._close(choices)

    def _close(self, choices: list[Request]) -> None:
        self._open -= len(choices)
        for choice in choices:
            self.engine.abort(choice)

    async def _stream(self, request: ChatRequest, choices: list[Request]) -> AsyncIterator[bytes]:
        """Yield server-sent events: one chunk a choice and step that has something new."""
        news = asyncio.Event()
        for choice in choices:
            choice.changed = news.set
        self._submit(choices)
        try:
            senders = [replies.Deltas(request, choice, self.chat) for choice in choices]
            first = protocol.head("chat.completion.chunk", self.model, self.engine.version)
            opening: dict[str, Any] = {"choices": [sender.opening() for sender in senders]}
            if request.return_token_ids:
                opening["prompt_token_ids"] = choices[0].prompt
            yield _event({**first, **opening})
            while not all(sender.closed for sender in senders):
                await news.wait()
                news.clear()
                for sender in senders:
                    if sender.choice.finish == "error":
                        error = Refused(sender.choice.error, status=500)
                        yield _event(openai_error(error))
                        return
                    delta = sender.delta()
                    if delta is not None:
                        yield _event({**first, "choices": [delta]})
            if request.usage_in_stream:
                yield _event({**first, "choices": [], "usage": protocol.usage(choices)})
            yield b"data: [DONE]\n\n"
        finally:
            self._close(choices)

    async def models(self, http: HttpRequest) -> Response:
        """List the one model."""
        item = {"id": self.model, "object": "model", "created": 0, "owned_by": "agentrig"}
        return _json({"object": "list", "data": [{**item, "max_model_len": self.max_length}]})

    async def health(self, http: HttpRequest) -> Response:
        """Say that the server lives, what it computes with, and what it has done so far."""
        import torch

        return _json(
            {
                "status": "ok",
                "version": self.engine.version,
                "running": self.engine.running,
                "threads": torch.get_num_threads(),
                "counts": dict(self.engine.counts),
            }
        )

    async def take_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Sample with new weights as soon as the running batch has ended.

        Raises:
            WeightsError: They do not fit; the old ones and the old version go on serving.
        """
        await self._between_batches(partial(self.engine.swap, weights, version))
        self._asleep = False

    async def free(self) -> None:
        """Free the weights and the keys and values of prompts as soon as the running batch has ended."""
        self._asleep = True
        await self._between_batches(self.engine.free)

    async def _between_batches(self, do: Callable[[Callable[[Exception | None], None]], None]) -> None:
        done: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        do(done.set_result)
        self._wake.set()
        error = await done
        if error is not None:
            raise error


def _raise_failures(choices: list[Request]) -> None:
    for choice in choices:
        if choice.finish == "error":
            raise Refused(f"the model failed: {choice.error}", status=500)


def _guarded(
    handler: Callable[[HttpRequest], Awaitable[Response]],
) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def guarded(http: HttpRequest) -> Response:
        try:
            return await handler(http)
        except Refused as error:
            return _json(openai_error(error), error.status)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            log.exception("request failed")
            return _json(openai_error(Refused(f"{type(error).__name__}: {error}", status=500)), 500)

    return guarded


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    route = f"{http.method} {http.url.path}"
    elsewhere = (
        "; with gateway.use=on, agentrig's gateway answers it" if route.endswith(("/messages", "/responses")) else ""
    )
    text = (
        f"there is no {route}{elsewhere}; try POST /v1/chat/completions, POST /v1/completions, "
        "POST /tokenize, GET /v1/models, GET /health"
    )
    return _json(openai_error(Refused(text, status=status)), status)


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(body), status_code=status, media_type="application/json")
