"""From a request to what the engine is asked: turns with their pictures and clips decoded, and the settings of the answer."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmsdk.apps.serve.form import Form
from mmsdk.apps.serve.refusal import RefusedError, refused
from mmsdk.apps.serve.settings import Settings
from mmsdk.apps.serve.wire import ChatRequest, ImagePart, Message, TextPart, VideoPart
from mmsdk.errors import InputError, ModelError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.constrain import Guide
from mmsdk.models.types import VLM
from mmsdk.prompt import Prompt, Role, Segment, Text, Turn
from mmsdk.vision.intake import load_image, load_video
from mmsdk.vision.types import Image, Video
from mmsdk.vision.values import shown

__all__ = ["Asked", "asked", "settled"]

STOPS = 16  # stop strings of one request
LETTERS = 128  # of a token, where a text is told to be too long before it is cut into tokens
LIKELIEST = 20  # tokens that are told in the place of each
HOTTEST = 2  # the temperature up to which OpenAI draws, and clients' sliders go
USUAL = 256  # tokens of an answer whose length nobody said


@dataclass(frozen=True, slots=True)
class Asked:
    """What the engine is told of one request: the settings and the guide of every answer that it wants.

    `likeliest` tokens are told in the place of each.
    """

    prompt: Prompt
    configs: tuple[GenerationConfig, ...]
    guides: tuple[Guide, ...]
    likeliest: int = 0


def settled(request: ChatRequest, settings: Settings) -> tuple[GenerationConfig, ...]:
    """The settings of every answer that a request wants, but for its form. Raises RefusedError, naming the item, for what cannot be."""
    _check_likeliest(request)
    if request.stream_options is not None and not request.stream:
        raise RefusedError(400, "stream_options go with stream; set that, too", "invalid_value", "stream_options")
    return _copies(_config(request, settings), request, settings)


def asked(request: ChatRequest, configs: Sequence[GenerationConfig], form: Form, vlm: VLM, settings: Settings) -> Asked:
    """Decode what a request shows, and put its turns together. Slow: media are fetched and decoded here, none that a bound forbids.

    Raises RefusedError, naming the item, for media that cannot be used or fetched, and turns that the model cannot take.
    """
    _check_length(request.messages, vlm.context)
    count = sum(not isinstance(part, TextPart) for message in request.messages for part in _parts(message))
    if count > settings.media:
        raise RefusedError(400, f"{count} pictures and clips, but at most {settings.media} go into a request", "too_many_media", "messages")
    _check_question(request.messages)
    prompt = _prompt(request.messages, settings)
    try:
        fixed = vlm.layout(prompt).fixed
    except ModelError as error:
        # its chat template will not have it: no such role, or not in this order
        raise RefusedError(400, f"the model cannot take these messages: {error}", "invalid_messages", "messages") from error
    most = configs[0].max_tokens
    if fixed + most > vlm.context:
        told = f"{fixed} tokens of words and {most} of an answer are more than the {vlm.context} that the model holds"
        raise RefusedError(400, told, "context_length_exceeded", "messages")
    return Asked(prompt, tuple(replace(one, constraint=form.constraint) for one in configs), form.guides, request.top_logprobs or 0)


def _config(request: ChatRequest, settings: Settings) -> GenerationConfig:
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    wanted = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    most = min(USUAL, settings.tokens) if wanted is None else wanted
    if most > settings.tokens:
        raise RefusedError(400, f"{name} is {shown(most)}, but an answer has at most {settings.tokens} tokens here", "invalid_value", name)
    if request.temperature is not None and request.temperature > HOTTEST:
        told = f"temperature is {shown(request.temperature)}, expected 0 to {HOTTEST}, as in OpenAI's API"
        raise RefusedError(400, told, "invalid_value", "temperature")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > STOPS:
        raise RefusedError(400, f"{len(stops)} stop strings, at most {STOPS} are looked for", "invalid_value", "stop")
    # without a seed no two answers are drawn alike
    seed = secrets.randbits(62) if request.seed is None else request.seed
    try:
        return GenerationConfig(
            max_tokens=most,
            temperature=0.0 if request.temperature is None else request.temperature,
            top_k=0 if request.top_k is None else request.top_k,
            top_p=1.0 if request.top_p is None else request.top_p,
            min_p=0.0 if request.min_p is None else request.min_p,
            seed=seed,
            stop=tuple(stops),
            repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logprobs=max(1, request.top_logprobs or 0) if request.logprobs else 0,
        )
    except InputError as error:
        raise refused(InputError(error.message, item=name) if error.item == "max_tokens" else error) from None


def _check_likeliest(request: ChatRequest) -> None:
    count = request.top_logprobs or 0
    if not 0 <= count <= LIKELIEST:
        raise RefusedError(400, f"top_logprobs is {shown(count)}, expected 0 to {LIKELIEST}", "invalid_value", "top_logprobs")
    if count and not request.logprobs:
        raise RefusedError(400, "top_logprobs are told with logprobs; set that, too", "invalid_value", "top_logprobs")


def _copies(config: GenerationConfig, request: ChatRequest, settings: Settings) -> tuple[GenerationConfig, ...]:
    """The settings of every answer that a request wants: they differ by their seeds."""
    count = 1 if request.n is None else request.n
    if not 1 <= count <= settings.rows:
        told = f"n is {shown(count)}, expected 1 to {settings.rows}: so many are answered at one time"
        raise RefusedError(400, told, "invalid_value", "n")
    try:
        return tuple(replace(config, seed=config.seed + place) for place in range(count))
    except InputError as error:
        raise refused(error) from None


def _check_length(messages: Sequence[Message], context: int) -> None:
    """What can be said to be too long by a glance: cutting it into tokens takes long, too."""
    letters = sum(len(part.text) for message in messages for part in _parts(message) if isinstance(part, TextPart))
    if letters > LETTERS * context or len(messages) > context:
        told = f"{len(messages):,} messages of {letters:,} letters are more than the {context} tokens that the model holds"
        raise RefusedError(400, told, "context_length_exceeded", "messages")


def _check_question(messages: Sequence[Message]) -> None:
    last, place = messages[-1], f"messages[{len(messages) - 1}]"
    if last.role != "user":
        raise RefusedError(
            400, f"{place}: the last message is the user's, this one is the {last.role}'s", "invalid_messages", f"{place}.role"
        )
    words = "".join(part.text for part in _parts(last) if isinstance(part, TextPart))
    if not words.strip():
        raise RefusedError(400, f"{place}: the question is empty; write what you want to know", "invalid_messages", f"{place}.content")


def _prompt(messages: Sequence[Message], settings: Settings) -> Prompt:
    turns, left = list[Turn](), settings.pixels
    for number, message in enumerate(messages):
        segments = list[Segment]()
        for place, part in enumerate(_parts(message)):
            if isinstance(part, TextPart):
                segments.append(Text(part.text))
                continue
            item = f"messages[{number}].content[{place}]"
            if message.role != "user":
                raise RefusedError(400, f"{item}: only the user shows pictures and clips", "invalid_messages", item)
            found = _loaded(part, item, settings, left)
            left -= (found.pixels if isinstance(found, Image) else found.frames).numel() // 3
            segments.append(found)
        turns.append(Turn(_role(message), tuple(segments)))
    return Prompt.talk(turns)


def _parts(message: Message) -> Sequence[TextPart | ImagePart | VideoPart]:
    return [TextPart(type="text", text=message.content)] if isinstance(message.content, str) else message.content


def _role(message: Message) -> Role:
    return "system" if message.role == "developer" else message.role


def _loaded(part: ImagePart | VideoPart, item: str, settings: Settings, left: int) -> Image | Video:
    """A picture or a clip, which engine and messages call by its place in the request."""
    url = (part.image_url if isinstance(part, ImagePart) else part.video_url).url.strip()
    # whatever else stands here would be taken for a file of this machine
    if not url[:8].lower().startswith(("data:", "http:", "https:")):
        raise RefusedError(400, f"{item}: a data: URI or an http(s) address is expected", "invalid_url", item)
    if left < 1:
        told = f"{item}: the pictures and clips before it have all of the {settings.pixels:,} pixels of a request"
        raise RefusedError(400, told, "too_many_pixels", item)
    limits = settings.limits(left)
    try:
        found: Image | Video
        if isinstance(part, ImagePart):
            found = load_image(url, limits=limits, access=settings.access)
        else:
            found = load_video(url, sampling=settings.sampling, limits=limits, access=settings.access)
    except InputError as error:
        raise RefusedError(400, f"{item}: {error}", "invalid_media", item) from error
    return replace(found, source=item)
