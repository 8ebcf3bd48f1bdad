"""Publish weights: folders with a manifest, and the PolicyVersion documents that refer to them."""
