"""Trains the small video model that `mmsdk imagine` runs, and a judge of its clips: `python -m mmsdk.apps.train_video`."""
