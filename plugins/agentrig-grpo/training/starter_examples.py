"""What the starter learns: conversations in which each reply is copied, looked up or filled in, with names at random.

No fact, name or wording of any domain is in them: who asks what about which things is random, so the only way to the
right reply is to read it in the conversation. `conversation` makes one of any family; `FAMILIES` has them by name.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from starter_words import COMMON, SMALL, VERBS, made, word


@attrs.frozen(kw_only=True)
class Conversation:
    """A conversation in which every reply of the assistant is right.

    Attributes:
        messages: As OpenAI's chat completions have them; calls of tools have their arguments as objects.
        tools: Their declarations.
        family: The name of its family.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    family: str = ""


# ----- names and values ---------------------------------------------------------------------------------------------


def number(rng: random.Random) -> str:
    """Return a number of one to five digits, sometimes with decimals."""
    digits = rng.choice((1, 1, 2, 2, 2, 3, 3, 4, 5))
    whole = str(rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits))
    return f"{whole}.{rng.randrange(100):02}" if rng.random() < 0.15 else whole


def code(rng: random.Random) -> str:
    """Return a code of letters and digits."""
    letters = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(1, 3)))
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 5)))
    letters = letters.upper() if rng.random() < 0.6 else letters
    return letters + rng.choice(("", "-", "_", "")) + digits


def date(rng: random.Random) -> str:
    """Return a date or a time of the day."""
    if rng.random() < 0.3:
        return f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    return f"{rng.randint(1950, 2050)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def cased(text: str, rng: random.Random) -> str:
    """Return a text, sometimes with capitals."""
    chance = rng.random()
    return text if chance < 0.8 else text.title() if chance < 0.95 else text.upper()


def phrase(rng: random.Random) -> str:
    """Return two to four words."""
    return cased(" ".join(word(rng) for _ in range(rng.choice((2, 2, 2, 3, 4)))), rng)


def name(rng: random.Random) -> str:
    """Return what a thing is called."""
    chance = rng.random()
    if chance < 0.55:
        return cased(word(rng), rng)
    return phrase(rng) if chance < 0.8 else code(rng)


KINDS: Mapping[str, Callable[[random.Random], str]] = {
    "number": number,
    "code": code,
    "date": date,
    "word": lambda rng: cased(word(rng), rng),
    "phrase": phrase,
}
"""Kinds of values."""

WEIGHTS = (5, 2, 1, 5, 2)


def kind_of(rng: random.Random) -> str:
    """Return a kind of value."""
    return rng.choices(list(KINDS), WEIGHTS)[0]


def value(kind: str, rng: random.Random) -> Any:
    """Return a value of a kind, as JSON has it: a number as a number."""
    text = KINDS[kind](rng)
    return (float(text) if "." in text else int(text)) if kind == "number" else text


def shown(found: Any) -> str:
    """Return a value as a text has it; a number as JSON writes it."""
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def different(make: Callable[[], Any], n: int) -> list[Any]:
    """Return that many values, none twice."""
    found: dict[Any, None] = {}
    while len(found) < n:
        found[make()] = None
    return list(found)


def column(rng: random.Random) -> str:
    """Return the name of a field."""
    chance = rng.random()
    if chance < 0.75:
        return word(rng)
    return word(rng) + rng.choice(("_", " ")) + word(rng) if chance < 0.92 else f"{word(rng)}_id"


# ----- records and how they are written -----------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Table:
    """Records of one sort.

    Attributes:
        noun: What one is.
        key: The field that names a record.
        fields: The others, with the kind of their values.
        records: Field to value.
    """

    noun: str
    key: str
    fields: Mapping[str, str]
    records: Sequence[Mapping[str, Any]]


