"""Checkpoints of tiny size, written by transformers' own classes: the outside truth of the parity bench and of tests."""
