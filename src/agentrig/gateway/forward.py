"""One call: read, checked, passed on to the model's server, recorded, and its answer passed back."""

from __future__ import annotations

import asyncio
import codecs
import json
import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp
import attrs
import orjson

from agentrig.chat_fields import CACHE, check_nested, objects, without_cache
from agentrig.endpoints import Endpoint, sampled_as
from agentrig.gateway.book import CUT, GONE, GatewayCall, Opened
from agentrig.gateway.connections import FAILED, Connections
from agentrig.gateway.dialects import ELSEWHERE, Chat, StreamWriter
from agentrig.gateway.responses import Responses
from agentrig.http_server import Receive, Refused, Send, not_json, read_body, reply
from agentrig.text import cut, parsed, words_of
from agentrig.traces import ABORTED, ASKED, IGNORED, LLM_CALL, PARENT, SERVER
from agentrig.tracing.recorder import server_of
from agentrig.tracing.streams import Events, Joining
from agentrig.tracing.tokens import sampled_calls

log = logging.getLogger(__name__)

ONLY_FIXED = ("completions", "embeddings")
"""Routes that only models which are not trained have."""

COUNT = "messages/count_tokens"
"""The route that counts a prompt's tokens."""

TOKENIZE = "/tokenize"
"""The route of a model's server that gives a prompt's tokens; as vLLM's, it is not below `/v1`."""

UNSUPPORTED = ("unknown_parameter", "unsupported_parameter", "unsupported_value")
"""Codes of errors about what the run's model cannot be asked, and another model may."""

CLIENTS = (400, 422)
"""Statuses of errors of a model's server about what the client has sent."""

REDIRECTS = (301, 302, 303, 307, 308)
"""Statuses of a server that names another address, which would get the key of this one."""

SHOWN = 2000
"""Most bytes of a fixed model's answer that a span has, where it is passed on as it is."""

NODE_HEADER = "agentrig-span"
"""Header of a call: the name of the part of the agent that makes it, as `agentrig.span` gives it."""

TOKENS = ("prompt_token_ids", "response_token_ids", "response_logprobs")
"""Attributes of a call that has the tokens of the run's model."""

ENDED = {
    CUT: "the rollout has ended, and its calls under way with it",
    GONE: "the client has broken the connection before the answer was complete",
}


@attrs.frozen(kw_only=True)
class CallRules:
    """What holds for every call.

    Attributes:
        models: The endpoint of each fixed model by the name that agents send; None for a further name of the rollout's.
        own: The fixed models that get calls in the API in which they come.
        sampling: Whether to add the sampling fields that a call lacks.
        limit: Most bytes of a call's body.
    """

    models: Mapping[str, Endpoint | None]
    own: Collection[str]
    sampling: bool
    limit: int
    connections: Connections = attrs.field(factory=Connections)