def table(rng: random.Random, rows: int, fields: int) -> Table:
    """Return a table with names and values at random."""
    noun, key, *others = different(lambda: column(rng), fields + 2)
    if rng.random() < 0.4:
        key = rng.choice(("name", "id", "key", "code", "title"))
        others = [other if other != key else made(rng) + "s" for other in others]
    kinds = {other: kind_of(rng) for other in others}
    naming = rng.choice((name, name, name, code, number, lambda r: word(r)))
    keys = different(lambda: naming(rng), rows)
    records = [{key: k, **{f: value(kind, rng) for f, kind in kinds.items()}} for k in keys]
    return Table(noun=noun.replace("_", " "), key=key, fields=kinds, records=records)


def record_text(record: Mapping[str, Any], rng: random.Random, form: str = "") -> str:
    """Return one record as text."""
    form = form or rng.choice(("json", "json", "lines", "pairs", "sentence"))
    if form == "json":
        return json.dumps(dict(record), ensure_ascii=False)
    if form == "lines":
        return "\n".join(f"{f}: {shown(v)}" for f, v in record.items())
    if form == "pairs":
        mark, gap = rng.choice((("=", ", "), ("=", "; "), (": ", ", "), (" ", ", "), ("=", " ")))
        return gap.join(f"{f}{mark}{shown(v)}" for f, v in record.items())
    (_, first), *others = record.items()
    return f"{shown(first)} has " + " and ".join(f"{f} {shown(v)}" for f, v in others)


def table_text(found: Table, rng: random.Random) -> str:
    """Return all records as text."""
    form = rng.choice(("json", "rows", "bars", "lines", "map", "sentences", "blocks"))
    columns = [found.key, *found.fields]
    if form == "json":
        return json.dumps([dict(r) for r in found.records], ensure_ascii=False)
    if form in ("rows", "bars"):
        mark = ", " if form == "rows" else " | "
        if rng.random() < 0.3:
            mark = mark.strip()
        return "\n".join([mark.join(columns), *(mark.join(shown(r[c]) for c in columns) for r in found.records)])
    if form == "map":
        inner = {shown(r[found.key]): {f: r[f] for f in found.fields} for r in found.records}
        only = next(iter(found.fields))
        flat = {k: v[only] for k, v in inner.items()} if len(found.fields) == 1 else inner
        return json.dumps(flat, ensure_ascii=False)
    if form == "sentences":
        return ". ".join(record_text(r, rng, "sentence") for r in found.records) + "."
    if form == "lines":
        rest = "; ".join if rng.random() < 0.5 else ", ".join
        return "\n".join(
            f"{shown(r[found.key])}: {rest(f'{f} {shown(r[f])}' for f in found.fields)}" for r in found.records
        )
    return "\n\n".join(record_text(r, rng, "lines") for r in found.records)


# ----- wordings -----------------------------------------------------------------------------------------------------

ASKING = (
    "what is the {f} of {k}?",
    "what is the {f} of the {n} {k}?",
    "{f} of {k}?",
    "{k}: {f}?",
    "tell me the {f} of {k}",
    "please give me the {f} for {k}",
    "I need the {f} of {n} {k}.",
    "which {f} does {k} have?",
    "how much {f} has {k}?",
    "how many {f} does the {n} {k} have?",
    "look up {f} of {k}",
    "find the {f} where {c} is {k}",
    "for {k} I want to know the {f}",
    "do you know the {f} of {k} ?",
    "{n} {k} , {f} please",
    "can you look up {k} and tell me its {f}?",
    "{k} {f}",
    "{f} {k}",
    "there is a {n} called {k} , what is its {f} ?",
)
"""f: the field; k: what the record is called; n: what it is; c: the field that names it."""


def filler(rng: random.Random) -> str:
    """Return a few words that say nothing."""
    return " ".join(rng.choice(COMMON) for _ in range(rng.randint(1, 5)))


def around(text: str, rng: random.Random) -> str:
    """Return a text, sometimes with a capital, quotes of its own, or words before or after it that say nothing."""
    if text.split(" ")[0] in SMALL and rng.random() < 0.4:  # else a name would lose its case
        text = text[:1].upper() + text[1:]
    chance = rng.random()
    if chance < 0.1:
        return f"{filler(rng)} . {text}"
    if chance < 0.2:
        return f"{text} {filler(rng)}"
    if chance < 0.25:
        return f"{filler(rng)}, {text}"
    return text


