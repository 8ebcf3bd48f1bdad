"""Wing: what is done to stored runs: fork, what-if, sweep, blame, retract, rescore, check, transfer."""
