"""Agent Lightning's in-memory store: what other runners report is judged first, and finished rollouts are forgotten."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any

import attrs
from agentlightning import InMemoryLightningStore
from agentlightning.store.base import UNSET
from agentlightning.store.utils import rollout_status_from_attempt
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    NamedResources,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    Span,
    Worker,
)

from agentrig.endpoints import is_loopback
from agentrig.pools import Result
from agentrig.text import words_of
from agentrig_lightning.leases import Leases
from agentrig_lightning.resources import endpoint_of

log = logging.getLogger(__name__)
logging.getLogger("agentlightning").setLevel(logging.WARNING)


def _in_one_line(record: logging.LogRecord) -> bool:
    """Say a request's error without the stack of the store's server, which any request with the token can cause."""
    if record.exc_info and record.exc_info[1]:
        record.msg, record.exc_info = f"{record.msg}: {words_of(record.exc_info[1])}", None
    return True


logging.getLogger("agentlightning.store.server").addFilter(_in_one_line)

FINISHED = ("succeeded", "failed", "cancelled")
"""The statuses in which a rollout stays."""

ENDED = ("succeeded", "failed", "timeout", "unresponsive")
"""The statuses in which an attempt stays."""

client: ContextVar[str | None] = ContextVar("client", default=None)
"""The address of the client whose request is handled; None for this process."""

OWN_RUNNER = "agentrig"
"""The worker id of the run's own runner."""

OWN_ID = "agentrig.id"
"""The key of a rollout's metadata with the id that the run has given it."""


@attrs.define(eq=False)
class Arrival:
    """The end of an attempt that another runner, or the store's own health check, has reported.

    Attributes:
        attempted: The rollout, with the attempt.
        status: How the attempt ended.
        result: What a runner of agentrig sent; None from others, whose spans are in the store.
        settled: Whether the store has the status already.
        filed: Done once the run has judged and filed it.
    """

    attempted: AttemptedRollout
    status: str
    result: Result | None = None
    settled: bool = False
    filed: Future[None] = attrs.field(factory=Future)


