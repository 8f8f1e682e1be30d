"""The training data of tests/benchmarks/verl_spider, on a database made here and, if available, on real Spider."""

# ruff: noqa: E402  (what the imports need may be missing)
import json
import random
import sqlite3
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "benchmarks" / "verl_spider"
sys.path.insert(0, str(FOLDER))
pytest.importorskip("sqlglot")
pytest.importorskip("torch")

import byte_tokenizer
import data
import measures
import turns
from agentrig_langgraph_sql.database import run_query
from agentrig_langgraph_sql.prompts import SHORT
from agentrig_spider.tasks.spider import read_rows
from canonical import NotCanonical, canonical, checked, tokens_of
from renaming import Pool, renamed
from schemas import read_schemas, value_pool
from templates import Asker

from agentrig import Outcome, Task
from agentrig.plan import resolve
from agentrig.plugins.loading import load_file


@pytest.fixture
def shop(tmp_path):
    file = data.database_of(tmp_path, "shop")
    file.parent.mkdir(parents=True)
    connection = sqlite3.connect(file)
    connection.executescript(
        """
        CREATE TABLE Customer (Customer_ID INTEGER PRIMARY KEY, "Home Town" TEXT, Age INT);
        CREATE TABLE orders (id INTEGER PRIMARY KEY, Customer_ID INT REFERENCES Customer, price REAL, state TEXT);
        INSERT INTO Customer VALUES (1, 'Rome', 30), (2, 'Oslo', 40), (3, 'Bern', 50);
        INSERT INTO orders VALUES (1, 1, 2.5, 'open'), (2, 1, 3.5, 'paid'), (3, 2, 9.0, 'paid');
        """
    )
    connection.close()
    (tmp_path / "tables.json").write_text("[]")
    schema = read_schemas(tmp_path, ["shop"])["shop"]
    keys = ((("orders", "Customer_ID"), ("Customer", "Customer_ID")),)
    return file, type(schema)("shop", schema.tables, keys)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (
            'select  age from customer where "home town"="Rome";',
            "SELECT Age FROM Customer WHERE \"Home Town\" = 'Rome'",
        ),
        (
            "SELECT T1.age, count(*) FROM customer AS T1 JOIN Orders AS T2 ON T2.customer_id = T1.customer_id"
            " GROUP BY T1.customer_id ORDER BY count(*) ASC",
            "SELECT Customer . Age , COUNT ( * ) FROM Customer"
            " JOIN orders ON Customer . Customer_ID = orders . Customer_ID"
            " GROUP BY Customer . Customer_ID ORDER BY COUNT ( * )",
        ),
        (
            "SELECT age FROM customer WHERE customer_id NOT IN (SELECT t.customer_id FROM orders AS t)",
            "SELECT Age FROM Customer WHERE Customer_ID NOT IN ( SELECT Customer_ID FROM orders )",
        ),
        (
            "SELECT A.age FROM customer AS A JOIN customer AS B ON A.age = B.age WHERE A.age != 30",
            "SELECT A . Age FROM Customer AS A JOIN Customer AS B ON A . Age = B . Age WHERE A . Age <> 30",
        ),
    ],
)
def test_one_style_with_the_same_rows(shop, query, expected):
    file, schema = shop
    assert canonical(query, schema) == expected
    assert checked(query, schema, file) == (expected, True)
    assert canonical(expected, schema) == expected


def test_queries_that_do_not_fit_the_schema_stay_as_they_are(shop):
    file, schema = shop
    with pytest.raises(NotCanonical):
        canonical("SELECT x FROM nowhere", schema)
    assert checked("SELECT  x FROM nowhere ;", schema, file) == ("SELECT x FROM nowhere", False)


