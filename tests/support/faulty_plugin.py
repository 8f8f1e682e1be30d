"""The agent `faulty`: `command`, but it answers by a callback in the rollout that is about it."""

import attrs

from agentrig import AgentSpec, hookimpl
from agentrig.external.command import CommandAgent
from agentrig.external.config import CommandConfig


class Faulty(CommandAgent):
    def __init__(self, config):
        super().__init__(config)
        self.posting = CommandAgent(attrs.evolve(config, answer="callback"))

    def run_job(self, job):
        return self.posting.run_job(job) if job.input["do"] == "answers-twice" else super().run_job(job)


@hookimpl
def register_agents():
    yield AgentSpec(name="faulty", summary="Does what it should not.", config=CommandConfig, build=Faulty)
