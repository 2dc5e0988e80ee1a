"""The language decoder: embeddings in, hidden states and logits out."""
