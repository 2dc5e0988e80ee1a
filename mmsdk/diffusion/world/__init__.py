"""Video without an end: frames chunk by chunk, with a memory of all that came before in a bounded place."""
