"""Sinks: where the metrics of a step go in addition to metrics.jsonl.

background.py    a thread and a queue for each sink: if it fails or hangs, training continues
trackers.py      TensorBoard and trackers, and which sinks the configuration names
"""
