"""Metrics of a step: the log file, the sinks, FLOPs."""
