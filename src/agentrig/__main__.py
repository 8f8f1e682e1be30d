"""`python -m agentrig`."""

from agentrig.cli import main

main()
