"""Sizes and places of the Fetch arm over a belt, for those who need no simulator. Lengths in metres, y along the belt, x across, z up."""

__all__ = ["ACTION", "CENTRE", "HEIGHT", "LANE", "LATE", "ON_BELT", "REST", "STATE", "WIDTH"]

HEIGHT, WIDTH = 32, 96
"""Pixels of a picture."""
CENTRE = (1.30, 0.75)
"""x and y of the middle of the belt, which the hand waits above."""
LANE = 0.06
"""How far to either side of the middle things come along."""
ON_BELT = 0.425
"""z of a thing that lies on the belt; things are cubes of 5 cm."""
REST = 0.56
"""z of the hand where it waits."""
STATE, ACTION = 5, 4
LATE = 8
"""Steps that the camera is late."""
