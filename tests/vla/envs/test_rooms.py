"""Rooms with pillars: what is seen is what geometry says, and the guide finds the way."""

import math

import torch

from mmsdk.vla.envs.rooms import BEFORE, LIMIT, WIDTH, WITHIN, Rooms, Walkers, draw, guide


def one(along: float, aside: float, radius: float) -> Walkers:
    """A walker at the origin that looks along x; a red pillar, the others far behind."""
    place = torch.tensor([[[along, aside], [-9.0, 0], [-9.0, 3], [-9.0, 6], [-9.0, 9]]])
    return Walkers(Rooms(place, torch.tensor([[radius, 0.1, 0.1, 0.1, 0.1]]), torch.tensor([0]), torch.zeros(1, 2), torch.zeros(1)))


def test_a_pillar_is_as_wide_in_the_picture_as_its_thickness_and_distance_say() -> None:
    for along, aside, radius in ((2.0, 0.0, 0.3), (3.0, 1.0, 0.5), (1.5, -0.5, 0.12)):
        seen = one(along, aside, radius).look()[0, 0] > 0
        middle, half = math.atan2(aside, along), math.asin(radius / math.hypot(along, aside))
        angles = math.radians(90) * (0.5 - (torch.arange(WIDTH) + 0.5) / WIDTH)
        assert torch.equal(seen, (angles - middle).abs() < half)


def test_the_nearer_pillar_hides_the_farther_one_and_from_inside_all_is_its_colour() -> None:
    walkers = one(1.0, 0.0, 0.3)
    walkers.rooms.place[0, 1] = torch.tensor([3.0, 0.0])
    middle = walkers.look()[0, :, WIDTH // 2]
    assert middle[0] > 0.5 and middle[1] < 0
    walkers.place[0] = torch.tensor([1.0, 0.0])
    assert bool((walkers.look()[0, 0] > 0.5).all())


def test_the_guide_stops_near_the_goal_in_every_room() -> None:
    walkers = Walkers(draw(200, torch.Generator().manual_seed(0)))
    for _ in range(LIMIT):
        walkers.apply(guide(walkers))
    assert bool((walkers.stopped & walkers.near).all())
    assert float((walkers.distance - BEFORE).abs().max()) < WITHIN


def test_who_is_too_close_is_led_through_the_pillar_and_stops_behind_it() -> None:
    walkers = one(0.4, 0.0, 0.3)
    assert not bool(walkers.near)
    for _ in range(LIMIT):
        walkers.apply(guide(walkers))
    assert bool(walkers.stopped & walkers.near) and float(walkers.place[0, 0]) > 1.0


def test_no_width_in_the_picture_is_right_for_pillars_of_all_thicknesses() -> None:
    """The same picture, of a thin pillar and of a thick one: one of them is where STOP is right."""
    thin, thick = one(0.55, 0.0, 0.15), one(1.1, 0.0, 0.3)
    assert torch.equal(thin.look()[0, 0] > 0, thick.look()[0, 0] > 0)
    assert not bool(thin.near) and bool(thick.near)


def test_who_begins_anew_is_elsewhere_and_the_others_go_on() -> None:
    walkers, fresh = Walkers(draw(4, torch.Generator().manual_seed(0))), draw(4, torch.Generator().manual_seed(1))
    walkers.apply(torch.tensor([0, 1, 1, 2]))
    before, which = walkers.place.clone(), torch.tensor([True, False, True, False])
    walkers.renew(which, fresh)
    assert torch.equal(walkers.place[which], fresh.start[which]) and torch.equal(walkers.place[~which], before[~which])
    assert torch.equal(walkers.rooms.place[which], fresh.place[which]) and not bool(walkers.stopped.any())
