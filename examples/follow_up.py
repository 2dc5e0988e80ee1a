"""Asking again: with a paged memory a later question about the same picture begins where the earlier one ended.

The picture goes by its content, so that it may come as another file, or as bytes, the second time.
"""

from pathlib import Path

import mmsdk

SCENE = Path(__file__).resolve().parents[1] / "apps" / "media" / "scene.png"

pipe = mmsdk.pipeline("image-text-to-text", kv="paged")
first = pipe(SCENE, "What is at the top?", max_tokens=12)
second = pipe(SCENE.read_bytes(), "What is at the bottom?", max_tokens=12)
for answer in (first, second):
    tokens, ms = answer.tokens, answer.timings
    print(f"{tokens.recalled:4} of {tokens.prompt} tokens were known; {ms.encode:.0f} ms to see, {ms.prefill:.0f} ms to read: {answer}")
