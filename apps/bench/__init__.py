"""Benches, one file each: every one prints a single object of flat rows."""
