"""The memory plan of a run: what the model's server and the learner take of one device, chosen before either starts.

It is arithmetic on sizes. `Fitting.choices` lists what may be chosen, the cheapest first, and the first that fits is
taken:

    the fastest of passes that hold whole groups, and of layers that compute their activations twice (`Fitting.cost`)
    → a smaller key-value cache → a server that sleeps during updates → the optimizer's moments in host memory
    → passes that cut groups apart → a message that says what would fit

With adapters the server's frozen weights may serve both. That costs less than a smaller cache, or than computing more
than half of the layers twice, and comes before these. Moments of 8 bits are named in the message only: they change the
weights that an update gives, so a user must ask for them.

`agentrig_grpo.planning` measures the device and the model for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import Any

import attrs

from agentrig.device_memory import in_gib
from agentrig.errors import ConfigError
from agentrig.hardware.memory import (
    CACHES,
    GIB,
    MARGIN,
    PASSES,
    ROUNDING,
    DeviceMemory,
    ModelShape,
    ServerNeed,
    or_more,
)
from agentrig.servers import ServerMemory
from agentrig_grpo.config import LearnerConfig

CPU_PASS = 8192
"""The largest pass that is chosen on a CPU."""

LEAST_CACHE = 0.125
"""The share that is chosen if nothing else of these helps."""

PROMPT = 4096
"""Longest prompt that is planned for, in tokens, where `max_length` does not say it."""

BUFFER = 1 << 29
"""Bytes of the device that an update needs for moments that are in host memory."""

PASS_COST = 2048
"""What a pass takes beside its tokens, as a number of tokens."""

TWICE_COST = 0.23
"""What computing the activations of all layers twice takes, as a share of an update.

Both by `tests/benchmarks/learner.py --grid` for 1.5B on an H200: 16 passes of one group each take 1.24 times the time
of two passes of eight, and 18 of 28 layers computed twice 1.15 times that of none.
"""

SCORED = 260
"""Tokens that a proof of delivery scores at most."""


@attrs.frozen(kw_only=True)
class Need:
    """Bytes that an update needs on its device, by part.

    Attributes:
        weights: Trained and frozen weights, and copies with fewer bits.
        gradients: Gradients of the trained weights.
        optimizer: The optimizer's state.
        activations: The most that the passes of one update add to these.
        change: The weights before the update, to measure how far it moved them; after the passes.
        earlier: The weights that sampled stale rollouts, to prove what was sampled; 0 without such rollouts.
        buffer: Through it pass the moments that are in host memory; 0 without such.
        proof: The most that a proof of delivery adds to what is held between updates, see `proof_bytes`.
        frozen: As much of the weights as a server in the same dtype has too.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    change: int
    earlier: int = 0
    buffer: int = 0
    proof: int = 0
    frozen: int = 0

    @property
    def state(self) -> int:
        """What the learner holds between updates."""
        return self.weights + self.earlier + self.optimizer + self.buffer

    @property
    def between(self) -> int:
        """What must be free between updates, beside the server that is awake.

        What torch keeps for later it gives back before a proof takes more.
        """
        return max(int(self.state * ROUNDING), self.state + self.proof)

    @property
    def peak(self) -> int:
        """Most at any time."""
        return self.state + self.gradients + max(self.activations, self.change)

    @property
    def room(self) -> int:
        """What must be free for an update."""
        held = self.state + self.gradients
        return int(held * ROUNDING + max(self.activations * MARGIN, self.change * ROUNDING))

    def describe(self) -> str:
        """Return the parts as text."""
        parts = {name: getattr(self, name) for name in ("weights", "gradients", "optimizer", "activations")}
        more = {"weights one version back": self.earlier} if self.earlier else {}
        return ", ".join(f"{name} {in_gib(size)}" for name, size in {**parts, **more}.items())

    def towards(self, other: Need, share: float) -> Need:
        """Return another need, with its activations a share of the way from this one's."""
        return attrs.evolve(other, activations=int(self.activations + share * (other.activations - self.activations)))


def checkpoint_bytes(config: LearnerConfig, *, trained: int, moments: int, model: int) -> int:
    """Return about how many bytes a checkpoint has.

    Args:
        trained: How many weights are trained.
        moments: Bytes of the optimizer's moments.
        model: Bytes of the whole model's files; with adapters only these are written.
    """
    weights = 4 * trained
    kept = weights if config.final == "best" else 0
    return moments + weights + kept + (weights if config.lora_rank else model)


