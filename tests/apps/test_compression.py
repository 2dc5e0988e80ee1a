"""What compression is measured by: answers are the model's own, questions come in equal shares, bytes are those of the entries held."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from mmsdk.apps.compression.aims import aims
from mmsdk.apps.compression.answers import right
from mmsdk.apps.compression.asked import Asked, asked_about
from mmsdk.apps.compression.costs import cost, long_clips, lost, paired
from mmsdk.apps.compression.lengths import encoder_flops
from mmsdk.apps.compression.plot import drawn
from mmsdk.apps.compression.table import CHAINS, RETENTIONS, completed, stage_of
from mmsdk.apps.console import Cell
from mmsdk.apps.train_mini.features import draw
from mmsdk.apps.train_mini.scenes import Artist
from mmsdk.apps.train_mini.wording import QA
from mmsdk.compress import Compression, compression
from mmsdk.encoded import Encoded
from mmsdk.models.mini.family import Mini
from mmsdk.models.mini.words import asked as worded
from mmsdk.pipeline import Pipeline
from mmsdk.stages import Clock, prepare
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.fidelity import fidelity
from mmsdk.tokencomp.plan import keep
from mmsdk.vision.types import Image, Media, Video

QUESTIONS = ("What is it ?", "Which colour has the thing on the left ?", "Is there a dog ?")


class Numbers:
    """A word is a token: "#12" is 12, and others are what their letters come to."""

    def encode(self, text: str) -> list[int]:
        return [int(word[1:]) if word[0] == "#" else 100 + sum(map(ord, word)) % 4000 for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return "".join(f" #{i}" for i in ids)

    def spelled(self, id_: int) -> bytes:
        return self.decode([id_]).encode()

    def to_json(self) -> str:
        return ""


@pytest.fixture(scope="module")
def vlm(small: Mini) -> Mini:
    return replace(small, tokenizer=Numbers())


@pytest.fixture(scope="module")
def asked(vlm: Mini) -> list[Asked]:
    """Two pictures of different shapes and a clip, the first with three questions."""
    generator = torch.Generator().manual_seed(3)

    def pixels(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    media: list[Media] = [Image(pixels(3, 56, 56)), Image(pixels(3, 28, 112)), Video(pixels(4, 3, 56, 56), torch.arange(4.0))]
    counts = (3, 2, 1)
    return [
        Asked(item, Encoded.of(item, tokens, "small"), tuple(QA("object", question, "") for question in QUESTIONS[:count]))
        for item, tokens, count in zip(media, vlm.encoder(media), counts, strict=True)
    ]


@torch.no_grad()
def said(vlm: Mini, spec: Compression, one: Asked, question: str, tokens: int) -> list[int]:
    """Greedy tokens of one question by itself, from the pixels on, one step after another."""
    ready = prepare(vlm, spec, [(one.media, question)], 16, Clock(torch.device("cpu")))
    assert ready.context is not None
    hidden, cache, ids = ready.context.hidden, ready.context.cache, list[int]()
    while len(ids) < tokens:
        ids.append(int(vlm.decoder.logits(hidden).argmax()))
        hidden = vlm.decoder(vlm.decoder.embed(torch.tensor([ids[-1:]])), cache.position[:, None], cache)[:, -1]
    return ids


@pytest.mark.parametrize(
    "steps",
    [
        "identity",
        "uniform:0.5",
        "simplecluster:3",
        "cdpruner:2",
        "p4q:2",
        "fastv:1",
        "deft:2",
        ["uniform:0.5", "simplecluster:0.5", "deft:1"],
        ["simplecluster:3", "proportional"],
        ["uniform:0.5", "deft:2", "proportional"],
    ],
)
def test_answers_are_judged_as_each_question_by_itself_would_say_them(vlm: Mini, asked: list[Asked], steps: str | list[str]) -> None:
    spec = compression(steps)
    spoken = [said(vlm, spec, one, qa.question, 3) for one in asked for qa in one.questions]
    # what the first question ends with is the end of all: right are those that end so, too
    model, told = replace(vlm, stop_ids=frozenset(spoken[0][2:])), iter(spoken)
    answered = [
        replace(one, questions=tuple(replace(qa, answer=vlm.tokenizer.decode(next(told)[:2]).strip()) for qa in one.questions))
        for one in asked
    ]
    wanted = [ids[2] == spoken[0][2] for ids in spoken]
    for rows in (1, 2, 3):
        assert right(model, spec, answered, rows) == wanted
    first = replace(answered[0], questions=(replace(answered[0].questions[0], answer=f"#{spoken[0][0]} #{spoken[0][1] + 1}"),))
    assert right(model, spec, [first], 1) == [False]


def test_bytes_are_those_of_words_and_of_tokens_kept(vlm: Mini, asked: list[Asked]) -> None:
    """3 layers, 2 heads of keys and of values, 12 wide, in float32; fastv keeps all in 2 of the layers, deft what it reserves in 2."""
    words, entry = 1 + len(vlm.tokenizer.encode(worded(QUESTIONS[0]))), 2 * 2 * 12 * 4
    for text, tokens in (("identity", 3 * 16), ("uniform:4", 3 * 4), ("fastv:4", 2 * 16 + 4), ("deft:4", 2 * (4 + 3) + 4)):
        found = cost(vlm, compression(text), asked[:1], 2, 1, pixels=False)
        assert found.kv_bytes == entry * (3 * words + tokens)
        assert found.kept == (1.0 if text == "identity" else 0.25)
    assert found.timings.prefill > 0 and found.timings.decode > 0


def test_pairs_are_beside_the_first_plan(vlm: Mini, emoji: Path, photos: Path) -> None:
    items = long_clips(Artist(emoji, photos, held_out=True), 2, 4, 0)
    assert [len(item[0].frames) for item in items if isinstance(item[0], Video)] == [4, 4]
    (whole, one), (short, ratio) = paired(vlm, [Compression(), compression("uniform:0.25")], items, 2, 3)
    assert one == 1.0 and ratio > 0 and (whole.kept, short.kept) == (1.0, 0.25) and short.kv_bytes < whole.kv_bytes


def test_operations_are_those_of_what_each_block_was_given(vlm: Mini, asked: list[Asked]) -> None:
    """Every product of the encoder counted while it runs; merging takes place between a block's attention and its MLP."""
    media = [one.media for one in asked[:2]]
    spec, counted = compression("tome:0.5"), list[int]()

    def product(module: torch.nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        counted.append(2 * given[0].numel() * out.shape[-1])

    vit = vlm.encoder.backbone.vit
    hooks = [module.register_forward_hook(product) for module in vit.blocks.modules() if isinstance(module, torch.nn.Linear)]

    def pairs(module: torch.nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        counted.append(4 * given[0].shape[1] * given[0].numel())

    hooks += [block.get_submodule("qkv").register_forward_hook(pairs) for block in vit.blocks]
    totals = []
    for one in (Compression(), spec):
        counted.clear()
        for item in media:
            prepare(vlm, one, [(item, "What is it ?")], 4, Clock(torch.device("cpu")))
        totals.append(sum(counted) + len(media) * 2 * 16 * 3 * vit.config.patch**2 * vit.config.width)
    for hook in hooks:
        hook.remove()
    assert encoder_flops(vlm, spec, media) == pytest.approx(totals[1] / totals[0])
    assert encoder_flops(vlm, Compression(), media) == encoder_flops(vlm, compression("deft:2"), media) == 1.0


def test_what_is_lost_is_told_of_steps_between(vlm: Mini, asked: list[Asked]) -> None:
    assert lost(vlm, compression("identity"), asked) == (0.0, 1.0)
    (few, _), (fewer, _) = (lost(vlm, compression(f"simplecluster:{count}"), asked) or (0, 0) for count in (8, 2))
    assert 0 < few < fewer
    assert lost(vlm, compression("fastv:2"), asked) is None


def test_what_is_lost_by_a_method_that_asks_is_that_of_the_choice_behind_its_question(vlm: Mini, asked: list[Asked]) -> None:
    told = lost(vlm, compression("cdpruner:3"), asked)
    silent = [replace(one, questions=(replace(one.questions[0], question="?"),)) for one in asked]
    assert told != lost(vlm, compression("cdpruner:3"), silent)
    answer = Pipeline(vlm, compression("cdpruner:3"))(asked[0].media, asked[0].questions[0].question, max_tokens=1)
    audit, tokens = answer.sights[0].audit, asked[0].encoded.tokens
    assert audit is not None
    full = replace(tokens, features=vlm.connect([tokens])[0])
    expected = fidelity(full, keep(full, (audit.assignment >= 0).nonzero()[:, 0], method="cdpruner"))
    assert lost(vlm, compression("cdpruner:3"), asked[:1]) == pytest.approx((expected.nqe, expected.coverage), abs=1e-5)


def test_types_of_questions_come_about_equally_often(emoji: Path, photos: Path) -> None:
    artist = Artist(emoji, photos, held_out=True)
    found = [list(asked_about(draw(artist, 5, 30, 0, 0), "image", 12, 3, 5)) for _ in range(2)]
    counts = Counter(qa.type for _, some in found[0] for qa in some)
    assert len(found[0]) == 12 and [some for _, some in found[0]] == [some for _, some in found[1]]
    assert all(1 <= len(some) == len(set(some)) <= 3 for _, some in found[0])
    assert set(counts) == {"object", "colour", "place", "relation", "yes/no"} and max(counts.values()) <= 2 * min(counts.values())


def row(method: str, stage: str, **more: Cell) -> dict[str, Cell]:
    plain: dict[str, Cell] = {"method": method, "stage": stage, "media": "image", "retention": 0.5, "batch": 4, "accuracy": 0.5}
    times: dict[str, Cell] = {
        "accuracy_full": None,
        "encode_ms": 0.0,
        "compress_ms": 1.0,
        "prefill_ms": 2.0,
        "decode_ms": 3.0,
        "speedup": None,
    }
    told = plain | times | more
    right, n = float(str(told["accuracy"] or 0)), int(str(told.get("n", 100)))
    # the same questions are the easy ones for all
    return told | {"answers": "1" * round(n * right) + "0" * (n - round(n * right)) if told["accuracy"] is not None else ""}


def test_rows_stand_beside_the_uncompressed_model() -> None:
    rows = [row("identity", "projector", encode_ms=14.0, accuracy=0.8), row("deft", "decoder"), row("tome", "encoder", encode_ms=4.0)]
    end = row("deft", "decoder", media="clip of 16 frames", accuracy=None, speedup=2.5)
    whole, deft, tome, _, last = completed([*rows, end | {"method": "identity", "speedup": 1.0}, end])
    assert (whole["speedup"], whole["accuracy_full"], whole["encode_ms"]) == (1.0, 0.8, 14.0)
    assert (deft["encode_ms"], deft["speedup"], deft["accuracy_full"]) == (14.0, 1.0, 0.8)
    assert (tome["encode_ms"], tome["speedup"]) == (4.0, 2.0)
    assert last["speedup"] == 2.5 and last["accuracy_full"] is None


def test_aims_are_met_or_not_by_the_rows_alone() -> None:
    def clip(method: str, share: float, accuracy: float | None, **more: Cell) -> dict[str, Cell]:
        told: dict[str, Cell] = {
            "media": "clip",
            "retention": share,
            "accuracy": accuracy,
            "n": 100,
            "choose_ms": 1.0,
            "encoder_flops": 1.0,
        }
        return row(method, str(more.pop("stage", "projector")), **told | more)

    rows = [
        clip("identity", 1.0, 0.8, prefill_ms=102.0), clip("simplecluster", 0.1, 0.79), clip("simplecluster", 0.01, 0.5),
        clip("random", 0.01, 0.5), clip("fastv", 0.01, 0.72, stage="decoder"),
        clip("deft", 0.1, 0.5), clip("deft", 0.2, 0.8, choose_ms=9.0), clip("simplecluster + deft", 0.01, 0.8),
        clip("braco-trained", 0.01, 0.8), clip("identity", 1.0, 0.8, media="image"),
        clip("dora-adaptive", 0.6, 0.79, media="image", encoder_flops=0.62, stage="encoder"),
        clip("identity", 1.0, None, media="image, in turn", encode_ms=100.0, speedup=1.0),
        clip("dora-adaptive", 0.6, None, media="image, in turn", encode_ms=125.0, speedup=1.0),
        clip("identity", 1.0, None, media="clip of 16 frames", speedup=1.0),
        clip("deft", 0.1, None, media="clip of 16 frames", speedup=2.81),
    ]  # fmt: skip
    found = {str(one["aim"]): (one["met"], str(one["reached"])) for one in aims(completed(rows))}
    assert {name: met for name, (met, _) in found.items()} == {
        "simplecluster, clips at 10 %": "cannot tell",
        "simplecluster, clips at 1 %": "no",
        # what was trained, and a chain, are no rivals
        "simplecluster ahead of every untrained method, clips at 1 %": "no",
        "deft, clips at 20 %": "yes",
        "deft, clips at 10 %": "no",
        # a point is not to be told by a hundred questions
        "dora, operations of the encoder on pictures": "cannot tell",
        "dora, pictures a second through the encoder": "no",
        "braco, trained, 100x on clips": "cannot tell",
        "choosing beside the prefill that it saves, at 10 %": "yes",
        "clip of 16 frames at 10 %, pixels to answer": "yes",
    }
    best = "62 % of full; the best other, fastv: 90 % of full; in front of the language model, random: 62 % of full"
    assert found["simplecluster ahead of every untrained method, clips at 1 %"][1] == best
    tied = [one for one in rows if one["method"] != "fastv"]
    assert [one["met"] for one in aims(completed(tied)) if "ahead" in str(one["aim"])] == ["cannot tell"]
    assert found["simplecluster, clips at 10 %"][1] == "99 % of full (95 to 102 %; 79 right of 100, uncompressed 80)"
    assert found["choosing beside the prefill that it saves, at 10 %"][1] == "2 of 2; most takes simplecluster on clips, 1.0 %"
    assert found["dora, pictures a second through the encoder"][1] == "0.80 times the whole encoder's"
    assert found["dora, operations of the encoder on pictures"][1].startswith("38.0 % less, 1.0 points lost (-1.8 to 3.7; ")


def test_stages_are_told_from_the_encoder_on() -> None:
    chain = ["tome:0.5", "uniform:0.5", "deft:0.5"]
    wanted = (("identity", "projector"), ("tome:0.5", "encoder"), ("deft:0.5", "decoder"), (chain, "encoder+projector+decoder"))
    for steps, stage in wanted:
        assert stage_of(compression(steps)) == stage
    assert stage_of(Compression()) == "projector"


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("n", [256, 512])
def test_two_methods_leave_what_one_would(name: str, n: int) -> None:
    """Of mini's pictures and clips, to the token, so that a chain stands beside its parts in one column."""
    first = CHAINS[name]
    for share in RETENTIONS:
        if share < first:
            assert Budget.of(share / first, Budget.of(first, n).count).count == Budget.of(share, n).count


def test_a_drawing_shows_each_method_in_every_panel() -> None:
    rows = [
        row(method, "projector", media=media, retention=share, accuracy=share / 2, accuracy_full=0.9, batch=batch)
        for method in ("identity", "uniform", "deft") for media in ("image", "clip") for share in (0.5, 0.1) for batch in (1, 4)
    ]  # fmt: skip
    picture = ElementTree.fromstring(drawn([*rows, row("deft", "decoder", media="clip of 16 frames", accuracy=None)]))
    assert len(picture.findall(".//{*}circle")) == 2 * 2 * 2 * 2
    told = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"uniform", "deft"} <= set(told) and "identity" not in told and not any("16 frames" in str(text) for text in told)
