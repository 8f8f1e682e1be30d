"""The worker process: runs the queries that are too risky or too long for the caller's process.

Started by `pool.py` as a script, without site packages. It reads requests from stdin and writes
replies to stdout, each a length (8 bytes, little endian) and `marshal` data. Its memory is limited,
it can't write files of any size, and a kernel timer ends it if SQLite does not return.
"""

from __future__ import annotations

import marshal
import os
import resource
import signal
import sqlite3
import sys
import time

TYPE_CHECKING = False  # importing typing, or urllib, would double the time that a worker takes to start
if TYPE_CHECKING:
    from typing import Any

CELL_BYTES = 16 << 20
"""Longest string, blob or record."""

STEPS_PER_CHECK = 10_000
KILL_AFTER_S = 0.05
"""Seconds after the time limit until the kernel timer ends the process."""


# Imported by path, because the package's own imports would take longer than a query; after the standard library.
sys.path.append(os.path.dirname(os.path.abspath(__file__)))
guard = __import__("guard")


def mapped_bytes() -> int | None:
    """Return the memory that this process maps; None if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None


BASE_BYTES = mapped_bytes()


def bound_memory(heap_bytes: int) -> None:
    """Limit the process to twice SQLite's memory limit: for its heap, and for the rows in Python."""
    if BASE_BYTES is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (BASE_BYTES + 2 * heap_bytes, hard))


def run(
    uri: str,
    sql: str,
    max_rows: int,
    max_bytes: int,
    heap_bytes: int,
    cut: bool,
    select_only: bool,
    undecodable: str,
    budget_s: float,
) -> tuple[Any, ...]:
    """Run one statement; the arguments are those of `query.QueryLimits`.

    Returns:
        `("rows", rows, column names, tables, whether the rows were cut at `max_bytes`)`, or
        `(kind, message, error code, what was refused)`.
    """
    end = time.monotonic() + budget_s
    signal.setitimer(signal.ITIMER_REAL, max(budget_s, 0.0) + KILL_AFTER_S)
    connection = authorizer = None
    try:
        bound_memory(heap_bytes)
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, cached_statements=0, timeout=0)
        connection.text_factory = lambda data: data.decode(errors=undecodable)
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA cache_size = -4096")
        connection.execute(f"PRAGMA hard_heap_limit = {heap_bytes}")
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
        authorizer = guard.Guard(None, recursion=True, virtual_tables=True, select_only=select_only)
        guard.set_limits(connection, cell_bytes=CELL_BYTES, pattern_bytes=50_000)
        connection.set_authorizer(authorizer.decide)
        connection.set_progress_handler(lambda: time.monotonic() > end, STEPS_PER_CHECK)
        cursor = connection.execute(sql)
        names = tuple(column[0] for column in cursor.description or ())
        if problem := authorizer.no_query(names):
            return "error", problem, None, ""
        rows: list[tuple[Any, ...]] = []
        size = 0
        for row in cursor:
            rows.append(row)
            if len(rows) >= max_rows:
                break
            size += 16 + sum(16 + len(cell) if isinstance(cell, (str, bytes)) else 16 for cell in row)
            if size > max_bytes:
                if cut:
                    return "rows", rows, names, tuple(authorizer.tables), True
                return "memory", f"the result is larger than {max_bytes} bytes", None, ""
        return "rows", rows, names, tuple(authorizer.tables), False
    except MemoryError:
        return "memory", "the query needs too much memory", None, ""
    except Exception as error:
        code = getattr(error, "sqlite_errorcode", None)
        if code == sqlite3.SQLITE_INTERRUPT:
            return "timeout", "the query ran past its budget", code, ""
        if code in (sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_TOOBIG):
            return "memory", f"the query needs too much memory: {error}", code, ""
        return "error", str(error), code, authorizer.refused if authorizer else ""
    finally:
        if connection is not None:
            connection.close()
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    """Serve until stdin ends."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    stdout.write(b"ready")
    stdout.flush()
    while len(head := stdin.read(8)) == 8:
        request = marshal.loads(stdin.read(int.from_bytes(head, "little")))
        try:
            reply = marshal.dumps(run(*request))
        except MemoryError:
            reply = marshal.dumps(("memory", "the result needs too much memory", None, ""))
        stdout.write(len(reply).to_bytes(8, "little"))
        stdout.write(reply)
        stdout.flush()


if __name__ == "__main__":
    main()
