"""Weights moved to large pages: the same objects, the same numbers, tied where they were."""

import copy
import sys

import pytest
import torch
from torch import nn

from mmsdk.decoder.large_pages import LEAST, Room, settle


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(512, 64), requires_grad=False)
        self.head = nn.Parameter(self.table.detach(), requires_grad=False)
        self.wide = nn.Parameter(torch.randn(4, 3, 1000).bfloat16())
        self.turned = nn.Parameter(torch.randn(64, 512).T)
        self.small = nn.Parameter(torch.randn(7))
        self.register_buffer("codes", torch.randint(0, 255, (300, 111), dtype=torch.uint8))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's pages")
def test_tensors_keep_their_identity_and_their_numbers() -> None:
    module = Tied()
    before, names = copy.deepcopy(module.state_dict()), dict(module.named_parameters()) | dict(module.named_buffers())
    places = {name: tensor.data_ptr() for name, tensor in names.items()}
    settle(module)
    after = dict(module.named_parameters()) | dict(module.named_buffers())
    assert all(after[name] is tensor for name, tensor in names.items())
    assert all(torch.equal(after[name], tensor) and after[name].stride() == tensor.stride() for name, tensor in before.items())
    moved = {name for name, tensor in after.items() if tensor.data_ptr() != places[name]}
    assert moved == {"table", "head", "wide", "codes"}
    assert module.table.data_ptr() == module.head.data_ptr()
    assert all(after[name].data_ptr() % 64 == 0 and after[name].nbytes >= LEAST for name in moved)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's pages")
def test_each_has_a_storage_of_its_own_and_may_be_copied_and_written_to() -> None:
    module = Tied()
    settle(module)
    assert module.wide.untyped_storage().nbytes() == module.wide.nbytes
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.wide.zero_()
        module.codes.fill_(7)
    assert module.wide.any()
    assert (twin.codes != 7).any()


def test_small_weights_and_none_at_all_are_left_alone() -> None:
    small = nn.Linear(4, 4)
    before = small.weight.data_ptr()
    settle(nn.Sequential(nn.Identity(), small))
    assert small.weight.data_ptr() == before


def test_a_room_gives_places_that_do_not_overlap_and_stay_where_they_are() -> None:
    shapes = [(300, 70), (5,), (0, 3), (128, 64)]
    room = Room(sum(Room.needed(shape, torch.bfloat16) for shape in shapes))
    tensors = [room.take(shape, torch.bfloat16).fill_(number) for number, shape in enumerate(shapes)]
    assert all(
        (tensor == number).all() and tensor.shape == shape for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True))
    )
    assert room.holds(tensors[0])
    assert not room.holds(torch.empty(3))
    module = nn.Linear(70, 300, bias=False)
    module.weight.data = tensors[0]
    settle(module, room)
    assert module.weight.data_ptr() == tensors[0].data_ptr()
