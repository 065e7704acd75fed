"""The files of models and of snapshots: format, tensors, deltas."""
