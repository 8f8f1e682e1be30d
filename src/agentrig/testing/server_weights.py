"""The checks of a server's weights: they arrive whole, also later versions, and nothing of the old ones is left."""

from __future__ import annotations

import math

from agentrig.delivery.asking import CannotAnswer, CannotScore, ask
from agentrig.delivery.digests import digests
from agentrig.servers import ServerError
from agentrig.testing import server_answers as server_answers  # whose checks come first
from agentrig.testing.checks import CheckFailed, CheckSkipped
from agentrig.testing.server_bench import TABLE, ServerBench

VERSIONS = 3
"""Weights that are handed over one after another."""


@TABLE.check(
    "takes-weights",
    why="A server that keeps a tensor of the old weights samples from a policy that nobody trains.",
    cure="Load every tensor of every version before `take` returns; refuse names that you do not know.",
    needs=("starts",),
)
def takes_weights(bench: ServerBench) -> None:
    """Weights arrive, whole, also those of later versions."""
    for _ in range(VERSIONS):
        version = bench.give("all")
        text = bench.prompt()
        try:
            bench.compare(text, bench.ask(text))
        except CheckFailed as failed:
            raise CheckFailed(f"after version {version}, with every tensor changed: {failed.what}") from None


@TABLE.check(
    "takes-merged",
    why="With LoRA only merged matrices change: a server that overlooks them never learns.",
    cure="Read each tensor's values as they are now, whatever its layout, gradient or identity.",
    needs=("takes-weights",),
)
def takes_merged(bench: ServerBench) -> None:
    """Weights with merged adapters arrive: some tensors changed, not contiguous, with gradients."""
    server = bench.server
    bench.policy.restore()
    bench.give(change=False)
    merged = bench.policy.merged(seed=11)
    with bench.marking():
        server.take(iter(merged), bench.next_version())
    text = bench.prompt()
    bench.compare(text, bench.ask(text))


@TABLE.check(
    "reads-only",
    why="These are the learner's own tensors: a server that writes to them changes the policy that is trained.",
    cure="Copy before you round, scale or move a tensor in place.",
    needs=("starts",),
)
def reads_only(bench: ServerBench) -> None:
    """`take` does not change the tensors that it gets."""
    bench.policy.change(21, "most")
    given = [(name, tensor.clone()) for name, tensor in bench.policy.weights()]
    before = digests(given)
    with bench.marking():
        bench.server.take(iter(given), bench.next_version())
    changed = [name for name, digest in digests(given).items() if digest != before[name]]
    if changed:
        raise CheckFailed(f"`take` changed {len(changed)} of the learner's tensors, {changed[0]} among them")


@TABLE.check(
    "refuses-weights",
    why="Weights that do not fit, or are not finite, would be sampled from until somebody looks at the answers.",
    cure="Check names, shapes and finite values, raise ServerError, and keep the weights that were there.",
    needs=("takes-weights",),
)
def refuses_weights(bench: ServerBench) -> None:
    """Weights that do not fit are refused, and the old ones stay."""
    for fault in ("missing", "shape", "nan"):
        bench.give()
        given = [(name, tensor.clone()) for name, tensor in bench.policy.weights()]
        at = max(i for i, (_, tensor) in enumerate(given) if tensor.ndim == 2)
        name, tensor = given[at]
        if fault == "missing":
            del given[at]
        elif fault == "shape":
            given[at] = (name, tensor[:, :-1].contiguous())
        else:
            tensor[-1, -1] = math.nan
        say = {"missing": f"without {name}", "shape": f"{name} with another shape", "nan": f"{name} with a NaN"}[fault]
        try:
            with bench.marking():
                bench.server.take(iter(given), bench.next_version())
        except ServerError:
            text = bench.prompt()
            try:
                bench.compare(text, bench.ask(text))
            except CheckFailed as failed:
                raise CheckFailed(f"after weights that it refused ({say}): {failed.what}") from None
            continue
        except Exception as error:
            raise CheckFailed(f"weights {say} raise {type(error).__name__}: {error}") from error
        raise CheckFailed(f"it takes weights {say}")


@TABLE.check(
    "version",
    why="By it a run finds replicas that still answer with old weights.",
    cure='Answer with system_fingerprint = "v" and the version of the latest `take`, "v0" before the first.',
    needs=("starts",),
)
def version(bench: ServerBench) -> None:
    """Answers state the version of the weights."""
    for _ in range(2):
        wanted = f"v{bench.give()}"
        found = bench.ask(bench.prompt()).version
        if found is None:
            raise CheckSkipped("its answers have no system_fingerprint: a run cannot tell its replicas apart")
        if found != wanted:
            raise CheckFailed(f'system_fingerprint is "{found}" after version {wanted[1:]}')


@TABLE.check(
    "prefix-cache",
    why="Keys and values of old weights make answers that neither policy would give, in silence.",
    cure="Drop every kept prompt in `take`, or keep it under the version that computed it.",
    needs=("takes-weights",),
)
def prefix_cache(bench: ServerBench) -> None:
    """A prompt that was asked before is computed with the new weights."""
    text = bench.prompt(24)
    bench.give()
    for _ in range(2):
        bench.compare(text, bench.ask(text))
    bench.give()
    for again in (text, text + " and"):
        try:
            bench.compare(again, bench.ask(again))
        except CheckFailed as failed:
            raise CheckFailed(f"a prompt that older weights had answered: {failed.what}") from None


@TABLE.check(
    "digests",
    why="A digest of other tensors than it computes with proves a delivery that did not happen.",
    cure="Compute `held()` from the parameters that the model uses at that moment, or return None.",
    needs=("takes-weights",),
)
def held_digests(bench: ServerBench) -> None:
    """The digests that it states are those of its weights."""
    bench.give()
    bench.give()
    found = bench.server.held()
    if found is None:
        try:
            stated = ask(bench.endpoint, bench.policy.ids(bench.prompt())).digests
        except (CannotScore, CannotAnswer):
            stated = {}
        if not stated:
            raise CheckSkipped("it states no digests: the proof of delivery compares log-probabilities")
        found = [stated]
    own = digests(bench.policy.weights())
    for mapping in found:
        known = own.keys() & mapping.keys()
        wrong = [name for name in sorted(known) if mapping[name] != own[name]]
        if wrong or not known:
            what = f"{len(wrong)} of {len(known)} digests are not those of its weights: {', '.join(wrong[:3])}"
            raise CheckFailed(what if known else "none of its digests has a name that the learner knows")


@TABLE.check(
    "sleep",
    why="With algorithm.server_sleep the learner computes in between: old weights after it train nothing.",
    cure="Free memory in `sleep`, take it back in `wake`, and load whatever `take` brings after it.",
    needs=("takes-weights",),
)
def sleep(bench: ServerBench) -> None:
    """After `sleep` and `wake` it takes weights and answers with them."""
    server = bench.server
    with bench.marking():
        server.sleep()
        server.wake()
    bench.give()
    text = bench.prompt()
    bench.compare(text, bench.ask(text))
