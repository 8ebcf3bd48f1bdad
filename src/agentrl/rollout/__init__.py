"""Sample trajectories: from a claim to a score.

A sampler process: ``sample`` → ``setup``, ``load_tasks`` → ``sampler``, ``held_claims``, ``housekeeping``,
``finalizer``, ``scoring``. One trajectory: ``worker`` → ``agents`` → ``rollout``, ``role``,
``tool_calls``, ``context``, ``histories``, ``fixed_model``. One model call: ``prompts``, then
``trajectory_calls``, ``model_call``. While a service is down: ``outages``, ``breaker``.
"""