def test_new_names_are_the_same_everywhere(shop):
    _, schema = shop
    pool = Pool([("Ships", "ships")], {"number": [("ht", "height")], "text": [("port", "port")]}, ["Dakar"])
    question, query = (
        "What is the age of customers from 'Rome'?",
        "SELECT Age FROM Customer WHERE \"Home Town\" = 'Rome'",
    )
    seen = set()
    for seed in range(40):
        new, asked, sql = renamed(schema, question, query, pool, random.Random(seed), share=0.8)
        table = next(t for t in new.tables if len(t.columns) == 3)
        number = table.columns[2]
        assert sql.split(" FROM ")[0] == f"SELECT {number.name}"
        assert sql.split()[3] == table.name
        # The question names what the query uses; a column that it does not mention keeps its name.
        assert number.words in asked
        assert '"Home Town" = ' in sql
        value = sql.split(" = ")[1].strip("'")
        assert f"'{value}'" in asked
        assert {c.name for c in table.columns} & {c.name for c in new.tables[1].columns}, "the join still shows"
        assert new.text().count("table ") == 2
        seen.add(sql)
    assert len(seen) > 10


def test_made_questions_run(shop):
    file, schema = shop
    pool = Pool.of([schema], value_pool([schema]))
    rng = random.Random(0)
    drawn = [asked for _ in range(400) if (asked := Asker(schema, pool, rng).draw())]
    assert len(drawn) > 300
    for asked in drawn:
        assert run_query(file, asked.query).error is None, asked
        assert asked.query == " ".join(tokens_of(asked.query))


def test_the_forms_of_a_word_share_their_tokens():
    words = ["singers stage_singer Singer OrchestraName orchestra", "stages have stage_names"]
    tokenizer = byte_tokenizer.build(words * 20, 1500)
    forms = [" singers", " Singer", "_singer", "Singer", "StageSinger", " stage_Singers"]
    assert {tuple(tokenizer.encode(form).tokens[-1:]) for form in forms if form[-1] != "s"} == {("inger",)}
    assert {tuple(tokenizer.encode(form).tokens[-2:]) for form in forms if form[-1] == "s"} == {("inger", "s")}
    assert tokenizer.encode(" orchestra").tokens[1:] == tokenizer.encode("Orchestra").tokens[1:]
    assert tokenizer.encode("SELECT COUNT ( * ) FROM").tokens == ["SELECT", "ĠCOUNT", "Ġ(", "Ġ*", "Ġ)", "ĠFROM"]
    text = "naïve 'café'\n\n  x >= 3.5, \"Zoë's\" 😀"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_turns_are_what_the_agent_and_the_chat_template_make(shop, tmp_path):
    _, schema = shop
    texts = [schema.text(), "What is the age of Zoë's customers?", "SELECT Age FROM Customer WHERE Age >= 30"] * 3
    tokenizer = byte_tokenizer.save(byte_tokenizer.build(texts, 1500), tmp_path / "tokenizer", length=64)
    turn = turns.write(texts[0], texts[1], texts[2])
    messages = SHORT.write.messages(schema=texts[0], question=texts[1])
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == turn.prompt
    later = turns.conversation(texts[0], [(texts[1], texts[2]), ("How many?", "SELECT 1")])
    pairs = turns.encoded(tokenizer, [turn, turn, later])
    assert len(pairs) == 1, "one reply to a prompt"
    whole = tokenizer.decode(pairs[0][0] + pairs[0][1])
    assert whole == turn.prompt + turn.reply
    turns.save(tmp_path / "x.npz", {"stage-1": pairs, "stage-2": pairs * 2})
    assert turns.load(tmp_path / "x.npz") == {"stage-1": pairs, "stage-2": pairs * 2}
    data.check_loaders(tmp_path / "tokenizer", tokenizer, [turn.prompt, later.prompt, "naïve  \n\n 123 it's"])


