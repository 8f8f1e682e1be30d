"""The domains of `mini-sql`: two tables each, and the words in which people ask about them.

Names are single plain words, and numbers have at most four digits, so that a model of a million
parameters can have a token for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen
class Number:
    """A column of whole numbers, all different within a table where the range allows it.

    Attributes:
        name: The column.
        low: Smallest value.
        high: Greatest value.
        most: The superlative for the greatest value (`oldest`), empty when there is none.
        least: The superlative for the smallest value.
        adds: Whether a sum of its values means something.
    """

    name: str
    low: int = 10
    high: int = 99
    most: str = ""
    least: str = ""
    adds: bool = True


@attrs.frozen
class Category:
    """A text column with few values.

    Attributes:
        name: The column.
        plural: Its plural in questions.
        phrase: A phrase for "has the value `{v}`" that does not name the column; empty for none.
        values: All values.
    """

    name: str
    plural: str
    phrase: str
    values: Sequence[str]


@attrs.frozen
class Table:
    """A table: a label that is different in each row, categories and numbers.

    Attributes:
        name: The table; its plural in questions ends in `s`.
        label: The column that names a row.
        labels: The words that the label is sampled from.
        categories: Its text columns.
        numbers: Its number columns.
        rows: The number of rows.
    """

    name: str
    label: str
    labels: Sequence[str]
    categories: Sequence[Category]
    numbers: Sequence[Number]
    rows: int

    @property
    def plural(self) -> str:
        """The rows in questions."""
        return f"{self.name}s"


@attrs.frozen
class Domain:
    """A database: a parent and a child table that refers to it by `{parent}_id`."""

    name: str
    parent: Table
    child: Table

    @property
    def key(self) -> str:
        """The parent's primary key and the child's column that refers to it."""
        return f"{self.parent.name}_id"


# ruff: noqa: SIM905 (words read better as a line than as a list)

PEOPLE = tuple(
    "ann bob carl dora emil fay gus hana ivan jane kurt lena milo nina omar paula quinn rosa sven tara ugo vera yuri "
    "zoe adam bella cyrus diana eric flora greg helga igor julia kevin laura mark nora oscar petra".split()
)
SURNAMES = tuple(
    "adler baker cole dunn emery fisher grant hale irwin joyce keller lopez moreno nash otto parker reed stone "
    "turner vance walsh young abbott bishop cortez dalton ellis fuller gibson harper jarvis kramer lambert morton "
    "norris osborne perry ross sutton tucker".split()
)
TITLES = tuple(
    "amber arrow aurora beacon blaze bloom breeze canyon cedar comet coral crystal dawn delta drift dusk ember falcon "
    "fern flame frost galaxy harvest island jasmine lagoon lantern maple meadow mirage nectar oasis onyx orchid pearl "
    "phoenix prism quartz raven saffron".split()
)


def _numbers() -> dict[str, Number]:
    age = Number("age", 18, 79, "oldest", "youngest", False)
    year = Number("year", 1950, 2019, "latest", "earliest", False)
    rest = {
        "price": ("most expensive", "cheapest"),
        "length": ("longest", "shortest"),
        "weight": ("heaviest", "lightest"),
        "height": ("tallest", "lowest"),
        "salary": ("best paid", "worst paid"),
        "speed": ("fastest", "slowest"),
        "rating": ("best rated", "worst rated"),
        "budget": ("richest", "poorest"),
        "power": ("strongest", "weakest"),
        "width": ("widest", "narrowest"),
        "experience": ("most experienced", "least experienced"),
        "capacity": ("roomiest", "tightest"),
        "depth": ("deepest", "shallowest"),
        "volume": ("loudest", "quietest"),
        "distance": ("farthest", "nearest"),
        "income": ("", ""),
        "stock": ("", ""),
        "area": ("", ""),
        "debt": ("", ""),
        "fame": ("", ""),
        "cargo": ("", ""),
        "yield": ("", ""),
    }
    return {"age": age, "year": year} | {name: Number(name, 10, 99, *words) for name, words in rest.items()}


def _categories() -> dict[str, Category]:
    rows = (
        ("country", "countries", "from {v}", "france italy spain norway japan peru egypt brazil"),
        ("city", "cities", "based in {v}", "paris rome oslo madrid berlin lima cairo tokyo"),
        ("genre", "genres", "in the style of {v}", "rock jazz folk pop disco soul metal opera"),
        ("language", "languages", "written in {v}", "french italian spanish german arabic english"),
        ("color", "colors", "painted {v}", "red blue green black white silver"),
        ("topic", "topics", "about {v}", "war love nature travel crime science"),
        ("field", "fields", "trained in {v}", "botany biology history law medicine music"),
        ("position", "positions", "playing as {v}", "defender winger striker goalie sweeper"),
        ("day", "days", "held on {v}", "monday tuesday wednesday thursday friday saturday"),
        ("material", "materials", "made of {v}", "wood steel glass cotton leather plastic"),
        ("crop", "crops", "growing {v}", "wheat corn rice barley millet hemp"),
        ("fuel", "fuels", "running on {v}", "petrol diesel gas hydrogen ethanol"),
        ("shift", "shifts", "working by {v}", "morning noon evening night"),
        ("habitat", "habitats", "living in {v}", "desert jungle ocean mountain river swamp"),
        ("cuisine", "cuisines", "serving {v} food", "thai greek indian mexican chinese turkish"),
        ("diet", "diets", "for {v} eaters", "meat fish vegan fruit dairy"),
        ("status", "statuses", "that are {v}", "active closed pending blocked retired"),
        ("month", "months", "open in {v}", "april may june july august october"),
        ("flag", "flags", "sailing for {v}", "malta panama cyprus liberia tuvalu"),
        ("soil", "soils", "rooted in {v}", "clay sand peat chalk loam"),
    )
    return {name: Category(name, plural, phrase, tuple(values.split())) for name, plural, phrase, values in rows}


NUMBERS = _numbers()
CATEGORIES = _categories()
_LABELS = {"name": PEOPLE, "surname": SURNAMES, "title": TITLES, "nickname": TITLES, "model": TITLES, "club": TITLES}


def _table(name: str, label: str, columns: str, rows: int) -> Table:
    words = columns.split()
    return Table(
        name,
        label,
        _LABELS[label],
        tuple(CATEGORIES[w] for w in words if w in CATEGORIES),
        tuple(NUMBERS[w] for w in words if w in NUMBERS),
        rows,
    )


def _domain(name: str, parent: tuple[str, str, str], child: tuple[str, str, str]) -> Domain:
    return Domain(name, _table(*parent, rows=28), _table(*child, rows=40))


SEEN = (
    _domain("music", ("singer", "name", "country age salary"), ("song", "title", "genre length rating")),
    _domain("library", ("writer", "name", "city age fame"), ("book", "title", "language price width")),
    _domain("sports", ("team", "club", "city budget rating"), ("player", "nickname", "position height salary")),
    _domain("cars", ("maker", "name", "country year income"), ("car", "model", "color price speed")),
    _domain("film", ("director", "name", "country age experience"), ("movie", "title", "topic length year")),
    _domain("hospital", ("doctor", "name", "field experience salary"), ("patient", "surname", "status age weight")),
    _domain("school", ("teacher", "name", "field age salary"), ("course", "title", "day capacity rating")),
    _domain("shop", ("store", "club", "city area budget"), ("product", "model", "material price stock")),
    _domain("farm", ("farmer", "name", "crop age experience"), ("tractor", "model", "fuel power price")),
    _domain("zoo", ("keeper", "name", "shift age salary"), ("animal", "nickname", "habitat weight speed")),
    _domain("museum", ("museum", "club", "city year rating"), ("painting", "title", "topic height width")),
    _domain("food", ("restaurant", "club", "cuisine rating capacity"), ("meal", "title", "diet price weight")),
    _domain("travel", ("hotel", "club", "city capacity year"), ("guest", "surname", "country age budget")),
    _domain("bank", ("bank", "club", "country year income"), ("client", "surname", "status age debt")),
)
"""Databases with questions in `train`, `dev` and `test`."""

UNSEEN = (
    _domain("harbor", ("captain", "name", "flag age experience"), ("ship", "title", "color length cargo")),
    _domain("garden", ("gardener", "name", "city age salary"), ("plant", "nickname", "soil height yield")),
    _domain("lab", ("lab", "club", "field year budget"), ("robot", "model", "material weight power")),
    _domain("hiking", ("guide", "name", "language experience rating"), ("trail", "title", "month length depth")),
    _domain("radio", ("station", "club", "language year volume"), ("show", "title", "day length distance")),
)
"""Databases of the split `unseen` only."""
