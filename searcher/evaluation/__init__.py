"""Evaluation on the held-out prompts: answers, metrics with intervals, and the follower of a run in progress."""
