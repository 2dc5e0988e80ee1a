"""What a pipeline recalls: the same answers as one that forgets, nothing computed twice, and nothing taken for another."""

import copy
import dataclasses
import gc
import io
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from mmsdk.answer import Answer
from mmsdk.compress import compression
from mmsdk.decoder.quantised import quantise
from mmsdk.errors import InputError, PluginError
from mmsdk.kv.memory import PagedMemory
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline, pipeline
from mmsdk.recall import Recall, Sights, content, recalling
from mmsdk.vision.encode import Encoder
from mmsdk.vision.intake import load
from mmsdk.vision.types import Image, Media, Video, VisualTokens


def picture(seed: int, height: int = 56, width: int = 56) -> Image:
    generator = torch.Generator().manual_seed(seed)
    return Image(torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator), f"picture {seed}")


def recalled(pipe: Pipeline, *question: object, **settings: object) -> int:
    answer = pipe(*question, max_tokens=4, **settings)  # type: ignore[call-overload]
    assert isinstance(answer, Answer)
    return answer.tokens.recalled


def paged(small: Mini, spec: str = "identity") -> Pipeline:
    return Pipeline(small, compression(spec), recall=recalling("paged"))


def memory_of(pipe: Pipeline) -> PagedMemory:
    assert isinstance(pipe.recall.memory, PagedMemory)
    return pipe.recall.memory


QUESTIONS = ["What is it?", "What is it? And which colour has the largest of all the things that can be seen in it?", "Where?"]


@pytest.mark.parametrize("spec", ["identity", "uniform:8", "fastv:0.5"])
def test_cs_14_answers_are_those_of_a_pipeline_that_forgets(small: Mini, spec: str) -> None:
    """Cold, found again, in a batch, and after all was evicted."""
    plain, pipe = Pipeline(small, compression(spec)), paged(small, spec)
    items = [(picture(seed), words) for seed in (0, 1) for words in QUESTIONS]
    wanted = [plain(*item, max_tokens=6) for item in items]
    assert [pipe(*item, max_tokens=6) for item in items] == wanted
    assert [pipe(*item, max_tokens=6) for item in items] == wanted
    assert pipe(items, max_tokens=6) == wanted
    memory_of(pipe).forget()
    assert [pipe(*item, max_tokens=6) for item in items] == wanted
    assert ["".join(pipe.stream(*item, max_tokens=6)) for item in items] == wanted


@pytest.mark.parametrize("kv", ["paged", "int8", "int4", "int2", "fp8", "dense"])
def test_every_kind_answers_mixed_batches(small: Mini, kv: str) -> None:
    """Within the window nothing is rounded, so that short questions are answered alike by all kinds."""
    pipe = Pipeline(small, recall=recalling(kv))
    items = [(picture(0), "What is it?"), ([], "Two and two?"), ([picture(1), picture(2)], "Which is larger?")]
    assert pipe(items, max_tokens=12) == Pipeline(small)(items, max_tokens=12)


def test_an_unknown_kind_is_refused_before_weights_are_looked_for() -> None:
    with pytest.raises(PluginError, match="^kv: 'pages' is not known; did you mean 'paged'. choose dense, paged, fp8, int8, int4, int2"):
        pipeline(model="there/is-none", kv="pages")


@dataclasses.dataclass(frozen=True, slots=True)
class Counted(Encoder):
    """An encoder that notes how many inputs it was given."""

    calls: list[int] = dataclasses.field(default_factory=list)

    def __call__(self, media: Sequence[Media]) -> list[VisualTokens]:
        self.calls.append(len(media))
        return Encoder.__call__(self, media)


def counted(small: Mini, recall: Recall) -> tuple[Pipeline, list[int]]:
    encoder = Counted(*(getattr(small.encoder, field.name) for field in dataclasses.fields(small.encoder)))
    return Pipeline(dataclasses.replace(small, encoder=encoder), recall=recall), encoder.calls


