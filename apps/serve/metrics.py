"""What a server has done and is doing, in the text that Prometheus reads."""

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from mmsdk.answer import Tokens

__all__ = ["Metrics"]

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """Counters of one server, in a registry of its own, and those of its process (memory, processor, files) where the system tells them."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, open_requests: Callable[[], float], held: Callable[[], float]) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._ended = Counter(
            "mmsdk_requests", "Requests for completions that ended, by status (499: the client left)", ["status"], registry=registry
        )
        self._tokens = Counter(
            "mmsdk_tokens", "Tokens of answered requests: visual, kept of these, prompt, recalled, generated", ["kind"], registry=registry
        )
        self._first = Histogram(
            "mmsdk_first_token_seconds", "From a request's arrival to its first token", buckets=SECONDS, registry=registry
        )
        self._whole = Histogram("mmsdk_request_seconds", "From a request's arrival to its last token", buckets=SECONDS, registry=registry)
        Gauge("mmsdk_open_requests", "Requests that are read, wait or are answered", registry=registry).set_function(open_requests)
        Gauge("mmsdk_held_blocks", "Blocks of keys and values that requests hold, over all layers", registry=registry).set_function(held)

    def ended(self, status: int) -> None:
        """A request came to its end, with this status."""
        self._ended.labels(str(status)).inc()

    def begun(self, seconds: float) -> None:
        """A request has its first token."""
        self._first.observe(seconds)

    def answered(self, tokens: Tokens, seconds: float) -> None:
        """A request has its last token."""
        counts = {"visual": tokens.visual, "kept": tokens.kept, "prompt": tokens.prompt, "recalled": tokens.recalled}
        for kind, count in (counts | {"generated": tokens.generated}).items():
            self._tokens.labels(kind).inc(count)
        self._whole.observe(seconds)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)
