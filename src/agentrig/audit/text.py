"""Link `text`: the tokens that the server states are those of the text that the client sent and got."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrig.audit.record import Call
from agentrig.audit.step import Step
from agentrig.audit.verdicts import CannotLook, Verdict, faults, ok
from agentrig.text import amount
from agentrig.traces import message_digest

CAUSES = (
    "the server, a proxy between it and the agent, a client that changes messages, or a tokenizer that is not the "
    "server's"
)


def text(step: Step) -> Iterator[Verdict]:
    """Compare tokens and text of each call of a step. All is equal or not: there is no bound."""
    calls = list(step.calls.values())
    looked, wrong, what = differences(step, calls)
    if not looked:
        raise CannotLook("no call has token ids and the messages of a chat")
    yield from faults(f"{amount(len(wrong), 'difference')} in {amount(len(calls), 'call')}", wrong, CAUSES)
    foreign = len(calls) - looked
    left = f"; {foreign} not looked at, which are not calls of a chat" if foreign else ""
    yield ok(f"{amount(looked, 'call')}: {what}{left}")


def differences(step: Step, calls: Sequence[Call]) -> tuple[int, list[str], str]:
    """Compare tokens and text of calls; return how many it could look at, the differences, and what was compared."""
    record = step.record
    tokenizer, ends = load_tokenizer(record.model)
    config = json.loads((record.model / "config.json").read_text("utf-8"))
    limits = record.settings.get("max_length"), config.get("max_position_embeddings")
    context = min(filter(None, limits), default=0)
    own = record.config["server"]["use"] == "embedded"  # another may take thoughts or spaces out of the text
    dated = "strftime_now" in str(tokenizer.chat_template)  # what it renders depends on the day
    wrong, looked, beside = list[str](), 0, 0
    for call in calls:
        if not isinstance(call.request.get("messages"), list):
            continue
        try:
            prompt = "" if dated else _prompt(call, tokenizer)
            said = [prompt, _reply(call, tokenizer, own), _end(call, ends, context, own), *_client(call)]
        except (TypeError, AttributeError, LookupError, ValueError):  # a field that is not what a chat has there
            continue
        looked += 1
        beside += call.sent is not None and call.handed is not None
        wrong += [f"{call.name}: {what}" for what in said if what]
    what = "reply and end; not the prompt, whose template has the date" if dated else "prompt, reply and end"
    if beside < looked:
        what += f"; of {looked - beside} (streams, or through the gateway) not what the client sent and got beside it"
    return looked, wrong, what


def _client(call: Call) -> Iterator[str]:
    """Compare what the client sent and got with the record, by digests; a value that has none is left out."""
    recorded, got = message_digest(call.request["messages"]), message_digest(call.choice.get("message"))
    if call.sent is not None and recorded not in (None, call.sent):
        yield "the client sent other messages than those that are recorded"
    if call.handed is not None and got not in (None, call.handed):
        yield "the client got another message than the one that is recorded"


def _prompt(call: Call, tokenizer: Any) -> str:
    """Compare the prompt's ids with the messages, rendered by the model's chat template."""
    messages = [_plain(message) for message in call.request["messages"]]
    template = tokenizer.apply_chat_template(
        messages,
        tools=call.request.get("tools") or None,
        add_generation_prompt=True,
        tokenize=False,
        **(call.request.get("chat_template_kwargs") or {}),
    )
    ids = tokenizer.backend_tokenizer.encode(template, add_special_tokens=False).ids
    if list(ids) == list(call.prompt):
        return ""
    at = next((i for i, (a, b) in enumerate(zip(ids, call.prompt, strict=False)) if a != b), None)
    place = f"they part at token {at}" if at is not None else "one is the beginning of the other"
    return f"the messages have {len(ids)} tokens and the server says {len(call.prompt)}; {place}"


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates take it: text as one string, the arguments of tools as objects."""
    found = {key: value for key, value in message.items() if key != "tool_calls" or value}
    content = message.get("content")
    if isinstance(content, list):
        found["content"] = "".join(part.get("text", "") for part in content)
    elif content is None and found.get("tool_calls"):
        found["content"] = ""
    if found.get("tool_calls"):
        found["tool_calls"] = [{**c, "function": _called(c["function"])} for c in found["tool_calls"]]
    return found


def _called(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    read = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    return {"name": function.get("name"), "arguments": read}


def _reply(call: Call, tokenizer: Any, own: bool) -> str:
    """Compare the reply's ids with the text and the tool calls that the client got; of another server a part of it."""
    message = call.choice.get("message") or {}
    content = message.get("content") or ""
    decoded = tokenizer.backend_tokenizer.decode(list(call.reply), skip_special_tokens=True)
    if message.get("tool_calls"):
        # Special tokens may be the marks of calls; servers leave others out, also inside of arguments.
        whole = tokenizer.backend_tokenizer.decode(list(call.reply), skip_special_tokens=False)
        if content.strip() not in whole and content.strip() not in decoded:
            return f"the client got the text {content!r:.80}, and the tokens say {whole!r:.80}"
        said = [*_objects(whole), *_objects(decoded)]
        for one in message["tool_calls"]:
            if _called(one["function"]) not in said:
                return f"the client got the call {json.dumps(one['function'])[:80]}, and the tokens say {whole!r:.80}"
        return ""
    stops = call.request.get("stop") or []
    ends = [at for stop in ([stops] if isinstance(stops, str) else stops) if (at := decoded.find(stop)) >= 0]
    expected = decoded[: min(ends)] if ends else decoded
    if content == expected or (not own and content.strip() in decoded):
        return ""
    return f"the client got the text {content!r:.80}, and the tokens say {expected!r:.80}"


def _objects(text: str) -> list[dict[str, Any]]:
    """Return every JSON object of a text that has a name and arguments."""
    found, at, read = [], text.find("{"), json.JSONDecoder()
    while at >= 0:
        try:
            value, end = read.raw_decode(text, at)
        except ValueError:
            end = at + 1
        else:
            if isinstance(value, dict) and "name" in value:
                found.append({"name": value["name"], "arguments": value.get("arguments", value.get("parameters", {}))})
        at = text.find("{", end)
    return found


def _end(call: Call, ends: Collection[int], context: int, own: bool) -> str:
    """Compare why the server says that the reply ended with the reply's last token, and with its length."""
    finish, last = call.choice.get("finish_reason"), call.reply[-1]
    if finish in ("stop", "tool_calls") and last not in ends and not call.request.get("stop"):
        return f"the server says {finish!r}, and the last of {len(call.reply)} tokens, {last}, ends no reply"
    if finish == "length" and own:
        most = call.request.get("max_completion_tokens") or call.request.get("max_tokens") or context
        limit = min(most, context - len(call.prompt)) if context else most
        if len(call.reply) < limit:
            return f"the server says 'length' after {len(call.reply)} tokens, and the limit is {limit}"
    return ""


def load_tokenizer(directory: Path) -> tuple[Any, frozenset[int]]:
    """Return a directory's tokenizer, and the ids that end a reply: of its generation settings, or the tokenizer's."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loader: Any = PreTrainedTokenizerFast if (directory / "tokenizer.json").is_file() else AutoTokenizer
    tokenizer = loader.from_pretrained(str(directory), local_files_only=True)
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        said = json.loads(file.read_text("utf-8")).get("eos_token_id") if file.is_file() else None
        ends |= set(said if isinstance(said, Sequence) else [said]) - {None}
    return tokenizer, frozenset(ends | ({tokenizer.eos_token_id} - {None}))
