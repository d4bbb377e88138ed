"""Finds keys that a type doesn't have in data that a person wrote.

A type can forbid unknown fields, but then it does so wherever it is decoded. What is strict in a file must be lenient in a
message, or neighbouring versions couldn't talk about jobs.
"""

from typing import Any

from msgspec.inspect import StructType, Type, UnionType, type_info


def first_unknown_key(raw: Any, kind: type) -> str | None:
    """The first key in nested plain data that the struct ``kind`` has no field for, dotted from the top; None without any.

    Data that isn't of the shape of ``kind`` is nobody's affair here: decoding it says what is wrong.
    """
    return _first(raw, type_info(kind))


def _first(raw: Any, kind: Type) -> str | None:
    struct = _struct_of(raw, kind)
    if struct is None:
        return None
    fields = {field.encode_name: field.type for field in struct.fields}
    for key, value in raw.items():
        if key == struct.tag_field:
            continue
        if key not in fields:
            return str(key)
        if (found := _first(value, fields[key])) is not None:
            return f"{key}.{found}"
    return None


def _struct_of(raw: Any, kind: Type) -> StructType | None:
    """The struct that ``raw`` is meant to be: the one of a union that has its tag."""
    if not isinstance(raw, dict):
        return None
    choices = kind.types if isinstance(kind, UnionType) else (kind,)
    structs = [choice for choice in choices if isinstance(choice, StructType)]
    return next((one for one in structs if one.tag_field is None or raw.get(one.tag_field) == one.tag), None)
