"""What a params model is: typed, complete with defaults, and explicit about which fields are part of a key.

A field is one of three kinds. *Keyed* (the default): the user may set it and it changes results. *Placement*
(`placement(...)`): the user may set it, it says where or how fast, and is in no key. *Derived* (`derived(...)`): computed
by the plan from other sections or from file contents (digests), in the key, never set by the user.

Values are coerced before they are hashed (`1e-4` is text to YAML), so one meaning has one key.
"""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

Role = str
KEYED, PLACEMENT, DERIVED = "keyed", "placement", "derived"


def placement(default: Any = ..., *, unit: str = "", **kwargs: Any) -> Any:
    """A field that enters no key: where, how many at once, how often to save."""
    return Field(default, json_schema_extra={"role": PLACEMENT, "unit": unit}, **kwargs)


def derived(default: Any = ..., *, unit: str = "", **kwargs: Any) -> Any:
    """A field that the plan fills in from other sections or file contents."""
    return Field(default, json_schema_extra={"role": DERIVED, "unit": unit}, **kwargs)


def keyed(default: Any = ..., *, unit: str = "", **kwargs: Any) -> Any:
    """A field that changes results and so enters the key."""
    return Field(default, json_schema_extra={"role": KEYED, "unit": unit}, **kwargs)


class Params(BaseModel):
    """Base of all params models: unknown keys are refused, values are immutable, defaults are validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, values: Any) -> Any:
        """`yes` where a number is due would silently become 1."""
        if isinstance(values, dict):
            for name, value in values.items():
                field = cls.model_fields.get(name)
                if isinstance(value, bool) and field is not None and not _accepts_bool(field.annotation):
                    raise PydanticCustomError("not_a_truth_value", f"`{name}` is not a yes/no value")
        return values

    @classmethod
    def role_of(cls, name: str) -> Role:
        """`keyed`, `placement` or `derived` for a field of this model."""
        return field_role(cls.model_fields[name])

    def keyed_values(self) -> dict[str, Any]:
        """All fields that enter the key, nested models included, as plain JSON values."""
        return _select(self, {KEYED, DERIVED})

    def placement_values(self) -> dict[str, Any]:
        """The fields that enter no key."""
        return _select(self, {PLACEMENT})


def without_password(address: str) -> str:
    """The address, which must hold no user and no password: configurations are kept with every result.

    Raises:
        PydanticCustomError: `secret_in_address`; its input must not be shown.
    """
    if "@" in address.partition("://")[2 if "://" in address else 0].partition("/")[0]:
        raise PydanticCustomError(
            "secret_in_address", "a password does not belong in an address; use `api_key_variable`"
        )
    return address


def _accepts_bool(annotation: Any) -> bool:
    return (
        annotation in (bool, Any)
        or any(_accepts_bool(part) for part in get_args(annotation))
        or True in get_args(annotation)
    )


def field_role(field: FieldInfo) -> Role:
    """The kind of a field; plain pydantic fields are keyed."""
    extra = field.json_schema_extra
    return str(extra.get("role", KEYED)) if isinstance(extra, dict) else KEYED


def _select(model: Params, roles: set[Role]) -> dict[str, Any]:
    names = {name for name in type(model).model_fields if type(model).role_of(name) in roles}
    dumped = model.model_dump(mode="json", include=names)
    for name in names:
        value = getattr(model, name)
        if isinstance(value, Params):
            dumped[name] = _select(value, roles)
        elif isinstance(value, list | tuple) and value and all(isinstance(item, Params) for item in value):
            dumped[name] = [_select(item, roles) for item in value]
    return dumped
