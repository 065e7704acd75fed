"""Counted nouns in sentences for people."""


def quantity(number: int, noun: str, plural: str = "") -> str:
    """`1 response`, `2 responses`, `1024 responses`; `plural` is for a noun that does not only take an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