def called(text: str, rng: random.Random) -> str:
    """Return a name as a question has it: sometimes in quotes."""
    chance = rng.random()
    return f'"{text}"' if chance < 0.08 else f"'{text}'" if chance < 0.14 else text


def question(fields: Sequence[str], key: str, found: Table, rng: random.Random) -> str:
    """Return a question for some fields of a record."""
    said = [f.replace("_", " ") if rng.random() < 0.5 else f for f in fields]
    asked = " and ".join(said) if rng.random() < 0.7 else ", ".join(said)
    wording = rng.choice(ASKING)
    if rng.random() < 0.15:  # words at random: only the two names say what is asked
        parts = ["{f}", "{k}"]
        rng.shuffle(parts)
        wording = f"{filler(rng)} {parts[0]} {filler(rng)} {parts[1]}"
    return around(wording.format(f=asked, k=called(key, rng), n=found.noun, c=found.key), rng)


def conversation_of(messages: Sequence[tuple[str, Any]], rng: random.Random, *, system: str = "") -> list[Any]:
    """Return messages from pairs of role and text, with a system message if there is one."""
    found = [{"role": "system", "content": system}] if system else []
    return found + [{"role": role, "content": text} for role, text in messages]


# ----- families -----------------------------------------------------------------------------------------------------


def copying(rng: random.Random, size: float) -> Conversation:
    """A text is to be said again: all of it, what stands in quotes, or one part that is named."""
    many = 1 + int(size * 5)
    way = rng.choice(("all", "quoted", "numbers", "slot", "list", "replace", "same"))
    if way in ("replace", "same"):
        return (replacing if way == "replace" else comparing)(rng, many)
    if way == "all":
        text = " ".join(name(rng) if rng.random() < 0.7 else number(rng) for _ in range(rng.randint(1, 1 + many * 2)))
        ask = rng.choice(("repeat: {}", "say {}", "repeat this:\n{}", "{}\nrepeat", "echo {}", "copy: {}"))
        return Conversation(messages=conversation_of([("user", ask.format(text)), ("assistant", text)], rng))
    if way == "quoted":
        text = phrase(rng)
        mark = rng.choice(('"', "'", "`"))
        said = f"{filler(rng)} {mark}{text}{mark} {filler(rng)}"
        ask = rng.choice(("{}\nwhat is in quotes?", "quoted part: {}", "{} . give me the quoted text"))
        return Conversation(messages=conversation_of([("user", ask.format(said)), ("assistant", text)], rng))
    if way == "numbers":
        found = number(rng)
        said = f"{filler(rng)} {found} {filler(rng)}"
        ask = rng.choice(("{}\nwhich number?", "{} , what number is there ?", "number in: {}"))
        return Conversation(messages=conversation_of([("user", ask.format(said)), ("assistant", found)], rng))
    pairs = [(column(rng), shown(value(kind_of(rng), rng))) for _ in range(rng.randint(1, many + 1))]
    if way == "slot":
        wanted, found = rng.choice(pairs)
        if sum(c == wanted for c, _ in pairs) > 1:
            return copying(rng, size)
        said = rng.choice((" , ", " and ", " ")).join(f"{c} {v}" for c, v in pairs)
        ask = rng.choice(("{s}\n{c}?", "{s} . what is the {c} ?", "{c} in: {s}", "give the {c}: {s}"))
        text = ask.format(s=said, c=wanted)
        return Conversation(messages=conversation_of([("user", text), ("assistant", found)], rng))
    lines = [v for _, v in pairs]
    ask = rng.choice(("write as a list: {}", "one on each line: {}", "list {}"))
    answer = "\n".join(lines)
    return Conversation(messages=conversation_of([("user", ask.format(", ".join(lines))), ("assistant", answer)], rng))


