"""The live page: what a run does while it runs, every trace of it, and runs side by side.

One process that reads run directories and writes nothing: a browser on this machine asks it for pages, which are
rendered here. `runs` finds and reads runs, `rollouts` searches the rollouts of one, `traces` makes one readable,
`views` is what a page shows, `app` has the addresses, `serving` starts it.
"""
