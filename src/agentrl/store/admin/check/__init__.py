"""``agentrl db check``: verifies the invariants of a run, one file each, while other processes write it."""
