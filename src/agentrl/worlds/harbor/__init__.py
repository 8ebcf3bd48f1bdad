"""Run tasks of Harbor's format: a container per trajectory, scored by the tests of the task's folder."""
