"""From chunk to chunk: how a new plan takes over from the one that is being executed."""
