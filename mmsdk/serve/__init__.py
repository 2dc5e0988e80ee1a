"""Many requests at one time over one model."""
