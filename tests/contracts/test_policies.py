"""What every policy of the memory promises, whatever it keeps or reads: rows for themselves, forks, exact budgets, nothing remembered."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mmsdk import plugins
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import BudgetError, InputError, PluginError
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.memory import memory_of
from mmsdk.kv.policy import Evictor, Gapless, Mover, OfLatents, Reader
from mmsdk.kv.policy_cache import PolicyCache
from mmsdk.kv.policy_memory import POLICIES, PolicyMemory
from mmsdk.kv.shape import Shape
from mmsdk.kv.types import KVCache

CONFIG = DecoderConfig(vocabulary=50, width=24, layers=2, heads=4, kv_heads=2, head_dim=6, inner=40, context=512)
PROMPT, STEPS, BUDGET, BLANK = 24, 3, 9, 7
# Knobs that make a short prompt long enough to be worth something to them.
SMALL = {"snapkv": ",window=4,kernel=3", "expected": ",future=16,sinks=2", "streaming": ",sinks=2"}
NAMES = plugins.available(POLICIES)
EVERY = pytest.mark.parametrize("name", NAMES)


def memory(name: str, amount: int | float = BUDGET) -> PolicyMemory:
    found = memory_of(f"{name}:{amount}{SMALL.get(name, '')}")
    assert isinstance(found, PolicyMemory)
    return found


EVICTORS = [name for name in NAMES if isinstance(memory(name).policy, Evictor)]
GAPLESS = [name for name in NAMES if isinstance(memory(name).policy, Gapless)]
READERS = [name for name in NAMES if isinstance(memory(name).policy, Reader)]


@pytest.fixture(scope="module")
def model() -> Decoder:
    """Weights large enough that what is not seen shows."""
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in Decoder(CONFIG).state_dict().items()}
    return Decoder.of(CONFIG, {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()})


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randn(2, PROMPT + STEPS, CONFIG.width, generator=torch.Generator().manual_seed(1))


def positions(blank: int) -> Tensor:
    """Two rows, of which the second begins behind `blank` columns of padding."""
    rows = torch.arange(PROMPT + STEPS).expand(2, -1).clone()
    rows[1, :blank] = -1
    rows[1, blank:] = torch.arange(PROMPT + STEPS - blank)
    return rows


@torch.no_grad()
def read(model: Decoder, cache: KVCache, x: Tensor, at: Tensor) -> Tensor:
    out: Tensor = model(x[:, :PROMPT], at[:, :PROMPT], cache)
    if isinstance(cache, PolicyCache):
        cache.settle()
    return out[:, -1]


@torch.no_grad()
def go_on(model: Decoder, cache: KVCache, x: Tensor, steps: range = range(STEPS)) -> Tensor:
    outs = [model(x[:, PROMPT + step : PROMPT + step + 1], cache.position[:, None], cache)[:, -1] for step in steps]
    return torch.stack(outs, dim=1)


@dataclass(frozen=True)
class Filled:
    """A policy whose memory has read the prompts, what came of them, and what then came of the tokens behind them."""

    memory: PolicyMemory
    cache: PolicyCache
    first: Tensor
    onward: Tensor


@pytest.fixture(scope="module")
def filled(model: Decoder, tokens: Tensor) -> Callable[[str], Filled]:
    """Read once for all tests, which go on from forks; that a fork is like a cache of its own is one of them."""
    known = dict[str, Filled]()

    def find(name: str) -> Filled:
        if name not in known:
            one = memory(name)
            cache = one.cache(CONFIG.layers, 2, "cpu")
            first = read(model, cache, tokens, positions(BLANK))
            known[name] = Filled(one, cache, first, go_on(model, cache.fork(), tokens))
        return known[name]

    return find


@pytest.fixture(scope="module")
def exact(model: Decoder, tokens: Tensor) -> Tensor:
    """What comes of the tokens behind the prompts where everything stays."""
    cache = DenseCache.allocate(CONFIG.layers, 2, 2, 6, 8, torch.float32, "cpu")
    read(model, cache, tokens, positions(BLANK))
    return go_on(model, cache, tokens)


@EVERY
def test_a_row_is_what_it_would_be_alone(model: Decoder, tokens: Tensor, filled: Callable[[str], Filled], name: str) -> None:
    """Padding in front, and what other rows hold, change nothing."""
    together = filled(name).onward
    for row, blank in ((0, 0), (1, BLANK)):
        alone = memory(name).cache(CONFIG.layers, 1, "cpu")
        with torch.no_grad():
            model(tokens[row : row + 1, blank:PROMPT], torch.arange(PROMPT - blank)[None], alone)
        alone.settle()
        torch.testing.assert_close(together[row : row + 1], go_on(model, alone, tokens[row : row + 1]), rtol=1e-3, atol=1e-4)


@EVERY
def test_ka_19_ka_21_rows_are_reordered_and_repeated(model: Decoder, tokens: Tensor, filled: Callable[[str], Filled], name: str) -> None:
    cache = filled(name).cache.fork()
    go_on(model, cache, tokens, range(STEPS - 1))
    turned = go_on(model, cache.select(torch.tensor([1, 0, 1])), tokens[[1, 0, 1]], range(STEPS - 1, STEPS))
    torch.testing.assert_close(turned, filled(name).onward[[1, 0, 1], -1:], rtol=1e-3, atol=1e-4)


@EVERY
def test_ka_22_two_continuations_of_one_prompt_do_not_meet(
    model: Decoder, tokens: Tensor, filled: Callable[[str], Filled], name: str
) -> None:
    """One of another answer, one of a fork, and then the cache itself, that nothing was forked from since it was read."""
    cache = memory(name).cache(CONFIG.layers, 2, "cpu")
    read(model, cache, tokens, positions(BLANK))
    child, grandchild = cache.fork(), cache.fork().fork()
    go_on(model, child, -tokens)
    for one in (grandchild, cache):
        torch.testing.assert_close(go_on(model, one, tokens), filled(name).onward, rtol=1e-4, atol=1e-5)


@EVERY
def test_ka_20_a_policy_used_twice_is_the_same(model: Decoder, tokens: Tensor, filled: Callable[[str], Filled], name: str) -> None:
    before = filled(name)
    shape = Shape(CONFIG.layers, 2, 6, torch.float32, torch.device("cpu"))
    cache, known = before.memory.begin(shape, [PROMPT + STEPS] * 3, [(), ()])
    assert torch.equal(read(model, cache, tokens, positions(BLANK)), before.first)
    assert torch.equal(go_on(model, cache, tokens), before.onward)
    assert before.memory == memory(name) and known == [0, 0]


@pytest.mark.parametrize("name", EVICTORS)
@pytest.mark.parametrize("amount", [BUDGET, 0.5])
def test_budgets_are_met_exactly(model: Decoder, tokens: Tensor, name: str, amount: int | float) -> None:
    """Of every row, layer and head, after the prompt and while an answer is written; the newest stays, and the memory is really freed."""
    policy = memory(name, amount).policy
    assert isinstance(policy, Evictor)
    cache = memory(name, amount).cache(CONFIG.layers, 2, "cpu")
    with torch.no_grad():
        model(tokens[:, :PROMPT], positions(BLANK)[:, :PROMPT], cache)
    nbytes, span = cache.nbytes, cache.span
    assert span == 2 * CONFIG.kv_heads * PROMPT * CONFIG.layers
    cache.settle()
    budgets = torch.tensor([BUDGET, BUDGET] if isinstance(amount, int) else [12, 9])[:, None]
    for steps in range(STEPS + 1):
        for layer in range(CONFIG.layers):
            held, grown = cache.lengths(layer), min(steps, max(policy.interval, 1) - 1) if policy.interval else steps
            assert bool((held == budgets + grown).all())
            view = cache.view(layer)
            assert torch.equal(view.positions[:, -1], cache.position - 1)
            assert bool(((view.positions.diff() > 0) | (view.positions[:, :-1] < 0)).all())
        if steps < STEPS:
            go_on(model, cache, tokens, range(steps, steps + 1))
    assert cache.span < span and cache.nbytes < nbytes


@pytest.mark.parametrize("name", [*EVICTORS, *READERS])
def test_a_budget_for_everything_is_exact(model: Decoder, tokens: Tensor, exact: Tensor, name: str) -> None:
    """What evicts nothing, or reads everything, is the plain cache; a store of its own may round what it keeps."""
    cache = memory(name, 1000).cache(CONFIG.layers, 2, "cpu")
    read(model, cache, tokens, positions(BLANK))
    torch.testing.assert_close(go_on(model, cache, tokens), exact, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", GAPLESS)
def test_where_nothing_is_missing_all_that_is_held_moves_as_one(
    model: Decoder, tokens: Tensor, filled: Callable[[str], Filled], name: str
) -> None:
    """Positions are given again before every token, to rows that stand at others, and no answer changes: only distances count."""
    cache, outs = filled(name).cache.fork(), list[Tensor]()
    for step in range(STEPS):
        cache.close_up()
        for layer in range(CONFIG.layers):
            assert cache.view(layer).positions.tolist() == [list(range(BUDGET))] * 2
        assert cache.position.tolist() == [BUDGET] * 2
        outs.append(go_on(model, cache, tokens, range(step, step + 1)))
    torch.testing.assert_close(torch.cat(outs, 1), filled(name).onward, rtol=1e-3, atol=1e-4)
    # and what it was forked from stays as it was
    assert torch.equal(go_on(model, filled(name).cache.fork(), tokens), filled(name).onward)


@EVERY
def test_bytes_are_told(model: Decoder, tokens: Tensor, filled: Callable[[str], Filled], name: str) -> None:
    cache = filled(name).cache.fork()
    go_on(model, cache, tokens, range(1))
    assert cache.nbytes > 0 and cache.span > 0 and 0 < cache.read_bytes <= 2 * 2 * CONFIG.kv_heads * (PROMPT + 1) * 6 * 4 * CONFIG.layers


@EVERY
def test_latents_are_kept_or_refused_by_name(name: str) -> None:
    """Where age or attention is all that counts latents will do; beside an indexer's keys nothing can be moved."""
    one = memory(name)
    shapes = [Shape(2, 1, entry, torch.float32, torch.device("cpu")) for entry in ((24, 0), (24, 8))]
    if not isinstance(one.policy, OfLatents):
        with pytest.raises(
            InputError, match=f"{one.name} .* latents; choose one of full, h2o, random, snapkv, streaming, tova, window, or"
        ):
            one.begin(shapes[0], [8, 8], [()])
        return
    assert isinstance(one.begin(shapes[0], [8, 8], [()])[0], PolicyCache)
    if isinstance(one.policy, Mover):
        with pytest.raises(InputError, match=f"{one.name} moves keys, and those of this model's indexer"):
            one.begin(shapes[1], [8, 8], [()])
    else:
        one.begin(shapes[1], [8, 8], [()])


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(PluginError, match="snapkw.* is not known; did you mean 'snapkv'. choose dense, .*snapkv"):
        memory_of("snapkw:0.5")
    for text, wrong in (
        ("snapkv", "how much to keep"),
        ("h2o:0", "at least one"),
        ("h2o:1.5", "outside"),
        ("tova:much", "no number"),
        ("window:٣٠", "no number"),
        ("h2o:0.٣", "no number"),
    ):
        with pytest.raises(BudgetError, match=wrong):
            memory_of(text)
    with pytest.raises(PluginError, match="did you mean 'window'"):
        memory_of("snapkv:0.5,windw=3")