@attrs.define(eq=False, kw_only=True)
class Exchange:
    """A call and its answer.

    Attributes:
        route: What it calls, below the rollout's base URL.
        headers: Its headers, names in lower case.
        abort: Breaks the connection to the client.
    """

    opened: Opened
    call: GatewayCall
    route: str
    dialect: Chat
    headers: Mapping[str, str]
    receive: Receive
    send: Send
    abort: Callable[[], None]
    rules: CallRules
    _start: float = attrs.field(factory=time.time, init=False)
    _body: dict[str, Any] = attrs.field(factory=dict, init=False)
    _sent: dict[str, Any] = attrs.field(factory=dict, init=False)
    _places: Mapping[str, str] = attrs.field(factory=dict, init=False)
    _sent_text: bytes = attrs.field(default=b"", init=False)
    _ignored: list[str] = attrs.field(factory=list, init=False)
    _replaced: dict[str, Any] = attrs.field(factory=dict, init=False)
    _upstream: Endpoint = attrs.field(init=False)
    _fixed: bool = attrs.field(default=False, init=False)
    _began: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._upstream = self.opened.upstream

    async def run(self) -> None:
        """Do it; whatever happens, the call has exactly one span, and the client an answer or a broken connection."""
        watching: asyncio.Task[None] | None = None
        try:
            self._body = await self._read()
            self._address()
            passes = self._fixed and (self.route in ONLY_FIXED or self._body["model"] in self.rules.own)
            self._sent = {**self._body, "model": self._upstream.model} if passes else self._prepared(self._asked())
            watching = asyncio.create_task(self._watch())
            async with self.opened.places:
                if passes:
                    await self._pass_on()
                elif self.route == COUNT:
                    await self._count()
                else:
                    await self._forward()
        except Refused as refused:
            self._record({}, error=f"HTTP {refused.status}: {refused}")
            await self._refuse(refused)
        except FAILED as error:
            reason = f"the model's server at {self._upstream.base_url} failed: {words_of(error)}"
            self._record({}, error=reason)
            await self._refuse(Refused(reason, status=502, code="upstream_failed"))
        except asyncio.CancelledError:
            if not self.call.ended:
                raise  # the gateway itself ends
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            self._record({}, error=ENDED[self.call.ended])
            if self.call.ended == CUT:
                await self._refuse(Refused(ENDED[CUT], status=410, code="rollout_ended"))
        except Exception as error:  # a fault of the gateway itself: the client must not wait for ever
            log.exception("a call failed")
            self._record({}, error=f"the gateway failed: {words_of(error)}")
            await self._refuse(Refused(f"the gateway failed: {words_of(error)}", status=500, code="gateway_failed"))
        finally:
            if watching is not None:
                watching.cancel()

    # --- the request ------------------------------------------------------------------------------

    async def _read(self) -> dict[str, Any]:
        content = await read_body(self.receive, self.rules.limit, self.headers, setting="gateway.body_mb")
        if content is None:
            self.call.end(GONE)
            await asyncio.sleep(0)  # the cancellation comes here
        try:
            body = json.loads(content or b"", parse_int=_of_64_bits, parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError) as error:
            raise not_json(error, self.headers) from None
        if not isinstance(body, dict):
            raise Refused("the body must be a JSON object", status=400, code="invalid_json")
        return body

    def _asked(self) -> dict[str, Any]:
        try:
            asked, self._places = self.dialect.asked(self._body, self.opened.responses)
            return asked
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            text = f"the body does not have the form of this API: {words_of(error)}"
            raise Refused(text, status=400, code="invalid_type") from None

    def _address(self) -> None:
        """Find the model that the call names; refuse an unknown name, or a route that the model does not have."""
        policy, name = self.opened.upstream, self._body.get("model")
        others = "".join(f" or {other!r}" for other in self.rules.models if other != policy.model)
        if name is None or name == "":
            text = f"model is missing; send model = {policy.model!r}{others}"
            raise Refused(text, status=400, code="missing_required_parameter", param="model")
        if not isinstance(name, str):
            text = f"model must be a text, not {name!r:.100}; send model = {policy.model!r}{others}"
            raise Refused(text, status=400, code="invalid_type", param="model")
        if name != policy.model and name not in self.rules.models and self.route not in ONLY_FIXED:
            raise Refused(
                f"there is no model {name!r:.200} here; send model = {policy.model!r} (an agent has it as "
                f"endpoint.model, a program as OPENAI_MODEL){others}. For an agent that always sends this name, add to "
                f'the run file: [gateway.models] {json.dumps(name[:200])} = "policy"',
                status=404,
                code="model_not_found",
                param="model",
            )
        fixed = self.rules.models.get(name)
        self._upstream, self._fixed = fixed or policy, fixed is not None
        if self.route in ONLY_FIXED and fixed is None:
            other = json.dumps("other" if name == policy.model else name[:200])
            raise Refused(
                f"the run's model answers no /v1/{self.route}: it is trained on chat completions. Name a model that is "
                f"not trained, and let the agent send that name: [gateway.models] {other} = "
                '{base_url = "https://…/v1", model = "…", api_key_env = "…"}',
                status=404,
                code="not_found",
                param="model",
            )

    def _prepared(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the request that the model's server gets."""
        sent = {**asked, "model": self._upstream.model}
        if not self._fixed:
            self._check()
            sent = {key: value for key, value in sent.items() if key not in Chat.hints}
        if self.rules.sampling:
            sent, self._replaced = sampled_as(sent, self._upstream.sampling, replace=self.opened.measured)
        if self._upstream.token_ids:
            sent["return_token_ids"] = sent["logprobs"] = True
        return sent

    def _check(self) -> None:
        """Refuse what the run's model cannot be asked; drop what has no effect on it, and list that."""
        check_nested(self._body, self.dialect.fields)
        if type(self.dialect) is Chat and self._body.get("top_logprobs") and not self._body.get("logprobs"):
            raise Refused("top_logprobs needs logprobs: true", status=400, code="invalid_value", param="top_logprobs")
        off: tuple[Any, ...] = (None, False, {"type": "disabled"}, {})
        ignored = {name for name in self.dialect.hints if self._body.get(name) not in off}
        for place, name in self.dialect.nested_hints:
            ignored |= {name for _, each in objects(self._body, place) if each.get(name) not in off}
        if without_cache(self._body, self.dialect.fields):
            ignored.add(CACHE)
        self._ignored = sorted(ignored)

    async def _watch(self) -> None:
        """End the call when its client breaks the connection."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.call.end(GONE)

    # --- the answer -------------------------------------------------------------------------------

    async def _post(self, path: str, **more: str) -> aiohttp.ClientResponse:
        upstream = self._upstream
        headers = {
            **upstream.headers,
            "authorization": f"Bearer {upstream.api_key}",
            "content-type": "application/json",
            "accept-encoding": "identity",
            **more,
        }
        self._sent_text = json.dumps(self._sent).encode()
        url = upstream.base_url.rstrip("/").removesuffix("/v1") if path == TOKENIZE else upstream.base_url.rstrip("/")
        response = await self.rules.connections.post(url + path, self._sent_text, headers)
        if response.status in REDIRECTS and (location := response.headers.get("location")):
            response.close()
            there = urljoin(url + path, location).removesuffix(path)
            text = f"{url} redirects to {there:.500} (HTTP {response.status}); set base_url to that address"
            raise Refused(text, status=502, code="upstream_failed")
        return response

    async def _count(self) -> None:
        """Answer with the length of the prompt in tokens; nothing is sampled, so there is no span."""
        kept = ("model", "messages", "tools", "add_generation_prompt", "continue_final_message")
        self._sent, self.call.recorded = {key: self._sent[key] for key in kept if key in self._sent}, True
        response = await self._post(TOKENIZE)
        content = await response.read()
        try:
            found = {"input_tokens": int(json.loads(content)["count"])}
        except (ValueError, LookupError, TypeError):
            if response.status < 400:
                raise Refused("the model's server counts no tokens", status=502, code="upstream_failed") from None
            await self._failed(response, content)
            return
        await self._respond(200, json.dumps(found).encode())

    async def _pass_on(self) -> None:
        """Pass a call to a fixed model and its answer back, as they are."""
        named = {name: self.headers[name] for name in ("anthropic-version", "anthropic-beta") if name in self.headers}
        response = await self._post(f"/{self.route}", **named, **{"x-api-key": self._upstream.api_key})
        kept = {k: response.headers[k] for k in ("content-type", "retry-after") if k in response.headers}
        start = b""
        try:
            self._began = True
            fields = [(name.encode(), value.encode("latin-1")) for name, value in kept.items()]
            await self.send({"type": "http.response.start", "status": response.status, "headers": fields})
            async for chunk in response.content.iter_any():
                start += chunk[: max(0, SHOWN - len(start))]
                await self.send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            response.close()
        text = start.decode("utf-8", "replace")
        error = f"HTTP {response.status}: {text[:500]}" if response.status >= 400 else None
        self._record({"response": {"text": text}}, error=error)
        await self.send({"type": "http.response.body", "body": b""})

    async def _forward(self) -> None:
        response = await self._post("/chat/completions")
        try:
            streams = response.headers.get("content-type", "").startswith("text/event-stream")
            if response.status < 400 and streams:
                await self._stream(response)
                return
            content = await response.read()
        finally:
            response.close()  # it keeps the connection if the answer was read to its end
        if response.status >= 400:
            await self._failed(response, content)
        else:
            await self._answer(response.status, content)

    async def _answer(self, status: int, content: bytes) -> None:
        completion: Any = None
        try:
            completion, plain = parsed(content)
            shown = self._shown(completion)
            calls = list(sampled_calls(self._request(), completion))
            body = json.dumps(self.dialect.answer(shown, self._body)).encode()
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
            text = content[:SHOWN].decode("utf-8", "replace")
            why = words_of(error) if isinstance(completion, dict) else f"HTTP {status} with the body {cut(text, 200)!r}"
            reason = f"the model's server at {self._upstream.base_url} answered no chat completion: {why}"
            self._record({"response": {"text": text}}, error=reason)
            await self._refuse(Refused(reason, status=502, code="upstream_failed"))
            return
        self._record_calls(calls, plain=plain)
        await self._respond(200, body)

    def _shown(self, completion: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a completion, or of an event of a stream, with what of the ids the client asked for."""
        hidden = {"prompt_token_ids", "token_ids"} if not self._body.get("return_token_ids") else set()
        if not self._body.get("logprobs"):
            hidden.add("logprobs")
        shown = {key: value for key, value in completion.items() if key not in hidden}
        shown["choices"] = [
            {key: value for key, value in choice.items() if key not in hidden}
            for choice in completion.get("choices") or ()
        ]
        return shown

    async def _failed(self, response: aiohttp.ClientResponse, content: bytes) -> None:
        """Pass an error of the model's server on."""
        text = content.decode("utf-8", "replace")
        error = f"HTTP {response.status}: {text[:500]}"
        self._record({"response": {"text": text[:2000]}}, error=error)
        kept = {k: response.headers[k] for k in ("retry-after", "retry-after-ms") if k in response.headers}
        try:
            body = json.loads(content)
            message = str(body["error"]["message"])
            code, param = str(body["error"].get("code") or ""), str(body["error"].get("param") or "")
        except (ValueError, LookupError, AttributeError, TypeError):
            message, code, param = cut(text, 2000), "", ""
        code = code or ("invalid_value" if response.status in CLIENTS else "upstream_error")
        if response.status in CLIENTS:
            message, param = self._in_own_names(message, param)
        if response.status == 400 and code in UNSUPPORTED and not self._fixed:
            message = f"{message}{'' if message[-1:] in ('.', '?') else '.'} This is the run's model: {ELSEWHERE}"
        shown = self.dialect.error(Refused(message, status=response.status, code=code, param=param))
        await self._respond(response.status, json.dumps(shown).encode(), kept)

    def _in_own_names(self, message: str, param: str) -> tuple[str, str]:
        """Return an error of the model's server about a chat completion in the names of the agent's API."""
        if type(self.dialect) is Chat:
            return message, param
        start = re.match(r"[a-z_]+[\w.\[\]]*", message)
        if start and (start[0] == param or re.split(r"[.\[]", start[0])[0] in self._sent):
            message = self.dialect.named(start[0], self._places) + message[start.end() :]
        for word, own in self.dialect.words.items():
            message = message.replace(word, own)
        if param == "tool_choice":
            message = message.replace(f"{self._sent.get(param)!r}", json.dumps(self._body.get(param)))
        return message, self.dialect.named(param, self._places)

    async def _stream(self, response: aiohttp.ClientResponse) -> None:
        """Pass a stream on, event by event; a client that reads slowly slows down the reading of the upstream."""
        events, joining = Events(), Joining()
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        writer = self.dialect.writer(self._body)
        try:
            async for chunk in response.content.iter_any():
                await self._pass(writer, joining, events.feed(decode(chunk)))
            await self._pass(writer, joining, events.feed(decode(b"", True), last=True))
            self._record_stream(joining, events.rest)
            await self._begin_stream()
            await self.send({"type": "http.response.body", "body": writer.end()})
        except FAILED as error:
            self._record_stream(joining, events.rest, error=f"the stream broke: {words_of(error)}")
            self.abort()
        except asyncio.CancelledError:
            if self.call.ended:
                self._record_stream(joining, events.rest, error=ENDED[self.call.ended])
            raise

    async def _pass(self, writer: StreamWriter, joining: Joining, found: list[str]) -> None:
        parts = []
        for data in found:
            event = joining.add(data)
            parts.append(writer.event(data, self._shown(event) if event is not None else None))
        if joining.done:  # before the client has it all: it may end the rollout at once
            self._record_stream(joining, "")
        if content := b"".join(parts):
            await self._begin_stream()
            await self.send({"type": "http.response.body", "body": content, "more_body": True})

    async def _begin_stream(self) -> None:
        if not self._began:
            self._began = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    def _record_stream(self, joining: Joining, rest: str, *, error: str | None = None) -> None:
        if self.call.recorded:
            return
        response, wrong = joining.end(rest, whole=error is None)
        try:
            calls = list(sampled_calls(self._request(), response))
        except (LookupError, AttributeError, TypeError) as broken:
            calls = [(self._request(), response, {})]
            wrong = wrong or f"the stream's tokens cannot be read: {words_of(broken)}"
        self._record_calls(calls, error=error or wrong)

    # --- what is recorded, and what the client gets --------------------------------------------------

    def _request(self) -> Mapping[str, Any]:
        """Return the request that is recorded: what the server gets, with the name that the agent has sent."""
        sent, named = self._sent or self._body, self._body.get("model")
        return sent if sent.get("model") == named else {**sent, "model": named}

    def _record_calls(
        self,
        calls: Sequence[tuple[Mapping[str, Any], dict[str, Any], dict[str, Any]]],
        *,
        error: str | None = None,
        plain: bool = False,
    ) -> None:
        """Record a span for each choice of a completion: each is a call with the same prompt."""
        if isinstance(self.dialect, Responses) and error is None:
            self.opened.responses |= self.dialect.conversation(self._body, self.opened.responses, calls[0][1])
        for request, response, tokens in calls:
            self.call.recorded = False
            self._record({"request": request, "response": response, **tokens}, error=error, plain=plain)

    def _record(self, attributes: Mapping[str, Any], *, error: str | None = None, plain: bool = False) -> None:
        """Record the call's span, once; `plain` attributes are plain JSON, as `agentrig.text.parsed` says."""
        if self.call.recorded:
            return
        self.call.recorded = True
        request = attributes.get("request") or self._request()
        if self._ignored:
            attributes = {**attributes, IGNORED: self._ignored}
        if error is not None and error == ENDED.get(self.call.ended):
            attributes = {**attributes, ABORTED: True}
        if self._replaced:
            attributes = {**attributes, ASKED: self._replaced}
        if self._fixed:
            # Another model's tokens must never be trained.
            attributes = {key: value for key, value in attributes.items() if key not in TOKENS}
            host, port = server_of(urlsplit(self._upstream.base_url))
            attributes = {**attributes, SERVER: f"{host}:{port}"}
        span: dict[str, Any] = {
            "id": secrets.token_hex(8),
            "parent": self.headers.get(PARENT),
            "name": LLM_CALL,
            "start": self._start,
            "end": time.time(),
            "error": error,
            "attributes": {**attributes, "request": request},
        }
        if plain and request is self._sent:  # it is text already
            span["attributes"]["request"] = orjson.Fragment(self._sent_text)
        node = self.headers.get(NODE_HEADER, "")
        if node:
            above = {**span, "id": secrets.token_hex(8), "name": "agent", "attributes": {"agent.name": node[:200]}}
            span["parent"] = above["id"]
            self.opened.spans.append(json.dumps(above).encode())
        self.opened.spans.append(orjson.dumps(span) if plain else json.dumps(span).encode())

    async def _refuse(self, refused: Refused) -> None:
        if self._began:
            self.abort()
            return
        body = json.dumps(self.dialect.error(refused)).encode()
        await self._respond(refused.status, body, {"connection": "close"} if refused.status in (410, 413) else {})

    async def _respond(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self._began = True
        await reply(self.send, status, body, headers)


def _finite(digits: str) -> float:
    """Return a number of a request; refuse NaN and infinities."""
    number = float(digits)
    if not math.isfinite(number):
        raise Refused(f"the body has {digits:.30}, which is no finite number", status=400, code="invalid_value")
    return number


def _of_64_bits(digits: str) -> int:
    """Return a whole number of a request; refuse one of more bits than a record of the call can hold."""
    number = int(digits)
    if not -(1 << 63) <= number < 1 << 64:
        raise Refused(f"the body has {digits:.30}, a whole number of more than 64 bits", code="invalid_value")
    return number
