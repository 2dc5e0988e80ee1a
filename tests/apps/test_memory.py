"""What memories are measured by: shared prompts are what each memory would have read, and answers stand where they are looked for."""

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from mmsdk.apps.console import Cell
from mmsdk.apps.intervals import sign_test
from mmsdk.apps.memory.asked import Asked, needles, texts
from mmsdk.apps.memory.carried import carried
from mmsdk.apps.memory.happenings import happenings
from mmsdk.apps.memory.measure import filled, measured, prompted
from mmsdk.apps.memory.plot import drawn
from mmsdk.apps.memory.rows import row, told
from mmsdk.apps.memory.saved import resumed
from mmsdk.apps.memory.streams import Remembering
from mmsdk.apps.train_mini.scenes import Artist
from mmsdk.apps.train_mini.vocabulary import COLOURS, place_of
from mmsdk.decoder.transformer import Decoder, DecoderConfig
from mmsdk.errors import InputError
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.policy_memory import policy_of
from mmsdk.models.mini.family import Mini
from mmsdk.tokenizer import TextTokenizer
from mmsdk.vision.types import Video
from mmsdk.weights.gguf_file import read_file
from mmsdk.weights.gguf_tokenizer import tokenizer_of


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    generator = torch.Generator().manual_seed(0)
    sizes = {"width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "inner": 48, "context": 4096}
    made = Decoder(DecoderConfig(vocabulary=96, **sizes)).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.normal_(0, 0.3, generator=generator).add_(float(parameter.ndim == 1))
    return made


@pytest.fixture(scope="module")
def tokenizer(mini_language: Path) -> TextTokenizer:
    return tokenizer_of(read_file(mini_language).metadata)


def ids_of(count: int) -> Tensor:
    return torch.randint(0, 96, (1, count), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["window", "streaming", "snapkv", "h2o", "keydiff", "expected"])
def test_a_shared_prompt_fills_a_memory_as_reading_it_does(decoder: Decoder, name: str) -> None:
    asked = Asked(decoder.embed(ids_of(60)), (1, 2), (3, 4, 5), "likelihood")
    policy, amounts = policy_of(f"{name}:1.0").policy, (0.5, 0.2)
    for amount, cache in zip(amounts, filled(policy, amounts, prompted(decoder, asked)), strict=True):
        own = policy_of(f"{name}:{amount}").cache(3, 1, "cpu")
        decoder(asked.prompt, torch.arange(60)[None], own)
        own.settle()
        for layer in range(3):
            mine, theirs = cache.view(layer), own.view(layer)
            torch.testing.assert_close(mine.keys, theirs.keys)
            assert torch.equal(mine.positions, theirs.positions) and cache.lengths(layer).unique().tolist() == [round(60 * amount)]
        shared, alone = measured(decoder, cache, asked), measured(decoder, own, asked)
        assert shared.quality == pytest.approx(alone.quality, rel=1e-5) and shared.tokens == 4
        assert 0 < shared.read <= shared.held


def test_qualities_are_those_of_the_model(decoder: Decoder) -> None:
    """Of the full cache: what one pass over prompt, cue and answer gives."""
    ids = ids_of(40)
    asked = {
        score: Asked(decoder.embed(ids[:, :30]), (*ids[0, 30:33].tolist(),), (*ids[0, 33:].tolist(),), score)
        for score in ("likelihood", "words", "whole")
    }
    plain = DenseCache.allocate(3, 1, 2, 8, 40, torch.float32, "cpu")
    scores = decoder.logits(decoder(decoder.embed(ids), torch.arange(40)[None], plain)[0, 32:-1]).log_softmax(-1)
    wanted = scores.gather(1, ids[0, 33:, None])
    right = (scores.argmax(-1) == ids[0, 33:]).float()
    prompt = prompted(decoder, asked["words"])
    for score, value in (("likelihood", wanted.mean().exp()), ("words", right.mean()), ("whole", right.min())):
        (cache,) = filled(policy_of("full").policy, (1.0,), prompt)
        assert measured(decoder, cache, asked[score]).quality == pytest.approx(float(value), rel=1e-4)
    best = scores.argmax(-1)
    (cache,) = filled(policy_of("full").policy, (1.0,), prompt)
    one = Asked(asked["whole"].prompt, asked["whole"].cue, (int(best[0]),), "whole")
    assert measured(decoder, cache, one).quality == 1.0


def test_a_text_is_carried_through_a_window(decoder: Decoder) -> None:
    """Without a compaction both ways are one pass; with some, reading anew forgets what went and costs passes over what stays."""
    ids, passed = ids_of(1000)[0].tolist(), list[int]()
    handle = decoder.layers[0].register_forward_hook(lambda module, inputs, output: passed.append(output.shape[1]))
    small = {anew: carried(decoder, ids, 300, anew) for anew in (False, True)}
    handle.remove()
    # 8 chunks; of 300 tokens, 150 stay, and the next compaction comes when the next chunk but one does
    assert small[False].compactions == small[True].compactions == 6
    assert sum(passed) == 2 * 1000 + 6 * 150 and small[False].held == small[True].held == 2 * 3 * 2 * 8 * 300 * 4
    assert small[False].quality != small[True].quality
    plain = DenseCache.allocate(3, 1, 2, 8, 500, torch.float32, "cpu")
    hidden = decoder(decoder.embed(torch.tensor([ids[:500]])), torch.arange(500)[None], plain)[0]
    lost = torch.nn.functional.cross_entropy(decoder.logits(hidden[:-1]), torch.tensor(ids[1:500]))
    for anew in (False, True):
        whole = carried(decoder, ids[:500], 500, anew)
        assert whole.compactions == 0 and whole.quality == pytest.approx(float((-lost).exp()), rel=1e-4)
    with pytest.raises(InputError, match="at least 260"):
        carried(decoder, ids, 200, anew=False)


def test_needles_lie_in_a_book_and_are_asked_for_by_name(small: Mini, tokenizer: TextTokenizer, book: Path) -> None:
    """The number that is asked for stands in the prompt once, among as many as there are keys, and its digits are tokens."""
    text = book.read_text(encoding="utf-8")
    for keys in (1, 8):
        for asked in needles(small.decoder, tokenizer, text, 512, 3, keys):
            code = tokenizer.decode(asked.answer)
            assert len(asked.answer) == 5 and code.isdigit() and asked.score == "words"
            assert asked.prompt.shape[1] == 512
            # each row of the prompt is the embedding of one id
            distance = torch.cdist(asked.prompt[0], small.decoder.embedding.weight)
            prompt = tokenizer.decode(distance.argmin(1).tolist())
            city = prompt.rsplit("What is the secret number of ", 1)[1].split("?")[0]
            assert prompt.count("\nThe secret number of") == keys and prompt.count(f"The secret number of {city} is {code}.") == 1
            assert f"{prompt}{tokenizer.decode(asked.cue)}".endswith(f"?\nAnswer: The secret number of {city} is ") and len(asked.cue) == 1


def test_texts_go_on_where_the_prompt_ends(small: Mini, tokenizer: TextTokenizer, book: Path) -> None:
    text = book.read_text(encoding="utf-8")
    short, long = texts(small.decoder, tokenizer, text, (64, 256), 16)
    assert short.prompt.shape[1] == 63 and long.prompt.shape[1] == 255 and len(short.cue) == 1 and len(long.answer) == 16
    assert tokenizer.decode((*long.cue, *long.answer)) in text
    with pytest.raises(InputError, match="are asked for"):
        texts(small.decoder, tokenizer, text[:1000], (512,), 16)


def test_what_happens_is_drawn_again_as_it_was(emoji: Path, photos: Path, small: Mini) -> None:
    artist = Artist(emoji, photos, held_out=True)
    first, again = happenings(artist, 2, 3, 8), happenings(artist, 2, 3, 8)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.early, other.early) and torch.equal(one.later, other.later) and one.asked == other.asked
    frames = list(first[0].frames(40))
    assert torch.equal(frames[23], first[0].early[23]) and torch.equal(frames[24], frames[32]) and len(frames) == 40
    # a stream goes on from any frame as it would have gone on
    assert all(torch.equal(one, frames[20 + place]) for place, one in enumerate(first[0].frames(10, 20)))
    assert not torch.equal(happenings(artist, 1, 3, 8, kind=1)[0].early, first[0].early)
    with pytest.raises(InputError, match="1 to 8 shapes, not 9"):
        happenings(artist, 1, 9, 8)
    encoder, clip = Remembering(small.encoder), Video(first[0].early[:8], torch.arange(8.0))
    (before,), (after,) = encoder([clip]), encoder([Video(first[0].early[:8].clone(), torch.arange(8.0))])
    assert after.features is before.features and len(encoder.known) == 1
    # a window that comes again later is looked at no more than one that comes at the same time
    later = Video(first[0].early[:8], torch.arange(8.0) + 64)
    (again,), (wanted,) = encoder([later]), small.encoder([later])
    assert again.features is before.features and torch.equal(again.features, wanted.features) and torch.equal(again.times, wanted.times)
    encoder([Video(first[0].early[:8], torch.arange(8.0) * 2)])
    assert len(encoder.known) == 2


