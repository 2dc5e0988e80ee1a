"""Training of DORA's actor: credits, shadows, odds, the closed loop and a resumed run, on a transformer that is small."""

import itertools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mmsdk.apps.train_dora import learn
from mmsdk.apps.train_dora.episodes import Episodes, block_flops, play
from mmsdk.apps.train_dora.learn import Loop, Recipe, advantages, rewards
from mmsdk.apps.train_dora.loop import World, export, train
from mmsdk.apps.train_dora.pictures import NAMES, Cells, Drawn, Probe, cells, cells_of_shard, divergence, fit, judged, recall
from mmsdk.apps.train_dora.policy import SURE, Drawing, draw, odds, plackett_luce
from mmsdk.apps.train_dora.pool import see
from mmsdk.apps.train_dora.score import Chance, row_flops, score
from mmsdk.apps.train_dora.warm import foretell, wanted
from mmsdk.apps.train_mini.features import Sample, Shard, cells_of
from mmsdk.apps.train_mini.scenes import Artist, Scene, Thing
from mmsdk.errors import InputError
from mmsdk.tokencomp.actor import Actor, ActorConfig
from mmsdk.tokencomp.methods.dora import DORA
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.prune import Pruning, View
from mmsdk.vision.vit import ViT, ViTConfig

WIDTH, DEPTH, SIDE = 24, 6, 42
CONFIG = ActorConfig(WIDTH, DEPTH, hidden=16)
BLOCKS = CONFIG.blocks


def vit_of() -> ViT:
    torch.manual_seed(0)
    vit = ViT(ViTConfig(width=WIDTH, layers=DEPTH, heads=3, hidden=48, grid=3)).eval().requires_grad_(False)
    for block in vit.blocks:
        torch.nn.init.normal_(block.qkv.weight, std=0.5)
    return vit


def actor_of(seed: int = 0, spread: float = 0.5) -> Actor:
    torch.manual_seed(seed)
    actor = Actor(CONFIG)
    for part in (actor.gate, actor.count, actor.rank):
        torch.nn.init.normal_(part.weight, std=spread)
    return actor


@dataclass(frozen=True)
class Noise:
    """Pictures by number, with names that their numbers give."""

    def __call__(self, numbers: range | list[int]) -> tuple[Tensor, Tensor]:
        pixels = [torch.randint(0, 256, (3, SIDE, SIDE), generator=torch.Generator().manual_seed(n), dtype=torch.uint8) for n in numbers]
        labels = torch.zeros(len(pixels), 7)
        for row, n in enumerate(numbers):
            labels[row, [n % 7, n * n % 7]] = 1.0
        return torch.stack(pixels), labels


def world_of(count: int = 12) -> World:
    vit, generator = vit_of(), torch.Generator().manual_seed(0)
    probe = fit(Cells(torch.randn(60, WIDTH, generator=generator), torch.arange(60) % 8), kinds=8, steps=40, batch=32)
    return World(vit, probe, see(vit, probe, Noise(), count, BLOCKS[0], fit=Preprocess(area=9)))


def episodes_of(world: World, actor: Actor, numbers: list[int], seed: int = 0) -> Episodes:
    return world.episodes(actor, numbers, 2, torch.Generator().manual_seed(seed))


def test_credits_add_up_to_the_fidelity_of_the_episode() -> None:
    world = world_of()
    episodes = episodes_of(world, actor_of(), list(range(12)))
    dense = world.pool.dense
    assert episodes.credit.shape == (12, len(BLOCKS)) and (episodes.fidelity[:, 0] == 0).all() and (episodes.fidelity < 1e-6).all()
    torch.testing.assert_close(episodes.credit.sum(1), -divergence(dense, episodes.final), rtol=1e-4, atol=1e-5)
    # where nothing is removed nothing is credited
    removed = torch.stack([drawing.remove for drawing in episodes.drawings], dim=1)
    assert (removed == 0).any() and (episodes.credit[removed == 0] == 0).all() and (episodes.credit[removed > 0] != 0).all()


