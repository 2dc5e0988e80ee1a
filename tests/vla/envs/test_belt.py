"""The belt: what is seen late, how hands close, and that the tasks can be done but not from one old picture."""

import torch
from torch import Tensor

from mmsdk.vla.envs.belt import CHUNK, HEIGHT, LIMIT, RATE, WIDTH, Episodes, Hands, draw, expert, picture


def episodes(cue: bool, n: int = 200, seed: int = 0) -> Episodes:
    return draw(torch.full((n,), cue), torch.Generator().manual_seed(seed))


def acted(drawn: Episodes) -> list[str]:
    hands = Hands(drawn)
    for _ in range(LIMIT):
        hands.apply(expert(hands))
    return hands.outcome


def test_the_expert_picks_the_right_thing_every_time() -> None:
    for cue in (False, True):
        assert set(acted(episodes(cue))) == {"picked"}


def test_a_hand_that_goes_where_the_camera_saw_the_thing_never_picks() -> None:
    drawn = episodes(cue=False)
    hands = Hands(drawn)
    for step in range(LIMIT):
        seen = drawn.at(torch.full_like(drawn.go, step - 8)).gather(1, drawn.wanted[:, None])[:, 0]
        lane = drawn.lane.gather(1, drawn.wanted[:, None])[:, 0]
        near = (seen - hands.place[:, 0]).abs() < 0.02
        close = torch.where((step >= drawn.go) & near, 1.0, -1.0)
        hands.apply(torch.stack((seen / 0.4, lane / 0.05, close), dim=1))
    assert "picked" not in hands.outcome and {"stalled", "missed"} & set(hands.outcome)


def test_the_camera_shows_what_was_a_third_of_a_second_ago() -> None:
    drawn, columns, looked = episodes(cue=False, n=50), torch.linspace(-0.5, 0.5, WIDTH), 0
    for step in (3, 40):
        for row, shown in enumerate((picture(drawn, step) + 1).sum((1, 2))):
            then = max(0, step - round(0.32 * RATE))
            where = float(drawn.place[row, drawn.wanted[row]] + (then - drawn.go[row]) / RATE * drawn.speed[row])
            if abs(where) < 0.4:
                looked += 1
                assert abs(float((shown * columns).sum() / shown.sum()) - where) < 0.003
    assert looked > 20 and picture(drawn, 0).shape == (50, 3, HEIGHT, WIDTH)


def test_the_lamp_shows_the_wanted_colour_and_is_out_before_anything_may_be_picked() -> None:
    drawn = episodes(cue=True)
    lamp = picture(drawn, 0)[:, :, HEIGHT - 4 :, :8].mean((2, 3))
    assert torch.equal(lamp[:, 0] > 0, drawn.wanted == 0) and torch.equal(lamp[:, 2] > 0, drawn.wanted == 1)
    first = int(drawn.go.min())
    assert first >= 30 and bool((picture(drawn, first)[:, :, HEIGHT - 4 :] == -1).all())
    assert bool((picture(episodes(cue=False), 0)[:, :, HEIGHT - 4 :] == -1).all())


def test_go_falls_on_decisions_and_on_each_of_the_three_alike() -> None:
    go = episodes(cue=False, n=3000).go
    assert bool((go % CHUNK == 0).all())
    share = torch.bincount(go // CHUNK % 3).float() / 3000
    assert float((share - 1 / 3).abs().max()) < 0.04


def one(speed: float = 0.2) -> Episodes:
    """A red thing on the upper lane and a blue one below, at the middle at step 0; the red one is wanted."""
    place, lane = torch.zeros(1, 2), torch.tensor([[0.05, -0.05]])
    there, wanted = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, dtype=torch.long)
    return Episodes(place, lane, there, torch.tensor([speed]), wanted, torch.ones(1, dtype=torch.bool), wanted)


def closed(x: float, y: float) -> str:
    """A hand that waits at (x, y) for 10 steps, then closes; the things are then 9.6 cm along."""
    hands = Hands(one())
    for step in range(LIMIT):
        action: Tensor = torch.tensor([[x / 0.4, y / 0.05, 1.0 if step >= 10 else -1.0]])
        hands.apply(action)
    return hands.outcome[0]


def test_how_a_hand_that_closes_ends() -> None:
    assert closed(0.096, 0.05) == "picked"
    assert closed(0.096 + 0.018, 0.05) == "picked"
    assert closed(0.096, -0.05) == "wrong"
    assert closed(0.096 + 0.04, 0.05) == "stalled"
    assert closed(0.096 - 0.1, 0.05) == "missed"
    assert closed(0.096, 0.0) == "missed"


def test_a_hand_goes_no_faster_than_it_can_and_stays_where_it_closed() -> None:
    hands = Hands(one())
    for _ in range(5):
        hands.apply(torch.tensor([[1.0, 1.0, -1.0]]))
    assert abs(float(torch.linalg.vector_norm(hands.place[0])) - 5 * 0.8 / RATE) < 1e-6
    assert hands.running.all() and not hands.closing.any()
    for _ in range(2):
        hands.apply(torch.tensor([[-1.0, -1.0, 1.0]]))
    place = hands.place.clone()
    hands.apply(torch.tensor([[1.0, 1.0, -1.0]]))
    assert torch.equal(hands.place, place) and not hands.running.any()
    assert hands.state()[0, 2] == 1 and hands.state()[0, 3] == 1
