"""LeRobotDataset v3.0, written and read by its published layout, without lerobot."""