class Store(InMemoryLightningStore):
    """Agent Lightning's in-memory store. What other runners report becomes final once the run has judged it.

    Attributes:
        open: The rollouts that have not finished: id to the id of their resources.
        ended: What ended the run; None while it goes on. An algorithm that goes on using the store gets it raised.
        leases: What other runners hold.
        arrivals: The ends of attempts of other runners, for the run's own runner to judge.
        arrived: Called when there is something to do for the run's own runner; None while there is none: then a report
            is final.
        foreign: How many rollouts came over HTTP, and not from the run, by the client's address.
    """

    def __init__(self) -> None:
        # The default estimator counts every token id of every span; `forget` bounds the store's memory anyway.
        super().__init__(thread_safe=True, span_size_estimator=lambda span: 0)
        self.open: dict[str, str | None] = {}
        self.ended: Exception | None = None
        self.leases = Leases()
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self.arrived: Callable[[], None] | None = None
        self._arriving: dict[tuple[str, str], Arrival] = {}
        self._given: dict[str, NamedResources] = {}
        self._warned: set[str] = set()
        self.foreign: Counter[str] = Counter()

    async def end(self, reason: Exception) -> None:
        """Cancel every rollout that has not finished, so that nobody waits for one; raise `reason` from now on."""
        self.ended = reason
        for rollout_id in list(self.open):
            await super().update_rollout(rollout_id, status="cancelled")

    def _alive(self) -> None:
        if self.ended is not None:
            raise self.ended

    # --- what an algorithm calls --------------------------------------------------------------------

    async def enqueue_rollout(self, *args: Any, **named: Any) -> Rollout:
        """Add a rollout to the queue; after `end`, raise its reason."""
        self._alive()
        self._count_foreign(1)
        rollout = await super().enqueue_rollout(*args, **named)
        self._tell()
        return rollout

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        """Add rollouts to the queue; after `end`, raise its reason."""
        self._alive()
        self._count_foreign(len(rollouts))
        added: Sequence[Rollout] = await super().enqueue_many_rollouts(rollouts)
        self._tell()
        return added

    async def _prepare_single_rollout(self, *args: Any, **named: Any) -> Rollout:
        """Give a rollout of the run the id that it has there; `enqueue_rollout` calls this."""
        rollout: Rollout = await super()._prepare_single_rollout(*args, **named)
        if client.get() is None and rollout.metadata:
            rollout.rollout_id = rollout.metadata.pop(OWN_ID, rollout.rollout_id)
        return rollout

    def _tell(self) -> None:
        """Wake the run's own runner."""
        if self.arrived is not None:
            self.arrived()

    def _count_foreign(self, n: int) -> None:
        """Note rollouts that somebody with the run's token adds over HTTP; the run itself calls the store directly."""
        address = client.get()
        if address is None:
            return
        if address not in self.foreign:
            log.warning("a rollout that is none of the run's has been put into the run's store from %s", address)
        self.foreign[address] += n

    async def wait_for_rollouts(self, *, rollout_ids: list[str], timeout: float | None = None) -> list[Rollout]:
        """Wait until rollouts have finished; if `end` is called meanwhile, raise its reason."""
        found: list[Rollout] = await super().wait_for_rollouts(rollout_ids=rollout_ids, timeout=timeout)
        self._alive()
        return found

    async def query_rollouts(self, **named: Any) -> Any:
        """Return rollouts; after `end`, raise its reason: an algorithm may wait for rollouts by asking for them."""
        self._alive()
        return await super().query_rollouts(**named)

    async def get_rollout_by_id(self, rollout_id: str) -> Any:
        """Return a rollout; after `end`, raise its reason."""
        self._alive()
        return await super().get_rollout_by_id(rollout_id)

    async def add_resources(self, resources: NamedResources) -> ResourcesUpdate:
        """Store resources; `resources_now` returns them."""
        return self._keep(await super().add_resources(resources))

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        """Replace resources; `resources_now` returns them."""
        return self._keep(await super().update_resources(resources_id, resources))

    def _keep(self, update: ResourcesUpdate) -> ResourcesUpdate:
        self._given.pop(update.resources_id, None)
        self._given[update.resources_id] = update.resources
        return update

    def resources_now(self, resources_id: str | None) -> NamedResources:
        """Return the resources of that id; without one, the latest. For code outside of an event loop."""
        return self._given.get(resources_id or next(reversed(self._given), ""), {})

    # --- what other runners call --------------------------------------------------------------------

    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:
        """Hand out a rollout, and note who has it."""
        attempted: AttemptedRollout | None = await super().dequeue_rollout(worker_id)
        await self._taken([attempted] if attempted is not None else [], worker_id)
        return attempted

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        """Hand out rollouts, and note who has them."""
        found: Sequence[AttemptedRollout] = await super().dequeue_many_rollouts(limit=limit, worker_id=worker_id)
        await self._taken(found, worker_id)
        return found

    async def start_rollout(self, *args: Any, **named: Any) -> AttemptedRollout:
        """Start a rollout that was not in the queue, and note who has it."""
        self._count_foreign(1)
        attempted: AttemptedRollout = await super().start_rollout(*args, **named)
        await self._taken([attempted], attempted.attempt.worker_id)
        return attempted

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        """Start another attempt, and note who has it."""
        attempted: AttemptedRollout = await super().start_attempt(rollout_id, worker_id)
        await self._taken([attempted], worker_id)
        return attempted

    async def _taken(self, found: Sequence[AttemptedRollout], worker_id: str | None) -> None:
        if worker_id == OWN_RUNNER and client.get() is None:
            return
        worker = worker_id or "(unnamed)"
        self.leases.alive(worker)
        for attempted in found:
            self.leases.take(attempted.rollout_id, attempted.attempt.attempt_id, worker)
        address = client.get()
        if not found or address is None or is_loopback(address):
            return
        update = await self.get_resources_by_id(found[0].resources_id or "")
        endpoint = endpoint_of(update.resources if update else {}, found[0].rollout_id, found[0].attempt.attempt_id)
        url = endpoint.reached_at
        if is_loopback(url) and url not in self._warned:
            self._warned.add(url)
            what, key = endpoint.way
            log.warning(
                "the runner %s at %s was told that the %s is at %s, which only this machine can reach: let it "
                "listen on all addresses (%s=0.0.0.0), or forward that port to the runner",
                *(worker, address, what, url, key),
            )

    async def update_worker(self, worker_id: str, *args: Any, **named: Any) -> Worker:
        """Note a runner's sign of life."""
        self.leases.alive(worker_id)
        return await super().update_worker(worker_id, *args, **named)

    async def add_span(self, span: Span) -> Span | None:
        """Add a span; it is a sign of life of its rollout."""
        self.leases.touch(span.rollout_id)
        return await super().add_span(span)

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Add spans; they are a sign of life of their rollouts."""
        for rollout_id in {span.rollout_id for span in spans}:
            self.leases.touch(rollout_id)
        added: Sequence[Span] = await super().add_many_spans(spans)
        return added

    async def update_rollout(
        self,
        rollout_id: str,
        input: Any = UNSET,
        mode: Any = UNSET,
        resources_id: Any = UNSET,
        status: Any = UNSET,
        *others: Any,
        **named: Any,
    ) -> Rollout:
        """Update a rollout, but not its status over HTTP: nobody takes or files one that its status says is over.

        Raises:
            ValueError: A client sets the status.
        """
        if client.get() is not None and status is not UNSET:
            raise ValueError(
                f"the run itself sets the status of {rollout_id}: report the end of an attempt instead "
                "(POST /v1/agl/rollouts/ROLLOUT/attempts/ATTEMPT)"
            )
        given = (input, mode, resources_id, status, *others)
        updated: Rollout = await super().update_rollout(rollout_id, *given, **named)
        return updated

    async def update_attempt(
        self, rollout_id: str, attempt_id: str, status: Any = UNSET, *others: Any, **named: Any
    ) -> Attempt:
        """Update an attempt; one that ends is judged and filed before its status changes.

        A report about a rollout that has finished already, or about an attempt that was replaced, changes nothing.
        """
        if status not in ENDED or self.arrived is None:
            return await super().update_attempt(rollout_id, attempt_id, status, *others, **named)
        await self.report(rollout_id, attempt_id, status)
        return await super().update_attempt(rollout_id, attempt_id, UNSET, *others, **named)

    async def report(self, rollout_id: str, attempt_id: str, status: str, result: Result | None = None) -> bool:
        """Take the end of an attempt, and wait until the run has judged and filed it.

        Return False if it does not count: the rollout has finished, or another attempt has replaced this one.
        """
        latest: Attempt | None = await super().get_latest_attempt(rollout_id)
        if rollout_id not in self.open or latest is None or attempt_id not in ("latest", latest.attempt_id):
            return False
        key = rollout_id, latest.attempt_id
        arrival = self._arriving.get(key)
        if arrival is None:
            rollout = await super().get_rollout_by_id(rollout_id)
            if not isinstance(rollout, AttemptedRollout):
                return False
            mine = Arrival(rollout, status, result)
            arrival = self._arriving.setdefault(key, mine)
            if arrival is mine:
                self._put(arrival)
        await asyncio.shield(asyncio.wrap_future(arrival.filed))
        return True

    def _put(self, arrival: Arrival) -> None:
        self.arrivals.put(arrival)
        self._tell()

    async def give_back(self, rollout_id: str, attempt_id: str) -> bool:
        """Put a rollout back into the queue, because its runner has left or was lost; return whether it was open."""
        latest: Attempt | None = await super().get_latest_attempt(rollout_id)
        rollout = await super().get_rollout_by_id(rollout_id)
        self.leases.drop(rollout_id)
        if rollout is None or latest is None or rollout_id not in self.open or latest.attempt_id != attempt_id:
            return False
        config: RolloutConfig = rollout.config.model_copy(
            update={
                "max_attempts": max(rollout.config.max_attempts, latest.sequence_id + 1),
                "retry_condition": list({*rollout.config.retry_condition, "unresponsive"}),
            }
        )
        await super().update_rollout(rollout_id, config=config)
        await super().update_attempt(rollout_id, attempt_id, "unresponsive")
        self._tell()
        return True

    # --- what the run's runner calls ----------------------------------------------------------------

    async def runs_again(self, attempted: AttemptedRollout, status: AttemptStatus) -> bool:
        """Return whether the rollout goes back to the queue if this attempt ends so: its `config` says."""
        attempt = attempted.attempt.model_copy(update={"status": status})
        return await rollout_status_from_attempt(attempt, attempted.config) not in FINISHED

    async def settle(self, attempted: AttemptedRollout, status: AttemptStatus) -> None:
        """Make the end of an attempt final, after the run has judged it."""
        if not await self.runs_again(attempted, status):
            self.open.pop(attempted.rollout_id, None)
        self.leases.drop(attempted.rollout_id)
        self._arriving.pop((attempted.rollout_id, attempted.attempt.attempt_id), None)
        await super().update_attempt(attempted.rollout_id, attempted.attempt.attempt_id, status)

    async def forget(self, rollout_ids: Sequence[str]) -> None:
        """Delete everything about finished rollouts."""
        async with self.collections.atomic(
            mode="rw", snapshot=False, labels=["rollouts", "attempts", "spans"]
        ) as collections:
            for rollout_id in rollout_ids:
                await collections.evict_spans_for_rollout(rollout_id)
                attempts = await collections.attempts.query(filter={"rollout_id": {"exact": rollout_id}})
                await collections.attempts.delete(list(attempts.items))
                rollout = await collections.rollouts.get({"rollout_id": {"exact": rollout_id}})
                if rollout is not None:
                    await collections.rollouts.delete([rollout])
                drop_private(self, rollout_id)
                self.leases.drop(rollout_id)

    async def _post_update_rollout(
        self, rollouts: Sequence[tuple[Rollout, Sequence[str]]], skip_enqueue: bool = False
    ) -> None:
        """Note which rollouts are open; the store calls this after every change of a rollout's status.

        A rollout that finishes here without `settle`, by the store's health check for example, is still filed.
        """
        closed = [r for r, _ in rollouts if r.status in FINISHED and r.rollout_id in self.open]
        for rollout, _ in rollouts:
            if rollout.status in FINISHED:
                self.open.pop(rollout.rollout_id, None)
            else:
                self.open[rollout.rollout_id] = rollout.resources_id
        await super()._post_update_rollout(rollouts, skip_enqueue=skip_enqueue)
        if self.ended is not None or self.arrived is None:
            return
        for rollout in closed:
            self.leases.drop(rollout.rollout_id)
            found = await super().get_rollout_by_id(rollout.rollout_id)
            if isinstance(found, AttemptedRollout):  # without an attempt, nothing ran
                self._put(Arrival(found, found.attempt.status, settled=True))


def drop_private(store: InMemoryLightningStore, rollout_id: str) -> None:
    """Delete a rollout from the store's private attributes; the public methods leave it there.

    Only this module uses private attributes of the store. `tests/test_store.py` fails when they change.
    """
    store.collections.attempts._items.pop(rollout_id, None)  # deleting the attempts leaves their empty dict
    store._completion_events.pop(rollout_id, None)
    store._start_time_by_rollout.pop(rollout_id, None)
    store._span_bytes_by_rollout.pop(rollout_id, None)
    store._running_rollout_ids.discard(rollout_id)
