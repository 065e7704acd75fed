"""Benchmarks: ratios in one run to a named peer or a physical limit. `make bench` runs those that need only tba."""
