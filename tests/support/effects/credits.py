"""The keys of the named credits, observed in what they say that calls are worth."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import attrs
from agentrig_grpo.config import GrpoConfig
from rollouts import rollout, trace_of

from agentrig import Score, Task, Triplet
from agentrig.credit import differ
from agentrig.run.drawing import Drawing
from agentrig.run.gate import Gate
from agentrig.testing.scripted import LocalServer, QuietHandler, serving
from effects import Elsewhere, Flip, Settings, config_of
from effects.tasks import build


def worths(name: str) -> Any:
    """Return a look at the worths of two rollouts: three calls with the rewards 1, 0 and 1, and one with 0."""

    def made(*calls: float) -> Any:
        triplets = [Triplet(prompt_ids=[1], response_ids=[2], span_id=f"c{i}") for i in range(len(calls))]
        score = Score(status="ok", value=calls[-1], calls=calls)
        return rollout(score=score, trace=trace_of(*["write"] * len(calls)), triplets=triplets)

    def look(settings: Settings) -> list[Any]:
        (found,) = build(f"credit.{name}", settings)([[made(1.0, 0.0, 1.0), made(0.0)]])
        return list(found)

    return look


def halved(name: str, **beside: Any) -> Flip:
    """Return the entry of `negative_scale`."""
    return Flip(
        a=1.0,
        b=0.5,
        look=worths(name),
        beside=beside,
        shows=lambda a, b: a[0] == b[0] and _sum(a[1]) < 0 and _sum(b[1]) == _sum(a[1]) / 2,
    )


def _sum(worth: Any) -> float:
    return sum(worth) if isinstance(worth, list) else worth


WEIGHTING = Flip(
    a="rollout", b="call", look=worths("dr-grpo"), shows=lambda a, b: a == [0.5, -0.5] and b == [0.25, -0.75]
)
SPREAD = Flip(
    a="rollout",
    b="call",
    look=worths("grpo"),
    shows=lambda a, b: abs(a[0] + a[1]) < 1e-9 and abs(3 * b[0] + b[1]) < 1e-9 < a[0],
)


def long_reply(settings: Settings) -> float:
    """Return the worth of a correct reply of 8 of at most 10 tokens, beside a short one that is correct too."""

    def made(tokens: int) -> Any:
        trace = trace_of("write")
        spans = [attrs.evolve(s, attributes={**s.attributes, "request": {"max_tokens": 10}}) for s in trace.spans]
        triplet = Triplet(prompt_ids=[1], response_ids=[2] * tokens, span_id="c0")
        return rollout(1.0, trace=attrs.evolve(trace, spans=spans), triplets=[triplet])

    return float(next(iter(build("credit.dapo", settings)([[made(8), made(1)]])))[0])


def batches(settings: Settings) -> int:
    """Return how many batches a step has if no group is admitted."""
    tasks = [Task(id=str(i), input={}) for i in range(6)]
    gate, found = Gate(differ, config_of("credit.dapo", settings).max_num_gen_batches), list[int]()

    def sample(drawn: Any) -> list[Any]:
        found.append(len(drawn))
        return [rollout(1.0, group=f"{len(found)}-{i}") for i in range(len(drawn))]

    gate.sample(1, Drawing(tasks, GrpoConfig(tasks_per_step=2), seed=1), sample)
    return len(found)


def asked(settings: Settings) -> dict[str, Any]:
    """Return what a teacher was asked, with one call for each of four rollouts."""
    with serving(Asked()) as server:
        rollouts = [
            attrs.evolve(
                rollout(1.0, triplets=[Triplet(prompt_ids=[1], response_ids=[2], logprobs=[-1.0], span_id="c0")]),
                id=f"r{i}",
            )
            for i in range(4)
        ]
        given = dict(settings)
        if given["base_url"].startswith("http://teacher"):
            given["base_url"] = f"{server.url.removesuffix('/v1')}/{given['base_url'][-1]}/v1"
        list(build("credit.opd", given)([rollouts]))
        return {"paths": set(server.paths), "models": set(server.models), "most": server.most}


class Asked(LocalServer):
    """A teacher that notes what it gets."""

    def __init__(self) -> None:
        super().__init__(Answering)
        self.paths, self.models = list[str](), list[str]()
        self.now = self.most = 0
        self.lock = threading.Lock()


class Answering(QuietHandler):
    server: Asked

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.paths.append(self.path)
            self.server.models.append(body["model"])
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        time.sleep(0.1)
        with self.server.lock:
            self.server.now -= 1
        scores = [None, *({str(token): {"logprob": -1.0}} for token in body["prompt"][1:])]
        self.reply(200, {"choices": [{"prompt_logprobs": scores}]})


BESIDE = {"base_url": "http://teacher/a", "model": "one"}

TABLES = {
    "credit.dapo": {
        "negative_scale": halved("dapo", overlong_buffer_len=0),
        "overlong_buffer_len": Flip(a=0, b=4, look=long_reply, shows=lambda a, b: a == 0 and b < -0.5),
        "max_num_gen_batches": Flip(a=1, b=3, look=batches, shows=lambda a, b: (a, b) == (1, 3)),
    },
    "credit.opd": {
        "base_url": Flip(
            a="http://teacher/a",
            b="http://teacher/b",
            look=asked,
            beside={"model": "one"},
            shows=lambda a, b: (a["paths"], b["paths"]) == ({"/a/v1/completions"}, {"/b/v1/completions"}),
        ),
        "model": Flip(
            a="one",
            b="two",
            look=asked,
            beside={"base_url": "http://teacher/a"},
            shows=lambda a, b: (a["models"], b["models"]) == ({"one"}, {"two"}),
        ),
        "api_key": Elsewhere(
            "tests/test_teacher.py::test_it_scores_what_was_sampled_after_its_prompt", "a key is no setting's value"
        ),
        "concurrency": Flip(a=1, b=4, look=asked, beside=BESIDE, shows=lambda a, b: a["most"] == 1 < b["most"]),
    },
    "credit.dr-grpo": {"negative_scale": halved("dr-grpo"), "weighting": WEIGHTING},
    "credit.grpo": {"negative_scale": halved("grpo"), "weighting": SPREAD},
    "credit.rloo": {"negative_scale": halved("rloo")},
    "credit.reinforce++": {"negative_scale": halved("reinforce++")},
    "credit.turn": {
        "negative_scale": halved("turn"),
        "discount": Flip(
            a=0.0,
            b=1.0,
            look=worths("turn"),
            shows=lambda a, b: (a[0], b[0]) == ([0.5, 0.0, 0.0], [1.0, 0.0, 0.0]),
        ),
    },
}
