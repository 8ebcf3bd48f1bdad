"""Task → Record: claim tasks, run their trajectories, score them, finalize their groups."""
