"""Visual-token compressors, one file per method."""
