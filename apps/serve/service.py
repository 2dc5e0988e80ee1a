"""One server's parts and its state: the model, the bounds, the engine's thread, what is counted, and whether anybody is still let in."""

import asyncio
import hmac
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from time import time

from mmsdk.apps.serve.metrics import Metrics
from mmsdk.apps.serve.refusal import RefusedError
from mmsdk.apps.serve.settings import Settings
from mmsdk.apps.serve.thread import EngineThread
from mmsdk.apps.serve.workers import Workers
from mmsdk.errors import InputError
from mmsdk.pipeline import Pipeline
from mmsdk.serve.engine import Engine

__all__ = ["Service"]

LOADERS = 4  # requests of a tenant whose media are fetched and decoded at one time
FORMS = 2  # and whose forms are compiled
TURNS = 2  # times as long as a form may take to compile, a form waits for a thread


class Service:
    """`name` is what clients call the model; the pipeline's adapters, by their own names, are models beside it.

    Raises InputError where an engine cannot serve the pipeline, and where an adapter is called as the model is.
    """

    def __init__(self, pipe: Pipeline, settings: Settings, name: str = "") -> None:
        # how much is kept is the server's word, not the client's: a picture that has less than that is no mistake of theirs
        self.pipe = replace(pipe, compression=pipe.compression.at_most())
        self.settings, self.name = settings, name or _public(pipe.vlm.name)
        if self.name in pipe.adapters.names:
            raise InputError("an adapter and the model have one name; call one of them otherwise", item=self.name)
        self.engine = EngineThread(Engine(self.pipe, rows=settings.rows, tokens=settings.pool))
        tenants = max(1, len(settings.keys))
        self.loaders = Workers("media", LOADERS, tenants)
        self.forms = Workers("forms", FORMS, tenants, settings.forming, TURNS * settings.forming)
        self.metrics = Metrics(lambda: self.open, lambda: self.engine.held)
        self.created = int(time())
        self.ending = False
        self.over = False
        self._limits = dict[asyncio.Timeout, float]()
        self._seated = Counter[str]()
        self._keys = [(sha256(key.encode()).digest(), sha256(key.encode()).hexdigest()[:16]) for key in settings.keys]

    @property
    def open(self) -> int:
        """Requests that are read, wait or are answered."""
        return self._seated.total()

    @contextmanager
    def until_cut(self, limit: asyncio.Timeout, patience: float = 0.0) -> Iterator[None]:
        """Let a limit that has been entered come when the server cuts off what runs, or so many seconds later, if it is not over before."""
        self._limits[limit] = patience
        if self.over:
            self._hurry(limit)
        try:
            yield
        finally:
            del self._limits[limit]

    def cut(self) -> None:
        """Cut off what runs: whoever waits is told so. Called in the event loop, when the server ends."""
        self.over = True
        for limit in self._limits:
            self._hurry(limit)

    def _hurry(self, limit: asyncio.Timeout) -> None:
        end = asyncio.get_running_loop().time() + self._limits[limit]
        until = limit.when()
        if not limit.expired() and (until is None or until > end):
            limit.reschedule(end)

    @contextmanager
    def seat(self, tenant: str) -> Iterator[None]:
        """Let a request in, for the time of a `with`. Raises RefusedError where there is no room, or the server ends.

        A seat is left for each of the other tenants that has none, so that one alone cannot take them all; at most half are left so.
        """
        if not self.well:
            raise RefusedError(503, "the server is ending", "unavailable", retry=5)
        seats = self.settings.rows + self.settings.waiting
        left = min(sum(other != tenant and not self._seated[other] for _, other in self._keys), seats // 2)
        if self.open >= seats or (self._seated[tenant] and self.open >= seats - left):
            raise RefusedError(
                429, f"{self.open} requests are answered or wait already; come back in a moment", "too_many_requests", retry=1
            )
        self._seated[tenant] += 1
        try:
            yield
        finally:
            self._seated[tenant] -= 1

    @property
    def models(self) -> tuple[str, ...]:
        """What may be asked for: the model as it is, then with each of its adapters."""
        return self.name, *self.pipe.adapters.names

    def adapter(self, model: str) -> str:
        """The adapter that a model's name asks for, "" for none. Raises RefusedError where there is no such model."""
        if model not in self.models:
            there = ", ".join(map(repr, self.models))
            raise RefusedError(404, f"there is no model {model!r} here; there is {there}", "model_not_found", "model")
        return "" if model == self.name else model

    @property
    def well(self) -> bool:
        """Whether requests are taken and answered."""
        return not (self.ending or self.engine.ended.done())

    def tenant(self, authorizations: Sequence[str], origins: Sequence[str]) -> str:
        """Whose request that is, by the key that it brings. Raises RefusedError without one, where one is needed, and for web pages.

        A header that comes twice is none of ours: whoever stands in front might have looked at the other one.
        """
        if any(origin not in self.settings.origins for origin in origins):
            raise RefusedError(403, "web pages are not served; --allow-origin lets one in", "origin_not_allowed")
        if not self._keys:
            return ""
        scheme, _, brought = (authorizations[0] if len(authorizations) == 1 else "").partition(" ")
        digest = sha256(brought.strip().encode()).digest()
        # digests are of one length, and all are compared: how long it takes tells nothing
        known = [tenant for key, tenant in self._keys if hmac.compare_digest(digest, key)]
        if scheme.lower() != "bearer" or not known:
            raise RefusedError(401, _unknown(authorizations), "invalid_api_key")
        return known[0]


def _public(name: str) -> str:
    """What clients may hear of a model: of a folder or a file its last name, and nothing of where it lies."""
    return Path(name).name if Path(name).exists() else name


def _unknown(authorizations: Sequence[str]) -> str:
    """What is said to who brings no key of this server's; nothing of the key, which may be right elsewhere."""
    if len(authorizations) > 1:
        return "two keys were brought; bring one: Authorization: Bearer ..."
    scheme, _, brought = (authorizations[0] if authorizations else "").partition(" ")
    if scheme.lower() == "bearer" and brought.strip():
        return "the key that was brought is not one of this server's; whoever runs it has them (--api-key-file)"
    return "this server wants a key: Authorization: Bearer ..."