def test_shapes_are_where_and_as_is_asked_and_no_answer_can_be_given_unseen(emoji: Path, photos: Path) -> None:
    """Each shape in its window alone, in the colour and at the place of the answers, before the ground that stays; all evenly drawn."""
    stories, colours, places = happenings(Artist(emoji, photos, held_out=True), 40, 4, 8), Counter[str](), Counter[str]()
    for story in stories:
        ground = story.later.float().mean(0)
        answers = [(qa.type, qa.answer) for qa in story.asked]
        assert [kind for kind, _ in answers] == ["colour", "place"] * 4 and len({qa.question for qa in story.asked}) == 8
        assert len(set(answers)) == 8 and (story.later.float() - ground).abs().max() < 16
        for number, (colour, place) in enumerate(zip(answers[::2], answers[1::2], strict=True)):
            seen = story.early[8 * number : 8 * number + 8].float().mean(0)
            there = (seen - ground).abs().amax(0) > 16
            assert 0.01 < there.float().mean() < 0.12
            y, x = (float(at.float().mean()) / 224 for at in there.nonzero(as_tuple=True))
            assert place_of(x, y) == place[1]
            inside = seen[:, there].median(1).values
            assert all(abs(float(one) - wanted) < 24 for one, wanted in zip(inside, COLOURS[colour[1]], strict=True))
            colours[colour[1]] += 1
            places[place[1]] += 1
    # 160 shapes in 11 colours and 9 places: to say the commonest of all would be right about one in five at most
    assert max(colours.values()) < 32 > max(places.values()) and len(colours) == 11 and len(places) == 9


