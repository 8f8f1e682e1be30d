"""Faults that train on in silence, each with its code and the link that must be named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs


@attrs.frozen(kw_only=True)
class Fault:
    """The link of `agentrig.audit.verdicts.LINKS` that must be named, and the Python that plants a fault.

    It runs in the process `where`; `names` is a text of the run's message.
    """

    link: str
    code: str
    where: Literal["run", "server", "runner"] = "run"
    settings: Sequence[str] = ()
    names: str = ""


REPLY = """
import json
from agentrig_grpo.server import replies
real, kept = replies.response, []
def response(chat, choices, tokenizer, *, model):
    body = json.loads(real(chat, choices, tokenizer, model=model))
    choice = body["choices"][0]
    {body}
    return json.dumps(body).encode()
replies.response = response
"""

TAP = """
import json
from agentrig.tracing import httpx_tap
real = httpx_tap._Call.answer
def answer(self, response):
    real(self, response)
    body = json.loads(response.content)
    body["choices"][0]["message"]["content"] = body["choices"][0]["message"]["content"][:8]
    response._content = json.dumps(body).encode()
httpx_tap._Call.answer = answer
"""

PREPARED = """
import json
from agentrig.tracing import httpx_tap
real = httpx_tap.sampled_as
def sampled_as(body, sampling, *, replace):
    cut = [{**one, "content": one["content"][-8:]} for one in body["messages"]]
    return real({**body, "messages": cut}, sampling, replace=replace)
httpx_tap.sampled_as = sampled_as
"""

SAMPLE = """
import torch
from attrs import evolve
from agentrig_grpo.server import engine, sampling
real = sampling.sample
def sample(logits, settings, uniforms, allowed=None):
    logp = real(logits, settings, uniforms, allowed)[1]
    {body}
    return tokens, logp
engine.sample = sample
"""

SCORES = """
import attrs
from agentrig.runners.engine import RolloutEngine
real = RolloutEngine.run
def run(self, tasks, *, n, mode, **more):
    found = real(self, tasks, n=n, mode=mode, **more)
    if mode == "train":
        {body}
    return found
RolloutEngine.run = run
"""

JOBS = """
from agentrig.runners import engine
real, inputs = engine.Job, []
def job(*, input, mode, **more):
    if mode == "train":
        inputs.append(input)
        i = len(inputs) - 1
        if i >= 8 and {which}:
            input = {{**input, "database": inputs[i - 8]["database"]}}
    return real(input=input, mode=mode, **more)
engine.Job = job
"""

MEASURED = """
import attrs
from agentrig.runners.engine import RolloutEngine
real = RolloutEngine.run
def run(self, tasks, *, n, mode, **more):
    if mode == "report":
        {before}
    found = real(self, tasks, n=n, mode=mode, **more)
    if mode == "report":
        {after}
    return found
RolloutEngine.run = run
"""

LATE = """
import attrs
from agentrig.runners.engine import RolloutEngine
real, latest = RolloutEngine.run, {{}}
def run(self, tasks, *, n, mode, **more):
    found = real(self, tasks, n=n, mode=mode, **more)
    if mode == {mode!r}:
        for i, rollout in enumerate(found):
            before = latest.get(rollout.task.id, (rollout.outcome, rollout.score))
            latest[rollout.task.id] = rollout.outcome, rollout.score
            found[i] = attrs.evolve(rollout, outcome=before[0], score=before[1])
    return found
RolloutEngine.run = run
"""

SWAP = """pairs = [(i, j) for i in range({first}) for j in range({second}) if found[i].value != found[j].value]
        i, j = pairs[0]
        found[i], found[j] = (attrs.evolve(found[a], score=found[b].score) for a, b in ((i, j), (j, i)))"""

ADVANTAGES = """
from agentrig import credit
real = credit.grpo
def grpo(groups, config):
    found = list(real(groups, config))
    {body}
credit.grpo = grpo
"""

WEIGHTS = """
from agentrig_grpo import learner
real = learner.sample_weights
def sample_weights(lengths, rollouts, aggregation):
    found = real(lengths, rollouts, aggregation)
    return [w * {by} if i % 3 == 0 else w for i, w in enumerate(found)]
