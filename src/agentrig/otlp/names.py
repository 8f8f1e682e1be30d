"""Names of OpenTelemetry's semantic conventions for generative AI, as of one version."""

from __future__ import annotations

from collections.abc import Mapping

SCHEMA = "https://opentelemetry.io/schemas/1.43.0"
"""The version of the conventions: every `gen_ai.*` name here is part of it."""

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
AGENT = "gen_ai.agent.name"
INPUT, OUTPUT = "gen_ai.input.messages", "gen_ai.output.messages"
TOOLS = "gen_ai.tool.definitions"
TOOL, TOOL_TYPE = "gen_ai.tool.name", "gen_ai.tool.type"
TOOL_ARGUMENTS, TOOL_RESULT = "gen_ai.tool.call.arguments", "gen_ai.tool.call.result"
RESPONSE_ID, RESPONSE_MODEL = "gen_ai.response.id", "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"

REQUEST: Mapping[str, str] = {
    "model": "gen_ai.request.model",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
    "stream": "gen_ai.request.stream",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
"""Fields of a request's body, and their attributes."""

EVALUATION = "gen_ai.evaluation.result"
"""The event with a score."""

EVALUATION_NAME = "gen_ai.evaluation.name"
EVALUATION_VALUE, EVALUATION_LABEL = "gen_ai.evaluation.score.value", "gen_ai.evaluation.score.label"
ERROR, SERVER = "error.type", "server.address"
