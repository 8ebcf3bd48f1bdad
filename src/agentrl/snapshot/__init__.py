"""One picture of a run with its findings, for the terminal, as JSON, and for the dashboard."""
