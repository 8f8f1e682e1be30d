"""The agent's prompts: two presets of three prompts, as templates of named fields.

`full` is for instruct models. `short` is for a model of a few million parameters that was trained
only on these prompts: they have only what such a model uses, and its replies are bare SQL or phrases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

Message = dict[str, str]
"""One chat message: `role` and `content`."""


@attrs.frozen
class Template:
    """Chat messages with named placeholders.

    Attributes:
        parts: Role and text of each message; `{name}` in a text is a placeholder, `{{` a brace.
    """

    parts: Sequence[tuple[str, str]]

    def messages(self, **fields: str) -> list[Message]:
        """Return the messages with every placeholder filled; braces in a field's value are unchanged.

        Args:
            **fields: `question`, `schema`, `dialect`, `db_id`; for check and rewrite also `query` and
                `result`; for rewrite also `feedback`. A template uses those that it needs.

        Raises:
            KeyError: A placeholder has no field.
        """
        return [{"role": role, "content": text.format_map(fields)} for role, text in self.parts]


@attrs.frozen(kw_only=True)
class Prompts:
    """The three prompts of the agent and how their replies are read.

    Attributes:
        name: The preset's name.
        write: Question and schema to a first query.
        check: Question, query and result to a verdict.
        rewrite: All of that to a better query.
        correct: The phrase by which a check accepts the query.
        incorrect: The phrase by which a check refuses it.
        fenced: Replies carry their query in a fenced code block; a rewrite without one keeps the
            former query. Otherwise a reply without a block is the query itself, in rewrites too.
        schema_style: The form of the schema that the templates were written for; see `schema.STYLES`.
        header: Results begin with the names of their columns.
    """

    name: str
    write: Template
    check: Template
    rewrite: Template
    correct: str
    incorrect: str
    fenced: bool
    schema_style: str
    header: bool

    def instructions(self) -> dict[str, str]:
        """Return the first message of each of the three: what a run may replace, and an algorithm improve."""
        return {name: self.template(name).parts[0][1] for name in TEMPLATES}

    def template(self, name: str, instructions: Mapping[str, str] | None = None) -> Template:
        """Return one of the three, with the text of `instructions` as its first message if that has it."""
        template: Template = getattr(self, name)
        (role, text), *rest = template.parts
        return Template(((role, (instructions or {}).get(name, text)), *rest))


TEMPLATES = ("write", "check", "rewrite")

FIELDS = ("question", "schema", "dialect", "db_id", "query", "result", "feedback")
"""All names that a template may use."""

FULL = Prompts(
    name="full",
    write=Template(
        (
            (
                "system",
                """\
You answer questions about a database by writing queries in {dialect}.

- Write one statement that only reads.
- Use no table or column that the schema does not show, and spell the names as it does.
- Return exactly the columns that the question asks for, in the order in which it names them: no extra ids, no helper \
columns.
- Join on the keys that the schema declares, and join no table that the question does not need.
- Add DISTINCT, ORDER BY or LIMIT only when the question calls for them.

Think as briefly as the question allows. End with the query in one code block:

```sql
SELECT ...
```""",
            ),
            ("user", "Schema of the database {db_id}:\n\n{schema}\n\nQuestion: {question}"),
        )
    ),
    check=Template(
        (
            (
                "system",
                """\
You review a query in {dialect} that somebody wrote to answer a question. You see the schema, the question, the query \
and what came back when it ran.

Ask yourself, in this order:
1. Did it run? An error means that it is incorrect.
2. Does it return the columns that the question asks for, no more and no fewer, one row for each thing asked about?
3. Do its conditions say what the question says: the right columns, the right values, each bound included or left out \
as worded, AND and OR as meant?
4. Do its joins use the right keys, without losing or doubling rows? Does NULL slip through a NOT IN or a count?
5. Does it group, sort, limit and remove duplicates where the question wants it, and only there?

An empty result can be right. Do not ask for another style when the answer stays the same. Say in a few sentences what \
is wrong and how to mend it, but write no query. Then end with a line that holds exactly one of these:

VERDICT: CORRECT
VERDICT: INCORRECT""",
            ),
            (
                "user",
                "Schema of the database {db_id}:\n\n{schema}\n\nQuestion: {question}\n\n"
                "Query:\n\n```sql\n{query}\n```\n\nResult:\n\n```\n{result}\n```",
            ),
        )
    ),
    rewrite=Template(
        (
            (
                "system",
                """\
A query in {dialect} did not answer its question. You see the schema, the question, the query, what came back when it \
ran, and a reviewer's remarks. Write a better query.

- Mend what the result and the remarks show to be wrong; keep what is right. A reviewer can err: follow the question.
- Write one statement that only reads, with names spelled as in the schema.
- Return exactly the columns that the question asks for, in the order in which it names them.

Think as briefly as the question allows. End with the whole new query in one code block:

```sql
SELECT ...
```""",
            ),
            (
                "user",
                "Schema of the database {db_id}:\n\n{schema}\n\nQuestion: {question}\n\n"
                "Query:\n\n```sql\n{query}\n```\n\nResult:\n\n```\n{result}\n```\n\nReviewer's remarks:\n\n{feedback}",
            ),
        )
    ),
    correct="VERDICT: CORRECT",
    incorrect="VERDICT: INCORRECT",
    fenced=True,
    schema_style="create",
    header=True,
)

# A model trained on these must be trained again when they change: `mini`'s starting model knows only this exchange.
SHORT = Prompts(
    name="short",
    write=Template((("user", "{schema}\n{question}"),)),
    check=Template((("user", "check\n{question}\n{query}\n{result}"),)),
    rewrite=Template((("user", "{schema}\n{question}\n{query}\n{result}"),)),
    correct="correct",
    incorrect="incorrect",
    fenced=False,
    schema_style="spaced",
    header=False,
)

PRESETS: Mapping[str, Prompts] = {preset.name: preset for preset in (FULL, SHORT)}
"""The presets by name, as the setting `prompts` chooses them."""
