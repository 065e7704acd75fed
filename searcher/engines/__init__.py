"""Inference engines: generate responses, score token sequences, load weights."""
