"""Where a checkpoint comes from: a local path, a hub name or a named bundle with checked hashes."""

from mmsdk.weights.bundle import Bundle, PartState, adapter_path, available, bundle, pull, verify

__all__ = ["Bundle", "PartState", "adapter_path", "available", "bundle", "pull", "verify"]