def test_answers_are_counted_and_set_beside_the_best_window() -> None:
    right, window, sinks = [True] * 9 + [False], [False] * 10, [True, False, True] + [False] * 6 + [True]
    cells = told(right, {"window": window, "streaming": sinks})
    assert (cells["n"], cells["against"], cells["better"], cells["worse"]) == (10, "streaming", 7, 1)
    # Wilson's interval of 9 in 10, and the binomial's tails of 8 that differ, 7 in one direction: 2 (1 + 8) / 2^8
    assert cells["ci_low"] == pytest.approx(0.5958, abs=1e-4) and cells["ci_high"] == pytest.approx(0.9821, abs=1e-4)
    assert cells["p"] == pytest.approx(18 / 256) and sign_test(0, 0) == sign_test(3, 3) == 1.0 and sign_test(0, 6) == 2 / 64
    alone = told(right)
    assert alone["n"] == 10 and alone["p"] is alone["against"] is None
    assert list(row("text", "full", 1.0, (0.5, 0.5), 8.5, 4.5, 2.0))[-len(alone) :] == list(alone) and set(told().values()) == {None}


def test_a_run_that_is_broken_off_goes_on_with_the_suite_that_it_stood_at(tmp_path: Path) -> None:
    path, asked = tmp_path / "rows.jsonl", list[str]()

    def measure(suite: str) -> list[dict[str, Cell]]:
        asked.append(suite)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return [{"suite": suite, "quality": 0.1 + len(asked)}]

    with pytest.raises(KeyboardInterrupt):
        resumed(path, "a", ["text", "clip"], measure)
    assert resumed(path, "a", ["text", "clip"], measure) == [{"suite": "text", "quality": 1.1}, {"suite": "clip", "quality": 3.1}]
    assert asked == ["text", "clip", "clip"] and resumed(path, "a", ["clip"], measure) == [{"suite": "clip", "quality": 3.1}]
    with pytest.raises(InputError, match="other settings: a"):
        resumed(path, "b", ["text"], measure)
    path.write_text("[1]\n", encoding="utf-8")
    with pytest.raises(InputError, match="something else"):
        resumed(path, "a", ["text"], measure)


