"""Actions: observations in, checked and timed robot actions out."""
