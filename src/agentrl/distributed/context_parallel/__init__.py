"""Context parallelism: a group of ranks splits the tokens of each forest."""
