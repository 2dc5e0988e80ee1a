"""Attention over a cache's view, one file per kind."""
