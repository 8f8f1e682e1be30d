"""The agent alone: `python -m agentrig_langgraph_sql --database x.sqlite --model NAME "question"`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from agentrig_langgraph_sql.prompts import PRESETS


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one question: every turn goes to standard error, the final SQL to standard output.

    Return the exit status: 0, or 1 when the model or the database failed.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    lacking = [name for name in ("question", "database", "model") if not getattr(options, name)]
    if lacking and not options.graph:
        parser.error(f"missing: {', '.join(name if name == 'question' else f'--{name}' for name in lacking)}")
    if not 1 <= options.max_turns <= 33:
        parser.error(f"--max-turns is {options.max_turns}; it goes from 1 to 33")

    from langchain_openai import ChatOpenAI
    from openai import OpenAIError
    from pydantic import SecretStr

    from agentrig_langgraph_sql.database import DatabaseBroken
    from agentrig_langgraph_sql.graph import NotACompletion, Question, build_graph, mermaid
    from agentrig_langgraph_sql.settings import SqlAgentConfig

    llm = ChatOpenAI(
        base_url=options.base_url,
        model=options.model,
        api_key=SecretStr(os.environ.get("OPENAI_API_KEY") or "none"),
        temperature=options.temperature,
        max_completion_tokens=options.max_tokens,
    )
    limits = SqlAgentConfig(max_turns=options.max_turns, sample_rows=options.sample_rows)
    graph = build_graph(llm, limits=limits, prompts=PRESETS[options.prompts])
    if options.graph:
        print(mermaid(graph))
        return 0
    query = ""
    try:
        question = Question(question=options.question, database=options.database)
        for update in graph.stream(question, stream_mode="updates"):
            for node, values in update.items():
                query = values.get("query", query)
                shown = values.get("query") or values.get("result") or values.get("feedback") or ""
                print(f"--- {node}\n{shown}", file=sys.stderr)
    except (OpenAIError, NotACompletion) as error:
        print(f"The model at {options.base_url} failed: {error}", file=sys.stderr)
        return 1
    except (DatabaseBroken, FileNotFoundError) as error:
        print(f"The database can't be read: {error}", file=sys.stderr)
        return 1
    print(query)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m agentrig_langgraph_sql",
        description="Answer a question about an SQLite database with SQL, by a model on an OpenAI-compatible server.",
        epilog="Environment: OPENAI_BASE_URL (or OPENAI_API_BASE) and OPENAI_API_KEY.",
    )
    address = os.environ.get("OPENAI_BASE_URL") or os.environ.get("OPENAI_API_BASE") or "https://api.openai.com/v1"
    parser.add_argument("question", nargs="?", default="", help="the question, in natural language")
    parser.add_argument("--database", default="", help="the SQLite file")
    parser.add_argument("--model", default="", help="the model's name at the server")
    parser.add_argument("--base-url", default=address, help="the server, ending in /v1 (default: %(default)s)")
    parser.add_argument("--max-turns", type=int, default=5, help="cycles of write, execute, check (default: 5)")
    parser.add_argument(
        "--sample-rows", type=int, default=3, choices=range(4), help="rows of each table to show (default: 3)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature (default: 0)")
    parser.add_argument("--max-tokens", type=int, default=2048, help="most new tokens per call (default: 2048)")
    parser.add_argument("--prompts", choices=sorted(PRESETS), default="full", help="preset of prompts (default: full)")
    parser.add_argument("--graph", action="store_true", help="print the graph as Mermaid and stop; asks no model")
    return parser


if __name__ == "__main__":
    sys.exit(main())