def proof_bytes(vocabulary: int, hidden: int, *, frozen: bool) -> int:
    """Return what a proof of delivery takes of the learner's device, while the server is awake.

    Args:
        vocabulary: Rows of the output layer.
        hidden: Its columns.
        frozen: Whether it is not trained and has 16 bits: then it is copied to fp32.

    Returns:
        Bytes of the fp32 logits of the scored tokens, of their log-softmax, and of two products for the entropy.
    """
    return 4 * vocabulary * (4 * SCORED + (hidden if frozen else 0))


def call_length(config: LearnerConfig, context: int) -> int:
    """Return how many tokens a call has at most, prompt and answer, as far as the settings say it."""
    return context if config.max_length else min(context, PROMPT + config.max_tokens)


def group_length(config: LearnerConfig, context: int) -> int:
    """Return the tokens of a group's longest prompt and all its answers: a smaller pass computes the prompt again."""
    prompt = call_length(config, context) - config.max_tokens
    return prompt + config.group_size * (config.max_tokens + 1)


def server_need(
    config: LearnerConfig,
    says: ServerMemory,
    shape: ModelShape | None,
    *,
    weights: int,
    element: int,
    context: int,
    runners: int,
    total: int,
    lends: bool = True,
) -> ServerNeed:
    """Return what a server needs.

    Args:
        shape: The model's; None if it is not known, and the server gets 0.4 of the device.
        weights: Bytes of the weights in the server's dtype.
        element: Bytes of one number in that dtype.
        context: Most tokens that the server takes.
        runners: Rollouts that run at once at most; 0 if it is not known.
        total: Bytes of the device.
        lends: Whether the learner can compute with the server's weights, as far as the model is concerned.
    """
    largest = shape.vocabulary * shape.hidden * element if shape else 0
    transfer = min(max(says.transfer, largest) if says.transfer else weights, weights)
    of_torch = transfer if says.transfer_of_torch else 0
    if says.elsewhere:
        return ServerNeed(transfer=transfer, of_torch=of_torch)
    calls = min(n for n in (config.tasks_per_step * config.group_size, says.sequences, runners) if n)
    asleep = says.asleep + (weights if says.keeps_weights else 0)
    if shape is None:
        share = int((says.share or 0.4) * total)
        return ServerNeed(
            weights=weights, calls=calls, asleep=asleep, given=share, transfer=transfer, of_torch=of_torch
        )
    return ServerNeed.of(
        shape,
        weights=weights,
        element=element,
        calls=calls,
        length=call_length(config, context),
        context=context,
        prefill=says.prefill,
        sequences=says.sequences,
        beside=says.beside,
        cache=says.cache,
        asleep=asleep,
        given=int(says.share * total),
        transfer=transfer,
        of_torch=of_torch,
        adapters=element * shape.adapters(config.lora_rank) if lends and config.lora_rank <= says.lends else 0,
    )


@attrs.frozen(kw_only=True)
class Choice:
    """One way to run.

    Attributes:
        tokens: Tokens of a pass.
        recomputed: How many layers compute their activations twice.
        cache: Share of the key-value cache of all calls.
        sleeps: Whether the server sleeps during updates.
        on_host: Whether the optimizer's moments are in host memory.
        lent: Whether the learner computes with the server's frozen weights.
    """

    tokens: int
    recomputed: int = 0
    cache: float = 1.0
    sleeps: bool = False
    on_host: bool = False
    lent: bool = False


