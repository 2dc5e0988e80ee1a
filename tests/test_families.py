"""One list of families: what the code finds, what errors say, what the documents tell."""

import re
from pathlib import Path

import pytest
import torch

from mmsdk.errors import ModelError
from mmsdk.families import families, open_model
from mmsdk.models.text import INNER

ROOT = Path(__file__).parents[1]


def test_an_unknown_family_is_told_all_that_are_known_and_no_parts_of_them(tmp_path: Path) -> None:
    for config in ('{"model_type": "fuyu"}', "{}"):
        (tmp_path / "config.json").write_text(config)
        (tmp_path / "model.safetensors").write_bytes(b"")
        with pytest.raises(ModelError, match="supported: ") as error:
            open_model(str(tmp_path), torch.float32, torch.device("cpu"))
        told = str(error.value).partition("supported: ")[2].split(", ")
        assert sorted(told) == sorted(families()) and told[0] == "mini" and not {*INNER, "language", "text", "types"} & {*told}


def test_the_documents_name_every_family_and_no_other() -> None:
    """The page of models by their `model_type`, the guide by what people call them."""
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").partition("## Families")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    alone = page.partition("Language models alone")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", " ".join(rows) + alone)) - {"model_type"}
    assert named == set(families()) - {"mini"}
    guide = re.sub(r"[^a-z0-9]", "", (ROOT / "docs" / "guide.md").read_text(encoding="utf-8").lower())
    for name in named:
        assert CALLED.get(name, re.sub(r"[^a-z0-9]", "", name)) in guide, name


# By what the guide says of them; a sibling stands beside the one that it is named after.
CALLED = {
    "llava": "llava15", "llava_next_video": "itssiblingforvideo", "gemma3_text": "gemma3", "deepseek_v2": "deepseekv2",
    "deepseek_v3": "deepseekv2tov32", "deepseek_v32": "deepseekv2tov32", "deepseek_v4": "deepseekv2tov32andv4",
}  # fmt: skip
