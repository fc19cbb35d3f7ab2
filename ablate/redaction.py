"""What is told of an address and of its errors: never the credentials in it, nor those in the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit, urlunsplit

_VARIABLES = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
_HIDDEN = "***"
_USER = re.compile(r"(?<=://)[^/\s?#]+@")
_IN_QUERY = re.compile(r"(?i)([?&][^=&\s]*(?:password|passwd|pwd|token|secret)[^=&\s]*=)[^&\s'\"]+")


def redacted(text: str) -> str:
    """`text` without what would let its reader in."""
    for secret in sorted(set(_known()), key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return _IN_QUERY.sub(rf"\1{_HIDDEN}", _USER.sub(f"{_HIDDEN}@", text))


def without_user(address: str) -> str:
    """The address as one may show it: its host, and nobody's name."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _known() -> Iterator[str]:
    """Credentials in MLflow's variables, as they stand there and as a library may have read them."""
    yield from filter(None, map(os.environ.get, _VARIABLES))
    user, _, _ = os.environ.get("MLFLOW_TRACKING_URI", "").partition("://")[2].rpartition("@")
    if password := user.partition(":")[2]:
        yield from (user, password, unquote(password))
