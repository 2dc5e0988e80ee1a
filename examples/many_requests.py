"""Many requests at one time: they join and leave at every token, and each gets the answer it would get alone."""

import time
from pathlib import Path

import mmsdk
from mmsdk.generate.config import GenerationConfig
from mmsdk.serve.engine import Engine

MEDIA = Path(__file__).resolve().parents[1] / "apps" / "media"
QUESTIONS = ("What is at the top?", "What is at the bottom?", "Which colour is the circle?", "How many things are there?")

begun = time.perf_counter()
pipe = mmsdk.pipeline("image-text-to-text")
with Engine(pipe, rows=4) as engine:
    asked = {engine.submit(MEDIA / "scene.png", question, GenerationConfig(max_tokens=16)): question for question in QUESTIONS}
    broken = engine.submit("missing.png", "What is it?", GenerationConfig(max_tokens=16))
    said = dict.fromkeys([*asked, broken], "")
    while engine.busy:
        for event in engine.step():
            said[event.number] += event.text
            if event.finish is not None:
                print(f"{event.number}: {asked.get(event.number, 'What is it?')} {said[event.number]} [{event.finish}]")
print(f"{len(said)} requests in {time.perf_counter() - begun:.1f} s, loading included")
