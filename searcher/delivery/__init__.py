"""Delivery of trajectories to the buffer: a spool on disk keeps them until they are acknowledged."""
