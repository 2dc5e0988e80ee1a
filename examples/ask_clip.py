"""A clip: which frames are looked at, their true times, and a clip that one's own program has as frames."""

from pathlib import Path

import numpy as np

import mmsdk
from mmsdk.vision.intake import Frames, Sampling, load_video

CLIP = Path(__file__).resolve().parents[1] / "apps" / "media" / "motion.mp4"

pipe = mmsdk.pipeline("image-text-to-text", compress="simplecluster:0.5")
clip = load_video(CLIP, sampling=Sampling(frames=4))
print(f"{len(clip.times)} frames, at {', '.join(f'{second:.2f}' for second in clip.times.tolist())} s")
answer = pipe(clip, "What happens?", max_tokens=24)
print(f"What happens? {answer} ({answer.tokens.kept} of {answer.tokens.visual} visual tokens kept)")

height, width, seconds = 96, 128, (0.0, 0.5, 1.0)
frames = [np.full((height, width, 3), 255, np.uint8) for _ in seconds]
for number, frame in enumerate(frames):
    frame[30:60, 10 + 40 * number : 40 + 40 * number] = (200, 30, 30)  # a red square that goes to the right
print("Which way? ", pipe(Frames(frames, times=seconds), "Which way does the square move?", max_tokens=12))
