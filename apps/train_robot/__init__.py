"""Training of the default robot policy: demonstrations by scripts in simulation, what mini's encoder sees of them, a small flow head."""
