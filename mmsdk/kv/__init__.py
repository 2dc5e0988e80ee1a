"""What the decoder remembers: key-value caches and the policies that thin them."""
