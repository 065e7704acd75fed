"""Checkpoints of a trainer and the thread that writes them."""
