"""Run agents that are programs of their own: a command line per trajectory, in a sandbox."""
