"""Bring published snapshots to this node, complete and verified, and keep the engine on the newest one."""
