"""Lets the model roll a die with a tool, by the OpenAI Agents SDK: JSON on stdin, the answer as JSON on stdout."""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from agents import Agent, FunctionTool, OpenAIChatCompletionsModel, Runner, StopAtTools, set_tracing_disabled
from agents.exceptions import AgentsException
from openai import APIError, AsyncOpenAI  # noqa: TID253  (it runs in an environment of its own)

FORM = json.loads((Path(__file__).resolve().parents[1] / "tools.json").read_text("utf-8"))[0]["function"]


async def roll(context: Any, arguments: str) -> str:
    """Roll a die; return how many sides it has, as JSON."""
    sides = json.loads(arguments).get("sides")
    if not isinstance(sides, int) or sides < 1:
        return '{"sides": 0}'
    print(f"rolled {random.randint(1, sides)}", file=sys.stderr)
    return json.dumps({"sides": sides})


def main() -> None:
    """Play once."""
    set_tracing_disabled(True)
    client = AsyncOpenAI(default_headers={"agentrig-span": "player"})  # OPENAI_BASE_URL and OPENAI_API_KEY
    player = Agent(
        name="player",
        model=OpenAIChatCompletionsModel(model=os.environ["OPENAI_MODEL"], openai_client=client),
        tools=[
            FunctionTool(
                name=FORM["name"],
                description=FORM["description"],
                params_json_schema=FORM["parameters"],
                on_invoke_tool=roll,
                strict_json_schema=False,
            )
        ],
        tool_use_behavior=StopAtTools(stop_at_tool_names=["roll"]),
    )
    try:
        said = str(Runner.run_sync(player, json.load(sys.stdin)["question"], max_turns=1).final_output)
    except AgentsException as error:  # such as a tool that there is not: the model's mistake
        print(error, file=sys.stderr)
        said = ""
    except APIError as error:
        print(error, file=sys.stderr)
        sys.exit(22)
    print(said if said.startswith('{"sides": ') else '{"sides": 0}')


if __name__ == "__main__":
    main()
