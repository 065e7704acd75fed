"""Weight snapshots: written, verified by a canary, announced, served, and deleted."""