def test_a_shadow_is_the_prefix_continued_with_no_further_pruning() -> None:
    """Each prefix of the same decisions, replayed by itself."""
    world, actor = world_of(), actor_of()
    numbers = [3, 0, 7, 5]
    episodes = episodes_of(world, actor, numbers)
    pool = world.pool.only(numbers)
    for steps in range(len(BLOCKS) + 1):
        calls = itertools.count()

        def decide(view: View, calls: "itertools.count[int]" = calls, steps: int = steps) -> tuple[Tensor, Drawing]:
            step = next(calls)
            drawing = episodes.drawings[step]
            if step >= steps:
                stays = torch.ones(len(view.stream), dtype=torch.bool)
                return stays, replace(drawing, remove=torch.zeros_like(drawing.remove))
            return replayed(view, drawing), drawing

        again = play(world.vit, world.probe, BLOCKS, decide, pool)
        torch.testing.assert_close(again.fidelity[:, -1], episodes.fidelity[:, steps], rtol=1e-3, atol=1e-5)
        if steps < len(BLOCKS):
            torch.testing.assert_close(episodes.before[:, steps], again.final, rtol=1e-3, atol=1e-4)


def replayed(view: View, drawing: Drawing) -> Tensor:
    """What stays by a decision's own account, token by token."""
    stays = torch.ones(len(view.stream), dtype=torch.bool)
    starts, pruning = view.rows.starts.tolist(), drawing.gate.nonzero()[:, 0].tolist()
    for order, row in zip(drawing.order.tolist(), pruning, strict=True):
        for place in order[: int(drawing.remove[row])]:
            stays[starts[row] + place] = False
    return stays


def test_operations_saved_add_up_to_those_of_the_lengths() -> None:
    world = world_of()
    episodes = episodes_of(world, actor_of(), list(range(12)))
    config, dense = world.vit.config, DEPTH * block_flops(world.vit.config, 10)
    for row in range(12):
        left, spent = 10, 0
        for block in range(DEPTH):
            if block in BLOCKS:
                left -= int(episodes.drawings[BLOCKS.index(block)].remove[row])
            spent += block_flops(config, left)
        assert left >= 3 and math.isclose(float(episodes.saved[row].sum()), 1 - spent / dense, rel_tol=1e-5, abs_tol=1e-7)


def test_plackett_luce_is_the_product_of_the_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, drawn = 3 * torch.randn(4, 6, generator=generator), torch.tensor([0, 1, 4, 6])
    for row, k in enumerate(drawn.tolist()):
        left, expected = logits[row].double().tolist(), 0.0
        for _ in range(k):
            expected += math.log(math.exp(left[0]) / sum(map(math.exp, left)))
            left.pop(0)
        assert math.isclose(float(plackett_luce(logits, drawn)[row]), expected, rel_tol=1e-4, abs_tol=1e-5)


def test_plackett_luce_of_all_orders_is_one() -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0])
    orders = torch.tensor(list(itertools.permutations(range(4), 4)))
    for k in (1, 2, 3):
        first = {tuple(order[:k]) for order in orders.tolist()}
        some = torch.tensor([[*f, *(i for i in range(4) if i not in f)] for f in first])
        total = plackett_luce(logits[some], torch.full((len(some),), k)).exp().sum()
        torch.testing.assert_close(total, torch.tensor(1.0))


def view_of(actor: Actor, lengths: tuple[int, ...] = (10, 10, 10, 10)) -> View:
    world, views = world_of(), list[View]()

    def decide(view: View) -> tuple[Tensor, Drawing]:
        views.append(view)
        return draw(actor, view, 2, torch.Generator().manual_seed(1))

    play(world.vit, world.probe, BLOCKS, decide, world.pool.only([0, 1, 2, 3]))
    return views[-1]


