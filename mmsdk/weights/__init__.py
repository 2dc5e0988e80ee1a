"""Where a checkpoint comes from: a local path, a hub name or a named bundle with checked hashes."""
