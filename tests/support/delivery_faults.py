"""Silent faults between training and serving, each with its code and with the message that must name it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs


@attrs.frozen(kw_only=True)
class Fault:
    """The Python that plants a fault in a process, at its start, and the error that must name it.

    `names` is a regular expression: what differs, and where; `step` is the last step by which the run must end.
    """

    stage: Literal["transfer", "sampling", "adapting"]
    where: Literal["run", "server"]
    code: str
    names: str
    step: int = 2
    settings: Mapping[str, Any] = attrs.field(factory=dict)


FILL = """
from agentrig_grpo.server import parameters
import torch
def fill(self, state, *, start=False):
    self.check(state, start=start)
    for name, (place, shape) in self._places.items():
        {body}
parameters.Parameters.fill = torch.no_grad()(fill)
"""

WEIGHTS = """
from agentrig_grpo import checkpoint
import torch
kept, real = [], checkpoint.weights
def weights(model):
    found = {{name: tensor.detach().clone() for name, tensor in real(model).items()}}
    kept.append(found)
    {body}
checkpoint.weights = weights
"""

MERGED = """
from agentrig_grpo import checkpoint
from peft.tuners.lora import LoraLayer
kept, real = [], checkpoint.weights
def weights(model):
    found = {{name: tensor.detach().clone() for name, tensor in real(model).items()}}
    layers = {{n: m for n, m in model.get_base_model().named_modules() if isinstance(m, LoraLayer)}}
    plain = {{n: m.base_layer.weight.detach() for n, m in layers.items()}}
    {body}
    return found
checkpoint.weights = weights
"""

LORA = {"lora_rank": 4, "lora_alpha": 16}
STILL = r"tensors differ.*\n  these are still the weights of version \d"
NAMED = r"did not arrive at http://.*\n  1 of \d+ tensors differ from the learner's: {}"
CALLS = r"step 1: what is trained is not what was sampled. The log-probabilities recorded with its calls differ"

FAULTS: Mapping[str, Fault] = {
    # --- transfer ---
    "the swap is skipped": Fault(
        stage="transfer",
        where="run",
        code="""
from agentrig_grpo.server.handle import Embedded
real = Embedded.take
Embedded.take = lambda self, weights, version, **more: real(self, weights, version, **more) if not version else None
""",
        names=r"answers with the weights of version 0; the learner's are version 1\n.*" + STILL,
    ),
    "the swap is skipped, the version is not": Fault(
        stage="transfer",
        where="server",
        code="""
from agentrig_grpo.server.decoder import LlamaDecoder
LlamaDecoder.load = lambda self, state: None
""",
        names=STILL,
    ),
    "the previous step's weights are sent": Fault(
        stage="transfer",
        where="run",
        code=WEIGHTS.format(body="return kept[-2] if len(kept) > 1 else found"),
        names=STILL,
    ),
    "one layer is left out": Fault(
        stage="transfer",
        where="server",
        code=FILL.format(body='if start or ".layers.1." not in name: place.copy_(state[name])'),
        names=r"tensors differ from the learner's: model\.layers\.1\.",
    ),
    "two layers' tensors are exchanged": Fault(
        stage="transfer",
        where="server",
        code=FILL.format(
            body='other = {"0": "1", "1": "0"}\n'
            '        parts = name.split(".")\n'
            '        if not start and name.endswith("up_proj.weight"): parts[2] = other[parts[2]]\n'
            '        place.copy_(state[".".join(parts)])'
        ),
        names=r"tensors are exchanged: model\.layers\.0\.mlp\.up_proj\.weight holds model\.layers\.1\.mlp\.up_proj",
    ),
    "the weights are cut to bf16": Fault(
        stage="transfer",
        where="run",
        code="""
from agentrig_grpo.server import transfer
import torch
real = transfer.Sender.pack
transfer.Sender.pack = lambda self, found: real(self, [(n, t.to(torch.bfloat16).float()) for n, t in found])
""",
        names=r"\d+ of \d+ tensors differ",
    ),
    "the output layer keeps the old tied embedding": Fault(
        stage="transfer",
        where="server",
        code="""
from agentrig_grpo.server.decoder import LlamaDecoder
real = LlamaDecoder._allocate
def allocate(self, *given, **more):
    real(self, *given, **more)
    self._stale = None
