"""Fewer visual tokens: budgets, compressors and the account of what became of each token."""
