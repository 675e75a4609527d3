"""`Keyring`: finds the holder of a secret in constant time; never sees a request and never limits anybody."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.engine import InvalidParams

__all__ = ["ANYBODY", "Caller", "Keyring"]


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a key, who makes requests."""

    name: str
    """Name of the key; also the tenant, whose prefix pages nobody else shares."""
    admin: bool = False


ANYBODY = Caller("anonymous")
"""Caller of every request where no key is needed."""


class Keyring:
    """The keys of a server. Only their hashes are kept."""

    def __init__(self, keys: Mapping[str, str], admin_keys: Mapping[str, str]) -> None:
        """Hold the hashes of secrets, which are given by name.

        Raises:
            InvalidParams: Two keys have the same name or the same secret.
        """
        entries = [(name, secret, False) for name, secret in keys.items()]
        entries += [(name, secret, True) for name, secret in admin_keys.items()]
        self._callers = [(_digest(secret.encode()), Caller(name, admin)) for name, secret, admin in entries]
        names = {name for name, _, _ in entries}
        if len(names) < len(entries) or len({digest for digest, _ in self._callers}) < len(entries):
            raise InvalidParams("api_keys: two keys have the same name or the same secret", field="api_keys")

    @property
    def empty(self) -> bool:
        """Whether nobody has a key, so that nobody needs one."""
        return not self._callers

    def caller(self, secret: bytes) -> Caller | None:
        """Return the holder of `secret`, if any; compare every key, so that the time taken tells nothing."""
        digest = _digest(secret)
        found = None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
