"""Rewards, computed in other processes."""
