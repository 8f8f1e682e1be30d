"""The live page: what a run does while it runs, every trace of it, and runs side by side.

One process that reads run directories and writes nothing: a browser on this machine asks it for pages, which are
rendered here. `runs` finds and reads runs, `rollouts` searches the rollouts of one, `views` is what its lists show,
`app` has the addresses and starts it.
"""
