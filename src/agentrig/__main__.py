"""`python -m agentrig`."""

import os
import sys

if not sys.flags.safe_path and sys.path[0] == os.getcwd():
    sys.path.append(sys.path.pop(0))  # files there can still be imported, but do not hide standard modules

from agentrig.cli.entry import main

main()
