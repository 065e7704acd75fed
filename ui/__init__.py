"""The web interface: pages over the buffer file and the metrics of runs, read-only."""
