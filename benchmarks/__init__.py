"""Benchmarks: ratios in one run against a named peer or the physical limit. `make bench` runs them all."""
