"""Continuous batching: requests join and leave the running batch between decode steps.

The engine has no thread of its own; `tick` is called by the server's event loop. On a CPU a second
Python thread would only fight the first for the interpreter.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch  # noqa: TID253  (imported in the server process only)

from agentrig_grpo.server.constraints import Constraint, ConstraintError
from agentrig_grpo.server.decoder import Decoder, Known, Prompt
from agentrig_grpo.server.prefixes import Prefixes
from agentrig_grpo.server.sampling import Settings, Uniforms, sample


@attrs.define(eq=False)
class Request:
    """One choice of a chat completion, from its prompt to its end.

    Attributes:
        prompt: Token ids.
        max_tokens: Most tokens to sample.
        temperature: 0 takes the likeliest token.
        top_p: Share of the probability to sample from.
        seed: Two requests with the same seed, prompt and weights get the same tokens; None for a
            seed made of the server's, the prompt and how often that prompt came before: whatever
            order requests arrive in, the same prompts get the same samples, but those with equal
            prompts share theirs in the order in which they arrive.
        choice: Which of a request's `n` choices this is.
        top_logprobs: How many of the likeliest tokens to report at every place.
        stopped: Called with the tokens so far after each token; True ends the request.
        constraint: Which tokens may come next; None for all.
        changed: Called after every new token and at the end.
        tokens: What was sampled, an end-of-sequence token included.
        logprobs: Of each token, see `sampling.sample`.
        tops: (token, log-probability) of the likeliest tokens at each place.
        finish: None while it runs, then `stop`, `length`, `abort` or `error`.
        version: The weights' version that it was sampled with.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    choice: int = 0
    top_logprobs: int = 0
    stopped: Callable[[Sequence[int]], bool] | None = None
    constraint: Constraint | None = None
    changed: Callable[[], None] | None = None
    tokens: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    tops: list[list[tuple[int, float]]] = attrs.field(factory=list)
    finish: str | None = None
    error: str = ""
    version: int = 0
    uniforms: Uniforms | None = None


@attrs.frozen(kw_only=True)
class Score:
    """The scores of given tokens.

    Attributes:
        logprobs: The log-probability of each token after the first, at temperature 1.
        digests: Name to digest of the weights that computed them.
    """

    version: int
    logprobs: list[float]
    digests: dict[str, str]


