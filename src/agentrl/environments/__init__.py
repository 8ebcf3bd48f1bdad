"""Environments: tasks, tools, scorer and state of a trajectory as one class (``@environment``)."""
