"""The quickstart: its models, tasks and tool servers, and the run that uses them."""
