"""What memories are measured by: long texts, needles, long clips and streams, each with what is asked of it."""
