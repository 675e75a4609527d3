"""`ResponseStore`: responses that clients may ask for again or go on from, within a bound of memory; answers nobody."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass

from headrace.server.errors import ApiError

__all__ = ["ResponseStore", "StoredResponse"]

_OVERHEAD = 1024  # bytes of the objects around a response


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that has ended, with everything that the next turn needs."""

    body: bytes
    """The response as JSON."""
    items: bytes
    """Input items of the request and, where it continued another, all input and output before them; a JSON list."""
    head: bytes
    """Other parts of the request that shape the prompt, as JSON; only a turn with the same parts continues the ids."""
    token_ids: array[int]
    """Ids of the prompt and the answer; empty where their text differs from the items, as after a stop string."""

    @property
    def nbytes(self) -> int:
        """Approximate memory, in bytes."""
        ids = len(self.token_ids) * self.token_ids.itemsize
        return len(self.body) + len(self.items) + len(self.head) + ids + _OVERHEAD


class ResponseStore:
    """Responses by tenant and id. No tenant finds the responses of another."""

    def __init__(self, most: int) -> None:
        """Start empty.

        Args:
            most: Bytes that all responses may take; 0 stores none. Where they take more, the tenant that has most of
                them loses the one that it has used least recently.
        """
        self.most = most
        self.held = 0
        """Bytes that the responses take."""
        self._of: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._sizes: Counter[str] = Counter()

    def put(self, tenant: str, identity: str, response: StoredResponse) -> None:
        """Keep a response and drop others to make room, unless it is larger than the whole bound."""
        if response.nbytes > self.most:
            return
        self._of.setdefault(tenant, OrderedDict())[identity] = response
        self._count(tenant, response.nbytes)
        while self.held > self.most:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self._drop(largest, next(iter(self._of[largest])))

    def get(self, tenant: str, identity: str) -> StoredResponse:
        """Return a response of the tenant, which has then been used.

        Raises:
            ApiError: 404 where no such response is stored; it may have made room for others.
        """
        own = self._of.get(tenant, OrderedDict())
        if identity not in own:
            message = f"there is no stored response {identity[:80]!r}; it may have made room for newer ones"
            raise ApiError(404, "response_not_found", message, param="response_id")
        own.move_to_end(identity)
        return own[identity]

    def delete(self, tenant: str, identity: str) -> None:
        """Forget a response of the tenant.

        Raises:
            ApiError: 404 where no such response is stored.
        """
        self.get(tenant, identity)
        self._drop(tenant, identity)

    def _drop(self, tenant: str, identity: str) -> None:
        self._count(tenant, -self._of[tenant].pop(identity).nbytes)
        if not self._of[tenant]:
            del self._of[tenant]
            del self._sizes[tenant]

    def _count(self, tenant: str, nbytes: int) -> None:
        self._sizes[tenant] += nbytes
        self.held += nbytes
