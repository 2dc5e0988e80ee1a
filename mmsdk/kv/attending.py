"""Caches that a decoder attends through: it hands them queries beside keys and values, and they say what the new tokens get."""

from mmsdk.kv.policy_cache import PolicyCache
from mmsdk.kv.renewed import RenewedCache
from mmsdk.kv.unturned import UnturnedCache

__all__ = ["Attending"]

Attending = PolicyCache | RenewedCache | UnturnedCache
"""Their `attend` takes the place of `KVCache.append` and of the layer's own attention to a view."""
