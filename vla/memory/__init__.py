"""Memory at the key-value interface: what a policy saw before, kept as keys and values and read again (D2-VLA, arXiv 2609.34792)."""
