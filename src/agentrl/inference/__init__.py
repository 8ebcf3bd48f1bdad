"""Each model call of a trajectory: the engine client, the router over live engines, the engines."""
