"""Fill the column ``teacher``: ask another model for the logprobs of what the policy sampled."""
