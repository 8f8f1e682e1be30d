"""What can be asked in `mini-sql`, and in which words: an SQL template and several wordings for each intent.

The first wordings of each list are the plain ones; the supervised warm-up uses only a few of them, which
the training script selects. `questions` fills the text in braces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs


@attrs.frozen
class Intent:
    """One kind of question.

    Attributes:
        name: Unique.
        sql: The gold query, with the placeholders of the frames, and `where` for a condition.
        frames: The wordings. If a placeholder in `<…>` is empty for a question, that wording is not used for it.
        share: How often it is sampled, relative to the others.
    """

    name: str
    sql: str
    frames: Sequence[str]
    share: int = 2


CONDITIONS: Mapping[str, Sequence[str]] = {
    "is": (
        "whose {c} is {v}",
        "with {c} {v}",
        "that have the {c} {v}",
        "with {v} as {c}",
        "where {c} equals {v}",
        "{phrase}",
    ),
    "above": (
        "whose {c} is above {x}",
        "with {c} over {x}",
        "whose {c} exceeds {x}",
        "with {c} past {x}",
        "having {c} greater than {x}",
        "of {c} more than {x}",
    ),
    "below": (
        "whose {c} is below {x}",
        "with {c} under {x}",
        "whose {c} stays short of {x}",
        "with {c} not reaching {x}",
        "having {c} smaller than {x}",
        "of {c} less than {x}",
    ),
}
"""The wordings of a condition; `{phrase}` is left out if the column has none."""

CONDITION_SQL: Mapping[str, str] = {"is": "{c} = '{v}'", "above": "{c} > {x}", "below": "{c} < {x}"}

INTENTS: Sequence[Intent] = (
    Intent(
        "count",
        "SELECT count ( * ) FROM {t}",
        (
            "How many {T} are there?",
            "Count the {T}.",
            "What is the number of {T}?",
            "How long is the list of {T}?",
            "Tell me the size of the set of {T}.",
        ),
        1,
    ),
    Intent(
        "count-where",
        "SELECT count ( * ) FROM {t} WHERE {where}",
        (
            "How many {T} {cond} are there?",
            "Count the {T} {cond}.",
            "What is the number of {T} {cond}?",
            "Of the {T}, how many can be found {cond}?",
            "Tell me how large the set of {T} {cond} is.",
        ),
        4,
    ),
    Intent(
        "list",
        "SELECT {c} FROM {t}",
        (
            "List the {cs} of all {T}.",
            "Show the {c} of each {t}.",
            "What {cs} do the {T} have?",
            "Give me every {t} by {c}.",
            "I would like to see the {cs} for the {T}.",
        ),
        2,
    ),
    Intent(
        "list-where",
        "SELECT {c} FROM {t} WHERE {where}",
        (
            "List the {cs} of the {T} {cond}.",
            "Show the {c} of each {t} {cond}.",
            "What {cs} do the {T} {cond} have?",
            "For {T} {cond}, give me the {c}.",
            "I need every {c} found among {T} {cond}.",
        ),
        6,
    ),
    Intent(
        "list-both",
        "SELECT {c} FROM {t} WHERE {where} AND {where2}",
        (
            "List the {cs} of the {T} {cond} and {cond2}.",
            "Show the {c} of each {t} {cond} and {cond2}.",
            "What {cs} do the {T} {cond} have that are also {cond2}?",
            "For {T} both {cond} and {cond2}, give me the {c}.",
            "I need every {c} found among {T} {cond}, but only {cond2}.",
        ),
        1,
    ),
    Intent(
        "max",
        "SELECT max ( {n} ) FROM {t}",
        (
            "What is the maximum {n} of the {T}?",
            "Find the highest {n} of any {t}.",
            "How far up does the {n} of the {T} go?",
            "Give the peak {n} among {T}.",
            "Which {n} is at the top for {T}?",
        ),
    ),
    Intent(
        "min",
        "SELECT min ( {n} ) FROM {t}",
        (
            "What is the minimum {n} of the {T}?",
            "Find the smallest {n} of any {t}.",
            "How far down does the {n} of the {T} go?",
            "Give the bottom {n} among {T}.",
            "Which {n} is the floor for {T}?",
        ),
    ),
    Intent(
        "avg",
        "SELECT avg ( {n} ) FROM {t}",
        (
            "What is the average {n} of the {T}?",
            "Find the mean {n} of all {T}.",
            "What {n} does a {t} typically have?",
            "Give the usual {n} among {T}.",
            "On the whole, what {n} is to be expected of a {t}?",
        ),
    ),
    Intent(
        "sum",
        "SELECT sum ( {n} ) FROM {t}",
        (
            "What is the total {n} of the {T}?",
            "Find the sum of the {n} of all {T}.",
            "What {n} do the {T} have together?",
            "Add up the {n} of the {T}.",
            "Give the combined {n} of {T}.",
        ),
    ),
    Intent(
        "avg-where",
        "SELECT avg ( {n} ) FROM {t} WHERE {where}",
        (
            "What is the average {n} of the {T} {cond}?",
            "Find the mean {n} of all {T} {cond}.",
            "What {n} do {T} {cond} typically have?",
            "Give the usual {n} among {T} {cond}.",
            "For {T} {cond}, what {n} is to be expected?",
        ),
        3,
    ),
    Intent(
        "sum-where",
        "SELECT sum ( {n} ) FROM {t} WHERE {where}",
        (
            "What is the total {n} of the {T} {cond}?",
            "Find the sum of the {n} of all {T} {cond}.",
            "What {n} do {T} {cond} have together?",
            "Add up the {n} of the {T} {cond}.",
            "Give the combined {n} of {T} {cond}.",
        ),
        3,
    ),
    Intent(
        "most",
        "SELECT {c} FROM {t} ORDER BY {n} DESC LIMIT 1",
        (
            "What is the {c} of the {t} with the highest {n}?",
            "Show the {c} of the {t} whose {n} is the maximum.",
            "Which {c} belongs to the {t} with the peak {n}?",
            "The {t} that leads in {n}: what is its {c}?",
            "Find the <most> {t} and give the {c}.",
        ),
        4,
    ),
    Intent(
        "least",
        "SELECT {c} FROM {t} ORDER BY {n} LIMIT 1",
        (
            "What is the {c} of the {t} with the smallest {n}?",
            "Show the {c} of the {t} whose {n} is the minimum.",
            "Which {c} belongs to the {t} with the bottom {n}?",
            "The {t} that comes last in {n}: what is its {c}?",
            "Find the <least> {t} and give the {c}.",
        ),
        4,
    ),
    Intent(
        "top",
        "SELECT {c} FROM {t} ORDER BY {n} DESC LIMIT {k}",
        (
            "List the {cs} of the {k} {T} with the highest {n}.",
            "Show the {cs} of the top {k} {T} by {n}.",
            "Take the {k} {T} that lead in {n} and give their {cs}.",
            "For the {k} {T} with the most {n}, what are the {cs}?",
        ),
        3,
    ),
    Intent(
        "bottom",
        "SELECT {c} FROM {t} ORDER BY {n} LIMIT {k}",
        (
            "List the {cs} of the {k} {T} with the smallest {n}.",
            "Show the {cs} of the bottom {k} {T} by {n}.",
            "Take the {k} {T} that come last in {n} and give their {cs}.",
            "For the {k} {T} with the least {n}, what are the {cs}?",
        ),
        3,
    ),
    Intent(
        "rising",
        "SELECT {c} FROM {t} ORDER BY {n}",
        (
            "List the {cs} of the {T} sorted by {n}.",
            "Show the {c} of each {t} in ascending order of {n}.",
            "What are the {cs} of the {T}, from low to high {n}?",
            "Give me the {cs} of the {T} by rising {n}.",
            "Arrange the {cs} of the {T} so that the {n} grows.",
        ),
        3,
    ),
    Intent(
        "falling",
        "SELECT {c} FROM {t} ORDER BY {n} DESC",
        (
            "List the {cs} of the {T} sorted by {n} backwards.",
            "Show the {c} of each {t} in descending order of {n}.",
            "What are the {cs} of the {T}, from high to low {n}?",
            "Give me the {cs} of the {T} by falling {n}.",
            "Arrange the {cs} of the {T} so that the {n} shrinks.",
        ),
        3,
    ),
    Intent(
        "lookup",
        "SELECT {c} FROM {t} WHERE {label} = '{v}'",
        (
            "What is the {c} of the {t} with {label} {v}?",
            "Show the {c} of the {t} whose {label} is {v}.",
            "Which {c} does the {t} {v} have?",
            "Tell me the {c} of {v}.",
            "About the {t} called {v}: what is the {c}?",
        ),
        4,
    ),
    Intent(
        "per",
        "SELECT {g} , count ( * ) FROM {t} GROUP BY {g}",
        (
            "How many {T} are there for each {g}?",
            "Count the {T} per {g}.",
            "Show every {g} with its number of {T}.",
            "Break the {T} down by {g} and count them.",
            "Give the {gs} and how often they occur among the {T}.",
        ),
        1,
    ),
    Intent(
        "avg-per",
        "SELECT {g} , avg ( {n} ) FROM {t} GROUP BY {g}",
        (
            "What is the average {n} of the {T} for each {g}?",
            "Find the mean {n} of the {T} per {g}.",
            "Break the {T} down by {g} and give the usual {n}.",
            "Show every {g} with the {n} that its {T} typically have.",
        ),
    ),
    Intent(
        "max-per",
        "SELECT {g} , max ( {n} ) FROM {t} GROUP BY {g}",
        (
            "What is the maximum {n} of the {T} for each {g}?",
            "Find the highest {n} of the {T} per {g}.",
            "Break the {T} down by {g} and give the peak {n}.",
        ),
    ),
    Intent(
        "common",
        "SELECT {g} FROM {t} GROUP BY {g} ORDER BY count ( * ) DESC LIMIT 1",
        (
            "Which {g} has the most {T}?",
            "What is the most common {g} of the {T}?",
            "Which {g} turns up more often than any other among the {T}?",
            "Name the leading {g} for {T}.",
        ),
    ),
    Intent(
        "rare",
        "SELECT {g} FROM {t} GROUP BY {g} ORDER BY count ( * ) LIMIT 1",
        (
            "Which {g} has the fewest {T}?",
            "What is the least common {g} of the {T}?",
            "Which {g} turns up less often than any other among the {T}?",
            "Name the rarest {g} for {T}.",
        ),
    ),
    Intent(
        "having",
        "SELECT {g} FROM {t} GROUP BY {g} HAVING count ( * ) > {k}",
        (
            "Which {gs} have more than {k} {T}?",
            "List the {gs} with over {k} {T}.",
            "What {gs} are shared by more than {k} {T}?",
            "Name each {g} that {T} have in common more than {k} times.",
        ),
        1,
    ),
    Intent(
        "child-list",
        "SELECT {c} FROM {t} JOIN {p} USING ( {key} ) WHERE {pwhere}",
        (
            "List the {cs} of the {T} of {P} {pcond}.",
            "Show the {c} of each {t} that belongs to {P} {pcond}.",
            "What {cs} do the {T} have that go with {P} {pcond}?",
            "For {P} {pcond}, give me the {cs} of their {T}.",
            "I need every {c} of {T} under {P} {pcond}.",
        ),
        4,
    ),
    Intent(
        "child-count",
        "SELECT count ( * ) FROM {t} JOIN {p} USING ( {key} ) WHERE {pwhere}",
        (
            "How many {T} of {P} {pcond} are there?",
            "Count the {T} that belong to {P} {pcond}.",
            "What is the number of {T} that go with {P} {pcond}?",
            "For {P} {pcond}, tell me how many {T} they have.",
        ),
        3,
    ),
    Intent(
        "parent-of",
        "SELECT {pc} FROM {p} JOIN {t} USING ( {key} ) WHERE {label} = '{v}'",
        (
            "What is the {pc} of the {p} of the {t} with {label} {v}?",
            "Show the {pc} of the {p} that the {t} {v} belongs to.",
            "Which {pc} does the {p} behind the {t} {v} have?",
            "The {t} {v}: tell me the {pc} of its {p}.",
        ),
        4,
    ),
    Intent(
        "children-most",
        "SELECT {plabel} FROM {p} JOIN {t} USING ( {key} ) GROUP BY {plabel} ORDER BY count ( * ) DESC LIMIT 1",
        (
            "Which {plabel} has the {p} with the most {T}?",
            "What is the {plabel} of the {p} that has the highest number of {T}?",
            "Name the {p} by {plabel} who leads in the number of {T}.",
        ),
        1,
    ),
)
