"""Eyes for the belt: a small convolutional network that finds things and lights in a picture, taught on rendered ones.

Maps of scores, one for each thing and each colour of the lamp; where a map is highest, by the mean of its softmax, is where the thing is
(spatial softmax: Finn et al., arXiv 1509.06113), and the highest score says whether it is there. They are taught first, by the simulator's
labels, and then left alone: the policy looks at the same eyes whatever its memory, and is never told where anything really is.

Letters: b pictures, k maps, c cells of a map, f numbers of a map.
"""

from pathlib import Path

import torch
from jaxtyping import Bool, Float
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.vla.envs.fetch_sizes import HEIGHT, LANE, WIDTH

__all__ = ["MAPS", "Eyes", "teach"]

MAPS, NUMBERS = 4, 3
"""The red thing, the blue thing, the red light, the blue light; of each two of place and how surely it is there."""
_RARE = torch.tensor([1.0, 1.0, 10.0, 10.0])
"""Lights are seldom on."""
_ABOUT = 0.1
_SIDE = 0.52
"""Metres to either side of the belt's middle that the camera sees."""


class Eyes(nn.Module):
    """Pictures in [-1, 1] to the maps' numbers: the place along the belt as a share of what is seen, and across it in lanes."""

    grid: Tensor
    cells: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(5, 16, 5, stride=2, padding=2)
        self.second = nn.Conv2d(16, 24, 3, padding=1)
        self.maps = nn.Conv2d(24, MAPS, 1)
        wide, narrow = nn.Linear(2, 32), nn.Linear(32, 2)
        nn.init.zeros_(narrow.weight)
        self.straight = nn.Sequential(wide, nn.GELU(), narrow)
        self.sharp = nn.Parameter(torch.tensor(3.0))
        rows, columns = torch.meshgrid(torch.linspace(-1, 1, HEIGHT), torch.linspace(-1, 1, WIDTH), indexing="ij")
        self.register_buffer("grid", torch.stack((columns, rows)), persistent=False)
        self.register_buffer("cells", F.avg_pool2d(torch.stack((columns, rows)), 2), persistent=False)

    def scores(self, pictures: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b k c"]:
        """The maps, cell by cell of two by two pixels."""
        grid: Tensor = self.grid.expand(len(pictures), -1, -1, -1)
        seen = F.gelu(self.second(F.gelu(self.first(torch.cat((pictures, grid), dim=1)))))
        maps: Tensor = self.maps(seen).flatten(2)
        return maps * self.sharp

    def forward(self, scores: Float[Tensor, "b k c"]) -> Float[Tensor, "b k f"]:
        """Where each thing is, and how surely: the last number is the highest score."""
        at = scores.softmax(dim=-1) @ self.cells.flatten(1).T
        return torch.cat((at + self.straight(at), scores.amax(dim=-1, keepdim=True)), dim=-1)

    @torch.no_grad()
    def features(self, pictures: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b k f"]:
        """What a policy gets: where and whether, bounded; where nothing is there, the place says nothing and is 0."""
        found = self(self.scores(pictures))
        sure = torch.sigmoid(found[..., 2:])
        return torch.cat((found[..., :2].clamp(-1.5, 1.5) * sure, sure), dim=-1)

    @staticmethod
    def of(path: Path) -> "Eyes":
        """Those of a file."""
        eyes = Eyes()
        eyes.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()})
        return eyes.eval()


def teach(data: dict[str, Tensor], steps: int, rows: int = 64, seed: int = 0) -> tuple[Eyes, float]:
    """Eyes taught on demonstrations' pictures, and the mean error along the belt over the last tenth of the steps, in metres."""
    torch.manual_seed(seed)
    eyes, generator = Eyes(), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(eyes.parameters(), lr=4e-3, weight_decay=1e-4)
    pictures, places, there, lit = _flat(data)
    errors = list[float]()
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = 4e-3 * min(1.0, (step + 1) / 30, 1.02 - step / steps)
        drawn = torch.randint(len(pictures), (rows,), generator=generator)
        scores = eyes.scores(pictures[drawn].float() / 127.5 - 1)
        found = eyes(scores)
        away = (found[:, :2, :2] - places[drawn]).abs()
        seen, present = there[drawn], torch.cat((there[drawn], lit[drawn]), dim=1)
        # a hundredth of the view is half a centimetre
        placed = (
            F.smooth_l1_loss(found[:, :2, :2], places[drawn], reduction="none", beta=0.02).sum(-1) * seen
        ).sum() / seen.sum().clamp_min(1)
        # all of a map lies where the thing is, as nearly as perspective lets a column tell
        about = (eyes.cells[0].flatten() - places[drawn][..., :1]).abs() < _ABOUT
        outside = -(scores[:, :2].log_softmax(-1).masked_fill(~about, -1e4).logsumexp(-1) * seen).sum() / seen.sum().clamp_min(1)
        told = F.binary_cross_entropy_with_logits(found[..., 2], present.float(), pos_weight=_RARE)
        optimiser.zero_grad()
        (20 * placed + outside + told).backward()
        optimiser.step()
        if step >= steps - max(1, steps // 10):
            errors.append(float((away.detach()[..., 0] * seen).sum() / seen.sum().clamp_min(1)) * _SIDE)
    return eyes.eval(), sum(errors) / len(errors)


def _flat(data: dict[str, Tensor]) -> tuple[Tensor, Float[Tensor, "b 2 2"], Bool[Tensor, "b 2"], Bool[Tensor, "b 2"]]:
    """Pictures, the things' places in the eyes' numbers, which of them can be seen, and which light is on."""
    places = data["places"].flatten(0, 1)
    along, across = places[..., 1] / _SIDE, places[..., 0] / LANE
    there = data["there"][:, None].expand(-1, data["places"].shape[1], -1).flatten(0, 1) & (along.abs() < 1)
    lit = data["lamps"].flatten()[:, None] == torch.arange(2)
    return data["pictures"].flatten(0, 1), torch.stack((along, across), dim=-1), there, lit
