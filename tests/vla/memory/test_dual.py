"""The schedule of slow and fast steps: who reads what, in which order, and what is forgotten; any of our heads behind it."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError, ModelError
from mmsdk.kv.parts import Part, whole
from mmsdk.kv.read import ReadCache
from mmsdk.kv.selection import BlockLayout, Selection
from mmsdk.stages import Context
from mmsdk.vla.heads.expert import ExpertConfig
from mmsdk.vla.heads.flow import FlowNetwork, euler, noise_of
from mmsdk.vla.heads.pi0 import Pi0, Pi0Config
from mmsdk.vla.heads.smolvla import SmolVLA, SmolVLAConfig
from mmsdk.vla.memory.dual import DualMemory, MemoryConfig, Turn, laid
from mmsdk.vla.memory.encode import encode
from mmsdk.vla.memory.expert import DualConfig, DualExpert, Watched
from mmsdk.vla.memory.refine import Refiner, RefinerConfig
from mmsdk.vla.memory.scores import Tally

Fill = Callable[[nn.Module, int], dict[str, Tensor]]
Moment = tuple[Tensor, Tensor, Tensor, Tensor]
FULL = Selection(ratio=1.0)
HALF = Selection(tokens=4, reserve=1)
NOISE = noise_of(6, (2, 4, 3))
STATE = noise_of(7, (2, 5))


@pytest.fixture(scope="module")
def refiner(decoder: Decoder, layout: BlockLayout, fill: Fill) -> Refiner:
    made = Refiner(decoder.config, layout, RefinerConfig(sight=32, width=16, layers=1, heads=2, inner=24, queries=3))
    made.load_state_dict(fill(made, 4))
    return made.eval()


@pytest.fixture(scope="module")
def expert(fill: Fill) -> DualExpert:
    made = DualExpert(DualConfig(ExpertConfig(16, 3, 4, 2, 8, 24), chunk=4, action_dim=3, state_dim=5))
    made.load_state_dict(fill(made, 5))
    return made.eval()


def act(memory: DualMemory, turn: Turn, expert: DualExpert, steps: int = 2) -> Tensor:
    tally = Tally()
    actions = euler(expert.watched(turn.context, STATE, tally), NOISE, steps)
    memory.close(turn, tally)
    return actions


def keys_of(turn: Turn, layer: int = 2) -> Tensor:
    return turn.context.cache.view(layer).keys


def test_a_slow_step_reads_at_most_three_blocks_and_the_new_one(
    decoder: Decoder, refiner: Refiner, layout: BlockLayout, moments: list[Moment]
) -> None:
    memory, blocks = DualMemory(decoder, refiner, MemoryConfig(selection=FULL)), list[Part]()
    for number, moment in enumerate(moments):
        turn = memory.slow(75.0 * number, *moment)
        with torch.no_grad():
            encoded = encode(decoder, *laid(decoder, layout, *moment), blocks[-3:], 75.0 * number)
        blocks.append(whole(encoded.block))
        assert len(memory.slow_queue) == min(number + 1, 4)
        expected = ReadCache.of(blocks[-4:], decoder.rotation)
        for layer in range(3):
            view = turn.context.cache.view(layer)
            assert torch.equal(view.keys, expected.view(layer).keys) and torch.equal(view.values, expected.view(layer).values)
        assert turn.context.cache.position.tolist() == [min(number + 1, 4) * 9, min(number + 1, 4) * 6]
    assert torch.equal(turn.context.hidden[0], encoded.hidden[0, 8]) and torch.equal(turn.context.hidden[1], encoded.hidden[1, 9])


def test_fast_steps_read_fast_history_alone_and_edit_the_slow_anchor(decoder: Decoder, refiner: Refiner, moments: list[Moment]) -> None:
    memory = DualMemory(decoder, refiner, MemoryConfig(period=75.0, selection=FULL))
    memory.slow(0.0, *moments[0])
    memory.slow(75.0, *moments[1])
    anchor = memory.slow_queue.entries[-1].block
    refined = []
    for number in (1, 2, 3):
        sight, present = moments[1 + number][:2]
        turn = memory.fast(75.0 + 25 * number, sight, present)
        with torch.no_grad():
            delta = torch.full((2,), min(25 * number / 75, 1.0))
            refined.append(whole(refiner(anchor, sight, present, delta)))
        assert torch.equal(keys_of(turn), ReadCache.of(refined[-2:], decoder.rotation).view(2).keys)
        assert len(turn.parts) == min(number, 2) and turn.consumer == "fast"
    # after a slow step the fast history is empty, and the slow one has never seen a refined block
    turn = memory.slow(150.0, *moments[5])
    assert len(turn.parts) == 3 and turn.parts[1].block is anchor
    assert len(memory.fast_queue) == 0
    assert len(memory.fast(175.0, *moments[4][:2]).parts) == 1


def test_a_late_vlm_update_counts_as_one_period(decoder: Decoder, refiner: Refiner, moments: list[Moment]) -> None:
    views = []
    for time in (75.0, 500.0):
        memory = DualMemory(decoder, refiner, MemoryConfig(period=75.0))
        memory.slow(0.0, *moments[0])
        views.append(keys_of(memory.fast(time, *moments[1][:2])))
    assert torch.equal(*views)


def test_scores_of_the_three_consumers_follow_what_each_looked_at(
    decoder: Decoder, refiner: Refiner, expert: DualExpert, layout: BlockLayout, moments: list[Moment]
) -> None:
    memory = DualMemory(decoder, refiner, MemoryConfig(selection=HALF))
    act(memory, memory.slow(0.0, *moments[0]), expert)
    first = memory.slow_queue.entries[0]
    assert set(first.scores) == {"prefill", "slow"} and not torch.allclose(first.score("prefill"), first.score("slow"))
    turn = memory.fast(25.0, *moments[1][:2])
    tally = Tally()
    euler(expert.watched(turn.context, STATE, tally), NOISE, 3)
    memory.close(turn, tally)
    assert memory.slow_queue.entries[0] is first
    fast = memory.fast_queue.entries[0].score("fast")
    valid = turn.parts[0].valid
    torch.testing.assert_close(fast, (0.8 * tally.mean()).masked_fill(~valid, 0))
    turn = memory.slow(75.0, *moments[2])
    # what is read follows the scores as they were before this step, and differs between the VLM and the expert
    index = HALF.index(first.score("slow").amax(0), first.block.valid, layout)
    assert torch.equal(turn.parts[0].index, index)
    unread = torch.ones(2, layout.slots, dtype=torch.bool).scatter(1, index, value=False)
    act(memory, turn, expert)
    second = memory.slow_queue.entries[0].score("slow")
    assert torch.equal(second[:, unread], first.score("slow")[:, unread])
    assert not torch.allclose(second[:, ~unread], first.score("slow")[:, ~unread])


def test_the_tally_is_the_mean_over_heads_queries_and_steps(
    decoder: Decoder, refiner: Refiner, expert: DualExpert, moments: list[Moment]
) -> None:
    memory, tally, weights = DualMemory(decoder, refiner, MemoryConfig()), Tally(), []
    turn = memory.slow(0.0, *moments[0])

    def watch(layer: int, query: Tensor, view: object, key: Tensor, mask: object) -> None:
        tally(layer, query, view, key, mask)  # type: ignore[arg-type]
        if layer == 1:
            keys = torch.cat((turn.context.cache.view(1).keys, key), dim=2)
            for row in range(2):
                among = [i for i in range(10) if turn.parts[0].valid[row, i]]
                for head in range(4):
                    for place in range(5):
                        # the state sees itself, actions all of the suffix
                        seen = [*among, *range(10, 11 if place == 0 else 15)]
                        share = (keys[row, head // 2, seen] @ query[row, head, place] / math.sqrt(8)).softmax(0)
                        full = torch.zeros(15)
                        full[seen] = share
                        weights.append((row, full[:10]))

    euler(expert.watched(turn.context, STATE, watch), NOISE, 2)
    for row in range(2):
        expected = torch.stack([share for at, share in weights if at == row]).mean(0)
        torch.testing.assert_close(tally.mean()[1, row], expected, atol=1e-6, rtol=1e-4)


def test_a_view_stays_as_it_is_while_its_flow_is_solved_and_after(
    decoder: Decoder, refiner: Refiner, expert: DualExpert, moments: list[Moment]
) -> None:
    memory, t = DualMemory(decoder, refiner, MemoryConfig(selection=HALF)), torch.full((2, 1), 0.5)
    act(memory, memory.slow(0.0, *moments[0]), expert)
    turn = memory.slow(75.0, *moments[1])
    with torch.no_grad():
        velocity = expert.velocity(turn.context, STATE)
        before = velocity(NOISE, t)
        act(memory, turn, expert)
        memory.slow(150.0, *moments[2])
        assert torch.equal(velocity(NOISE, t), before)


def test_a_reset_forgets_everything(decoder: Decoder, refiner: Refiner, expert: DualExpert, moments: list[Moment]) -> None:
    memory = DualMemory(decoder, refiner, MemoryConfig(selection=HALF))

    def episode() -> list[Tensor]:
        first = act(memory, memory.slow(0.0, *moments[0]), expert)
        second = act(memory, memory.fast(25.0, *moments[1][:2]), expert)
        return [first, second, act(memory, memory.slow(75.0, *moments[2]), expert)]

    before = episode()
    memory.reset()
    assert not memory.started and memory.nbytes == 0
    with pytest.raises(InputError, match="first step of an episode is a slow one"):
        memory.fast(0.0, *moments[0][:2])
    assert all(torch.equal(a, b) for a, b in zip(before, episode(), strict=True))


def test_memory_stays_within_its_bound(decoder: Decoder, refiner: Refiner, layout: BlockLayout, moments: list[Moment]) -> None:
    memory = DualMemory(decoder, refiner, MemoryConfig(selection=HALF))
    for number in range(30):
        if number % 3:
            memory.fast(25.0 * number, *moments[number % 6][:2])
        else:
            memory.slow(25.0 * number, *moments[number % 6])
    # 6 blocks of 3 layers, 2 rows, 2 heads, 10 slots, 8 numbers, keys and values, in float32
    assert memory.nbytes == 6 * 3 * 2 * 2 * 10 * 8 * 2 * 4


def test_ablations_are_the_queues_and_the_fast_path_switched_off(decoder: Decoder, refiner: Refiner, moments: list[Moment]) -> None:
    config = MemoryConfig(selection=FULL)
    assert config.ablated("dual") == config
    parts = {}
    for condition in ("none", "slow", "fast", "dual"):
        memory = DualMemory(decoder, refiner, config.ablated(condition))
        memory.slow(0.0, *moments[0])
        slow = memory.slow(75.0, *moments[1])
        fast = memory.fast(100.0, *moments[2][:2])
        parts[condition] = len(slow.parts), fast is slow
    assert parts == {"none": (1, True), "slow": (2, True), "fast": (1, False), "dual": (2, False)}


def test_rows_are_independent(decoder: Decoder, refiner: Refiner, expert: DualExpert, moments: list[Moment]) -> None:
    def run(rows: slice) -> Tensor:
        memory = DualMemory(decoder, refiner, MemoryConfig(selection=HALF))
        found = []
        for number, moment in enumerate(moments):
            cut: Moment = tuple(part[rows] for part in moment)
            turn = memory.fast(25.0 * number, *cut[:2]) if number % 3 else memory.slow(25.0 * number, *cut)
            tally = Tally()
            found.append(euler(expert.watched(turn.context, STATE[rows], tally), NOISE[rows], 2))
            memory.close(turn, tally)
        return torch.stack(found)

    together = run(slice(0, 2))
    for row in range(2):
        torch.testing.assert_close(together[:, row], run(slice(row, row + 1))[:, 0], atol=1e-5, rtol=1e-4)


def test_every_head_of_ours_reads_the_memory(decoder: Decoder, refiner: Refiner, fill: Fill, moments: list[Moment]) -> None:
    memory = DualMemory(decoder, refiner, MemoryConfig(selection=HALF))
    memory.slow(0.0, *moments[0])
    turn = memory.slow(75.0, *moments[1])
    shape = ExpertConfig(16, 3, 4, 2, 8, 24)
    networks = Pi0(Pi0Config(shape, chunk=4, action_dim=3, state_dim=5)), SmolVLA(decoder, SmolVLAConfig(shape, 32, 2, 4, 3, 5))
    for network in networks:
        network.load_state_dict(fill(network, 2))
        before = keys_of(turn).clone()
        with torch.no_grad():
            found = euler(network.velocity(turn.context, STATE), NOISE, 2)
            alone = euler(network.velocity(memory_less(decoder, refiner, moments[1]), STATE), NOISE, 2)
        assert found.isfinite().all() and not torch.allclose(found, alone, atol=1e-3)
        assert torch.equal(keys_of(turn), before)


def memory_less(decoder: Decoder, refiner: Refiner, moment: Moment) -> Context:
    return DualMemory(decoder, refiner, MemoryConfig().ablated("none")).slow(0.0, *moment).context


def test_the_expert_is_pi05s_with_a_state_token_by_hand(
    decoder: Decoder, refiner: Refiner, expert: DualExpert, moments: list[Moment]
) -> None:
    turn = DualMemory(decoder, refiner, MemoryConfig(selection=FULL)).slow(0.0, *moments[0])
    with torch.no_grad():
        found = expert.velocity(turn.context, STATE)(NOISE, torch.full((2, 1), 0.7, dtype=torch.float64))
        for row in range(2):
            torch.testing.assert_close(found[row], expert_by_hand(dict(expert.state_dict()), turn, row, 0.7), atol=1e-5, rtol=1e-4)
    assert isinstance(expert, FlowNetwork) and isinstance(Watched(expert, Tally()), FlowNetwork)


def expert_by_hand(s: dict[str, Tensor], turn: Turn, row: int, t: float) -> Tensor:
    def line(name: str, x: Tensor) -> Tensor:
        return x @ s[f"{name}.weight"].T + s[f"{name}.bias"]

    def adapted(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift, gate = line(f"{name}.modulation", condition).chunk(3, dim=-1)
        return (1 + scale) * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() + shift, gate

    def turned(x: Tensor, first: int) -> Tensor:
        out = x.clone()
        for place in range(len(x)):
            for i in range(4):
                angle = (first + place) / 10_000 ** (i / 4)
                left, right = x[place, :, i], x[place, :, i + 4]
                out[place, :, i] = left * math.cos(angle) - right * math.sin(angle)
                out[place, :, i + 4] = right * math.cos(angle) + left * math.sin(angle)
        return out

    angles = [2 * math.pi * t / (4e-3 * 1000 ** (i / 7)) for i in range(8)]
    time = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)])
    condition = F.silu(line("time_out", F.silu(line("time_in", time))))
    x = torch.cat((line("state_in", STATE[row])[None], line("action_in", NOISE[row])))
    valid = turn.parts[0].valid[row]
    for number in range(3):
        name, view = f"expert.layers.{number}", turn.context.cache.view(number)
        read, gate = adapted(f"{name}.norm1", x)
        query, key, value = (read @ s[f"{name}.attention.qkv.weight"].T).view(5, 8, 8).split((4, 2, 2), dim=1)
        query, key = turned(query, int(valid.sum())), turned(key, int(valid.sum()))
        out = torch.zeros(5, 4, 8)
        for place in range(5):
            ends = 1 if place == 0 else 5
            for head in range(4):
                keys = torch.cat((view.keys[row, head // 2, valid], key[:ends, head // 2]))
                values = torch.cat((view.values[row, head // 2, valid], value[:ends, head // 2]))
                out[place, head] = (keys @ query[place, head] / math.sqrt(8)).softmax(0) @ values
        x = x + gate * (out.flatten(1) @ s[f"{name}.attention.o.weight"].T)
        read, gate = adapted(f"{name}.norm2", x)
        left, right = (read @ s[f"{name}.mlp.gate_up.weight"].T).chunk(2, dim=-1)
        x = x + gate * ((F.gelu(left, approximate="tanh") * right) @ s[f"{name}.mlp.down.weight"].T)
    return line("action_out", adapted("expert.norm", x)[0])[1:]


def test_actions_of_one_chunk_may_stand_at_different_times(
    decoder: Decoder, refiner: Refiner, expert: DualExpert, moments: list[Moment]
) -> None:
    context = DualMemory(decoder, refiner).slow(0.0, *moments[0]).context
    with torch.no_grad():
        velocity = expert.velocity(context, STATE)
        torch.testing.assert_close(velocity(NOISE, torch.full((2, 4), 0.3)), velocity(NOISE, torch.full((2, 1), 0.3)))


def test_vr_13_a_first_step_without_history_acts_on_the_block_alone(
    decoder: Decoder, refiner: Refiner, expert: DualExpert, layout: BlockLayout, moments: list[Moment]
) -> None:
    memory = DualMemory(decoder, refiner, MemoryConfig(selection=HALF))
    found = act(memory, memory.slow(0.0, *moments[0]), expert)
    with torch.no_grad():
        alone = ReadCache.of([whole(encode(decoder, *laid(decoder, layout, *moments[0])).block)], decoder.rotation)
        expected = euler(expert.velocity(Context(torch.zeros(2, 32), alone), STATE), NOISE, 2)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected)


def test_vr_22_what_a_masked_camera_shows_changes_nothing(
    decoder: Decoder, refiner: Refiner, expert: DualExpert, moments: list[Moment]
) -> None:
    def episode(noise: float) -> Tensor:
        memory = DualMemory(decoder, refiner, MemoryConfig(selection=HALF))
        found = []
        for number, (sight, *others) in enumerate(moments):
            shown = sight.clone()
            shown[1, :4] += noise
            turn = memory.fast(25.0 * number, shown, others[0]) if number % 3 else memory.slow(25.0 * number, shown, *others)
            found.append(act(memory, turn, expert))
        return torch.stack(found)

    torch.testing.assert_close(episode(5.0), episode(0.0))


def test_vr_28_a_half_precision_decoder_beside_a_float32_expert(
    decoder: Decoder, refiner: Refiner, expert: DualExpert, moments: list[Moment]
) -> None:
    half = Decoder.of(decoder.config, {name: tensor.bfloat16() for name, tensor in decoder.state_dict().items()})
    found = []
    for model in (decoder, half):
        memory = DualMemory(model, refiner, MemoryConfig(selection=FULL))
        found.append([act(memory, memory.slow(0.0, *moments[0]), expert), act(memory, memory.fast(25.0, *moments[1][:2]), expert)])
        assert memory.slow_queue.entries[0].block.keys.dtype == model.embedding.weight.dtype
    for exact, rounded in zip(*found, strict=True):
        assert rounded.dtype == torch.float32
        torch.testing.assert_close(rounded, exact, atol=0.2, rtol=0.2)


def test_settings_that_do_not_fit_are_refused(decoder: Decoder, refiner: Refiner, layout: BlockLayout, moments: list[Moment]) -> None:
    with pytest.raises(InputError, match="queues hold at least 1"):
        MemoryConfig(slow=0)
    small = Refiner(replace(decoder.config, layers=2), layout, RefinerConfig(sight=32, width=16, heads=2, inner=8, queries=2))
    with pytest.raises(ModelError, match="edits 2 layers, the decoder has 3"):
        DualMemory(decoder, small)
    memory = DualMemory(decoder, refiner)
    memory.slow(0.0, *moments[0])
    with pytest.raises(InputError, match="visual tokens"):
        memory.fast(25.0, moments[0][0][:, :5], moments[0][1])
