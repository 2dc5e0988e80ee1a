"""The stop verifier and its rule: step by step as in one pass, a window that forgets, and thresholds that do what they say."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk.errors import InputError, ModelError
from mmsdk.vla.heads.flow import noise_of
from mmsdk.vla.heads.latte import STOP, Opinion, StopVerifier, Trace, VerifierConfig, stop_loss
from mmsdk.vla.stop import Recorded, StopRule, Terminator, calibrated, reported, tuned

HIDDEN = noise_of(1, (2, 14, 6))
PROPOSED = torch.randint(0, 4, (2, 14), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def verifier() -> StopVerifier:
    torch.manual_seed(0)
    return StopVerifier(VerifierConfig(hidden=6, actions=4, width=16, layers=2, heads=4, window=5, steps=9)).eval()


def by_hand(s: dict[str, Tensor], row: int, t: int) -> tuple[Tensor, Tensor]:
    """The opinion at step t, every layer's window looked up entry by entry."""

    def line(name: str, x: Tensor) -> Tensor:
        return x @ s[f"{name}.weight"].T + s[f"{name}.bias"]

    def normed(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (16,), s[f"{name}.weight"], s[f"{name}.bias"])

    x = [line("hidden_in", HIDDEN[row, i]) + s["action.weight"][PROPOSED[row, i]] + s["step.weight"][min(i, 8)] for i in range(t + 1)]
    for layer in ("layers.0", "layers.1"):
        projected = [line(f"{layer}.qkv", normed(f"{layer}.norm1", each)).view(3, 4, 4) for each in x]
        out = []
        for i, each in enumerate(x):
            among, seen = range(max(0, i - 4), i + 1), []
            for head in range(4):
                scores = torch.stack([projected[i][0, head] @ projected[j][1, head] / 2 for j in among]).softmax(0)
                seen.append(sum(weight * projected[j][2, head] for weight, j in zip(scores, among, strict=True)))
            each = each + line(f"{layer}.o", torch.cat(seen))
            out.append(each + line(f"{layer}.mlp.2", F.gelu(line(f"{layer}.mlp.0", normed(f"{layer}.norm2", each)))))
        x = out
    last = normed("norm", x[-1])
    return line("stop_out", last)[0], line("order_out", last)


