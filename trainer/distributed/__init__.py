"""Ranks of a trainer and the sharding of its model with FSDP2."""