def test_the_odds_of_a_decision_are_the_sum_of_its_three_parts() -> None:
    """By hand from the actor's heads: how many and which count only where the row prunes; class tokens are never drawn."""
    actor = actor_of().requires_grad_(False)
    view = view_of(actor)
    generator = torch.Generator().manual_seed(4)
    both = set()
    for _ in range(16):
        stays, drawing = draw(actor, view, 2, generator)
        found = odds(actor, drawing).logp
        gate, count, context = actor(drawing.brief)
        keep, starts, pruning = actor.which(drawing.brief, context), view.rows.starts.tolist(), drawing.gate.nonzero()[:, 0].tolist()
        for row in range(4):
            p = (1 - SURE) + (2 * SURE - 1) * float(gate[row].sigmoid())
            expected = math.log(p if drawing.gate[row] else 1 - p)
            both.add(bool(drawing.gate[row]))
            if drawing.gate[row]:
                expected += float(count[row].log_softmax(0)[drawing.choice[row]])
                order = drawing.order[pruning.index(row)].tolist()[: int(drawing.remove[row])]
                left = {place: -float(keep[starts[row] + place]) for place in range(1, view.rows.lengths[row])}
                for place in order:
                    expected += left[place] - math.log(sum(map(math.exp, left.values())))
                    del left[place]
            assert math.isclose(float(found[row]), expected, rel_tol=1e-4, abs_tol=1e-4)
        assert torch.equal(stays, replayed(view, drawing)) and stays[view.rows.starts].all()
    assert both == {True, False}


def test_draws_come_as_often_as_their_odds_say() -> None:
    """One token of three, many times: Gumbel noise gives the softmax of the removal logits."""
    actor, view = actor_of(spread=0.0), view_of(actor_of())
    with torch.no_grad():
        actor.gate.bias.fill_(20.0)
        actor.count.bias.copy_(torch.tensor([0, 0, 0, 0, 0, 0, 50.0]))
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(len(view.stream))
    tries = 300
    for _ in range(tries):
        stays, drawing = draw(actor, view, view.rows.lengths[0] - 2, generator)
        counts += (~stays).float()
    _, _, context = actor(drawing.brief)
    keep = actor.which(drawing.brief, context).detach()
    n = view.rows.lengths[0]
    torch.testing.assert_close(counts[1:n] / tries, (-keep[1:n]).softmax(0), rtol=0.0, atol=0.1)


@pytest.mark.parametrize(("drop", "dearer"), [(5.0, True), (0.0, False)])
def test_a_loss_above_the_target_raises_lambda_and_one_below_lowers_it(drop: float, dearer: bool) -> None:
    loop = Loop(target=1.0, price=2.0, drop=1.0)
    after = loop.after(drop)
    assert (after.price > 2.0) == dearer
    assert math.isclose(after.drop, 0.9 + 0.1 * drop) and math.isclose(after.price, 2.0 * math.exp(0.1 * (after.drop - 1.0)))


def test_lambda_stays_within_its_bounds() -> None:
    high, low = Loop(price=999.0, drop=100.0), Loop(price=0.1001, drop=-100.0)
    assert high.after(100.0).price == 1e3 and low.after(-100.0).price == 0.1


def test_advantages_are_traced_sums_of_surprises() -> None:
    generator = torch.Generator().manual_seed(0)
    reward, value = torch.randn(2, 3, 5, generator=generator).unbind(0)
    found, returns = advantages(reward, value, 0.9)
    for row in range(3):
        for j in range(5):
            surprises = [reward[row, i] + (value[row, i + 1] if i < 4 else 0.0) - value[row, i] for i in range(5)]
            expected = sum(0.9 ** (i - j) * surprises[i] for i in range(j, 5))
            torch.testing.assert_close(found[row, j], expected)
            torch.testing.assert_close(returns[row, j], expected + value[row, j])
    whole, _ = advantages(reward, torch.zeros_like(value), 1.0)
    torch.testing.assert_close(whole[:, 0], reward.sum(1))


