"""Training a walker that is told where to go, and a verifier that knows when it has arrived (LATTE)."""
