"""The base class and the field types of the sections."""

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
GpuList = Annotated[str, Field(pattern=r"^(cpu|all|((\d+(-\d+)?|GPU-[^,\s]+|MIG-[^,\s]+)(,|$))+)$")]


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