def test_cs_10_a_picture_is_encoded_once_and_its_tokens_are_read_once(small: Mini) -> None:
    pipe, calls = counted(small, recalling("paged"))
    words, before = "Tell me about it.", 0
    for turn in range(5):
        answer = pipe(picture(3, 112, 112), words, max_tokens=8)
        # the end of the template is new, and what is left of the last block
        assert answer.tokens.recalled >= before - 4 - 16 and (answer.tokens.recalled > 0) == (turn > 0)
        words, before = f"{words} {answer} And turn {turn}, what do you see there?", answer.tokens.prompt
    assert sum(calls) == 1


def test_the_same_question_again_reads_less_than_a_block(small: Mini) -> None:
    pipe = paged(small)
    long = "Which of all these many things that can be seen there is the largest one, and which one is the smallest? " * 4
    first, again = (pipe(picture(0), long, max_tokens=4) for _ in range(2))
    assert first.tokens.recalled == 0 and again.tokens.prompt - again.tokens.recalled <= 16
    assert again.tokens.recalled > 0.85 * again.tokens.prompt


def test_cs_09_more_pictures_than_are_kept_are_encoded_again(small: Mini) -> None:
    one = small.encoder([picture(0)])[0]
    room = 2 * (one.features.nbytes + one.positions.nbytes + one.weight.nbytes + one.times.nbytes + one.saliency.nbytes)
    pipe, calls = counted(small, Recall(PagedMemory(), Sights(room)))
    three = [picture(seed) for seed in range(3)]
    answers = [pipe(three, "Which is larger?", max_tokens=6) for _ in range(2)]
    assert answers[0] == answers[1] == Pipeline(small)(three, "Which is larger?", max_tokens=6)
    assert sum(calls) > 3 and 0 < pipe.recall.sights.nbytes <= room


@pytest.mark.parametrize(
    "other",
    [
        {"compress": "uniform:12"},
        {"compress": "uniform:8"},
        {"compress": "random:8"},
        {"compress": "random:8,seed=1"},
        {"compress": ["simplecluster:12", "uniform:8"]},
    ],
)
def test_cs_05_other_compression_shares_nothing(small: Mini, other: dict[str, object]) -> None:
    pipe = paged(small)
    assert recalled(pipe, picture(0), QUESTIONS[1], **other) == 0
    assert recalled(pipe, picture(0), QUESTIONS[1]) == 0
    assert recalled(pipe, picture(0), QUESTIONS[1], **other) > 0


def test_cs_05_a_method_that_asks_shares_no_picture_between_questions(small: Mini) -> None:
    pipe = paged(small, "cdpruner:12")
    assert pipe.compression.asks
    assert recalled(pipe, picture(0), QUESTIONS[0]) == recalled(pipe, picture(0), QUESTIONS[1]) == 0
    assert recalled(pipe, picture(0), QUESTIONS[1]) > 0


def test_cs_05_the_same_model_in_fewer_bits_shares_no_block(small: Mini) -> None:
    ours, fewer = paged(small), copy.deepcopy(small.decoder)
    quantise(fewer, "int4")
    theirs = dataclasses.replace(ours, vlm=dataclasses.replace(small, decoder=fewer))
    assert recalled(ours, picture(0), QUESTIONS[1]) == recalled(theirs, picture(0), QUESTIONS[1]) == 0
    assert recalled(ours, picture(0), QUESTIONS[1]) > 0 and recalled(theirs, picture(0), QUESTIONS[1]) > 0


def test_another_picture_never_hits(small: Mini) -> None:
    pipe, other = paged(small), picture(0)
    assert recalled(pipe, picture(0), QUESTIONS[1]) == 0
    pixels = other.pixels.clone()
    pixels[2, 55, 55] ^= 1
    assert recalled(pipe, Image(pixels), QUESTIONS[1]) == 0
    assert recalled(pipe, [picture(0), picture(1)], QUESTIONS[1]) == 16
    assert recalled(pipe, [picture(1), picture(0)], QUESTIONS[1]) == 0


@pytest.mark.parametrize("words", ["Where?", QUESTIONS[1] * 3])
def test_cs_06_and_cs_07_tenants_share_no_block_and_no_picture(small: Mini, words: str) -> None:
    """A prompt shorter than two blocks and a longer one: to another tenant all is new, to the same it is not."""
    ours, calls = counted(small, recalling("paged"))
    theirs = dataclasses.replace(ours, recall=dataclasses.replace(ours.recall, tenant="b"))
    assert recalled(ours, picture(0), words) == 0 and sum(calls) == 1
    assert recalled(theirs, picture(0), words) == 0 and sum(calls) == 2
    assert recalled(ours, picture(0), words) >= 16 and recalled(theirs, picture(0), words) >= 16 and sum(calls) == 2


