"""What all request schemas share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

INT64_MAX = 2**63 - 1


class RequestModel(BaseModel):
    """A request body. Strict: "5" is not 5 and "yes" is not true. Every optional field may be null."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


class AnswerModel(BaseModel):
    """An answer as the OpenAPI document shows it. Answers are written by hand-made code, not through these."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


def whole_number(value: Any) -> Any:
    """5.0 is 5: some languages have one number type. Everything else is left for the schema to judge."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(whole_number, json_schema_input_type=int), Field(ge=-INT64_MAX - 1, le=INT64_MAX)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