def replacing(rng: random.Random, many: int) -> Conversation:
    """A text is to be said again with one part of it replaced, left out or followed by another."""
    parts = different(lambda: name(rng) if rng.random() < 0.7 else number(rng), rng.randint(2, 2 + many))
    old, new = rng.choice(parts), name(rng)
    mark = rng.choice((" ", ", ", "\n"))
    way = rng.choice(("replace", "drop", "append"))
    ask = {
        "replace": (
            "{t}\nreplace {o} by {n}",
            "replace {o} with {n}: {t}",
            "{t} . change {o} to {n}",
            "{o} -> {n}\n{t}",
        ),
        "drop": ("{t}\nleave out {o}", "without {o}: {t}", "{t} . remove {o}"),
        "append": ("{t}\nadd {n}", "append {n}: {t}", "{t} . put {n} at the end"),
    }[way]
    answer = {
        "replace": [new if part == old else part for part in parts],
        "drop": [part for part in parts if part != old],
        "append": [*parts, new],
    }[way]
    text = rng.choice(ask).format(t=mark.join(parts), o=old, n=new)
    return Conversation(messages=conversation_of([("user", text), ("assistant", mark.join(answer))], rng))


def comparing(rng: random.Random, many: int) -> Conversation:
    """Whether a list has something, or whether two things are the same: yes or no."""
    parts = different(lambda: name(rng) if rng.random() < 0.6 else number(rng), rng.randint(1, 1 + many))
    yes = rng.random() < 0.5
    wanted = rng.choice(parts)
    while not yes and wanted in parts:
        wanted = name(rng) if rng.random() < 0.6 else number(rng)
    if len(parts) == 1:
        ask = rng.choice(("is {t} the same as {w}?", "{t} = {w} ?", "are they equal: {t} and {w}"))
    else:
        ask = rng.choice(("{t}\nis {w} there?", "does this list have {w}? {t}", "{w} in {t} ?"))
    text = ask.format(t=", ".join(parts), w=wanted)
    return Conversation(messages=conversation_of([("user", text), ("assistant", "yes" if yes else "no")], rng))


def looking_up(rng: random.Random, size: float) -> Conversation:
    """A value is to be found in records of the conversation; often several questions, one after the other."""
    found = table(rng, rng.randint(1, 2 + int(size * 10)), rng.randint(1, 1 + int(size * 4)))
    text = table_text(found, rng) if len(found.records) > 1 else record_text(found.records[0], rng)
    asked = []
    for _ in range(rng.randint(1, 3)):
        record = rng.choice(found.records)
        fields = rng.sample(list(found.fields), min(len(found.fields), rng.choice((1, 1, 1, 2))))
        ask = question(fields, shown(record[found.key]), found, rng)
        if rng.random() < 0.15:  # the other way round
            pairs = {f: [shown(r[f]) for r in found.records] for f in found.fields}
            alone = [f for f, vs in pairs.items() if vs.count(shown(record[f])) == 1]
            if alone:
                f = rng.choice(alone)
                ask = rng.choice(("which {n} has {f} {v}?", "whose {f} is {v}?", "{c} with {f} {v}"))
                ask = around(ask.format(n=found.noun, f=f, v=shown(record[f]), c=found.key), rng)
                asked.append((ask, shown(record[found.key])))
                continue
        asked.append((ask, " ".join(shown(record[f]) for f in fields)))
    system = ""
    (first, answer), *others = asked
    if rng.random() < 0.4:
        system = text
    else:
        first = rng.choice((f"{text}\n{first}", f"{first}\n{text}", f"{text}\n\n{first}"))
    messages = [("user", first), ("assistant", answer)]
    for ask, said in others:
        messages += [("user", ask), ("assistant", said)]
    return Conversation(messages=conversation_of(messages, rng, system=system))


