"""Sample trajectories: from a claim to a score.

A sampler process: ``setup``, ``preflight``, ``load_tasks`` → ``sampler``, ``housekeeping``. One trajectory:
``worker`` → ``agents`` → ``rollout``, ``agent_io``, ``tool_calls``, ``histories``. A model call:
``prompts``, then ``trajectory_calls``. Claims are held, and scores filled in, by ``agentrl.columns``.
"""
