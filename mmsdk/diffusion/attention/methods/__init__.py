"""Methods that choose blocks, one file each."""
