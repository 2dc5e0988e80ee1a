"""OpenAI's own client against `mmsdk serve`: a picture, a streamed answer, and what the picture cost before and after compression.

python examples/openai_client.py [URL]        # of a server that runs; without one, one is started and ended again

It needs `pip install ".[serve]" openai`, in the clone.
"""

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

SCENE = Path(__file__).resolve().parents[1] / "apps" / "media" / "scene.png"


@contextmanager
def server() -> Iterator[str]:
    """`mmsdk serve` in a process of its own; it says where when it is ready."""
    command = [sys.executable, "-m", "mmsdk.apps.entry", "serve", "--port", "0", "--compress", "uniform:0.5", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def ask(url: str) -> None:
    """One question, as any program for OpenAI's API asks it."""
    picture = f"data:image/png;base64,{base64.b64encode(SCENE.read_bytes()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": "What is at the top?"}]
    messages: Any = [{"role": "user", "content": content}]
    with openai.OpenAI(base_url=url, api_key="none") as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model, messages=messages, max_tokens=24, stream=True, stream_options={"include_usage": True}
        )
        for chunk in stream:
            print("".join(choice.delta.content or "" for choice in chunk.choices), end="", flush=True)
            if chunk.usage is not None:
                told = chunk.usage.model_extra or {}
                print(f"\n{told['visual_tokens']} visual tokens, of which {model} saw {told['visual_tokens_kept']}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        ask(sys.argv[1])
    else:
        with server() as address:
            ask(address)
