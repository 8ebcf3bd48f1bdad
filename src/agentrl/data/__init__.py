"""From stored training data to the batches that one optimizer step trains."""