@attrs.frozen(kw_only=True, eq=False)
class Fitting:
    """Server, learner and device of a run, and what fits.

    Attributes:
        config: The learner's settings; what they set is kept.
        estimate: Returns what an update needs, for settings, the tokens of a pass, and none or all of the layers that
            compute their activations twice.
        passes: The passes that are estimated, ascending: the smallest, that whose chunk of logits is full, the largest.
        layers: How many layers the model has.
        group: Tokens of a whole group, see `group_length`.
        begun: What the server has started with: only passes and layers may still be chosen.
        factor: Activations that were measured, over those that were estimated.
        owner: Whose memory `server` is, in words.
    """

    config: LearnerConfig
    device: DeviceMemory
    server: ServerNeed
    estimate: Callable[[LearnerConfig, int, int], Need]
    passes: Sequence[int]
    layers: int
    group: int
    begun: Choice | None = None
    factor: float = 1.0
    owner: str = "its server"

    def choose(self) -> Choice:
        """Return the cheapest choice that fits.

        Raises:
            ConfigError: None does; the message says what would.
        """
        found = self.first()
        if found is None:
            raise ConfigError(self.refusal())
        return found

    def first(self) -> Choice | None:
        """Return the cheapest choice that fits, or None."""
        choices = list(self.choices())
        if self.fits(choices[0]):
            return choices[0]
        least, most = min(choice.tokens for choice in choices), max(choice.recomputed for choice in choices)
        tightest = [choice for choice in choices if (choice.tokens, choice.recomputed) == (least, most)]
        # One small estimate says whether anything fits; larger ones take longer.
        return next(filter(self.fits, choices), None) if any(map(self.fits, tightest)) else None

    def choices(self) -> Iterator[Choice]:
        """Yield what may be chosen, the cheapest first."""
        passes = passes_of(self.config, self.device, self.group)
        whole = [tokens for tokens in passes if tokens >= min(self.group, passes[0])]
        pairs = sorted(product(whole, self._twice()), key=lambda pair: self.cost(*pair))
        ways = [
            Choice(tokens=tokens, recomputed=twice, **beside) for beside in self._beside() for tokens, twice in pairs
        ]
        yield from sorted(ways, key=self._lent_when) if any(way.lent for way in ways) else ways
        for tokens in passes[len(whole) :]:
            for beside, twice in product(self._beside(), self._twice()):
                yield Choice(tokens=tokens, recomputed=twice, **beside)

    def cost(self, tokens: int, recomputed: int) -> float:
        """Return how long an update of whole groups takes, as a number of tokens that are computed once."""
        groups = -(-self.config.tasks_per_step // self.config.mini_batches)
        passes = -(-groups // max(1, tokens // self.group))
        return groups * self.group * (1 + TWICE_COST * recomputed / self.layers) + PASS_COST * passes

    def _lent_when(self, way: Choice) -> tuple[bool, int]:
        """Return a key that sorts lent weights behind what costs less than they do, and before what costs more."""
        added = way.recomputed - self._twice()[0]
        cheap = way.cache == 1 and not way.sleeps and added <= self.layers / 2
        return way.on_host, 1 if way.lent else 0 if cheap else 2

    def _twice(self) -> Sequence[int]:
        """Return how many layers may compute their activations twice."""
        setting = self.config.gradient_checkpointing
        return range(self.layers + 1) if setting == "auto" else [self.layers if setting else 0]

    def _beside(self) -> Sequence[Mapping[str, Any]]:
        """Return where the moments may be, whether the server lends its weights or sleeps, its share of the cache."""
        if begun := self.begun:
            return [{name: getattr(begun, name) for name in ("on_host", "sleeps", "cache", "lent")}]
        moments, asked = self.config.moments, self.config.server_sleep
        may_sleep = self.device.accelerator and self.server.memory() and not self.config.max_staleness
        sleeping = ([False, True] if may_sleep else [False]) if asked == "auto" else [asked]
        may_lend = self.server.adapters and asked is not True and self.config.lora_base != "own"
        ways = [] if self.config.lora_base == "server" else [*product(sleeping, CACHES), (sleeping[-1], LEAST_CACHE)]
        beside = [{"sleeps": sleeps, "cache": share} for sleeps, share in ways]
        if may_lend:  # without sleep, and before it
            awake = sum(not way["sleeps"] for way in beside[:-1])
            beside[awake:awake] = [{"lent": True, "cache": share} for share in (*CACHES, LEAST_CACHE)]
        may_move = moments == "auto" and self.device.accelerator and self.config.optimizer == "adamw"
        return [
            {"on_host": host, **way} for host in ([False, True] if may_move else [moments == "host"]) for way in beside
        ]

    def fits(self, choice: Choice) -> bool:
        """Whether an update fits beside the server, and the learner's state beside the server that is awake."""
        need = self.need(choice)
        return need.room <= self.left(choice) and need.between <= self.left(choice, updating=False)

    def need(self, choice: Choice) -> Need:
        """Return what an update with a choice needs on the device."""
        found = self._estimated(choice.tokens, choice.recomputed)
        found = attrs.evolve(found, activations=int(found.activations * self.factor))
        if choice.lent:
            found = attrs.evolve(found, weights=found.weights - found.frozen)
        if choice.on_host:  # the weights before the update are where the moments are
            found = attrs.evolve(found, optimizer=0, change=0, buffer=min(BUFFER, found.optimizer))
        return found

    def _estimated(self, tokens: int, recomputed: int) -> Need:
        """Return the need of a pass, of which so many layers compute their activations twice.

        Only a few passes are estimated, with none and with all of these layers, and only when they are asked for. In
        between the need is at most what a straight line says: it is the largest of several straight lines, as long as
        no chunk of logits becomes full.
        """
        if 0 < recomputed < self.layers:
            return self._estimated(tokens, 0).towards(self._estimated(tokens, self.layers), recomputed / self.layers)
        if tokens in self.passes:
            return self.estimate(self.config, tokens, recomputed)
        low, high = next(pair for pair in pairwise(self.passes) if tokens < pair[1])
        ends = (self.estimate(self.config, end, recomputed) for end in (low, high))
        return next(ends).towards(next(ends), (tokens - low) / (high - low))

    def left(self, choice: Choice, *, updating: bool = True) -> int:
        """Return the bytes that the learner may take during an update, or between updates."""
        server = self.serving(choice)
        taken = server.asleep if choice.sleeps and updating else server.memory(choice.cache)
        return self.device.budget - server.transfer - taken

    def serving(self, choice: Choice) -> ServerNeed:
        """Return what the server needs with a choice."""
        return self.server.lent if choice.lent else self.server

    def describe(self, choice: Choice) -> str:
        """Return the plan as one line."""
        server, update = self.serving(choice).memory(choice.cache), self.need(choice).peak
        parts = []
        if server:
            inside = f"weights {self.server.weights / GIB:.1f}{', which the learner reads' if choice.lent else ''}"
            if not self.server.given:
                cached = max(int(self.server.cache * choice.cache), self.server.least) / GIB
                some = "" if choice.cache == 1 else f" {choice.cache:.0%} of"
                inside += f",{some} the cache of {self.server.calls} calls {cached:.1f}"
            asleep = f"; {self.server.asleep / GIB:.1f} while it sleeps during updates" if choice.sleeps else ""
            parts.append(f"server {server / GIB:.1f} ({inside}{asleep})")
        words = {0: "no layer", 1: "one layer", self.layers: "all layers"}
        layers = words.get(choice.recomputed, f"{choice.recomputed} layers")
        host = ", moments in host memory" if choice.on_host else ""
        cut = "" if choice.tokens >= self.group else f", cut groups of up to {self.group:,}"
        parts.append(
            f"update {update / GIB:.1f} (pass of {choice.tokens:,} tokens{cut}, {layers} computed twice{host})"
        )
        of = f" of memory_gib = {self.device.limit / GIB:g}" if self.device.limit else ""
        whole = f"memory: {in_gib(self.device.budget)} of {self.device.name}{of}"
        return f"{whole}: {', '.join(parts)}, {(self.left(choice) - update) / GIB:.1f} left"

    def refusal(self) -> str:
        """Return why nothing fits, and what to set so that something does."""
        tightest = list(self.choices())[-1]
        tightest = attrs.evolve(tightest, tokens=self.asked or tightest.tokens)
        need, parts = self.need(tightest), self._estimated(tightest.tokens, tightest.recomputed)
        limit = f" ([hardware] memory_gib = {self.device.limit / GIB:g})" if self.device.limit else ""
        others = f", of which {in_gib(self.device.others)} were taken before" if self.device.others else ""
        asleep = f", asleep {in_gib(self.server.asleep)}" if tightest.sleeps else ""
        what = (
            f"an update needs about {in_gib(need.room)} of memory, and "
            f"{in_gib(max(0, self.left(tightest)))} of {self.device.name} are free for it{limit}: it has "
            f"{in_gib(self.device.total)}{others}; {self.owner} takes "
            f"{in_gib(self.serving(tightest).memory(tightest.cache))}"
            f"{asleep}; {parts.describe()}, with tokens_per_batch = {tightest.tokens}.\n  "
        )
        if need.room <= self.left(tightest):  # then it is the time between updates
            what = (
                f"between updates the learner needs {in_gib(need.between)} and {self.owner} "
                f"{in_gib(self.serving(tightest).memory(tightest.cache))}, and {in_gib(self.device.budget)} of "
                f"{self.device.name} are free for both{limit}: it has {in_gib(self.device.total)}{others}.\n  "
            )
        cure = next((cure for cure, way in self._cures() if way.first()), OTHERWISE)
        return what + cure + or_more(self.device, lambda device: bool(attrs.evolve(self, device=device).first()))

    @property
    def asked(self) -> int:
        """The pass that the settings ask for; 0 for none."""
        return 0 if self.config.tokens_per_batch == "auto" else self.config.tokens_per_batch

    def _cures(self) -> Iterator[tuple[str, Fitting]]:
        """Yield what may help, in words, and what fits then."""

        def with_(**changes: Any) -> Fitting:
            return attrs.evolve(self, config=attrs.evolve(self.config, **changes))

        twice = {"gradient_checkpointing": self.config.gradient_checkpointing or True}
        if not self.config.gradient_checkpointing:
            yield "Set algorithm.gradient_checkpointing = true", with_(**twice)
        for tokens in PASSES:
            if tokens < self.asked:
                yield f"Set algorithm.tokens_per_batch = {tokens}", with_(tokens_per_batch=tokens, **twice)
        if self.server.given and not self.begun:
            least = -(-100 * attrs.evolve(self.server, given=0).memory(0) // self.device.total)
            shares = range(100 * self.server.given // self.device.total, least - 1, -1)
            found = bisect_left(shares, True, key=lambda share: bool(self._giving(share).first()))
            for share in shares[found : found + 1]:  # the largest that fits
                cure = f"Set server.gpu_memory_utilization = {share / 100:g} or less, or 0 for what the server needs"
                yield cure, self._giving(share)
        if self.config.server_sleep is False and self.device.accelerator and not self.config.max_staleness:
            yield "Set algorithm.server_sleep = true", with_(server_sleep=True, **twice)
        if self.config.moments == "device" and self.config.optimizer == "adamw" and self.device.accelerator:
            yield 'Set algorithm.moments = "host"', with_(moments="host", **twice)
        if not self.config.lora_rank and self.config.optimizer == "adamw":
            cure = "Set algorithm.optimizer = \"adamw8bit\" (pip install 'agentrig-grpo[8bit]')"
            yield cure, with_(optimizer="adamw8bit", **twice)
        if not self.config.lora_rank:
            cure = "Set algorithm.lora_rank = 16, which trains adapters only"
            yield cure, with_(lora_rank=16, gradient_checkpointing=True)

    def _giving(self, share: int) -> Fitting:
        """Return the same with a server that gets a share of the device, in percent."""
        return attrs.evolve(self, server=attrs.evolve(self.server, given=share * self.device.total // 100))


OTHERWISE = "Take a smaller model, or a device with more memory"


def passes_of(config: LearnerConfig, device: DeviceMemory, group: int) -> list[int]:
    """Return the passes that may be chosen, the largest first; those that whole groups fill are among them."""
    if config.tokens_per_batch != "auto":
        return [config.tokens_per_batch]
    most = PASSES[0] if device.accelerator else CPU_PASS
    filled = {min(most, -(-max(1, n // group) * group // 64) * 64) for n in PASSES}
    return sorted({n for n in PASSES if n <= most} | filled, reverse=True)


def lower(tokens: int, recomputed: int, *, latest: int, group: int, most: int) -> tuple[int, int] | None:
    """Return a smaller pass, and how many layers compute their activations twice, after an update ran out of memory.

    Args:
        tokens: Most tokens of a pass.
        recomputed: How many layers computed their activations twice.
        latest: Tokens of the pass that was too large; more than `tokens` for one call, of which no part is a pass.
        group: Tokens of a whole group: it is cut apart last.
        most: How many layers may compute them twice.

    Returns:
        None if there is nothing smaller.
    """
    half = tokens // 2
    while half >= latest:
        half //= 2
    smaller = (half, recomputed) if half >= PASSES[-1] and latest <= tokens else None
    if recomputed < most and (smaller is None or half < group):
        return tokens, most
    return smaller
