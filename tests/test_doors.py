"""Every port that a run opens: half-sent, huge and strange requests get an answer or are closed, never a 500."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from doors import Door, problems

from agentrig import Endpoint


@contextmanager
def gateway() -> Iterator[Door]:
    from agentrig.gateway.client import GatewayAttempt
    from agentrig.gateway.process import Gateway
    from agentrig.gateway.settings import GatewaySettings

    with Gateway(GatewaySettings()) as running:
        endpoint = GatewayAttempt(running.address, "r").open(1, Endpoint(base_url="http://127.0.0.1:9/v1", model="m"))
        path, port = urlsplit(endpoint.base_url).path, urlsplit(endpoint.base_url).port
        yield Door(port=port or 0, path=f"{path}/chat/completions", header=f"Authorization: Bearer {endpoint.api_key}")


@contextmanager
def control() -> Iterator[Door]:
    from agentrig.gateway.process import Gateway
    from agentrig.gateway.settings import GatewaySettings

    with Gateway(GatewaySettings()) as running:
        port = urlsplit(running.address.url).port or 0
        yield Door(port=port, path="/agentrig/open", header=f"Authorization: Bearer {running.address.token}")


@contextmanager
def store() -> Iterator[Door]:
    from agentrig_lightning.joining import JOIN
    from agentrig_lightning.store import Store
    from agentrig_lightning.store_server import ServedStore

    token = "a-token-of-this-test-0123"
    served = ServedStore(Store(), address=("127.0.0.1", 0), token=token, silent_s=5.0, offer={})
    served.start()
    try:
        yield Door(port=urlsplit(served.url).port or 0, path=JOIN, header=f"Authorization: Bearer {token}")
    finally:
        served.stop()


@contextmanager
def callbacks() -> Iterator[Door]:
    from agentrig.external.callbacks import Callback, Listener

    listener = Listener()
    with Callback("r", listener=listener) as callback:
        parts = urlsplit(callback.url)
        yield Door(port=parts.port or 0, path=parts.path, header=f"Authorization: Bearer {callback.key}")
    listener.close()


@contextmanager
def watch(place: Path) -> Iterator[Door]:
    from agentrig.view.watch.app import serving

    with serving(place) as link:
        parts = urlsplit(link)
        yield Door(port=parts.port or 0, path=parts.path, method="GET")


@contextmanager
def demonstrations() -> Iterator[Door]:
    from agentrig.run.demonstration_server import demonstrating
    from agentrig.tasks import Task

    task = Task(id="t", input={"question": "?"})
    with demonstrating([task], lambda task, call: "yes", seed=random.randrange(9)) as (endpoints, _):
        parts = urlsplit(endpoints[0].base_url)
        header = f"Authorization: Bearer {endpoints[0].api_key}"
        yield Door(port=parts.port or 0, path="/v1/chat/completions", header=header)


def still_answers(door: Door) -> bool:
    """Whether a door answers a request of its own users, and refuses one that a foreign page or name sends."""
    name, _, value = door.header.partition(": ")
    url, headers = f"http://127.0.0.1:{door.port}{door.path}", {name: value} if name else {}
    with httpx.Client(trust_env=False) as client:
        sound = client.request("GET", url, headers=headers, timeout=5)
        for name, value in (("Host", "evil.example"), ("Host", "10.1.2.3"), ("Origin", "http://evil.example")):
            foreign = client.request(door.method, url, headers={**headers, name: value}, timeout=5)
            assert (foreign.status_code, foreign.headers["connection"]) == (403, "close"), (name, foreign.text)
            assert value in foreign.text
    return sound.status_code in (200, 400, 404, 405)


def test_every_door_is_closed_to_what_is_no_request_and_still_answers(ended_run: Callable[..., Path]) -> None:
    """All at once: each attack waits until the door gives up."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        made = (gateway(), control(), store(), callbacks(), watch(ended_run().parent), demonstrations())
        doors = [stack.enter_context(each) for each in made]
        assert list(pool.map(problems, doors)) == [[]] * 6
        assert list(pool.map(still_answers, doors)) == [True] * 6
