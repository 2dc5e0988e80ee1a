"""Training a policy with a dual memory on what a belt carries past a Fetch arm, and what each part of the memory is worth there."""
