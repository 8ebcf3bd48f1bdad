"""Record → training data → TokenForest → micro-batches: the batches that one optimizer step trains."""
