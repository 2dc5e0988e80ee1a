"""Vision encoders, one file per family: pixels in, visual tokens out."""