learner.sample_weights = sample_weights
"""

PASSES = """
import torch
from agentrig_grpo import learner
real, state = learner.tokens_in_loss, {{"passes": 0}}
batches = learner.Learner._batches
def begun(self, *given):
    state.update(passes=0, learner=self)
    return batches(self, *given)
def tokens_in_loss(*given):
    state["passes"] += 1
    if state["passes"] == 1:
        for p in state["learner"].trained.values():
            if p.grad is not None:
                p.grad *= {by}
    return real(*given)
learner.tokens_in_loss, learner.Learner._batches = tokens_in_loss, begun
"""

LOSSES = """
import math
import attrs
from agentrig_grpo import learner
real = learner.token_losses
def token_losses(now, sampled, advantages, **more):
    {body}
learner.token_losses = token_losses
"""

OPTIMIZER = """
from agentrig_grpo import learner
real = learner.optimizer_of
def optimizer_of(parameters, config):
    made = real(parameters, config)
    {body}
    return made
learner.optimizer_of = optimizer_of
"""

SAVED = """
from agentrig_grpo import checkpoint
real = checkpoint.save
def save(model, tokenizer, directory, *, dtype=None, state=None):
    state = checkpoint.weights(model) if state is None else state
    rounded = {name: tensor.bfloat16().float() for name, tensor in state.items()}
    return real(model, tokenizer, directory, dtype=dtype, state=rounded)
checkpoint.save = save
"""

ADAPTERS = """
from agentrig_grpo import adapter_files
real = adapter_files.save
def save(*given, trained, **more):
    {body}
    real(*given, trained=trained, **more)