def test_no_question_or_database_of_dev_is_shown(spider_dir):
    train, dev = (read_rows(spider_dir / f"{name}.parquet") for name in ("train_spider", "dev"))
    shown, rewarded = data.split(sorted({row["db_id"] for row in train}), 0.6, 0)
    assert not set(shown) & set(rewarded)
    assert not (set(shown) | set(rewarded)) & {row["db_id"] for row in dev}
    few = [row for row in train if row["db_id"] in shown[:3]]
    schemas = read_schemas(spider_dir, [*shown, *rewarded])
    items = data.labelled(spider_dir, few, schemas)
    assert sum(item.styled for item in items) > 0.95 * len(items)
    pool = Pool.of(list(schemas.values()), value_pool(list(schemas.values())))
    rng = random.Random(0)
    made = [
        *data.with_own_names(items, rng, 2),
        *data.with_other_names(items[:50], pool, rng, 2),
        *data.made(list(schemas.values()), pool, rng, 200, whole=False),
        *data.later_turns(items[:20], rng),
    ]
    text = "\n".join(turn.prompt + turn.reply for turn in made)
    held = {row["question"] for row in dev} - {row["question"] for row in few}
    assert not [question for question in held if len(question) > 40 and question in text]
    described = {d["db_id"]: d for d in json.loads((spider_dir / "tables.json").read_text())}
    for db_id in {row["db_id"] for row in dev}:
        tables = [f"table {name}:" for name in described[db_id]["table_names_original"]]
        assert len(tables) < 2 or not any(all(t in turn.prompt for t in tables) for turn in made), db_id


def test_the_graded_reward_gives_partial_credit_to_a_wrong_query_that_runs(shop):
    database, _ = shop
    source = Path(__file__).parents[1] / "src/agentrig/templates/reward/src/agentrig_partial_credit/__init__.py"
    [spec] = load_file(source).register_rewards()
    reward = spec.build(spec.config(runs=0.3))
    task = Task(id="t", input={"database": str(database)}, private={"gold": "SELECT Age FROM Customer"})
    broken = Task(id="b", input={"database": str(database)}, private={"gold": "SELECT Height FROM Customer"})
    answers = ["SELECT age FROM customer", "SELECT id FROM orders", "SELECT height FROM customer", "no query"]
    items = [(task, Outcome(answer=answer)) for answer in answers] + [(broken, Outcome(answer=answers[0]))]
    assert [reward(*item, 5.0).value for item in items] == [1.0, 0.3, 0.0, 0.0, None]


def test_a_measurement_is_reported_by_turn_and_against_the_first():
    def one(right, runs, rejected):
        return measures.Measured(right=right, runs=runs, rejected=rejected)

    start = {"a": one([True, False], [True, False], True), "b": one([False, False], [False, False], True)}
    now = {"a": one([True, True], [True, True], False), "b": one([False, True], [False, True], True)}
    first, later = measures.figures(start, start), measures.figures(now, start)
    assert (first["right_lost_by_rewrite"], first["rejected_failing"], first["rejected_running"]) == (1, 1, 1)
    assert (later["right"], later["won"], later["lost"], later["runs_won"]) == (2, 2, 0, 2)
    assert (later["right_lost_by_rewrite"], later["rejected_running"]) == (0, 0)
    assert later["p"] == 0.5
    assert measures.sign_test(8, 1) == pytest.approx(20 / 512)


def test_queries_are_taken_from_the_nodes_and_not_from_the_whole_graph():
    def span(kind, **output):
        return {"attributes": {"langchain.chain.type": kind, "output": output}}

    spans = [
        span("langgraph-sql", query="b", correct=True),
        span("write_query", query="a"),
        span("execute_query", result="1"),
        span("check_query", correct=False),
        span("rewrite_query", query="b"),
    ]
    assert measures.outputs(spans, "query") == ["a", "b"]
    assert measures.outputs(spans, "correct") == [False]


def test_the_run_file_has_what_its_figures_were_made_with():
    """The recipe that it builds on may change; what the model was trained on may not."""
    agent = resolve(str(FOLDER / "run.toml")).configs["agent"]
    assert (agent.prompts, agent.table_info_truncate, agent.execution_truncate) == ("short", 2048, 64)
    assert (agent.max_turns, agent.sample_rows) == (2, 0)
