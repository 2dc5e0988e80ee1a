"""A world's memory: causal chunks are one masked pass, tiers change nothing, capacities hold, and what was planted is found."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk.diffusion.attention.types import Grid
from mmsdk.diffusion.dit import DiT, DiTConfig
from mmsdk.diffusion.guidance import ClassifierFree
from mmsdk.diffusion.rotary import ByAxis
from mmsdk.diffusion.schedule import flow
from mmsdk.diffusion.types import Condition, Spot
from mmsdk.diffusion.world.disk import read_page, write_page
from mmsdk.diffusion.world.hybrid import Hybrid
from mmsdk.diffusion.world.index import Kind
from mmsdk.diffusion.world.memory import Paging, WorldMemory
from mmsdk.diffusion.world.rollout import remember, rollout
from mmsdk.diffusion.world.room import moved_in
from mmsdk.errors import InputError

TEXT = Condition(torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(1)))
DENSE = Hybrid(share=0.0, masses=(1.0,), block=4)
SHAPE = (1, 2, 2, 4, 6)


@pytest.fixture(scope="module")
def model() -> DiT:
    torch.manual_seed(0)
    return DiT(DiTConfig(2, 2, heads=2, head_dim=12, hidden=16, layers=2, text_width=6, rotary=ByAxis(), frequencies=16)).eval()


class ByChunks:
    """Every token reads its own chunk and those before it, by a mask."""

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, spot: Spot) -> Tensor:
        chunk = torch.arange(query.shape[2]) // (2 * spot.grid.frame)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=chunk[:, None] >= chunk)


def test_chunk_after_chunk_is_one_pass_with_a_causal_mask(model: DiT, tmp_path: Path) -> None:
    clip = torch.randn(1, 2, 8, 4, 6, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = model(clip, torch.zeros(1), TEXT, ByChunks())
    with WorldMemory(tmp_path, Paging(sinks=1, recent=1, recalled=9), DENSE) as memory:
        parts = [remember(model, clip[:, :, at : at + 2], TEXT, memory, first=at) for at in range(0, 8, 2)]
    torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=0, atol=1e-5)


def rolled(model: DiT, folder: Path, paging: Paging, hybrid: Hybrid) -> tuple[list[Tensor], list[tuple[int, int, int]], int]:
    """Seven chunks, guided, the tiers of every layer after each, and how many pages were on disk at last."""
    guidance, chunks, tiers = ClassifierFree(Condition(torch.zeros(1, 4, 6)), 2.0), list[Tensor](), list[tuple[int, int, int]]()
    with WorldMemory(folder, paging, hybrid) as memory:
        for chunk in rollout(model, SHAPE, [TEXT] * 7, flow(2), memory, torch.Generator().manual_seed(3), guidance):
            assert not chunk.requires_grad
            chunks.append(chunk)
            tiers += memory.resident
        return chunks, tiers, len(list(folder.rglob("*.page")))


def test_where_pages_lie_changes_no_bit_and_no_tier_holds_too_many(model: DiT, tmp_path: Path) -> None:
    hybrid = Hybrid(share=0.1, masses=(0.7,), block=4)
    near, _, none = rolled(model, tmp_path / "near", Paging(sinks=1, recent=2, recalled=2, fast=50, host=50), hybrid)
    far, tiers, many = rolled(model, tmp_path / "far", Paging(sinks=1, recent=2, recalled=2, fast=6, host=1), hybrid)
    assert all(torch.equal(one, other) and one.isfinite().all() for one, other in zip(near, far, strict=True))
    assert max(fast for fast, _, _ in tiers) == 6 and max(host for _, host, _ in tiers) == 1
    # 14 pages of each layer and pass, of which 7 fit into memory
    assert max(disk for _, _, disk in tiers) >= 7
    assert none == 0 < many and not rooms(tmp_path / "near") + rooms(tmp_path / "far"), "pages go with their memory"


def rooms(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()]


TIGHT = Paging(sinks=1, recent=1, recalled=1, fast=4, host=1)
SPOT = Spot(Grid(1, 2, 4), 0, 1, torch.empty(1, 8, 8))


def alike(memory: WorldMemory, value: float) -> None:
    """Twelve frames, all of whose values are this one."""
    for frame in range(12):
        keys = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(frame))
        memory.writing("cond")(torch.zeros(1, 1, 8, 8), keys, torch.full((1, 1, 8, 8), value), SPOT)


def seen(memory: WorldMemory, value: float) -> Tensor:
    """What is read back, asked for the keys of each frame."""
    asked = [torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(frame)) for frame in range(12)]
    own = torch.full((1, 1, 8, 8), value)
    return torch.cat([memory.at(0, 1, "cond")(9 * query, query, own, SPOT) for query in asked])


def test_worlds_in_one_folder_read_their_own_pages(tmp_path: Path) -> None:
    with WorldMemory(tmp_path, TIGHT, DENSE) as one, WorldMemory(tmp_path, TIGHT, DENSE) as other:
        alike(one, 1.0)
        alike(other, 2.0)
        assert min(memory.resident[0][2] for memory in (one, other)) >= 7
        for memory, value in ((one, 1.0), (other, 2.0)):
            torch.testing.assert_close(seen(memory, value), torch.full((12, 1, 8, 8), value), rtol=0, atol=1e-5)


def test_pages_go_with_their_memory_and_those_of_a_crash_with_the_next_one(tmp_path: Path) -> None:
    """A process that dies lets go of its locks and removes nothing. What else lies in a folder is nobody's to remove."""
    crashed, strange = moved_in(tmp_path), tmp_path / "world-atlas"
    write_page(crashed.folder / "cond-0-0.page", (torch.ones(1, 1, 2, 4), torch.zeros(1, 1, 2, 4)))
    strange.mkdir()
    (strange / "map.txt").write_text("here")
    living, dropped = WorldMemory(tmp_path, TIGHT, DENSE), WorldMemory(tmp_path, TIGHT, DENSE)
    assert crashed.folder.is_dir() and len(rooms(tmp_path)) == 4, "its process lives yet"
    crashed.lock.release()
    alike(living, 1.0)
    alike(dropped, 1.0)
    del dropped
    assert len(rooms(tmp_path)) == 3, "nobody holds it any more"
    with WorldMemory(tmp_path, TIGHT, DENSE):
        assert not crashed.folder.exists() and len(rooms(tmp_path)) == 3
    with living:
        assert (seen(living, 1.0) - 1).abs().max() < 1e-5
    assert rooms(tmp_path) == [strange] and (strange / "map.txt").read_text() == "here"
    with pytest.raises(InputError, match="has ended"):
        living.at(0, 1, "cond")(*[torch.zeros(1, 1, 8, 8)] * 3, SPOT)


