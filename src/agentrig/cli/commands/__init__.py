"""The commands; `agentrig.cli.groups.Group.sections` lists them."""
