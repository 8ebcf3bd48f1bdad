"""Loss → weights: the model, its optimizer, its checkpoints, and the loop around them."""