def logits(self, x):
    import torch.nn.functional as F
    if self._stale is None:
        self._stale = self._head.clone()
    return F.linear(F.rms_norm(x, (x.shape[-1],), self._norm, self.eps), self._stale).float()
LlamaDecoder._allocate, LlamaDecoder._logits = allocate, logits
""",
        names=r"the probe's \d+ log-probabilities differ from the learner's by up to",
    ),
    "the adapter is merged twice": Fault(
        stage="transfer",
        where="run",
        code=MERGED.format(
            body='found |= {n + ".weight": w + 2 * (found[n + ".weight"] - w) for n, w in plain.items()}'
        ),
        names=r"tensors differ from the learner's: model\.layers\.0\.self_attn\.q_proj\.weight",
        settings=LORA,
    ),
    # --- sampling ---
    "the prefix cache is stale": Fault(
        stage="sampling",
        where="server",
        code="""
from agentrig_grpo.server.engine import Engine
Engine._forget_prompts = lambda self: self._seen.clear()
""",
        names=r"its prefix cache still has keys and values of\s+older weights",
        settings={"steps": 3, "lr": 1e-2},
    ),
    "log-probabilities ignore the temperature": Fault(
        stage="sampling",
        where="server",
        code="""
from agentrig_grpo.server import engine
import torch
real = engine.sample
def sample(logits, settings, uniforms, *more):
    tokens, _ = real(logits, settings, uniforms, *more)
    return tokens, torch.log_softmax(logits, -1)
engine.sample = sample
""",
        names=r"log-probabilities are not those of temperature 0\.6",
        settings={"temperature": 0.6},
    ),
    "log-probabilities come after the nucleus's cut": Fault(
        stage="sampling",
        where="server",
        code="""
from agentrig_grpo.server import engine, sampling
real = engine.sample
def sample(logits, settings, uniforms, *more):
    tokens, logp = real(logits, settings, uniforms, *more)
    if settings.top_p is not None:
        probs = sampling._nucleus(logp.exp(), settings.top_p)
        logp = (probs / probs.sum(-1, keepdim=True)).log()
    return tokens, logp
engine.sample = sample
""",
        names=CALLS,
        settings={"top_p": 0.5},
    ),
    "positions are off by one after the prompt": Fault(
        stage="sampling",
        where="server",
        code="""
from agentrig_grpo.server.decoder import LlamaDecoder
real = LlamaDecoder.step
def step(self, tokens):
    cos, sin = self._cos, self._sin
    self._cos, self._sin = cos.roll(-1, 0), sin.roll(-1, 0)
    try:
        return real(self, tokens)
    finally:
        self._cos, self._sin = cos, sin
LlamaDecoder.step = step
""",
        names=r"the tokens that it samples after the probe have log-probabilities that differ",
    ),
    "rows of a batch are mixed up": Fault(
        stage="sampling",
        where="server",
        code="""
from agentrig_grpo.server.decoder import LlamaDecoder
real = LlamaDecoder.append
def append(self, prompts):
    real(self, prompts)
    if self.rows > 1:
        self._values[:, :self.rows] = self._values[:, :self.rows].roll(1, 1)
LlamaDecoder.append = append
""",
        names=CALLS + r"|the tokens that it samples after the probe have log-probabilities that differ",
    ),
    # --- adapting ---
    "the prompt has lost its beginning": Fault(
        stage="adapting", where="run", code="CHANGE = lambda t: evolve(t, prompt_ids=t.prompt_ids[4:])", names=CALLS
    ),
    "the response is tokenized again": Fault(
        stage="adapting",
        where="run",
        code="CHANGE = lambda t: evolve(t, response_ids=tuple((i + 1) % 300 for i in t.response_ids))",
        names=CALLS,
    ),
    "the log-probabilities are shifted by a token": Fault(
        stage="adapting",
        where="run",
        code="CHANGE = lambda t: evolve(t, logprobs=(*t.logprobs[1:], t.logprobs[0]))",
        names=CALLS,
    ),
    "an end-of-text token is added": Fault(
        stage="adapting",
        where="run",
        code="CHANGE = lambda t: evolve(t, response_ids=(*t.response_ids, 1), logprobs=(*t.logprobs, 0.0))",
        names=CALLS,
    ),
}
"""Description to fault."""
