"""Context parallelism: a group of ranks shares the tokens of the same forests."""