def test_a_reward_is_what_is_saved_and_the_credit_at_its_price() -> None:
    world = world_of()
    episodes = episodes_of(world, actor_of(), list(range(12)))
    torch.testing.assert_close(rewards(episodes, 3.0), episodes.saved + 3.0 * episodes.fidelity.diff(dim=1))


def test_updates_make_rewarded_decisions_more_probable() -> None:
    """Reward is for removing anything, then for removing nothing: the gates follow."""
    world = world_of()
    for sign in (1.0, -1.0):
        actor = actor_of(spread=0.1)
        inputs = 2 * CONFIG.width + 2 + 2 * 7 + 3
        critic = learn.Critic(inputs)
        optimiser = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=3e-3)
        rates = []
        for step in range(9):
            episodes = episodes_of(world, actor, list(range(12)), step)
            known = learn.privileged(episodes, world.pool.cls, world.pool.labels, 1.0)
            removed = torch.stack([drawing.gate for drawing in episodes.drawings], dim=1).float()
            rates.append(float(removed.mean()))
            learn.improve(actor, critic, optimiser, episodes, known, sign * removed, Recipe())
        assert sign * (sum(rates[-3:]) - sum(rates[:3])) > 0.3


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    world, recipe = world_of(), Recipe(updates=4, rows=5, least=2, epochs=2)
    results = []
    for folder, stops in (("once", (None,)), ("twice", (1, 2, None))):
        (tmp_path / folder).mkdir()
        for stop in stops:
            actor = actor_of()
            done, loop = train(world, actor, recipe, tmp_path / folder, stop)
        results.append(((done, loop), actor.state_dict(), load_file(tmp_path / folder / "checkpoint.safetensors")))
    (one, first, saved), (two, second, resaved) = results
    assert (
        one == two
        and one[0] == 4
        and all(torch.equal(first[k], second[k]) for k in first)
        and all(torch.equal(saved[k], resaved[k]) for k in saved)
    )
    assert not torch.equal(first["summary.weight"], actor_of().state_dict()["summary.weight"])
    log = [json.loads(line) for line in (tmp_path / "twice" / "log.jsonl").read_text().splitlines()]
    assert [line["update"] for line in log] == [1, 2, 3, 4] and all(0 <= line["saved"] < 1 for line in log)


def test_a_run_goes_on_with_the_settings_that_it_began_with(tmp_path: Path) -> None:
    """The one that differs is named, and nothing is written; how long it is to be may change."""
    world, recipe = world_of(), Recipe(updates=2, rows=5, least=2, epochs=1)
    train(world, actor_of(), recipe, tmp_path, 1)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    freer = Actor(replace(CONFIG, drop=2.0))
    for told, given, actor, changed in (
        ("rows 5, and this is 6", world, actor_of(), replace(recipe, rows=6)),
        ("seed 0, and this is 1", world, actor_of(), replace(recipe, seed=1)),
        ("rank_lr 0.0001, and this is 0.01", world, actor_of(), replace(recipe, rank_lr=0.01)),
        ("actor's drop 1.0, and this is 2.0", world, freer, recipe),
        ("pictures 12, and this is 11", world_of(11), actor_of(), recipe),
    ):
        with pytest.raises(InputError, match=told):
            train(given, actor, changed, tmp_path)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before
    done, _ = train(world, actor_of(), replace(recipe, updates=3), tmp_path)
    assert done == 3


def test_too_few_pictures_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="32 pictures make an update, and the pool has 12"):
        train(world_of(), actor_of(), Recipe(), tmp_path)


