"""Training of DORA's actor: which tokens a frozen vision transformer can do without, learned by reinforcement on drawn scenes."""
