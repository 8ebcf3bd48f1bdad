"""The quickstart: its models, tasks, tool servers, and the supervisor that runs every process of it."""
