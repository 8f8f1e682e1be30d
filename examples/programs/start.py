"""Make the starting model of the dice game: `python examples/programs/start.py models/dice`, seconds on one core.

It has learned the form of a call, and to choose any of the dice, or to roll none, with equal chances.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from agentrig_grpo import checkpoint
from agentrig_grpo.config import GrpoConfig
from agentrig_grpo.server.chat import Chat
from agentrig_grpo.starting import encode, make_start
from agentrig_grpo.warmup import fine_tune

from agentrig.demonstrations import Reply, StartPlan, Turn

sys.path.insert(0, str(Path(__file__).parent))
from dice import DICE, Rounds


def make(directory: Path) -> None:
    """Write the model to a directory."""
    tools = json.loads(Path(__file__).with_name("tools.json").read_text("utf-8"))
    replies = [Reply(content="I roll none.")]
    replies += [Reply(tool_calls=[{"name": "roll", "arguments": {"sides": sides}}]) for sides in DICE]
    turns = [
        Turn(messages=[{"role": "user", "content": task.input["question"]}], tools=tools, reply=reply)
        for task in Rounds().load("train")
        for reply in replies
    ]
    plan = StartPlan(directory=directory, passes=4, parameters=100_000, vocabulary=400, context=512)
    made = make_start(GrpoConfig(), plan, turns)
    model, tokenizer = checkpoint.load_model(directory), checkpoint.load_tokenizer(directory)
    examples = [encode(turn, Chat(tokenizer)) for turn in turns]
    fine_tune(model, examples, epochs=plan.passes, lr=made.lr, tokens_per_batch=256, log=print)
    checkpoint.save(model, tokenizer, directory)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