adapter_files.save = save
"""

STALE = ("algorithm.max_staleness=1", "algorithm.rollout_is_threshold=1.0")

FAULTS = {
    "the same tasks in every step": Fault(
        link="tasks",
        code="from agentrig.run import drawing\nreal = drawing.tasks_of_step\n"
        "drawing.tasks_of_step = lambda tasks, *, n, step, seed: real(tasks, n=n, step=1, seed=seed)",
    ),
    "the same tasks from the third step on": Fault(
        link="tasks",
        settings=("algorithm.steps=4",),
        code="from agentrig.run import drawing\nreal = drawing.tasks_of_step\n"
        "drawing.tasks_of_step = lambda tasks, *, n, step, seed: real(tasks, n=n, step=min(step, 2), seed=seed)",
        names="which algorithm.task_sampling=uniform does not draw then",
    ),
    "one task only": Fault(
        link="tasks",
        code="from agentrig.run import drawing\ndrawing.tasks_of_step = lambda tasks, *, n, **_: [tasks[0]] * n",
    ),
    "all training inputs are equal": Fault(
        link="tasks", code="import os\nos.environ['AUDIT_EQUAL'] = '1'", names="different inputs"
    ),
    "tasks have the gold of another one": Fault(
        link="tasks",
        code="import attrs\nfrom agentrig.run import splits\nreal = splits.read_split\n"
        "def read_split(*given, **more):\n"
        "    rows = real(*given, **more)\n"
        "    return [attrs.evolve(t, private=rows[i - 1].private) if i % 4 == 3 else t for i, t in enumerate(rows)]\n"
        "splits.read_split = read_split",
        names="another private part than the task set",
    ),
    "the last rollout of a group gets the database of another task": Fault(
        link="tasks", code=JOBS.format(which="i % 8 == 7"), names="another input than the task's in 2 rollouts"
    ),
    "a whole group gets the database of another task": Fault(
        link="tasks", code=JOBS.format(which="i < 16"), names="another input than the task's in 8 rollouts"
    ),
    "answers are cut before they are recorded and scored": Fault(
        link="tasks",
        where="runner",
        code="from agentrig.runners import attempt\nreal = attempt.json_values\n"
        "attempt.json_values = lambda answer: real(answer)[:4]",
        names="the agent returned another answer than the one that is recorded",
    ),
    "the end-of-text token is dropped from the ids": Fault(
        link="text",
        where="server",
        settings=("algorithm.model=mini", "algorithm.temperature=1.5"),
        code=REPLY.format(
            body='if choice["token_ids"][-1] == 1 and len(choice["token_ids"]) > 1: '
            'choice["token_ids"].pop(); choice["logprobs"]["content"].pop()'
        ),
        names="ends no reply",
    ),
    "tokens are cut out of the prompt": Fault(
        link="text",
        where="server",
        code="from agentrig_grpo.server import chat\nreal = chat.Chat.render\n"
        "chat.Chat.render = lambda self, *given: (lambda ids: ids[:2] + ids[4:])(real(self, *given))",
    ),
    "the agent gets the text of another reply": Fault(
        link="text",
        where="server",
        code=REPLY.format(body='kept.append(choice["message"]); choice["message"] = kept[-2:][0]'),
    ),
    "the tap cuts the reply that the agent gets": Fault(
        link="text", where="runner", code=TAP, names="the client got another message than the one that is recorded"
    ),
    "the tap cuts the messages before they are recorded": Fault(
        link="text", where="runner", code=PREPARED, names="the client sent other messages than those that are recorded"
    ),
    "sampled at half the temperature": Fault(
        link="distribution",
        where="server",
        code=SAMPLE.format(
            body="tokens = real(logits, evolve(settings, temperature=settings.temperature / 2), uniforms, allowed)[0]"
        ),
    ),
    "sampled at the temperature 1 instead of 0.7": Fault(
        link="distribution",
        where="server",
        settings=("algorithm.temperature=0.7",),
        code=SAMPLE.format(body="tokens = real(logits, evolve(settings, temperature=1.0), uniforms, allowed)[0]"),
    ),
    "sampled from the three likeliest tokens": Fault(
        link="distribution",
        where="server",
        code=SAMPLE.format(
            body="cut = logits.masked_fill(logits < logits.topk(3).values[:, -1:], -torch.inf); "
            "tokens = real(cut, settings, uniforms, allowed)[0]"
        ),
    ),
    "sampled with the same noise for pairs": Fault(
        link="distribution",
        where="server",
        code="from agentrig_grpo.server import engine\nreal = engine.Uniforms\n"
        "def pairs(*key):\n    return real(*key[:-1], key[-1] // 2 if isinstance(key[-1], int) else key[-1])\n"
        "engine.Uniforms = pairs",
    ),
    "the same random numbers for all prompts": Fault(
        link="distribution",
        where="server",
        code="from agentrig_grpo.server import engine\nreal = engine.Uniforms\n"
        "engine.Uniforms = lambda *key: real(*(key[:-2] + key[-1:]))",
        names="the random numbers of another prompt's reply",
    ),
    "one random number for all tokens of a request": Fault(
        link="distribution",
        where="server",
        code="from agentrig_grpo.server import engine\nreal = engine.Uniforms\n"
        "def one(*key):\n    number = real(*key)()\n    return lambda: number\n"
        "engine.Uniforms = one",
        names="one random number for several tokens of a reply, in the order of the vocabulary",
    ),
    "rewards are exchanged between two tasks": Fault(
        link="score", code=SCORES.format(body=SWAP.format(first="n", second="n, 2 * n"))
    ),
    "rewards are exchanged within a group": Fault(
        link="score", code=SCORES.format(body=SWAP.format(first="n", second="n"))
    ),
    "answers with their rewards are exchanged within a group": Fault(
        link="score",
        code=SCORES.format(
            body=SWAP.format(first="n", second="n").replace(
                "score=found[b].score", "score=found[b].score, outcome=found[b].outcome"
            )
        ),
        names="in the replies of another rollout",
    ),
    "each rollout has the answer of the one before": Fault(
        link="score", code=LATE.format(mode="train"), names="but in those of another rollout"
    ),
    "each held-out rollout has the answer of the one before": Fault(
        link="held-out",
        settings=("run.report_tasks=6", "algorithm.val_temperature=1.0"),
        code=LATE.format(mode="report"),
        names="but in those of another rollout",
    ),
    "scores of calls are those of another rollout": Fault(
        link="score",
        code=SCORES.format(
            body="found = [attrs.evolve(r, score=attrs.evolve(r.score, calls=found[i - 1].score.calls)) "
            "for i, r in enumerate(found)]"
        ),
        names="a call of rollout",
    ),
    "the reward mixes up the scores of calls in some rollouts": Fault(
        link="score",
        code="import attrs\n"
        "from agentrig.plan import Plan\n"
        "real = Plan.scorer\n"
        "def scorer(self):\n"
        "    made = real(self)\n"
        "    judge = made._reward\n"
        "    def reward(task, outcome, *more):\n"
        "        found, text = judge(task, outcome, *more), str(outcome.answer)\n"
        "        return attrs.evolve(found, calls=[found.value + 0.5]) if ord(text[:1] or 'a') % 4 == 0 else found\n"
        "    made._reward = reward\n"
        "    return made\n"
        "Plan.scorer = scorer",
        names="calls whose reply is an answer to their task have another score than it",
    ),
    "two groups are merged": Fault(
        link="tasks",
        code=SCORES.format(
            body="found = [attrs.evolve(r, group=found[0].group) if i < 2 * n else r for i, r in enumerate(found)]"
        ),
    ),
    "advantages are 100 times as large in one group": Fault(
        link="advantages",
        code=ADVANTAGES.format(body="return [[a and a * (1 if i else 100) for a in g] for i, g in enumerate(found)]"),
    ),
    "the size of advantages is ignored": Fault(
        link="advantages",
        code=ADVANTAGES.format(body="return [[a and (1.0 if a > 0 else -1.0) for a in g] for g in found]"),
    ),
    "advantages are mixed up between rollouts": Fault(
        link="advantages", code=ADVANTAGES.format(body="return [g[::-1] for g in found[::-1]]")
    ),
    "advantages are shifted from the third step on": Fault(
        link="advantages",
        settings=("algorithm.steps=4",),
        code="from agentrig import credit\nreal, steps = credit.grpo, []\n"
        "def grpo(groups, config):\n"
        "    steps.append(1)\n"
        "    return [[a + 0.4 * (len(steps) > 2) for a in g] for g in real(groups, config)]\n"
        "credit.grpo = grpo",
    ),
    "the warm-up begins again in the third step": Fault(
        link="weights",
        settings=("algorithm.steps=4", "algorithm.warmup_steps=2"),
        code="from agentrig_grpo import learner\nreal = learner.learning_rate\n"
        "learner.learning_rate = lambda config, *, step, update: real(config, step=step, update=(update - 1) % 4 + 1)",
    ),
    "two rollouts have each other's calls": Fault(
        link="tasks",
        code=SCORES.format(
            body="a, b = found[0], found[-1]\n"
            "        found[0] = attrs.evolve(a, trace=b.trace, triplets=b.triplets)\n"
            "        found[-1] = attrs.evolve(b, trace=a.trace, triplets=a.triplets)"
        ),
        names="the first call of 2 rollouts is about another task",
    ),
    "the last accuracy is of training tasks": Fault(
        link="held-out",
        code="from agentrig.run import session\nreal = session.RunSession.report\n"
        "def report(self, endpoint, *, when, step):\n"
        "    if when == 'after':\n"
        "        self._report_tasks = self.train_tasks[: len(self._report_tasks)]\n"
        "    return real(self, endpoint, when=when, step=step)\n"
        "session.RunSession.report = report",
    ),
    "the last accuracy is of replies that were kept": Fault(
        link="held-out",
        code="import attrs\n"
        "from agentrig.runners.engine import RolloutEngine\nrun = RolloutEngine.run\n"
        "def without(self, tasks, *, n, mode, **more):\n"
        "    found = run(self, tasks, n=n, mode=mode, **more)\n"
        "    if mode == 'report':\n"
        "        found = [attrs.evolve(r, trace=attrs.evolve(r.trace, spans=())) for r in found]\n"
        "    return found\n"
        "RolloutEngine.run = without",
    ),
    "held-out answers count as correct": Fault(
        link="held-out",
        code=MEASURED.format(
            before="pass",
            after="found = [attrs.evolve(r, score=attrs.evolve(r.score, correct=not r.correct)) for r in found]",
        ),
        names="its answer scores",
    ),
    "held-out answers get the score that the reward kept of their task": Fault(
        link="held-out",
        settings=("run.report_tasks=6", "algorithm.val_temperature=1.0"),
        code="from agentrig.plan import Plan\n"
        "real = Plan.scorer\n"
        "def scorer(self):\n"
        "    made, kept = real(self), {}\n"
        "    judge = made._reward\n"
        "    def reward(task, outcome, *more):\n"
        "        found = judge(task, outcome, *more)\n"
        "        return kept.setdefault(task.id, found) if task.id.startswith('test') else found\n"
        "    made._reward = reward\n"
        "    return made\n"
        "Plan.scorer = scorer",
        names="the report of step 2: ",
    ),
    "held-out answers are those to one task": Fault(
        link="held-out",
        code=MEASURED.format(
            before="tasks = [attrs.evolve(task, input=tasks[0].input) for task in tasks]", after="pass"
        ),
        names="another input than the task's",
    ),
    "held-out replies are sampled at the temperature 1": Fault(
        link="held-out",
        where="server",
        code=SAMPLE.format(
            body="tokens = real(logits, evolve(settings, greedy=None, all_greedy=False), uniforms, allowed)[0]"
        ),
        names="has the temperature 0, and a token of it is",
    ),
    "held-out replies are cut sooner before training": Fault(
        link="held-out",
        code="from agentrig.run import session\nreal = session.RunSession.report\n"
        "def report(self, endpoint, *, when, step):\n"
        "    served = [one.with_sampling(max_tokens=7 if when == 'before' else 8) for one in endpoint]\n"
        "    return real(self, served, when=when, step=step)\n"
        "session.RunSession.report = report",
        names="first requests of the report of step 2 have max_tokens 8, and before training 7",
    ),
    "held-out replies are sampled from a nucleus": Fault(
        link="held-out",
        settings=("algorithm.top_p=0.9",),
        code="from agentrig.run import loop\n"
        "loop.Loop._greedy = lambda self: [e.with_sampling(temperature=0.0) for e in self._sampling()]",
        names="were sampled with top_p 0.9 instead of 1.0",
    ),
    "the agent gets the text of another reply in measurements only": Fault(
        link="held-out",
        where="server",
        code=REPLY.format(
            body='kept.extend([choice["message"]] * (chat.temperature == 0)); '
            'choice["message"] = kept[0] if chat.temperature == 0 else choice["message"]'
        ),
        names="the client got the text",
    ),
    "a step states another accuracy of validation": Fault(
        link="held-out",
        settings=("algorithm.validate_every=1", "run.validation_tasks=2"),
        code="from agentrig.run import session\nreal = session.RunSession._line\n"
        "session.RunSession._line = lambda self, *given: {**real(self, *given), 'validation_accuracy': 0.987}",
        names="metrics.jsonl states the accuracy 0.9870 of the validation of step 1",
    ),
    "the summary states another accuracy": Fault(
        link="held-out",
        code="from agentrig.run import session\nreal = session.RunSession.summary\n"
        "def summary(self, **more):\n"
        "    found = real(self, **more)\n"
        "    found['accuracy']['after'] = 0.987\n"
        "    return found\n"
        "session.RunSession.summary = summary",
    ),
    "the adapter leaves out what matches": Fault(
        link="advantages",
        settings=("adapter.match=sp.ak",),
        code="from agentrig_agent_match import AgentMatch\nreal, seen = AgentMatch._node, {}\n"
        "def node(self, trace, call):\n"
        "    found = real(self, trace, call)\n"
        "    return None if found and int(call.id[-1], 16) % 2 else found\n"
        "AgentMatch._node = node",
    ),
    "token weights times 10": Fault(link="gradient", code=WEIGHTS.format(by="10")),
    "token weights times 0.1": Fault(link="gradient", code=WEIGHTS.format(by="0.1")),
    "the gradient's sign is flipped at a layer's input": Fault(
        link="gradient",
        code="from agentrig_grpo import learner\nreal = learner.build\n"
        "def build(model, *given, **more):\n"
        "    made = real(model, *given, **more)\n"
        "    def flip(module, args, kwargs):\n"
        "        if args[0].requires_grad:\n"
        "            args[0].register_hook(lambda g: -g)\n"
        "    made.model.model.layers[1].register_forward_pre_hook(flip, with_kwargs=True)\n"
        "    return made\n"
        "learner.build = build",
    ),
    "one pass's gradient is doubled": Fault(
        link="gradient", code=PASSES.format(by="2"), settings=("algorithm.tokens_per_batch=96",)
    ),
    "one pass's gradient is lost": Fault(
        link="gradient", code=PASSES.format(by="0"), settings=("algorithm.tokens_per_batch=96",)
    ),
    "one tensor's gradient has the other sign in the second update": Fault(
        link="gradient",
        settings=("algorithm.mini_batches=4",),
        code="import torch\nreal, made = torch.nn.utils.clip_grad_norm_, []\n"
        "def clip(parameters, most):\n"
        "    parameters = list(parameters)\n"
        "    norm = real(parameters, most)\n"
        "    made.append(1)\n"
        "    if len(made) == 2:\n"
        "        parameters[5].grad.neg_()\n"
        "    return norm\n"
        "torch.nn.utils.clip_grad_norm_ = clip",
        names="gradients are not those of the step's loss: update 2",
    ),
    "the learning rate is a thousandth": Fault(
        link="weights",
        code="from agentrig_grpo import learner\nreal = learner.learning_rate\n"
        "learner.learning_rate = lambda *given, **more: real(*given, **more) / 1000",
    ),
    "the reference of the KL loss is the live model": Fault(
        link="gradient",
        settings=("algorithm.kl_loss_coef=0.1",),
        code="from agentrig_grpo import learner\nimport torch\n"
        "learner.Learner._reference_logprobs = torch.no_grad()(lambda self, batch: self._score(self.model, batch)[0])",
        names="the reference model of the KL loss",
    ),
    "the model is trained beside its adapters": Fault(
        link="weights",
        settings=("algorithm.lora_rank=4",),
        code="from agentrig_grpo import lora\nreal = lora.wrap\n"
        "lora.wrap = lambda *given, **more: real(*given, **more).requires_grad_(True)",
        names="no adapters",
    ),
    "the loss has the wrong sign": Fault(
        link="gradient",
        code=LOSSES.format(
            body="found = real(now, sampled, advantages, **more)\n    return attrs.evolve(found, loss=-found.loss)"
        ),
        names="of the other sign",
    ),
    "the ratio is always 1": Fault(
        link="gradient",
        settings=("algorithm.ppo_epochs=2",),
        code=LOSSES.format(body="return real(now, now.detach(), advantages, **more)"),
    ),
    "stale rollouts are not corrected": Fault(
        link="gradient",
        settings=STALE,
        code=LOSSES.format(body='return real(now, more["proximal"], advantages, **more)'),
    ),
    "importance weights are not truncated": Fault(
        link="gradient",
        settings=STALE,
        code=LOSSES.format(body='return real(now, sampled, advantages, **{**more, "rollout_is_threshold": math.inf})'),
    ),
    "importance weights are upside down": Fault(
        link="gradient",
        settings=STALE,
        code=LOSSES.format(body='return real(now, 2 * more["proximal"] - sampled, advantages, **more)'),
    ),
    "advantages are mixed up between tokens": Fault(
        link="gradient",
        code="from agentrig_grpo.loss import LossInputs\nreal = LossInputs.look_up\n"
        "def look_up(table, batch):\n"
        "    behaviour, advantage, weight = real(table, batch)\n"
        "    return behaviour, advantage.roll(7), weight\n"
        "LossInputs.look_up = look_up",
    ),
    "a layer is detached": Fault(
        link="gradient",
        code="from agentrig_grpo import learner\nreal = learner.build\n"
        "def build(model, *given, **more):\n"
        "    model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output.detach())\n"
        "    return real(model, *given, **more)\n"
        "learner.build = build",
        names="no gradient reaches 4 tensors: model.layers.1.mlp.",
    ),
    "the gradient of the update before is not cleared": Fault(
        link="gradient", code=OPTIMIZER.format(body="made.zero_grad = lambda set_to_none=True: None")
    ),
    "the gradient is clipped to half the norm": Fault(
        link="gradient",
        settings=("algorithm.max_grad_norm=0.001",),
        code="import torch\nreal = torch.nn.utils.clip_grad_norm_\n"
        "torch.nn.utils.clip_grad_norm_ = lambda parameters, most: real(parameters, most / 2)",
    ),
    "a layer is not in the optimizer": Fault(
        link="weights", code=OPTIMIZER.format(body='del made.param_groups[0]["params"][2:14]')
    ),
    "the optimizer's step is made twice": Fault(
        link="weights", code=OPTIMIZER.format(body="step = made.step\n    made.step = lambda: (step(), step())")
    ),
    "the optimizer's step is made twice from the third step on": Fault(
        link="weights",
        settings=("algorithm.steps=4",),
        code=OPTIMIZER.format(
            body="step, made_steps = made.step, []\n"
            "    def twice():\n"
            "        made_steps.append(1)\n"
            "        step()\n"
            "        if len(made_steps) > 2:\n"
            "            step()\n"
            "    made.step = twice"
        ),
    ),
    "only the first layer's adapters are trained": Fault(
        link="weights",
        settings=("algorithm.lora_rank=4",),
        code="from agentrig_grpo import lora\nreal = lora.wrap\n"
        "def wrap(*given, **more):\n"
        "    found = real(*given, **more)\n"
        "    for name, parameter in found.named_parameters():\n"
        "        if '.layers.1.' in name:\n"
        "            parameter.requires_grad_(False)\n"
        "    return found\n"
        "lora.wrap = wrap",
        names="14 of 28 tensors that lora_rank = 4 and lora_targets = all-linear must train are not trained",
    ),
    "norms are frozen": Fault(
        link="weights",
        code="from agentrig_grpo import learner\nreal = learner.build\n"
        "def build(model, *given, **more):\n"
        "    for name, parameter in model.named_parameters():\n"
        "        parameter.requires_grad_('norm' not in name)\n"
        "    return real(model, *given, **more)\n"
        "learner.build = build",
        names="must train are not trained: model.layers.0.input_layernorm.weight",
    ),
    "the model's file is rounded to 16 bits": Fault(link="weights", code=SAVED, names="the checkpoint of step 1"),
    "the adapters' file is rounded to 16 bits": Fault(
        link="weights",
        code=ADAPTERS.format(body="trained = {name: tensor.bfloat16().float() for name, tensor in trained.items()}"),
        settings=("algorithm.lora_rank=4",),
        names="the checkpoint of step 1",
    ),
    "the adapters' file has another alpha": Fault(
        link="weights",
        code=ADAPTERS.format(body="given[0].peft_config['default'].lora_alpha *= 2"),
        settings=("algorithm.lora_rank=4",),
        names="adapter_config.json scales them by 8 instead of 4",
    ),
    "the learner's file has the weights of the start": Fault(
        link="weights",
        code="from agentrig_grpo import trainer_files\nreal, first = trainer_files.write, {}\n"
        "def write(directory, state):\n"
        "    first.update({} if first else {name: t.clone() for name, t in state['trained'].items()})\n"
        "    real(directory, {**state, 'trained': first})\n"
        "trainer_files.write = write",
        names="learner.pt has other weights than those that step 2 made",
    ),
    "the last weights are saved as those of the start, the best": Fault(
        link="weights",
        settings=("algorithm.lr=1e-8", "algorithm.final=best", "algorithm.validate_every=1", "run.validation_tasks=6"),
        code="from agentrig.run import loop\n"
        "def take_best(self, step):\n"
        "    assert self.best.step == 0\n"
        "    self._save(step, weights_of=0)\n"
        "    self.learner.restore()\n"
        "    self._deliver(0)\n"
        "    self.saving.settle()\n"
        "loop.Loop._take_best = take_best",
        names="the checkpoint of step 2 does not hold the weights of the start: learner.pt has other weights",
    ),
    "the worst weights are kept as the best": Fault(
        link="held-out",
        settings=(
            "algorithm.final=best",
            "algorithm.validate_every=1",
            "algorithm.val_temperature=1.0",
            "algorithm.steps=3",
            "run.validation_tasks=6",
        ),
        code="from agentrig.run import loop\n"
        "def validate(self, step):\n"
        "    accuracy, best = self.session.validate(self._greedy(), step=step), self.best\n"
        "    found = accuracy, self.session.measured.reward\n"
        "    if best.accuracy is None or found < (best.accuracy, best.reward):\n"
        "        self.best = loop.Best(step, *found, kept=True)\n"
        "        self.learner.keep()\n"
        "loop.Loop._validate = validate",
        names="the ones that algorithm.final = best asks for",
    ),
    "the model computes with the copies of the weights before": Fault(
        link="weights",
        settings=("algorithm.dtype=bfloat16",),
        code="from agentrig_grpo.masters import Masters\nMasters.refresh = lambda self: None",
        names="does not compute with the new weights in bf16",
    ),
}
"""Found without a look at any check: runs trained on with the first 20 (the merged groups count once). Those from the
loss's sign on were planted for checks inside the learner, which the auditor has replaced."""
