"""The base class of all recipe sections, and the number types of their fields."""

import os.path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def no_truth_value(value: Any) -> Any:
    # YAML reads `yes` as true, which pydantic would convert to 1.
    if isinstance(value, bool):
        raise ValueError("a number")
    return value


def no_as_written(value: Any) -> Any:
    # YAML reads an unquoted `no` as false.
    return "no" if value is False else value


Whole = Annotated[int, BeforeValidator(no_truth_value)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1), BeforeValidator(no_truth_value)]
Depth = Annotated[int, Field(ge=1, le=1024), BeforeValidator(no_truth_value)]
"""A number of layers, heads or steps that are built one by one."""
Number = Annotated[float, BeforeValidator(no_truth_value)]
Location = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path, whose leading `~` is replaced by the home folder, or a Hub id."""


class Section(BaseModel):
    """Base class of all sections: frozen; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