class Engine:
    """The requests that wait, the batch that runs, and the prompts that are kept.

    Args:
        eos: Tokens that end a response.
        slots: Most requests in the batch.
        seed: See `Request.seed`.
        prompt_cache_bytes: Most memory of kept prompts.
        prefill_tokens: Most prompt tokens, padding counted, to put through the model between two decode steps.
        cache_bytes: Most memory of the rows that run, each counted with all tokens that it may yet get; 0 for no
            limit. One request always runs, whatever it takes.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        eos: Sequence[int],
        slots: int,
        seed: int = 0,
        prompt_cache_bytes: int = 256 << 20,
        prefill_tokens: int = 8192,
        cache_bytes: int = 0,
    ) -> None:
        self.decoder, self.eos, self.slots, self.seed = decoder, frozenset(eos), slots, seed
        self.prefill_tokens, self.prompt_cache_bytes = prefill_tokens, prompt_cache_bytes
        self.cache_bytes = cache_bytes
        self.version = 0
        self.counts: Counter[str] = Counter()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._logits: list[torch.Tensor] = []
        self._prompts: OrderedDict[tuple[int, ...], Prompt] = OrderedDict()
        self._prefixes = Prefixes()
        self._prompt_bytes = 0
        self._seen: Counter[bytes] = Counter()
        self._swap: Callable[[], None] | None = None
        self._scoring: deque[Callable[[], None]] = deque()
        self._held: dict[str, str] | None = None
        self._settings: Settings | None = None

    @property
    def busy(self) -> bool:
        """Whether `tick` has anything to do."""
        return bool(self._running or self._waiting or self._swap or self._scoring)

    @property
    def running(self) -> int:
        """How many requests are in the batch."""
        return len(self._running)

    def submit(self, request: Request) -> None:
        """Queue a request; it joins the batch before the next decode step that has room."""
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request whose client has gone; its row is free before the next step."""
        if request.finish is None:
            request.finish = "abort"

    def swap(self, state: Mapping[str, torch.Tensor], version: int, done: Callable[[Exception | None], None]) -> None:
        """Take new weights once the running batch has ended; waiting requests get the new ones.

        Every response therefore comes from one version. `done` is called with None or the error;
        after an error the old weights and the old version go on serving.
        """

        def apply() -> None:
            try:
                self.decoder.load(state)
            except Exception as error:
                done(error)
                return
            self._forget_prompts()
            self.decoder.clear()
            self.version, self._held = version, None
            done(None)

        self._swap = apply

    def free(self, done: Callable[[Exception | None], None]) -> None:
        """Free the weights and all keys and values once the running batch has ended; `done` is called then."""

        def apply() -> None:
            self._forget_prompts()
            self.decoder.free()
            done(None)

        self._swap = apply

    def score(self, tokens: Sequence[int], done: Callable[[Score | Exception], None]) -> None:
        """Score given tokens before the next decode step; `done` is called with the answer or the error.

        The result is kept as a prompt, unless these tokens are one already. A later request that samples after them
        needs no pass of its own.
        """

        def apply() -> None:
            try:
                scores, prompt = self.decoder.score(tokens)
                logprobs, key = scores.tolist(), tuple(tokens)
                if prompt is not None and key not in self._prompts:
                    self._keep(key, prompt)
                if self._held is None:
                    self._held = self.decoder.held()
                found = Score(version=self.version, logprobs=logprobs, digests=self._held)
            except Exception as error:
                done(error)
                return
            done(found)

        self._scoring.append(apply)

    def tick(self) -> None:
        """Swap, admit, sample one token for every row, drop what has ended, decode the rest.

        Whatever the model raises ends the requests that it concerns, as an error, and not the server.
        """
        if self._swap and not self._running:
            swap, self._swap = self._swap, None
            swap()
        if self._scoring and not self._swap:
            self._scoring.popleft()()
        try:
            if not self._swap:
                self._admit()
            if self._running:
                self._advance()
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, message: str) -> None:
        self.counts["errors"] += 1
        failed, self._running, self._logits, self._settings = self._running, [], [], None
        self.decoder.clear()
        self._forget_prompts()
        for request in failed:
            request.finish, request.error = "error", message
            _tell(request)

    def _forget_prompts(self) -> None:
        self._prompts.clear()
        self._prefixes.clear()
        self._seen.clear()
        self._prompt_bytes = 0

    def _admit(self) -> None:
        room = self.slots - len(self._running)
        joining: list[Request] = []
        missing: dict[tuple[int, ...], None] = {}
        longest = max((_most(r) for r in self._running), default=0) if self._waiting else 0
        padded = 0
        while self._waiting and len(joining) < room:
            request = self._waiting[0]
            if request.finish is not None:
                self._waiting.popleft()
                _tell(request)
                continue
            longest = max(longest, _most(request))
            rows = len(self._running) + len(joining) + 1
            if self.cache_bytes and rows > 1 and rows * longest * self.decoder.token_bytes > self.cache_bytes:
                break
            if request.prompt not in self._prompts and request.prompt not in missing:
                padded = max(padded, len(request.prompt))
                if missing and padded * (len(missing) + 1) > self.prefill_tokens:
                    break
                missing[request.prompt] = None
            joining.append(self._waiting.popleft())
        if not joining:
            return
        # If rows fail here, the batch that they join fails with them.
        self._running += joining
        self._settings = None
        ready = dict(zip(missing, self._prefilled(list(missing)), strict=True)) if missing else {}
        self.counts["prefills"] += len(missing)
        self.counts["prompts"] += len(joining)
        for prompt in dict.fromkeys(r.prompt for r in joining):
            if prompt in ready:
                self._keep(prompt, ready[prompt])
            else:
                ready[prompt] = self._prompts[prompt]
                self._prompts.move_to_end(prompt)
        self._drop_old_prompts()
        self.decoder.append([ready[r.prompt] for r in joining])
        self._logits.append(torch.stack([ready[r.prompt].logits for r in joining]))
        for request in joining:
            request.version = self.version
            request.uniforms = self._uniforms(request)

    def _uniforms(self, request: Request) -> Uniforms:
        if request.seed is not None:
            return Uniforms("seed", request.seed, request.choice)
        prompt = repr(request.prompt)
        # Only the digest is kept: there may be many long prompts before the next swap.
        digest = hashlib.blake2b(prompt.encode(), digest_size=16).digest()
        earlier = self._seen[digest]
        self._seen[digest] += 1
        return Uniforms("run", self.seed, self.version, prompt, earlier)

    def _prefilled(self, prompts: Sequence[tuple[int, ...]]) -> list[Prompt]:
        """Run prompts through the model; first tokens that a kept prompt shares are taken from it."""
        found = [self._prefixes.longest(prompt) for prompt in prompts]
        known = [None if same is None else Known(self._prompts[same[0]], same[1]) for same in found]
        self.counts["prompt_tokens"] += sum(map(len, prompts))
        self.counts["reused_prompt_tokens"] += sum(k.tokens for k in known if k is not None)
        return self.decoder.prefill(prompts, known)

    def _keep(self, key: tuple[int, ...], prompt: Prompt) -> None:
        self._prompts[key] = prompt
        self._prefixes.add(key)
        self._prompt_bytes += prompt.nbytes

    def _drop_old_prompts(self) -> None:
        while self._prompt_bytes > self.prompt_cache_bytes and self._prompts:
            key, old = self._prompts.popitem(last=False)
            self._prefixes.remove(key)
            self._prompt_bytes -= old.nbytes

    def _advance(self) -> None:
        running = self._running
        logits = self._logits[0] if len(self._logits) == 1 else torch.cat(self._logits)
        self._logits = []
        tokens, chosen, tops = self._sample(logits)
        ended = []
        for row, request in enumerate(running):
            if request.finish is None:
                token = tokens[row]
                if request.constraint is not None and not _accepted(request, request.constraint, token):
                    ended.append(row)
                    continue
                request.tokens.append(token)
                request.logprobs.append(chosen[row])
                if request.top_logprobs:
                    request.tops.append(tops[row][: request.top_logprobs])
                if token in self.eos or (request.stopped is not None and request.stopped(request.tokens)):
                    request.finish = "stop"
                elif len(request.tokens) >= request.max_tokens:
                    request.finish = "length"
            if request.finish is not None:
                ended.append(row)
        self.counts["tokens"] += len(running)
        for row in reversed(ended):
            _tell(running[row])
            self.decoder.remove(row)
            tokens[row], running[row] = tokens[-1], running[-1]
            tokens.pop()
            running.pop()
            self._settings = None
        if running:
            self._logits = [self.decoder.step(tokens)]
            self.counts["steps"] += 1
            for request in running:
                _tell(request)

    def _sample(self, logits: torch.Tensor) -> tuple[list[int], list[float], list[list[tuple[int, float]]]]:
        running = self._running
        if self._settings is None:
            temperatures, top_ps = [r.temperature for r in running], [r.top_p for r in running]
            self._settings = Settings.of(temperatures, top_ps, logits.device)
        uniforms = [r.uniforms() if r.uniforms and r.temperature else 0.0 for r in running]
        picked, logp = sample(logits, self._settings, uniforms, _allowed(running, logits))
        chosen = logp.gather(1, picked[:, None])[:, 0].tolist()
        if any(c != c for c in chosen):
            raise FloatingPointError("the model's logits are not finite; its weights have probably diverged")
        tops: list[list[tuple[int, float]]] = []
        most = max(r.top_logprobs for r in running)
        if most:
            values, indices = logp.topk(most)
            rows = zip(indices.tolist(), values.tolist(), strict=True)
            tops = [list(zip(i, v, strict=True)) for i, v in rows]
        return picked.tolist(), chosen, tops


def _allowed(running: Sequence[Request], logits: torch.Tensor) -> torch.Tensor | None:
    """Return which tokens each row may sample, bool [rows, vocabulary]; None if every row may sample all.

    A request whose constraint fails ends with an error.
    """
    if all(r.constraint is None for r in running):
        return None
    allowed = torch.ones(logits.shape, dtype=torch.bool)
    for row, request in enumerate(running):
        if request.constraint is not None and request.finish is None:
            try:
                allowed[row] = request.constraint.allowed()
            except ConstraintError as error:
                request.finish, request.error = "error", str(error)
    return allowed.to(logits.device)


def _accepted(request: Request, constraint: Constraint, token: int) -> bool:
    """Tell the constraint what was sampled; return False if it fails, which ends the request with an error."""
    try:
        constraint.accept(token)
    except ConstraintError as error:
        request.finish, request.error = "error", str(error)
    return request.finish is None


def _most(request: Request) -> int:
    """Return the largest length, in tokens, that a request may reach."""
    return len(request.prompt) + request.max_tokens


def _tell(request: Request) -> None:
    if request.changed is not None:
        request.changed()
