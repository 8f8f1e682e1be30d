"""One file per command; `agentrig.cli.groups.Group.lazy` lists them."""
