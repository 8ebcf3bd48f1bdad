"""Published weights: folders with a manifest, and the PolicyVersion documents that name them."""
