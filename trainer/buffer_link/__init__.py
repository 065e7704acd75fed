"""The trainer's connection to the buffer: requests, the next batch, heartbeats."""
