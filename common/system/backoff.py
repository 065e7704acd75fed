"""Exponential backoff."""


def backoff(failures: int, first_seconds: float, max_seconds: float) -> float:
    """Return the seconds to wait after a number of failures in a row: `first_seconds`, doubled after each."""
    # 60 doublings exceed any maximum; more would overflow a float.
    doublings = min(max(failures - 1, 0), 60)
    return min(first_seconds * 2.0**doublings, max_seconds)
