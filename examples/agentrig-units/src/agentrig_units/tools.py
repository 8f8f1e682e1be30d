"""The two tools: a table of factors, and a calculator. What they can't do is a text that the model reads."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrig_units.tasks import FACTORS

OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
LONGEST = 60
"""Most characters of an expression."""


def _tool(name: str, *parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string"} for key in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS: Sequence[Mapping[str, Any]] = (
    _tool("factor", "big", "small"),
    _tool("calculate", "expression", "unit"),
)
"""The tools, in the form of OpenAI's chat completions."""


def factor(big: str, small: str) -> str:
    """Return how many of a small unit one big unit has."""
    if (big, small) not in FACTORS:
        return f"error: {big} {small}"[:LONGEST]
    return str(FACTORS[big, small])


def calculate(expression: str, unit: str) -> str:
    """Return the value of an expression of numbers, + - * / and parentheses, with its unit."""
    try:
        if len(expression) > LONGEST:
            raise ValueError
        value = _value(ast.parse(expression, mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, OverflowError, RecursionError):
        return "error"
    return f"{value:g} {unit[:LONGEST]}"


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError


def use(name: str, arguments: str) -> str:
    """Return what a tool answers to a call; a mistake in the call is an answer that begins with `error`."""
    functions: Mapping[str, Callable[..., str]] = {"factor": factor, "calculate": calculate}
    if name not in functions:
        return f"error: no tool {name}"[:LONGEST]
    given = json.loads(arguments)
    if not all(isinstance(value, str) for value in given.values()):
        return "error: text expected"
    try:
        return functions[name](**given)
    except TypeError:
        return "error: wrong arguments"
