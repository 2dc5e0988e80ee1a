"""The numeric ground floor: operations with a torch reference and, where it pays, a Triton kernel."""
