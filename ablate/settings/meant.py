"""Settings that mean nothing beside others are None, so that equal recipes are equal settings."""

from __future__ import annotations

from typing import TypeVar

from ablate.choice import Settings

S = TypeVar("S", bound=Settings)


def where_meant(settings: S, **meant: bool) -> S:
    """A copy in which settings that mean nothing are None, and those that mean something are not."""
    fields = type(settings).model_fields
    given = {key: getattr(settings, key) for key in meant}
    values = {key: fields[key].default if value is None else value for key, value in given.items()}
    return settings.model_copy(update={key: values[key] if means else None for key, means in meant.items()})
