"""Rewards and reference log-probabilities, computed in other processes and threads."""
