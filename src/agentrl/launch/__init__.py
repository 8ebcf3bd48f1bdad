"""Start the processes of a run on this machine: what they are, what is checked before, what is said."""