def png(indices: np.ndarray, palette: Sequence[int]) -> bytes:
    image, out = PIL.Image.frombytes("P", (indices.shape[1], indices.shape[0]), indices.tobytes()), io.BytesIO()
    image.putpalette(list(palette))
    image.save(out, "PNG")
    return out.getvalue()


def test_cs_01_and_cs_02_content_is_decoded_upright_pixels_and_their_shape() -> None:
    flat = torch.arange(3 * 16, dtype=torch.uint8)
    assert content(Image(flat.view(3, 2, 8))) != content(Image(flat.view(3, 4, 4)))
    indices = np.arange(64, dtype=np.uint8).reshape(8, 8) % 4
    red, blue = ([*range(255, 251, -1), *[0] * 8], [*[0] * 8, *range(255, 251, -1)])
    assert content(load(png(indices, red))) != content(load(png(indices, blue)))
    upright = []
    for turn in (1, 6):
        image, out = PIL.Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)), io.BytesIO()
        exif = image.getexif()
        exif[0x0112] = turn
        image.save(out, "JPEG", exif=exif)
        upright.append(content(load(out.getvalue())))
    assert upright[0] != upright[1]
    frames = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    assert content(Video(frames, torch.tensor([0.0, 1.0]))) != content(Video(frames, torch.tensor([0.0, 2.0])))


def test_the_same_pixels_by_any_way_are_the_same_content(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    path = tmp_path / "a.png"
    PIL.Image.fromarray(pixels).save(path)
    ways = [path, path.read_bytes(), pixels, PIL.Image.fromarray(pixels), torch.from_numpy(pixels).permute(2, 0, 1)]
    assert len({content(load(way)) for way in ways}) == 1


def test_cs_04_a_file_that_is_replaced_is_another_picture(small: Mini, tmp_path: Path) -> None:
    """Of the same name, size and time."""
    pipe, path = paged(small), tmp_path / "a.bmp"
    for seed in (0, 1):
        pixels = np.random.default_rng(seed).integers(0, 256, (56, 56, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).save(path)
        os.utime(path, (0, 0))
        assert recalled(pipe, path, QUESTIONS[1]) == 0
        assert pipe(path, "What is it?", max_tokens=8) == Pipeline(small)(pixels, "What is it?", max_tokens=8)


def test_cs_11_blocks_come_back_after_answers_errors_and_streams_left_early(small: Mini) -> None:
    pipe = paged(small)
    pipe(picture(0), "What is it?", max_tokens=4)
    stream = pipe.stream(picture(1), "What is it?", max_tokens=64)
    next(stream)
    assert memory_of(pipe).held > 0
    del stream
    pipe([(picture(0), "What?"), ("nowhere.png", "What?"), (picture(2), "")], max_tokens=4)
    with pytest.raises(InputError):
        pipe(picture(0), "What is it?", max_tokens=4, compress="uniform:400")
    gc.collect()
    assert memory_of(pipe).held == 0


def test_many_calls_need_no_more_memory_than_a_few(small: Mini) -> None:
    pipe, sizes = paged(small), set[int]()
    for seed in range(40):
        pipe(picture(seed), "What is it?", max_tokens=2)
        ((pages, _),) = memory_of(pipe)._pools.values()
        sizes.add(pages.blocks.columns)
    gc.collect()
    assert len(sizes) == 1 and memory_of(pipe).held == 0


def test_threads_share_a_pipeline(small: Mini) -> None:
    pipe, plain = paged(small), Pipeline(small)
    items = [(picture(seed % 3), f"Question {seed}: what is it?") for seed in range(6)]
    wanted, found = [plain(*item, max_tokens=8) for item in items], dict[int, object]()

    def ask(index: int) -> None:
        found[index] = pipe(*items[index], max_tokens=8)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(items))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(len(items))] == wanted
