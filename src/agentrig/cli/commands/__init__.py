"""One file per command; `agentrig.cli.groups.Group.sections` lists them."""
