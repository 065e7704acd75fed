"""The base class and the field types of the sections."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
GpuList = Annotated[str, Field(pattern=r"^(cpu|all|((\d+(-\d+)?|GPU-[^,\s]+|MIG-[^,\s]+)(,|$))+)$")]


class Section(BaseModel):
    """Base of the sections: immutable, with unknown keys as errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, coerce_numbers_to_str=True
    )