def test_an_opinion_is_what_the_formulas_say(verifier: StopVerifier) -> None:
    with torch.no_grad():
        found, _ = verifier(HIDDEN, PROPOSED)
    for row in range(2):
        for t in (0, 4, 13):
            stop, order = by_hand(dict(verifier.state_dict()), row, t)
            torch.testing.assert_close(found.stop[row, t], stop, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(found.order[row, t], order, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("pieces", [[1] * 14, [3, 1, 6, 4], [14]])
def test_step_by_step_is_one_pass(verifier: StopVerifier, pieces: list[int]) -> None:
    with torch.no_grad():
        whole, end = verifier(HIDDEN, PROPOSED)
        trace, stops = Trace(), []
        for hidden, proposed in zip(HIDDEN.split(pieces, dim=1), PROPOSED.split(pieces, dim=1), strict=True):
            opinion, trace = verifier(hidden, proposed, trace)
            stops.append(opinion.stop)
    torch.testing.assert_close(torch.cat(stops, dim=1), whole.stop, atol=1e-5, rtol=1e-4)
    assert trace.count == 14 and [kept.shape for kept in trace.layers] == [(2, 2, 4, 4, 4)] * 2
    torch.testing.assert_close(trace.layers[1], end.layers[1], atol=1e-5, rtol=1e-4)


def test_what_left_the_window_of_every_layer_is_forgotten(verifier: StopVerifier) -> None:
    changed = HIDDEN.clone()
    changed[:, 4] += 3
    with torch.no_grad():
        before, after = verifier(HIDDEN, PROPOSED)[0].stop, verifier(changed, PROPOSED)[0].stop
    # two layers of five steps: step 4 reaches step 12
    torch.testing.assert_close(after[:, :4], before[:, :4])
    assert not torch.allclose(after[:, 12], before[:, 12], atol=1e-5)
    torch.testing.assert_close(after[:, 13], before[:, 13])


def test_open_thresholds_leave_the_backbone_its_own_policy(verifier: StopVerifier) -> None:
    terminator = Terminator(verifier, StopRule(accept=0.0, force=1.1))
    for t in range(14):
        found = terminator(HIDDEN[:, t], PROPOSED[:, t], torch.full((2,), 2))
        assert torch.equal(found, PROPOSED[:, t])


def sure(verifier: StopVerifier, stop: float, first: float) -> StopVerifier:
    """The verifier with an opinion of its own that nothing changes."""
    made = StopVerifier(verifier.config)
    torch.nn.init.zeros_(made.stop_out.weight)
    torch.nn.init.zeros_(made.order_out.weight)
    torch.nn.init.constant_(made.stop_out.bias, stop)
    made.order_out.bias.data = torch.tensor([first, 0.0])
    return made


def test_a_stop_that_is_not_verified_becomes_the_best_other_action(verifier: StopVerifier) -> None:
    stop, other = torch.tensor([STOP, 3]), torch.tensor([2, 1])
    rule = StopRule(accept=0.5, force=2.0)
    assert Terminator(sure(verifier, 1.0, 1.0), rule)(HIDDEN[:, 0], stop, other).tolist() == [STOP, 3]
    assert Terminator(sure(verifier, -1.0, 1.0), rule)(HIDDEN[:, 0], stop, other).tolist() == [2, 3]
    assert Terminator(sure(verifier, 1.0, -1.0), rule)(HIDDEN[:, 0], stop, other).tolist() == [2, 3]


def test_a_stop_is_forced_after_two_sure_steps_running_and_at_the_limit(verifier: StopVerifier) -> None:
    going = torch.tensor([1, 2])
    forced = Terminator(sure(verifier, 5.0, 1.0), StopRule(force=0.9, patience=2))
    assert [forced(HIDDEN[:, t], going, going).tolist() for t in range(3)] == [[1, 2], [STOP, STOP], [STOP, STOP]]
    forced.reset()
    assert forced(HIDDEN[:, 0], going, going).tolist() == [1, 2]
    limited = Terminator(sure(verifier, -5.0, -1.0), StopRule(limit=3))
    assert [limited(HIDDEN[:, t], going, going).tolist() for t in range(3)] == [[1, 2], [1, 2], [STOP, STOP]]


def test_calibration_keeps_false_stops_within_the_bound() -> None:
    generator = torch.Generator().manual_seed(3)
    near = torch.rand(400, generator=generator) < 0.3
    probability = (torch.rand(400, generator=generator) * 0.7 + near * 0.3).clamp(0, 1)
    first = torch.rand(400, generator=generator) < 0.9
    for most in (0.0, 0.02, 0.1):
        rule = calibrated(StopRule(), probability, first, near, most)
        found = reported(rule, probability, first, near)
        assert found.false_stop <= most and found.n == 400
        # a threshold at the next lower false stop would break the bound
        lower = [float(p) for p, f, n in zip(probability, first, near, strict=True) if f and not n and float(p) < rule.accept]
        assert reported(StopRule(accept=max(lower)), probability, first, near).false_stop > most
    with pytest.raises(InputError, match="share is in"):
        calibrated(StopRule(), probability, first, near, 1.0)


def recorded(n: int = 60, t: int = 20) -> Recorded:
    """Episodes of nobody, in which a verifier is right rather often."""
    generator = torch.Generator().manual_seed(4)
    near = (torch.arange(t) - torch.randint(4, t + 6, (n, 1), generator=generator)).abs() < 3
    probability = (torch.rand(n, t, generator=generator) * 0.75 + near * 0.25).clamp(0, 1)
    first = torch.rand(n, t, generator=generator) < 0.9
    return Recorded(probability, first, torch.randint(0, 3, (n, t), generator=generator), near)


@pytest.mark.parametrize(("accept", "force", "patience"), [(0.5, 0.8, 2), (0.9, 2.0, 1), (0.0, 0.6, 3), (0.3, 0.3, 1)])
def test_an_episode_ends_where_the_rule_would_have_ended_it(accept: float, force: float, patience: int) -> None:
    rule, seen, (n, t) = StopRule(accept, force, patience), recorded(), (60, 20)
    found, false, missed = seen.ends(rule), 0, 0
    for row in range(n):
        sure, end = 0, t
        for step in range(t):
            p = float(seen.probability[row, step])
            sure = sure + 1 if p >= force else 0
            if int(seen.proposed[row, step]) == STOP:
                stops = accept == 0 or (bool(seen.first[row, step]) and p >= accept)
            else:
                stops = sure >= patience
            if stops:
                end = step
                break
        assert int(found[row]) == end
        false += end < t and not bool(seen.near[row, end])
        missed += end == t and bool(seen.near[row].any())
    report = seen.report(rule)
    torch.testing.assert_close((report.false_stop, report.missed_stop), (false / n, missed / n))


def test_tuning_keeps_the_bound_and_no_rule_of_a_finer_grid_is_far_better() -> None:
    seen = recorded()
    for most in (0.05, 0.2):
        rule = tuned(StopRule(), seen, most)
        found = seen.report(rule)
        assert found.false_stop <= most
        lost = found.false_stop + found.missed_stop
        for accept in (0.5, 0.75, 0.85, 0.95):
            for force in (0.75, 0.85, 0.95, 2.0):
                other = seen.report(StopRule(accept, force))
                assert other.false_stop > most or other.false_stop + other.missed_stop > lost - 0.1
    # nothing keeps a bound of none here: it is the rule with the fewest
    wild = Recorded(torch.ones(4, 3), torch.ones(4, 3, dtype=torch.bool), torch.zeros(4, 3, dtype=torch.long), torch.zeros(4, 3) > 0)
    assert wild.report(tuned(StopRule(), wild, 0.0)).false_stop == 1
    with pytest.raises(InputError, match="at least one"):
        tuned(StopRule(), seen, 1.0)


def test_the_loss_wants_both_heads_right_and_is_masked() -> None:
    near = torch.tensor([[True, False, True]])
    opinion = Opinion(torch.tensor([[2.0, -1.0, 9.0]]), torch.tensor([[[0.5, 0.0], [0.0, 3.0], [0.0, 9.0]]]))
    # softplus(-2) + .5 at three times the weight, softplus(-1) and no lack of lead; the third does not count
    expected = (3 * (0.126928 + 0.5) + 0.313262) / 2
    found = stop_loss(opinion, near, torch.tensor([[True, True, False]]), weight=3.0)
    torch.testing.assert_close(float(found), expected, atol=1e-5, rtol=1e-5)


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ModelError, match="shared by the heads"):
        VerifierConfig(hidden=6, actions=4, width=10)
    with pytest.raises(InputError, match="at least 0"):
        StopRule(accept=-0.1)
