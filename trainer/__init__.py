"""The trainer: samples groups from the buffer, updates the policy, publishes snapshots."""
