"""Spider's classes of difficulty."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from agentrig_spider.difficulty import difficulty

FROM = "FROM band AS T1 JOIN album AS T2 ON T1.id = T2.band_id"


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("SELECT count(*) FROM band", "easy"),
        ("SELECT name FROM band WHERE country = 'where, or like'", "easy"),
        ("SELECT name FROM band WHERE founded BETWEEN 1960 AND 1970", "easy"),
        ("SELECT count(DISTINCT name, id) FROM band", "easy"),
        ("SELECT name, country FROM band WHERE founded > 1990", "medium"),
        ("SELECT name FROM band WHERE country = 'x' AND founded > 1990", "medium"),
        ("SELECT country FROM band GROUP BY country HAVING count(*) > 1 AND max(founded) > 1990", "easy"),
        ("SELECT country, count(*) FROM band GROUP BY country", "medium"),
        (f"SELECT T1.name {FROM} WHERE T2.sold > 9", "medium"),
        (f"SELECT T1.name {FROM} GROUP BY T1.id ORDER BY count(*) DESC LIMIT 1", "extra"),
        (f"SELECT T1.name, T1.country {FROM} WHERE T2.sold > 9 OR T2.title LIKE 'a%'", "extra"),
        ("SELECT name FROM band WHERE id NOT IN (SELECT band_id FROM album)", "hard"),
        ("SELECT name FROM band EXCEPT SELECT name FROM band WHERE founded > 1990 AND country = 'x'", "hard"),
        ("SELECT name FROM band ORDER BY founded LIMIT 1", "medium"),
        ("SELECT name, id FROM band WHERE id IN (SELECT band_id FROM album)", "extra"),
        ("SELECT max(a), min(b), c FROM band WHERE a > 1 AND b > 2 GROUP BY c, d", "hard"),
    ],
)
def test_the_class_of_a_query(query: str, wanted: str) -> None:
    assert difficulty(query) == wanted
    assert difficulty(query.lower() + " ;") == wanted


def test_the_classes_of_dev_are_the_published_ones() -> None:
    folder = os.environ.get("AGENTRIG_SPIDER_DIR")
    if not folder:
        pytest.skip("needs Spider: set AGENTRIG_SPIDER_DIR")
    import pyarrow.parquet as pq

    rows = pq.read_table(Path(folder) / "dev.parquet").to_pylist()
    found = Counter(difficulty(row["query"]) for row in rows)
    assert found == {"easy": 248, "medium": 446, "hard": 174, "extra": 166}
