"""Policies of the memory, one file each: what a decoder keeps, or reads, of what it has read. See `mmsdk.kv.policy`."""