def test_what_is_exported_is_what_runs(tmp_path: Path) -> None:
    actor = actor_of()
    export(tmp_path / "actor.safetensors", actor, "a test")
    by = DORA(actor=str(tmp_path / "actor.safetensors"), least=2)
    agent = by.agent(torch.zeros(1, 10, WIDTH), DEPTH, 1, 9, False)
    assert agent.blocks == BLOCKS and all(
        torch.equal(v.half().float(), agent.actor.state_dict()[k])
        for k, v in actor.state_dict().items()  # type: ignore[attr-defined]
    )


def test_chance_costs_what_the_actor_costs(tmp_path: Path) -> None:
    vit = vit_of()
    export(tmp_path / "actor.safetensors", actor_of(), "a test")
    by = DORA(actor=str(tmp_path / "actor.safetensors"), least=2)
    x = Preprocess(area=9)(Noise()(range(6))[0])
    out = vit(x, shortening=Pruning(by, 9, False))
    other = vit(x, shortening=Pruning(Chance(by, torch.Generator().manual_seed(0)), 9, False))
    # until the first deletion both see the same, and remove as many
    first = [int((groups.ran[0] * DEPTH).round().min()) for groups in (out.groups, other.groups)]
    assert first[0] == first[1] and not torch.equal(out.groups.owner, other.groups.owner)
    share = row_flops(vit.config, out.groups, None)
    price = [block_flops(vit.config, n) for n in range(11)]
    embedding = 2 * 9 * 3 * 14 * 14 * WIDTH
    for row in range(6):
        ran = (out.groups.ran[row] * DEPTH).round().tolist()
        spent = embedding + sum(price[1 + sum(r > block for r in ran)] for block in range(DEPTH))
        assert math.isclose(float(share[row]), spent / (embedding + DEPTH * price[10]), rel_tol=1e-5)
    assert (row_flops(vit.config, vit(x).groups, None) == 1).all()
    assert (row_flops(vit.config, out.groups, actor_of()) > share).all()


def test_an_actor_of_the_default_size_is_below_a_hundredth_of_its_transformer() -> None:
    config, actor = ViTConfig(), Actor()
    assert len(actor.config.blocks) * actor.flops(257) < 0.011 * config.layers * block_flops(config, 257)
    assert sum(p.numel() for p in actor.parameters()) < 150_000


def test_recall_is_the_share_of_names_among_as_many_most_probable() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    labels = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    assert recall(logits, labels).tolist() == [0.5, 1.0]


def test_divergence_is_the_sum_over_names() -> None:
    p, q = torch.tensor([[0.2, 0.9]]), torch.tensor([[0.5, 0.6]])
    expected = sum(a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)) for a, b in ((0.2, 0.5), (0.9, 0.6)))
    torch.testing.assert_close(divergence(p.logit(), q.logit()), torch.tensor([expected]))


def test_the_probe_tells_a_picture_by_its_best_patch() -> None:
    """Trained on patches of four directions, the last of them nothing; a picture has a name as surely as one of its patches."""
    generator, directions = torch.Generator().manual_seed(0), 4 * torch.eye(4, 6)
    name = torch.arange(400) % 4
    probe = fit(Cells(directions[name] + 0.3 * torch.randn(400, 6, generator=generator), name), kinds=4, steps=200, batch=64)
    picture = directions[torch.tensor([[3, 0, 3, 2], [3, 3, 1, 1]])]
    there = torch.tensor([[True, True, True, False], [True] * 4])
    logits = probe(picture, there)
    assert (logits > 0).tolist() == [[True, False, False], [False, True, False]], "what stands behind a shorter row is not there"
    odds_of = (picture[0, 1] - probe.mean) / probe.scale @ probe.weight.T + probe.bias
    assert float(logits[0, 0]) == pytest.approx(float(odds_of[0] - odds_of[[1, 2, 3]].logsumexp(0)), abs=1e-3)


