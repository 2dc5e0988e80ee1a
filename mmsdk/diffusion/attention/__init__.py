"""Sparse attention for video diffusion: methods choose blocks of keys for blocks of queries, one kernel attends to what they chose."""
