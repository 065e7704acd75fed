"""The base class and the field types of the sections."""

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def matching(pattern: str, form: str) -> AfterValidator:
    """Return a validator of texts, whose error has `form` in place of the regular expression."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"it must be {form}")
        return value

    return AfterValidator(check)


GpuList = Annotated[
    str,
    matching(
        r"cpu|all|(\d+(-\d+)?|(GPU|MIG)-[^,\s]+)(,(\d+(-\d+)?|(GPU|MIG)-[^,\s]+))*,?",
        "cpu, all, or numbers, ranges and UUIDs of GPUs, such as 0-6 or 0,2,4",
    ),
]


def _fits_header(key: SecretStr) -> SecretStr:
    if not re.fullmatch(r"[!-~]*", key.get_secret_value()):
        raise ValueError("a key that is sent in a header has no spaces, line ends or letters beyond ASCII")
    return key


BearerToken = Annotated[SecretStr, AfterValidator(_fits_header)]


class Section(BaseModel):
    """Base of the sections: immutable, with unknown keys as errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, coerce_numbers_to_str=True
    )