def test_the_picture_has_a_panel_for_every_suite_and_a_line_for_every_policy() -> None:
    rows = [
        {"suite": suite, "policy": policy, "budget": budget, "quality": quality, "quality_full": 0.8}
        for suite in ("text", "needle", "stream")
        for policy, quality in (("window", 0.1), ("<new>", 0.5))
        for budget in (0.5, 0.25)
    ]
    odd = [{"suite": "text", "policy": "full", "budget": 1.0, "quality": 0.8, "quality_full": 0.8}, {**rows[0], "quality": None}]
    odd.append({**rows[0], "policy": "kv-streams", "budget": 0.13, "quality_full": None})
    root = ElementTree.fromstring(drawn([*rows, *odd]))
    name = "{http://www.w3.org/2000/svg}"
    assert [text.text for text in root.iter(f"{name}text") if text.get("class") == "t"] == ["text", "needle", "stream"]
    assert len(list(root.iter(f"{name}circle"))) == len(rows)
    assert {"<new>", "window", "50 %", "25 %"} <= {text.text for text in root.iter(f"{name}text")}


def test_what_is_measured_at_one_budget_has_bars_the_best_first_and_streams_that_go_on_at_their_end() -> None:
    def asked(policy: str, quality: float, frames: int) -> dict[str, Cell]:
        told = {"quality": quality, "quality_full": 0.8, "frames": frames, "ci_low": quality - 0.1, "ci_high": quality + 0.1}
        return {"suite": "stream", "policy": policy, "budget": 0.25, **told}

    going = [
        asked(f"{policy}, going on", quality, frames) for frames in (2500, 10_000) for policy, quality in (("window", 0.1), ("h2o", 0.6))
    ]
    root = ElementTree.fromstring(drawn([asked("window", 0.2, 64), asked("h2o", 0.9, 64), *going]))
    name = "{http://www.w3.org/2000/svg}"
    told = [text.text for text in root.iter(f"{name}text")]
    assert [text.text for text in root.iter(f"{name}text") if text.get("class") == "t"] == [
        "stream, 25 % of the tokens",
        "stream of 10,000 frames",
    ]
    # the legend comes last
    assert [text for text in told if text in ("h2o", "window")] == ["h2o", "window"] * 2 + ["window", "h2o"]
    bars = [path.get("d", "") for path in root.iter(f"{name}path") if float(path.get("stroke-width", "0")) > 3]
    ends = [float(bar.partition("H")[2]) for bar in bars]
    # in the order of the picture, from the same beginning, as long as they are good
    begin = float(bars[0].partition(" ")[0].lstrip("M"))
    assert [round((end - begin) / (ends[0] - begin), 2) for end in ends] == [1.0, 0.22, 0.67, 0.11]
