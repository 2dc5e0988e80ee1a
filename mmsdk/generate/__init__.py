"""From hidden states to text: sampling, stopping and streaming."""