def test_the_which_begins_with_what_the_probe_will_find() -> None:
    world, actor = world_of(), actor_of(spread=0.0)
    goal = wanted(world.pool.evidence)
    torch.testing.assert_close(goal.std(dim=1), torch.full((12,), 3.0))
    assert goal.mean(dim=1).abs().max() < 1e-5
    first = foretell(world.vit, actor, world.pool, 0, passes=20, batch=6, rate=1e-2)
    assert foretell(world.vit, actor, world.pool, 0, passes=20, batch=6, rate=1e-2) < first < 1.0


def test_a_pool_is_what_the_transformer_does_and_is_read_back(tmp_path: Path) -> None:
    world, path = world_of(), tmp_path / "pool.safetensors"
    out = world.vit(Preprocess(area=9)(Noise()(range(12))[0]))
    torch.testing.assert_close(world.pool.dense, judged(world.probe, out), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(world.pool.cls, out.cls[:, 0], rtol=1e-4, atol=1e-4)
    for pictures in (Noise(), Noise()):
        pool = see(world.vit, world.probe, pictures, 3, BLOCKS[0], path, "three", Preprocess(area=9))
        torch.testing.assert_close(pool.stream, world.pool.stream[:3], rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="three"):
        see(world.vit, world.probe, Noise(), 3, BLOCKS[0], path, "four", Preprocess(area=9))


def test_scenes_are_square_named_and_scored(emoji: Path, photos: Path, tmp_path: Path) -> None:
    drawn = Drawn(Artist(emoji, photos, held_out=True), 5)
    pixels, labels = drawn(range(3))
    assert pixels.shape == (3, 3, 224, 224) and torch.equal(pixels[2:], drawn([2])[0]) and (labels.sum(1) >= 1).all()
    vit = vit_of()
    found, again = (cells(tmp_path / "cells.safetensors", vit, drawn, 3) for _ in range(2))
    assert torch.equal(found.states, again.states) and torch.equal(found.name, again.name)
    assert {NAMES[n] for n in found.name.unique().tolist() if n < len(NAMES)} == {NAMES[n] for n in labels.sum(0).nonzero()[:, 0].tolist()}
    export(tmp_path / "actor.safetensors", actor_of(), "a test")
    probe = Probe(torch.zeros(WIDTH), torch.ones(WIDTH), torch.randn(len(NAMES) + 1, WIDTH), torch.zeros(len(NAMES) + 1))
    rows = score(vit, probe, drawn, 3, DORA(actor=str(tmp_path / "actor.safetensors")), shares=(0.25,), batch=2)
    assert [(row["method"], row["budget"]) for row in rows] == [
        ("whole", "-"), ("dora", "adaptive"), ("random", "adaptive"), ("dora", "0.25"), ("random", "0.25")
    ]  # fmt: skip
    assert rows[0]["flops"] == rows[0]["kept"] == 1 and rows[3]["kept"] == rows[4]["kept"] == 0.25
    assert all(row["n"] == 3 and row["flops"] < 1.02 for row in rows[1:])


def test_cells_of_a_shard_are_its_things_and_some_of_nothing() -> None:
    things = (Thing("dog", "", "object", 0.2, 0.2, 0.2, 0.2), Thing("circle", "red", "shape", 0.8, 0.8, 0.2, 0.2))
    sample = Sample(Scene(np.zeros((0, 0, 3), np.uint8), things), None)
    features = torch.randn(2, 49, 6).half()
    shard = Shard((sample, sample), features, torch.full((2,), 49), torch.tensor([[1, 7, 7]] * 2))
    found = cells_of_shard(shard, 4)
    on = cells_of(sample, (1, 7, 7))
    assert len(found.name) == 2 * (len(on) + 24) and (found.name == len(NAMES)).sum() == 48 and found.states.shape[1] == 4
    dogs = [cell for cell, thing in on if thing.name == "dog"]
    assert torch.equal(found.states[: len(on)][found.name[: len(on)] == NAMES.index("dog")], features[0, dogs, :4])
