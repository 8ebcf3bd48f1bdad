"""Wing: looking at runs: audit views, pictures of a run, the terminal's screens, the dashboard, notebooks."""