@pytest.mark.parametrize("index", ["bounds", "mean"])
def test_a_page_that_was_planted_is_found_again_from_disk(tmp_path: Path, index: Kind) -> None:
    """A hundred frames of noise, one of them like nothing else; much later its own key asks for it."""
    draw, grid = torch.Generator().manual_seed(4), Grid(1, 2, 4)
    spot, shape = Spot(grid, 0, 1, torch.empty(1, 8, 8)), (1, 1, 8, 8)
    planted, answer = 3 * torch.eye(8)[None, None], torch.full(shape, 5.0)
    paging = Paging(sinks=1, recent=2, recalled=1, fast=5, host=2, index=index)
    with WorldMemory(tmp_path, paging, DENSE) as memory:
        for frame in range(100):
            keys = planted if frame == 20 else 0.3 * torch.randn(shape, generator=draw)
            memory.writing("cond")(torch.zeros(shape), keys, answer if frame == 20 else torch.zeros(shape), spot)
        asked = (10 * planted, torch.zeros(shape), torch.zeros(shape), spot)
        found = memory.at(0, 1, "cond")(*asked)
        torch.testing.assert_close(found, answer, rtol=0, atol=0.05)
        # another request, or pass, knows nothing of it
        assert memory.at(0, 1, "uncond")(*asked).abs().max() == 0
        # reading wrote nothing, and reading ahead changes nothing
        memory.prefetch()
        assert torch.equal(memory.at(0, 1, "cond")(*asked), found)
        (kept, _) = memory.resident
        assert kept[0] <= 5 and kept[1] <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pages_come_back_from_disk_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    pair = (torch.randn(1, 2, 5, 8).to(dtype), torch.randn(1, 2, 10, 8)[:, :, ::2].to(dtype))
    write_page(tmp_path / "a.page", pair)
    for back, was in zip(read_page(tmp_path / "a.page"), pair, strict=True):
        assert back.dtype == dtype and torch.equal(back, was)


def test_damage_and_broken_writes_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, old = tmp_path / "a.page", (torch.ones(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))
    write_page(path, old)

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr("os.fsync", full)
        with pytest.raises(OSError, match="no space"):
            write_page(path, (old[1], old[0]))
    # what was there before is there still, as a whole
    assert torch.equal(read_page(path)[0], old[0])
    content = path.read_bytes()
    for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1]), b""):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="checksum"):
            read_page(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_page(tmp_path / "b.page")


def test_too_small_tiers_and_broken_pages_of_frames_are_refused(model: DiT, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="7 pages are read at one time"):
        Paging(fast=7)
    with WorldMemory(tmp_path, Paging(frames=3)) as memory, pytest.raises(InputError, match="2 frames are no whole pages of 3"):
        remember(model, torch.zeros(SHAPE), TEXT, memory)
