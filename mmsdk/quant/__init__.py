"""Weights in fewer bits: what is stored, how a number is read back, and the products that a decoder takes of them."""
