"""Rows of a batch and the micro-batches they are split into."""
