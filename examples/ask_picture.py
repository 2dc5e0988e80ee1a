"""One picture, one question: the answer, what it cost, and the same answer as it comes.

python examples/ask_picture.py [PICTURE] [QUESTION]
"""

import sys
from pathlib import Path

import mmsdk

SCENE = Path(__file__).resolve().parents[1] / "apps" / "media" / "scene.png"

picture = sys.argv[1] if len(sys.argv) > 1 else SCENE
question = sys.argv[2] if len(sys.argv) > 2 else "What is at the top?"
pipe = mmsdk.pipeline("image-text-to-text")
answer = pipe(picture, question, max_tokens=32)
print(f"{question} {answer}")
print(f"{answer.tokens.visual} visual tokens and {answer.tokens.generated} words' tokens; ms: {answer.timings}")
for piece in pipe.stream(picture, question, max_tokens=32):
    print(piece, end="|", flush=True)
print()
