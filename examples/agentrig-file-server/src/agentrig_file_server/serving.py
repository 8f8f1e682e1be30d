"""The process: `python -m agentrig_file_server.serving DESCRIPTOR`; it ends when the run closes the channel."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch  # noqa: TID253  (a process of its own)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: TID253  (a process of its own)

from agentrig.delivery.digests import digests
from agentrig.processes.channel import Channel


class Policy:
    """The model, its tokenizer and the version of its weights; one request at a time."""

    def __init__(self, directory: str, name: str, context: int) -> None:
        self.name, self.version = name, 0
        self.tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        loader: Any = AutoModelForCausalLM
        self.model = loader.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
        own = self.model.config.max_position_embeddings
        self.context = min(context or own, own)
        self._eos = {self.tokenizer.eos_token_id, self.model.generation_config.eos_token_id}
        self._tied = set(getattr(self.model, "all_tied_weights_keys", None) or {})
        self._lock = threading.Lock()

    def take(self, file: str, version: int) -> None:
        """Compute with the tensors of a file from now on."""
        state = load_file(file)
        with self._lock:
            missing = set(self.model.state_dict()) - set(state) - self._tied
            if missing:
                raise ValueError(f"{sorted(missing)[0]} is missing")
            odd = [name for name, tensor in state.items() if not tensor.isfinite().all()]
            if odd:
                raise ValueError(f"{odd[0]} holds NaN or infinity")
            self.model.load_state_dict(state, strict=False)
            self.version = version

    def held(self) -> dict[str, str]:
        """Return name to digest of the model's own tensors."""
        with self._lock:
            return digests((name, t) for name, t in self.model.state_dict().items() if name not in self._tied)

    @torch.no_grad()
    def answer(
        self, ids: Sequence[int], fields: dict[str, Any], index: int = 0
    ) -> tuple[list[int], list[float], str, int]:
        """Sample after token ids; return tokens, their log-probabilities, why they end, and the weights' version."""
        stops = fields.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        with self._lock:
            most = min(fields.get("max_tokens") or self.context, self.context - len(ids))
            temperature, top_p = float(fields.get("temperature", 1.0)), float(fields.get("top_p", 1.0))
            generator = torch.Generator().manual_seed(
                hash((fields.get("seed"), index, self.version, tuple(ids))) % 2**63
            )
            if fields.get("seed") is None:
                generator.seed()
            tokens: list[int] = []
            logprobs: list[float] = []
            given, cache = torch.tensor([list(ids)]), None
            while len(tokens) < most:
                out = self.model(input_ids=given, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                found = torch.log_softmax(out.logits[0, -1].float() / (temperature or 1.0), -1)
                token = int(_nucleus(found, top_p, generator)) if temperature else int(found.argmax())
                tokens.append(token)
                logprobs.append(float(found[token]))
                if token in self._eos or (stops and _first(stops, self.text(tokens)) is not None):
                    return tokens, logprobs, "stop", self.version
                given = torch.tensor([[token]])
            return tokens, logprobs, "length", self.version

    def text(self, tokens: Sequence[int], stops: Sequence[str] = ()) -> str:
        """Return the text of tokens, up to the first stop string."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text[: _first(stops, text)]

    @torch.no_grad()
    def score(self, ids: Sequence[int]) -> list[Any]:
        """Return the log-probabilities of token ids, as vLLM's `prompt_logprobs`."""
        with self._lock:
            logits = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()
        logp = torch.log_softmax(logits, -1)
        return [None, *({str(t): {"logprob": float(logp[i, t])}} for i, t in enumerate(ids[1:]))]


def _first(stops: Sequence[str], text: str) -> int | None:
    """Return where the first stop string begins, or None."""
    return min((at for at in map(text.find, stops) if at >= 0), default=None)


def _nucleus(logp: torch.Tensor, top_p: float, generator: torch.Generator) -> torch.Tensor:
    """Sample one token among those that hold the first `top_p` of the probability."""
    p = logp.exp()
    if top_p < 1:
        ordered, places = p.sort(descending=True)
        p = torch.zeros_like(p).scatter(0, places, ordered * ((ordered.cumsum(0) - ordered) < top_p))
    return torch.multinomial(p, 1, generator=generator)


class Handler(BaseHTTPRequestHandler):
    """OpenAI's routes that agents and the proof of delivery use."""

    policy: Policy
    key: str
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """List the model."""
        if self._refused():
            return
        self._send(200, {"object": "list", "data": [{"id": self.policy.name, "object": "model"}]})

    def do_POST(self) -> None:
        """Answer a completion."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._refused():
            return
        if self.path == "/v1/chat/completions":
            text = self.policy.tokenizer.apply_chat_template(
                body["messages"], tokenize=False, add_generation_prompt=True
            )
            self._complete(body, self.policy.tokenizer(text, add_special_tokens=False)["input_ids"], chat=True)
        elif self.path == "/v1/completions":
            self._complete(body, body["prompt"], chat=False)
        else:
            self._send(404, {"error": {"message": f"there is no {self.path}"}})

    def _refused(self) -> bool:
        """Answer 401 to a request without the key."""
        if self.headers.get("Authorization") == f"Bearer {self.key}":
            return False
        self._send(401, {"error": {"message": "the key is missing or wrong"}})
        return True

    def _complete(self, body: dict[str, Any], ids: list[int], *, chat: bool) -> None:
        policy = self.policy
        if len(ids) >= policy.context:
            words = f"the prompt has {len(ids)} tokens, and the context is {policy.context}"
            self._send(400, {"error": {"message": words}})
            return
        choices, version = [], policy.version
        for index in range(int(body.get("n") or 1)):
            tokens, logprobs, finish, version = policy.answer(ids, body, index)
            stops = body.get("stop") or []
            text = policy.text(tokens, [stops] if isinstance(stops, str) else stops)
            choice: dict[str, Any] = {"index": index, "finish_reason": finish, "token_ids": tokens}
            if chat:
                choice["message"] = {"role": "assistant", "content": text}
                choice["logprobs"] = {
                    "content": [
                        {"token": policy.tokenizer.decode([t]), "logprob": p, "bytes": None, "top_logprobs": []}
                        for t, p in zip(tokens, logprobs, strict=True)
                    ]
                }
            else:
                choice |= {"text": text, "logprobs": {"token_logprobs": logprobs}}
                if body.get("prompt_logprobs") is not None:
                    choice["prompt_logprobs"] = policy.score(ids)
            choices.append(choice)
        used = sum(len(choice["token_ids"]) for choice in choices)
        usage = {"prompt_tokens": len(ids), "completion_tokens": used, "total_tokens": len(ids) + used}
        kind = "chat.completion" if chat else "text_completion"
        found = {"id": "x", "object": kind, "created": 0, "model": policy.name, "choices": choices, "usage": usage}
        self._send(200, found | {"prompt_token_ids": ids, "system_fingerprint": f"v{version}"})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main() -> None:
    """Serve, and follow the run's orders until it has gone."""
    channel = Channel.inherited(int(sys.argv[1]))
    started, _ = channel.receive()
    torch.set_num_threads(started["threads"])
    try:
        Handler.policy = Policy(started["model"], started["name"], started["context"])
        Handler.key = started["key"]
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    except Exception as error:
        channel.send({"error": f"{type(error).__name__}: {error}"})
        raise
    threading.Thread(target=server.serve_forever, daemon=True).start()
    channel.send({"port": server.server_address[1], "context": Handler.policy.context})
    while True:
        try:
            order = channel.receive()[0]
        except (EOFError, OSError):
            os._exit(0)  # the run has gone, even by SIGKILL
        try:
            if "file" in order:
                Handler.policy.take(order["file"], order["version"])
            channel.send({"digests": Handler.policy.held()} if "held" in order else {})
        except Exception as error:
            channel.send({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
