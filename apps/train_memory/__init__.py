"""Training a policy with a dual memory on things that move, and what each part of the memory is worth there."""
