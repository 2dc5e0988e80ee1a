"""One server's parts and its state: the model, the bounds, the engine's thread, what is counted, and whether anybody is still let in."""

import hmac
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from time import time

from mmsdk.apps.serve.metrics import Metrics
from mmsdk.apps.serve.refusal import RefusedError
from mmsdk.apps.serve.settings import Settings
from mmsdk.apps.serve.thread import EngineThread
from mmsdk.errors import InputError
from mmsdk.pipeline import Pipeline
from mmsdk.serve.engine import Engine

__all__ = ["Service"]

LOADERS = 4  # requests whose media are fetched and decoded at one time


class Service:
    """`name` is what clients call the model; the pipeline's adapters, by their own names, are models beside it.

    Raises InputError where an engine cannot serve the pipeline, and where an adapter is called as the model is.
    """

    def __init__(self, pipe: Pipeline, settings: Settings, name: str = "") -> None:
        self.pipe, self.settings, self.name = pipe, settings, name or _public(pipe.vlm.name)
        if self.name in pipe.adapters.names:
            raise InputError("an adapter and the model have one name; call one of them otherwise", item=self.name)
        self.engine = EngineThread(Engine(pipe, rows=settings.rows, tokens=settings.pool))
        self.loaders = ThreadPoolExecutor(LOADERS, thread_name_prefix="media")
        self.metrics = Metrics(lambda: self.open, lambda: self.engine.held)
        self.created = int(time())
        self.open = 0
        self.ending = False

    @contextmanager
    def seat(self) -> Iterator[None]:
        """Let a request in, for the time of a `with`. Raises RefusedError where there is no room, or the server ends."""
        if not self.well:
            raise RefusedError(503, "the server is ending", "unavailable", retry=5)
        if self.open >= self.settings.rows + self.settings.waiting:
            raise RefusedError(
                429, f"{self.open} requests are answered or wait already; come back in a moment", "too_many_requests", retry=1
            )
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

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

    def tenant(self, authorization: str, origin: str) -> str:
        """Whose request that is, by the key that it brings. Raises RefusedError without one, where one is needed, and for web pages."""
        if origin and origin not in self.settings.origins:
            raise RefusedError(403, "web pages are not served; --allow-origin lets one in", "origin_not_allowed")
        if not self.settings.keys:
            return ""
        scheme, _, brought = authorization.partition(" ")
        known = [key for key in self.settings.keys if hmac.compare_digest(brought.strip().encode(), key.encode())]
        if scheme.lower() != "bearer" or not known:
            raise RefusedError(401, "this server wants a key: Authorization: Bearer ...", "invalid_api_key")
        return sha256(known[0].encode()).hexdigest()[:16]


def _public(name: str) -> str:
    """What clients may hear of a model: of a folder its last name, and nothing of where it lies."""
    return Path(name).name if Path(name).is_dir() else name