def pattern(fields: Sequence[str], rng: random.Random) -> Callable[[Mapping[str, str] | None], str]:
    """Return a function that writes a template with placeholders (None), or filled in."""
    left, right = rng.choice((("<", ">"), ("{", "}"), ("[", "]"), ("<", ">"), ("$", "")))
    gaps = [rng.choice((" ", ", ", ": ", " -> ", "; ", "\n", " is ", " / ", f" {word(rng)} ")) for _ in fields]
    lead = rng.choice(("", "", f"{word(rng)} ", f"{word(rng)}: "))
    tail = rng.choice(("", "", ".", f" {word(rng)}"))
    as_json = rng.random() < 0.25

    def written(values: Mapping[str, str] | None) -> str:
        slots = [values[f] if values else f"{left}{f}{right}" for f in fields]
        if as_json:
            return json.dumps(dict(zip(fields, slots, strict=True)), ensure_ascii=False)
        return lead + "".join(s + g for s, g in zip(slots, [*gaps[:-1], ""], strict=True)) + tail

    return written


def filling_in(rng: random.Random, size: float) -> Conversation:
    """A template of the system's message, or of the first one, is to be filled from what a user writes."""
    fields = different(lambda: column(rng), rng.randint(1, 2 + int(size * 2)))
    kinds = {f: kind_of(rng) for f in fields}
    written = pattern(fields, rng)
    ask = rng.choice(("answer as {}", "Answer in this form: {}", "form: {}", "reply like this: {}", "Write {}")).format(
        written(None)
    )

    def said() -> tuple[str, str]:
        values = {f: KINDS[kinds[f]](rng) for f in fields}
        order = list(fields)
        if rng.random() < 0.7:
            rng.shuffle(order)
        way = rng.random()
        if way < 0.6:
            mark = rng.choice((" ", ": ", " is ", "=", " of "))
            text = rng.choice((", ", " and ", " , ", "\n")).join(f"{f}{mark}{values[f]}" for f in order)
        elif way < 0.8:
            text = record_text({f: values[f] for f in order}, rng, "json")
        else:  # the kinds of the values say which is which, or their order
            order = list(fields)
            text = " ".join(f"{filler(rng)} {values[f]}" for f in order)
        return around(text, rng), written(values)

    pairs = [said() for _ in range(rng.randint(1, 3))]
    messages = [m for user, answer in pairs for m in (("user", user), ("assistant", answer))]
    if rng.random() < 0.7:
        return Conversation(messages=conversation_of(messages, rng, system=ask))
    messages[0] = ("user", f"{ask}\n{messages[0][1]}")
    return Conversation(messages=conversation_of(messages, rng))


def json_type(kind: str, rng: random.Random) -> str:
    """Return the JSON type by which a tool declares an argument of a kind."""
    return rng.choice(("integer", "number")) if kind == "number" else "string"


def declared(tool: str, about: str, arguments: Mapping[str, Any], rng: random.Random, style: Mapping[str, bool]) -> Any:
    """Return a tool's declaration.

    Args:
        tool: Its name.
        about: Its description.
        arguments: Name to JSON type, or to a list of allowed values.
        rng: Random numbers.
        style: Whether declarations of this conversation have descriptions, required arguments, …
    """
    properties: dict[str, Any] = {}
    for argument, kind in arguments.items():
        properties[argument] = {"type": "string", "enum": kind} if isinstance(kind, list) else {"type": kind}
        if style["explains"]:
            properties[argument]["description"] = rng.choice(("the {}", "{} to use", "a {}", "The {} of it.")).format(
                argument.replace("_", " ")
            )
    function: dict[str, Any] = {"name": tool}
    if style["describes"]:
        function["description"] = about
    function["parameters"] = {"type": "object", "properties": properties}
    if style["required"]:
        function["parameters"]["required"] = list(arguments)
    return {"type": "function", "function": function}


def style_of(rng: random.Random) -> dict[str, bool]:
    """Return how tools are declared in one conversation."""
    return {"describes": rng.random() < 0.65, "explains": rng.random() < 0.3, "required": rng.random() < 0.6}


def call(tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the assistant's message that calls a tool."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": tool, "arguments": dict(arguments)}}],
    }


def tool_name(about: str, rng: random.Random) -> str:
    """Return the name of a tool about something."""
    about = about.replace(" ", "_")
    chance = rng.random()
    if chance < 0.25:
        return about
    verb = rng.choice(VERBS)
    return f"{verb}_{about}" if chance < 0.85 else f"{about}_{verb}"


