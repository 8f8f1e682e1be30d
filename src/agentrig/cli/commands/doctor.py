"""`agentrig doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import click

from agentrig.cli.options import asked, configured, json_option, print_json
from agentrig.doctor.examination import could_start, examine
from agentrig.findings import Finding


def _table(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warning": "yellow", "problem": "red", "skipped": "dim"}
    table = Table(show_lines=False, pad_edge=False)
    cures = any(f.cure for f in findings)
    for column in ("check", "result", "evidence", *(["cure"] if cures else [])):
        table.add_column(column, overflow="fold", no_wrap=column in ("check", "result"))
    for f in findings:
        table.add_row(
            Text(f.check), Text(f.result, style=colours[f.result]), Text(f.evidence), *([Text(f.cure)] if cures else [])
        )
    Console().print(table)


@click.command()
@configured
@json_option("Print a JSON object instead of the table.")
def doctor(words: Sequence[str], as_json: bool, **options: Any) -> None:
    """Find what would keep a recipe from running here.

    Takes what `agentrig train` takes; exit status 0 only when that could start.

    \b
    agentrig doctor qwen --hardware cuda
    """
    findings = examine(**asked(words, options))
    ok = could_start(findings)
    if as_json:
        print_json({"could_start": ok, "findings": [attrs.asdict(f) for f in findings]}, indent=2)
    else:
        _table(findings)
        counts = {r: sum(f.result == r for f in findings) for r in ("ok", "warning", "problem", "skipped")}
        click.echo(
            ", ".join(f"{n} {r}" for r, n in counts.items()) + (": it could start" if ok else ": it cannot start")
        )
    if not ok:
        raise SystemExit(1)
