"""Step caches, one file each."""
