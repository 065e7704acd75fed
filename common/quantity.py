"""Numbers with their nouns in sentences for people."""


def quantity(number: int, noun: str, plural: str = "") -> str:
    """Return `1 response` or `2 responses`; `plural` is for a noun whose plural is not formed with an s alone."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
