"""What a robot went through, written down so that it can be gone through again."""
