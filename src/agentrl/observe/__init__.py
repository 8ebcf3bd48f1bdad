"""Looking at a run: logs, live metrics, trackers, audit and the parity check."""
