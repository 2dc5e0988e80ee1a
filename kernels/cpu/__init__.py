"""What the processor does in C++: a decode step whose only cost is reading the weights."""
