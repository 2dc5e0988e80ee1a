"""Training of braco's coder for mini: the language model, reading few tokens, learns to say what it says when it reads all of them."""