RETURNS = (
    "Return the {} of a {}.",
    "{1}: its {0}",
    "Looks up the {} for one {}.",
    "Gives the {} of the {}",
    "get {} of {}",
)


def result_text(record: Mapping[str, Any], wanted: str, rng: random.Random, way: str) -> str:
    """Return what a tool answers: the value alone, a record, or a sentence."""
    if way == "bare":
        return shown(record[wanted])
    if way == "one":
        return json.dumps({wanted: record[wanted]}, ensure_ascii=False)
    if way == "says":
        return f"{wanted} {shown(record[wanted])}"
    return record_text(record, rng, {"record": "json", "lines": "lines", "pairs": "pairs"}[way])


RESULTS = ("bare", "bare", "one", "one", "record", "record", "lines", "pairs", "says")


def asking_tools(rng: random.Random, size: float) -> Conversation:
    """A question that one tool of several answers, or two in a row: the first gives what the second wants."""
    found = table(rng, rng.randint(1, 3), rng.randint(2, 2 + int(size * 4)))
    style = style_of(rng)
    fields = list(found.fields)
    chained = size > 0.2 and rng.random() < 0.5
    link = rng.choice((f"{made(rng)}_id", f"{found.noun}_id".replace(" ", "_"), "id", made(rng), "number", "code"))
    if link in fields or link == found.key:
        link = made(rng) + "no"
    many = rng.randint(1, min(len(fields), 1 + int(size * 4)))
    offered = fields[:many]
    record = rng.choice(found.records)
    key = shown(record[found.key])
    argument = rng.choice((found.key, found.noun.replace(" ", "_"), found.key))
    links = {shown(r[found.key]): value(rng.choice(("number", "code")), rng) for r in found.records}
    link_type = "integer" if isinstance(links[key], int) else "number" if isinstance(links[key], float) else "string"
    key_type = "string"
    # An argument that the question has apart from the record's name: a choice, or a value.
    extra, extra_kind, extra_value = "", None, None
    if size > 0.3 and rng.random() < 0.4:
        extra = made(rng) if rng.random() < 0.5 else rng.choice(COMMON)
        if extra in (*fields, found.key, link, argument):
            extra = made(rng) + "by"
        if rng.random() < 0.5:
            choices = different(lambda: word(rng), rng.randint(2, 4))
            extra_value, extra_kind = rng.choice(choices), choices
        else:
            kind = kind_of(rng)
            extra_value = value(kind, rng)
            extra_kind = json_type("number" if not isinstance(extra_value, str) else kind, rng)
    tools, names = [], {}
    wanted_argument = link if chained else argument
    for f in offered:
        names[f] = tool_name(f, rng)
        about = rng.choice(RETURNS).format(f.replace("_", " "), found.noun)
        arguments = {wanted_argument: link_type if chained else key_type}
        if extra:
            arguments[extra] = extra_kind
        tools.append(declared(names[f], about, arguments, rng, style))
    finder = tool_name(rng.choice((found.noun, link, found.noun)), rng)
    if finder in names.values():
        finder = f"{finder}_{made(rng)}"
    if chained:
        about = rng.choice(RETURNS).format(link.replace("_", " "), found.noun)
        place = 0 if rng.random() < 0.7 else rng.randint(0, len(tools))
        tools.insert(place, declared(finder, about, {argument: key_type}, rng, style))
    for _ in range(rng.randint(0, 1 + int(size * 2)) if rng.random() < 0.5 else 0):
        other = made(rng)
        about = rng.choice(RETURNS).format(other, word(rng))
        fake = declared(tool_name(other, rng), about, {column(rng).replace(" ", "_"): "string"}, rng, style)
        tools.insert(rng.randint(0, len(tools)), fake)
    asked = rng.sample(offered, min(len(offered), rng.choice((1, 1, 1, 2))))
    text = question(asked, key, found, rng)
    if extra:
        cue = "{e} {v}" if rng.random() < 0.5 else "{v}"
        cue = rng.choice((cue, f"in {cue}", f"at {cue}", f"with {cue}", f"for {cue}", f"{cue} ,"))
        text = rng.choice(("{t} {c}", "{c} {t}", "{t} , {c}")).format(
            t=text, c=cue.format(e=extra.replace("_", " "), v=shown(extra_value))
        )
    messages: list[Any] = []
    way, link_way = rng.choice(RESULTS), rng.choice(RESULTS)
    # What is said at the end: the values, or a template that the system's message has.
    system, written = "", None
    if rng.random() < 0.3:
        written = pattern(asked, rng)
        system = rng.choice(("answer as {}", "Use the tools. Answer in this form: {}", "At the end say {}")).format(
            written(None)
        )
    elif rng.random() < 0.3:
        told = ("Use the tools.", "You answer questions with tools.", "Answer with the value only.", filler(rng))
        system = rng.choice(told)
    if system:
        messages.append({"role": "system", "content": system})
    messages.append({"role": "user", "content": text})
    start: Any = key
    if chained:
        messages.append(call(finder, {argument: key}))
        linked = {found.key: record[found.key], link: links[key], **{f: record[f] for f in fields[many:]}}
        messages.append({"role": "tool", "content": result_text(linked, link, rng, link_way)})
        start = links[key]
    for f in asked:
        arguments = {wanted_argument: start}
        if extra:
            arguments[extra] = extra_value
        messages.append(call(names[f], arguments))
        others = {other: v for other, v in record.items() if other == f or other not in asked}
        whole = len(asked) == 1 and len(found.records) > 1 and rng.random() < 0.15
        said_by_tool = table_text(found, rng) if whole else result_text(others, f, rng, way)
        messages.append({"role": "tool", "content": said_by_tool})
    said = {f: shown(record[f]) for f in asked}
    if rng.random() < 0.2:  # a last tool takes the answer
        last = rng.choice(("answer", "finish", "submit", "done", "reply"))
        if last not in names.values() and last != finder:
            properties = {f.replace(" ", "_"): json_type(found.fields[f], rng) for f in asked}
            tools.append(declared(last, "Give the answer.", properties, rng, style))
            messages.append(call(last, {f.replace(" ", "_"): record[f] for f in asked}))
            return Conversation(messages=messages, tools=tools)
    answer = written(said) if written else " ".join(said.values())
    messages.append({"role": "assistant", "content": answer})
    return Conversation(messages=messages, tools=tools)


