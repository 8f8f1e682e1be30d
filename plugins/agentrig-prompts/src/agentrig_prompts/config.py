"""The keys of `gepa` and `apo`; every command imports this."""

from __future__ import annotations

import attrs

from agentrig import Secret, setting
from agentrig.secrets import http_address


@attrs.frozen(kw_only=True)
class GepaConfig:
    """Keys of `gepa`."""

    model: str = setting("", help="the Hugging Face directory that the run's server serves; server endpoint needs none")
    dtype: str = setting("float32", choices=("float32", "bfloat16"), help="what that server computes in")
    temperature: float = setting(0.0, help="sampling temperature of the agent's calls", ge=0)
    reply_tokens: int = setting(1024, help="longest reply of the model to the agent, in tokens", ge=1)
    reflection_base_url: str = setting("", validator=http_address, help="reflecting model's address; empty: agent's")
    reflection_model: str = setting("", help="the reflecting model's name there")
    reflection_api_key: Secret | None = setting(None, secret=True, help="its key")
    reflection_temperature: float = setting(1.0, help="sampling temperature of reflections", ge=0)
    max_calls: int = setting(500, help="most rollouts that the model answered, and reflections, in the search", ge=1)
    max_tokens: int = setting(0, help="most tokens of all of them; 0 for no limit", ge=0)
    minibatch: int = setting(3, help="training tasks that a reflection sees; gepa: a new prompt must win on them", ge=1)
    perfect: float = setting(1.0, help="the reward from which on an answer has nothing to improve")
    retries: int = setting(2, help="how often a failed rollout is sampled again, until its task is left out", ge=0)
    patience_s: float = setting(300.0, help="seconds to wait for a model that is away; then the run stops", ge=0)

    def __attrs_post_init__(self) -> None:
        """Reject an address without a model, and the other way round."""
        if bool(self.reflection_base_url) != bool(self.reflection_model):
            raise ValueError("reflection_base_url and reflection_model go together: set both, or none")


@attrs.frozen(kw_only=True)
class ApoConfig(GepaConfig):
    """Keys of `apo`: those of `gepa`, and two more."""

    beam_width: int = setting(4, help="prompts that go on to the next step", ge=1)
    branch_factor: int = setting(4, help="new prompts that are made of each of them, if the budget has them", ge=1)
