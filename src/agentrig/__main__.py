"""`python -m agentrig`."""

import os
import sys

if not sys.flags.safe_path and sys.path[0] == os.getcwd():
    sys.path.append(sys.path.pop(0))  # what lies there can still be imported, and hides no module of Python's

from agentrig.cli.entry import main

main()
