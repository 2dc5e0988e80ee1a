"""The backbone of the walker: pixels and an instruction through a small decoder, to the next step; one picture at a time, no memory.

Letters: n walkers, w pixels, d width, k actions.
"""

from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from torch import Tensor, nn

from mmsdk.apps import kept
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError
from mmsdk.vla.envs.rooms import ACTIONS, COLOURS, WIDTH
from mmsdk.vla.heads.latte import STOP, StopVerifier, VerifierConfig
from mmsdk.vla.memory.encode import encode

__all__ = ["Walker", "read", "verifier", "write"]

_PATCH, _SIZE, _LAYERS, _HEADS = 4, 64, 2, 4


class Walker(nn.Module):
    """[patches ; "go to the <colour> one" ; the place where the action is asked for], both ways, and a logit for every action."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        sizes = _LAYERS, _HEADS, _HEADS, _SIZE // _HEADS, 2 * _SIZE
        self.patch = nn.Conv1d(3, _SIZE, _PATCH, stride=_PATCH)
        self.place = nn.Parameter(torch.randn(WIDTH // _PATCH, _SIZE) * 0.2)
        self.decoder = Decoder(DecoderConfig(len(COLOURS) + 1, _SIZE, *sizes, 128, tied=True))
        nn.init.normal_(self.decoder.embedding.weight, std=0.5)
        self.act = nn.Linear(_SIZE, len(ACTIONS))

    def forward(self, pixels: Float[Tensor, "n 3 w"], goal: Int[Tensor, " n"]) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n k"]]:
        """The hidden state where the action is asked for, and the logits."""
        patches = self.patch(pixels).transpose(1, 2) + self.place
        asked = torch.stack((goal, torch.full_like(goal, len(COLOURS))), dim=1)
        tokens = torch.cat((patches, self.decoder.embed(asked)), dim=1)
        hidden = encode(self.decoder, tokens, torch.ones(tokens.shape[:2], dtype=torch.bool)).hidden[:, -1]
        return hidden, self.act(hidden)

    def proposes(self, logits: Float[Tensor, "n k"]) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
        """The best action, and the best that is not STOP."""
        return logits.argmax(1), 1 + logits[:, STOP + 1 :].argmax(1)


def verifier(seed: int = 0) -> StopVerifier:
    """One for this walker."""
    torch.manual_seed(seed)
    return StopVerifier(VerifierConfig(_SIZE, len(ACTIONS), width=64, layers=2, heads=4, window=16, steps=128))


def read(path: Path, into: nn.Module) -> dict[str, str]:
    """Load what training wrote, and tell what stands beside it. Raises InputError where there is nothing."""
    if not path.is_file():
        raise InputError("there is no such file; train it: python -m mmsdk.apps.train_stop", item=str(path))
    with safe_open(path, "pt") as file:
        into.load_state_dict({name: file.get_tensor(name).float() for name in file.keys()})  # noqa: SIM118
        facts: dict[str, str] = file.metadata() or {}
    into.eval()
    return facts


def write(path: Path, module: nn.Module, facts: dict[str, str]) -> None:
    """Keep it, 16-bit, whole or not at all."""
    kept.write(path, {name: tensor.half() for name, tensor in module.state_dict().items()}, facts)
