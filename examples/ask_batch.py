"""Many questions at a time, one of which cannot be answered: it gives its error in its place, and the others do not notice."""

from pathlib import Path

import mmsdk

MEDIA = Path(__file__).resolve().parents[1] / "apps" / "media"

questions = [
    (MEDIA / "scene.png", "What is at the top?"),
    ("missing.png", "What is at the top?"),
    (MEDIA / "motion.mp4", "What moves?"),
]
pipe = mmsdk.pipeline("image-text-to-text", batch_size=8)
for (media, question), answer in zip(questions, pipe(questions, max_tokens=12), strict=True):
    if isinstance(answer, mmsdk.MmsdkError):
        print(f"{Path(media).name}: no answer: {answer}")
    else:
        print(f"{Path(media).name}: {question} {answer}")
