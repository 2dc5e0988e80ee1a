"""Checkpoints: a run that goes on from one is the run in one piece, an older file is read, and a write that fails leaves what was there."""

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mmsdk.apps.interrupts import Stop
from mmsdk.apps.kept import resume, save, write
from mmsdk.errors import InputError


def begun() -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    student = nn.Linear(3, 2)
    return student, torch.optim.AdamW(student.parameters(), lr=0.1)


def step(student: nn.Linear, optimiser: torch.optim.Optimizer, number: int) -> None:
    loss = student(torch.randn(4, 3, generator=torch.Generator().manual_seed(number))).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def test_going_on_from_a_checkpoint_is_not_having_stopped(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    whole, optimiser = begun()
    step(whole, optimiser, 0)
    save(path, {"student": whole.state_dict()}, optimiser, {"step": "1", "recipe": "this"})
    step(whole, optimiser, 1)
    again, other = begun()
    parts, facts = resume(path, other, "this")
    again.load_state_dict(parts["student"])
    step(again, other, int(facts["step"]))
    assert torch.equal(whole.weight, again.weight) and torch.equal(whole.bias, again.bias)
    with pytest.raises(InputError, match="it was made by this, this is that"):
        resume(path, other, "that")


def test_a_step_among_the_tensors_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    student, optimiser = begun()
    save_file({"model.weight": student.weight.detach(), "average.model.weight": student.weight.detach() + 1, "step": torch.tensor(7)}, path)
    parts, facts = resume(path, optimiser)
    assert facts == {"step": "7"} and parts["model"].keys() == {"weight"} and parts["average"].keys() == {"model.weight"}


def test_a_checkpoint_that_lacks_what_going_on_needs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    student, optimiser = begun()
    save(path, {"student": student.state_dict()}, optimiser, {})
    with pytest.raises(InputError, match="checkpoint.safetensors: this checkpoint does not say its recipe; name another folder"):
        resume(path, optimiser, "this")
    _, facts = resume(path, optimiser)
    with pytest.raises(InputError, match="checkpoint.safetensors: this checkpoint does not say its step"):
        int(facts["step"])


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path, one = tmp_path / "tensors.safetensors", torch.arange(6.0)
    write(path, {"columns": one.view(2, 3).T})
    with pytest.raises(RuntimeError, match="share memory"):
        write(path, {"one": one, "other": one})
    assert torch.equal(load_file(path)["columns"], one.view(2, 3).T)


def test_the_first_ctrl_c_is_a_wish_and_the_second_one_an_order() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Stop() as stopping:
            assert not stopping.asked
            signal.raise_signal(signal.SIGINT)
            assert stopping.asked
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
