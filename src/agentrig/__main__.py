"""`python -m agentrig`."""

import contextlib
import os
import sys

with contextlib.suppress(FileNotFoundError):  # the current directory was deleted: the command line says so
    if not sys.flags.safe_path and sys.path[0] == os.getcwd():
        sys.path.append(sys.path.pop(0))  # files there can still be imported, but do not hide standard modules

from agentrig.cli.entry import main

main()
