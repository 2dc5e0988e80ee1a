"""What `mmsdk bench video` measures, a kind of row to a file."""