DONE = ("ok", "done", "added", "closed", "saved", "yes", "accepted", "set")


def acting(rng: random.Random, size: float) -> Conversation:
    """What a user writes is put into the arguments of one tool or of several, in the order of their declaration."""
    style = style_of(rng)
    steps = rng.randint(1, 1 + int(size * 2.5))
    tools, calls, cues, taken = [], [], [], set()
    for _ in range(steps):
        arguments: dict[str, Any] = {}
        given: dict[str, Any] = {}
        for _ in range(rng.randint(1, 1 + int(size * 2.5))):
            argument = column(rng).replace(" ", "_")
            if argument in taken:
                continue
            taken.add(argument)
            chance = rng.random()
            if chance < 0.2:
                choices = different(lambda: word(rng), rng.randint(2, 5))
                given[argument] = rng.choice(choices)
                arguments[argument] = choices
                cues.append(rng.choice(("{v}", "{a} {v}")).format(a=argument.replace("_", " "), v=given[argument]))
                continue
            kind = kind_of(rng)
            given[argument] = value(kind, rng)
            arguments[argument] = json_type(kind, rng)
            v = shown(given[argument])
            cue = rng.choice(("{a} {v}", "{a} {v}", "{v} {a}", "{a}: {v}", "{a} is {v}"))
            if rng.random() < 0.3:  # only its kind, or its place, says which argument it is
                cue = rng.choice(("{v}", "{w} {v}", "{v} {w}"))
            cues.append(cue.format(a=argument.replace("_", " "), v=v, w=rng.choice(COMMON)))
        if not arguments:
            continue
        tool = tool_name(column(rng), rng)
        if tool in taken:
            continue
        taken.add(tool)
        about = rng.choice(("{} the {}", "Use it to {} a {}", "{} {}")).format(rng.choice(VERBS), word(rng))
        tools.append(declared(tool, about, arguments, rng, style))
        calls.append((tool, given))
    if not calls:
        return acting(rng, size)
    text = around(rng.choice((" , ", " ", " and ", ", ")).join(cues), rng)
    if rng.random() < 0.5:
        text = rng.choice(("please {}", "we need {}", "I want {}", "{} please", "can you do {} ?")).format(text)
    system = ""
    if rng.random() < 0.3:
        system = rng.choice(("Use the tools.", "Call the tools in their order.", filler(rng)))
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    done = rng.choice(DONE)
    for tool, given in calls:
        messages.append(call(tool, given))
        messages.append({"role": "tool", "content": done})
    messages.append({"role": "assistant", "content": done})
    return Conversation(messages=messages, tools=tools)


