"""Numbers with their nouns in sentences for people."""


def quantity(number: int, noun: str, plural: str = "") -> str:
    """Return `1 response` or `2 responses`; `plural` is for a noun whose plural is not formed with an s alone."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def lasting(seconds: float) -> str:
    """Return `94 s`, `12 min` or `5 h`: a duration to about one part in a hundred or in a dozen."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
