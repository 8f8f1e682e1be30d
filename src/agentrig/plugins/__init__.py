"""The plugin system: hooks, specs, loading and lookup."""
