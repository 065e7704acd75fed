"""Comparison with other replay buffers: `make bench-peers`, or `python -m benchmarks.peers`."""
