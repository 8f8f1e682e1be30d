"""How the loop manager checks its servers; test_verl_cluster.py runs it on a real Ray cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from agentrig_verl.manager import OVERLONG, answers, explained, servers_done

from agentrig import Endpoint
from agentrig.errors import RunStopped
from agentrig.testing.scripted import LocalServer, QuietHandler, serving


@pytest.mark.parametrize(("health", "expected"), [(200, True), (404, True), (503, False), (500, False)])
def test_a_server_whose_engine_died_does_not_answer(health: int, expected: bool) -> None:
    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.reply(health if self.path == "/health" else 200, b"")

    with serving(LocalServer(Handler)) as server:
        endpoint = Endpoint(base_url=server.url, model="m")
        assert answers(endpoint) is expected
    assert not answers(endpoint), "no server listens there now"


def test_the_message_of_a_run_that_lost_its_server_says_how_to_resume(tmp_path: Any) -> None:
    session: Any = SimpleNamespace(resumes=f"agentrig train --resume {tmp_path}")
    gone = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")
    with (
        pytest.raises(RunStopped, match=rf"too many failed\n.*127\.0\.0\.1:9/v1 does not.*--resume {tmp_path}"),
        explained(session, [gone]),
    ):
        raise RunStopped("too many failed")
    with pytest.raises(RunStopped, match=r"^too many failed$"), explained(session, []):
        raise RunStopped("too many failed")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("This model's maximum context length is 1280 tokens. However, you requested 1300", True),
        ("You passed 1300 input tokens and requested 192 output tokens. However, the model's context length is", True),
        ("The decoder prompt (length 1300) is longer than the maximum model length of 1280", True),
        ("prompt is longer than max_model_len", True),
        ("Connection error.", False),
    ],
)
def test_a_prompt_that_is_too_long_is_recognized_by_the_message(message: str, expected: bool) -> None:
    assert bool(OVERLONG.search(message)) is expected


def test_the_figures_tell_a_slow_server_from_a_fast_one() -> None:
    """Four groups of two go to two servers in turn: the second one ends last."""
    times: Any = [
        (100.0, 2.0),
        (100.5, 2.0),
        (100.0, 6.0),
        (100.0, 1.0),
        (102.0, 1.5),
        (0.0, 0.0),
        (103.0, 4.0),
        (0.0, 0.0),
    ]
    rollouts: Any = [SimpleNamespace(start=start, duration_s=duration) for start, duration in times]
    assert servers_done(rollouts, n=2, servers=2) == {"rollout_first_server_s": 3.5, "rollout_last_server_s": 7.0}
    assert servers_done(rollouts, n=2, servers=1)["rollout_first_server_s"] == 7.0
    assert servers_done([], n=2, servers=2) == {}, "rollouts that never began have no time"