def choosing(rng: random.Random, size: float) -> Conversation:
    """One of several tools is to be called, once; the question names what it is about and has its argument."""
    style = style_of(rng) | {"describes": rng.random() < 0.8}
    abouts = different(lambda: column(rng), rng.randint(2, 2 + int(size * 4)))
    tools, names, arguments = [], [], []
    for about in abouts:
        # Either the name says what it is about, or the description does.
        hidden = style["describes"] and rng.random() < 0.4
        names.append(tool_name(made(rng) if hidden else about, rng))
        arguments.append(rng.choice(("name", "query", "key", "value", "id", column(rng).replace(" ", "_"))))
        text = rng.choice(RETURNS).format(about.replace("_", " "), word(rng))
        tools.append(declared(names[-1], text, {arguments[-1]: "string"}, rng, style))
    if len(set(names)) < len(names):
        return choosing(rng, size)
    i = rng.randrange(len(abouts))
    key = name(rng)
    text = question([abouts[i]], key, Table(noun=word(rng), key="name", fields={}, records=()), rng)
    answer = shown(value(kind_of(rng), rng))
    messages = [
        {"role": "user", "content": text},
        call(names[i], {arguments[i]: key}),
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": answer},
    ]
    return Conversation(messages=messages, tools=tools)


Family = Callable[[random.Random, float], Conversation]

FAMILIES: Mapping[str, Family] = {
    "copy": copying,
    "look-up": looking_up,
    "template": filling_in,
    "choose": choosing,
    "tools": asking_tools,
    "act": acting,
}
"""Name to a function that makes a conversation of that family from random numbers and a size from 0 to 1."""

SHARES: Mapping[str, float] = {
    "copy": 0.14,
    "look-up": 0.2,
    "template": 0.12,
    "choose": 0.12,
    "tools": 0.27,
    "act": 0.15,
}
"""How many of the conversations are of each family."""


def conversation(rng: random.Random, level: float, families: Sequence[str] = tuple(FAMILIES)) -> Conversation:
    """Return a conversation of a size up to `level`, from 0 to 1, of one of some families."""
    family = rng.choices(families, [SHARES[name] for name in families])[0]
    size = level * rng.random() ** 0.7
    found = FAMILIES[family](rng, size)
    messages = list(found.messages)
    if rng.random() < 0.2 * level:  # what an agent is told at length, and this question does not need
        told = " ".join(f"{filler(rng).capitalize()}." for _ in range(rng.randint(1, 2 + int(6 * size))))
        if messages[0]["role"] == "system":
            order = (told, messages[0]["content"]) if rng.random() < 0.6 else (messages[0]["content"], told)
            messages[0] = {"role": "system", "content": rng.choice((" ", "\n", "\n\n")).join(order)}
        else:
            messages.insert(0, {"role": "system", "content": told})
    return attrs.evolve(found, messages=messages, family=family)
