"""Watch a process from within: logs, progress, metrics, trackers, traces."""
