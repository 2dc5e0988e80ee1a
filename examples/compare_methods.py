"""Compression compared: the same picture and question with all tokens, and with a quarter of them chosen in different ways.

Where a method works decides what it saves: `tome` works inside the encoder, `fastv` inside the language model, the others between them.
"""

from pathlib import Path

import mmsdk

SCENE = Path(__file__).resolve().parents[1] / "apps" / "media" / "scene.png"
QUESTION = "What is at the top?"

pipe = mmsdk.pipeline("image-text-to-text")
pipe(SCENE, QUESTION, max_tokens=1)  # the first question pays for what is set up once
print(f"{'':22}  kept  encode  prefill ms")
for compress in ("identity", "uniform:0.25", "simplecluster:0.25", "tome:0.25", "fastv:0.25"):
    answer = pipe(SCENE, QUESTION, compress=compress, max_tokens=24)
    print(f"{compress:22}{answer.tokens.kept:6}{answer.timings.encode:8.0f}{answer.timings.prefill:9.0f}     {answer}")
