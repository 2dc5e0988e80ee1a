"""The bench of decoding on a model of two small layers: engines that agree where they must, and rows that add up."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaForCausalLM

from mmsdk.apps.bench.decode import Decode
from mmsdk.apps.cli import main
from mmsdk.apps.engines import Contender, Read, Say, open_engine
from mmsdk.errors import InputError, ModelError

Small = Callable[[bool], LlamaForCausalLM]
Written = Callable[[LlamaForCausalLM, Kind], Path]
PROMPT = tuple(torch.randint(0, 260, (20,), generator=torch.Generator().manual_seed(2)).tolist())


def test_engines_say_the_same_and_are_surprised_alike(small: Small, written: Written) -> None:
    model = small(True)
    path = written(model, Kind.F32)
    ours, theirs = (open_engine(Contender(engine, "fp32"), path, 1, 64) for engine in ("mmsdk", "transformers"))
    said, other = ours.say(Say(PROMPT, 12)), theirs.say(Say(PROMPT, 12))
    assert said.ids == other.ids and len(said.ids) == 12
    assert min(said.first, said.rest, other.first, other.rest) > 0
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        lost = float(model(ids, labels=ids).loss) * (len(PROMPT) - 1)
    assert ours.read(Read(PROMPT)) == pytest.approx(lost, rel=1e-4) == theirs.read(Read(PROMPT))
    # all of it in float32, the embedding once
    assert ours.step() == sum(p.nbytes for p in model.parameters()) / 1e6 and theirs.step() is None


def test_fewer_bits_are_fewer_bytes_a_token_and_nearly_as_surprised(small: Small, written: Written) -> None:
    path = written(small(False), Kind.F32)
    engines = {weights: open_engine(Contender("mmsdk", weights), path, 1, 64) for weights in ("bf16", "int8", "int4")}
    wide, eight, four = (engine.step() for engine in engines.values())
    assert wide is not None and eight is not None and four is not None and wide > 1.8 * eight > 1.8 * four
    lost = {weights: engine.read(Read(PROMPT)) for weights, engine in engines.items()}
    assert lost["int8"] == pytest.approx(lost["bf16"], rel=0.02) and lost["int4"] == pytest.approx(lost["bf16"], rel=0.25)


def test_engines_that_are_not_there_are_named(small: Small, written: Written, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no engine 'vllm'; there are mmsdk, transformers, llama"):
        open_engine(Contender("vllm", "bf16"), tmp_path / "m.gguf", 1, 64)
    with pytest.raises(InputError, match=r"text: it has \d+ tokens, 1000000000 are needed"):
        Decode(text_tokens=10**9, model=str(written(small(True), Kind.F32)))()
    with pytest.raises(InputError, match="no such GGUF file"):
        Decode(model=str(tmp_path / "m.gguf"))()
    with pytest.raises(InputError, match="rounds: it is 0, it must be at least 1"):
        Decode(rounds=0)()


def test_the_command_gives_a_row_for_every_way_of_storing(
    small: Small, written: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("ab aba ab a b " * 10, encoding="utf-8")
    path = written(small(True), Kind.Q4_1)
    knobs = f"prompt=16,tokens=4,rounds=2,text_tokens=48,only=mmsdk,threads=1,model={path},text={text}"
    assert main(["bench", f"decode:{knobs}", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["engine"], row["weights"]) for row in rows] == [("mmsdk", "bf16"), ("mmsdk", "int8"), ("mmsdk", "int4")]
    for row in rows:
        assert row["prefill_tok_s"] > 0 and row["decode_tok_s"] > 0 and math.isfinite(row["perplexity"]) and row["perplexity"] > 1
        assert row["decode_x_transformers"] is None and row["prefill_x_llama.cpp"] is None
        assert row["peak_mb"] is None or row["peak_mb"] >= row["memory_mb"] > row["step_mb"]
        assert 0 < row["of_stream"] < 1 and 0 < row["of_products"] < 1
    # the file's blocks are int4 already
    assert rows[2]["perplexity"] == pytest.approx(rows[0]["perplexity"], rel=0.05)
