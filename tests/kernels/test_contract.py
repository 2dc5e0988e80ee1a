"""What every kernel promises, over every file in kernels/ops: a new one is tested by being there."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels.case import TOLERANCE, Case, Op, Plan, Result, distant
from mmsdk.kernels.ops import find, names
from mmsdk.kernels.proof import Agreement, compare, interpreted, moved
from mmsdk.kernels.targets import SHARED, TARGETS, resources

NAMES = names()
CPU = torch.device("cpu")
# What the end of a run shows as a table.
COMPILED = "compiled kernel"


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def tensors(values: tuple[object, ...]) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor))


@pytest.fixture(scope="module")
def agreements() -> list[Agreement]:
    """One process for all: what it costs to start is most of it."""
    return interpreted(NAMES)


def test_the_table_of_tolerances_is_the_agreed_one() -> None:
    assert {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2} == TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_agrees_with_its_reference_in_the_interpreter(name: str, agreements: list[Agreement]) -> None:
    """KA-02, KA-08, KA-09, KA-10, KA-12 and KA-13 are among the cases; memory is filled with NaN before."""
    rows = [row for row in agreements if row.op == name]
    assert len({case.name for case in find(name).cases}) == len(find(name).cases)
    assert len(rows) == 3 * len(find(name).cases)
    assert not [row for row in rows if not row.within]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_agrees_with_its_reference_on_the_gpu(name: str) -> None:
    op = find(name)
    rows = [compare(name, op, case, dtype, torch.device("cuda")) for case in op.cases for dtype in TOLERANCE]
    assert not [row for row in rows if not row.within]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_compiles_without_a_gpu_and_without_spills(
    name: str, target: str, record_property: Callable[[str, object], None]
) -> None:
    op = find(name)
    taken = resources(op, op.builds[0], torch.bfloat16, target)
    record_property(COMPILED, {"op": name, "target": target, **asdict(taken)})
    assert taken.spills == 0
    assert 0 < taken.registers <= (512 if target.startswith("gfx") else 255)
    assert 0 <= taken.shared_bytes <= SHARED[target]


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_reads_no_value_and_gives_results_of_the_right_kind(name: str) -> None:
    """On the meta device there are no values. Only a grid's first axis may be long."""
    op = find(name)
    for case in op.cases:
        truth = op.reference(*case.make(seeded(), torch.float16))
        plan = op.plan(*moved(case.make(seeded(), torch.float16), torch.device("meta")))
        assert [(x.shape, x.dtype) for x in plan.out] == [(x.shape, x.dtype) for x in truth]
        assert all(size <= 65535 for launch in plan.launches for size in launch.grid[1:])


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_repeats_itself_and_changes_nothing_but_what_it_returns(name: str) -> None:
    op = find(name)
    for case in op.cases:
        arguments, fresh = case.make(seeded(), torch.bfloat16), case.make(seeded(), torch.bfloat16)
        first, second = op.reference(*arguments), op.reference(*fresh)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True))
        untouched = [value for value in tensors(arguments) if not any(value is result for result in first)]
        again = case.make(seeded(), torch.bfloat16)
        before = [b for a, b in zip(tensors(arguments), tensors(again), strict=True) if any(a is value for value in untouched)]
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(untouched, before, strict=True))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("rms_norm", lambda: (torch.empty(200_000, 64), None, torch.empty(64), 1e-6, 0.0)),
        ("swiglu", lambda: (torch.empty(200_000, 64),)),
        ("rope", lambda: (*(torch.empty(1, 8, 200_000, 64),) * 2, *(torch.empty(1, 1, 200_000, 32),) * 2, (32,), False, False)),
        ("gather", lambda: (torch.empty(1, 200_000, 64), torch.empty(1, 200_000, dtype=torch.int64))),
        (
            "block_sparse",
            lambda: (
                *(torch.empty(1, 300, 16384, 64),) * 3,
                *(torch.empty(1, 300, 256, dtype=torch.int32), torch.empty(1, 300, 256, 9, dtype=torch.int32)),
                *((64, 64), 1.0, None, None, None, None),
            ),
        ),
        ("flash_prefill", lambda: (*(torch.empty(9_000_000, 1, 8),) * 3, *(torch.empty(2),) * 2, 9_000_000, 1.0, True, 0, None, None)),
        (
            "paged_decode",
            lambda: (
                torch.empty(70_000, 8, 64),
                *(torch.empty(9, 16, 8, 64),) * 2,
                torch.empty(70_000, 100_000, dtype=torch.int32),
                *(torch.empty(70_000, dtype=torch.int64), 1.0, 0, None, ""),
            ),
        ),
        (
            "block_gather",
            lambda: (
                *(torch.empty(70_000, 8, 64), *(torch.empty(70_000, 8, 48, 64),) * 2, torch.empty(70_000, 8, 2, dtype=torch.int64)),
                *(torch.empty(70_000, 8, 2), torch.empty(70_000, 48, dtype=torch.bool), torch.empty(70_000, dtype=torch.int64), 16, 1.0),
            ),
        ),
        ("block_worth", lambda: (torch.empty(70_000, 8, 1, 64), torch.empty(70_000, 8, 9, 64), None, torch.empty(70_000, 8, 9), 1.0, True)),
        (
            "indexer",
            lambda: (torch.empty(1, 70_000, 4, 64), torch.empty(1, 70_000, 4), torch.empty(1, 9, 64), torch.empty(1, 70_000), 4, None),
        ),
        (
            "mla_decode",
            lambda: (torch.empty(70_000, 8, 40), torch.empty(9, 16, 40), torch.empty(70_000, 99), torch.empty(70_000), 1.0, 32),
        ),
        ("kv_store", lambda: (*(torch.empty(200_000, 8, 64),) * 2, torch.empty(200_000), *(torch.empty(9, 16, 8, 64),) * 2)),
        (
            "kv_round",
            lambda: (
                *(torch.empty(30, 9, 16, 8, 64), torch.empty(300), torch.empty(300), torch.empty(30, 400, 16, 8, 64)),
                *(*(torch.empty(30, 400, 1, 8, 64),) * 2, "int8", True),
            ),
        ),
        ("sample", lambda: (torch.empty(200_000, 100), *(torch.empty(200_000),) * 5)),
        ("small_gemm", lambda: (torch.empty(4, 64), torch.empty(3_000_000, 64, dtype=torch.int8), torch.empty(3_000_000, 1), None)),
        ("pair_similarity", lambda: (torch.empty(9, 600_000, 8), torch.empty(9, 300, 8))),
        ("farthest_point", lambda: (torch.empty(70_000, 300, 8), torch.empty(70_000, dtype=torch.int64), 30)),
        ("dpp_greedy", lambda: (torch.empty(70_000, 300, 8), 30)),
        ("assign_and_merge", lambda: (torch.empty(70_000, 2, 8), torch.empty(70_000, 3, 8), torch.empty(70_000, 2, 8), None)),
    ],
)  # fmt: skip
def test_ka_11_more_blocks_than_a_second_axis_takes(name: str, make: object) -> None:
    """200,000 tokens, or 9 million of one sequence: the long axis of every grid is the first."""
    assert callable(make)
    with torch.device("meta"):
        plan = find(name).plan(*make())
    for launch in plan.launches:
        assert launch.grid[0] > 65535 and all(size <= 65535 for size in launch.grid[1:])


@pytest.mark.parametrize("name", ["farthest_point", "dpp_greedy"])
def test_no_program_reads_all_vectors_of_a_long_input(name: str) -> None:
    """4,000 tokens: a step is a launch over blocks of them, none of which is larger for more tokens, and nothing waits in between."""
    first = [torch.zeros(1, dtype=torch.int64)] if name == "farthest_point" else []
    for n in (2000, 4000):
        with torch.device("meta"):
            plan = find(name).plan(torch.empty(1, n, 1152), *first, 50)
        steps = plan.launches[-50:]
        block = steps[0].constants["block"]
        assert isinstance(block, int) and block <= 64 and len(plan.launches) <= 51
        assert {(step.grid, step.constants["block"]) for step in steps} == {((-(-n // block),), block)}


def test_ka_11_more_programs_than_a_launch_takes_are_refused() -> None:
    """Triton multiplies the axes in 32 bits and would start none of them."""
    with torch.device("meta"):
        plan = find("swiglu").plan(torch.empty(2**21, 2**21))
    with pytest.raises(InputError, match="2147483648 programs"):
        plan.launches[0]()


@pytest.mark.parametrize("rows", [2, 16, 17, 64])
def test_up_to_64_rows_read_each_weight_once(rows: int) -> None:
    """No two programs are of one tile of the matrix."""
    with torch.device("meta"):
        arguments = torch.empty(rows, 256), torch.empty(4096, 128, dtype=torch.uint8), *(torch.empty(4096, 8),) * 2
    (launch,) = find("small_gemm").plan(*arguments).launches
    assert launch.grid == (4096 // launch.constants["outputs"],) and launch.constants["rows"] >= rows


def test_what_a_kernel_forgets_to_write_is_seen() -> None:
    """A plan that launches nothing leaves poison, whatever the memory held before."""

    def reference(x: Tensor) -> Result:
        return (x.clone(),)

    def plan(x: Tensor) -> Plan:
        return Plan((torch.empty_like(x),), ())

    case = Case("zeros", lambda generator, dtype: (torch.zeros(4, dtype=dtype),))
    row = compare("copy", Op(reference, plan, (case,), ()), case, torch.float32, CPU)
    assert not row.within and math.isnan(row.error)


@pytest.mark.parametrize(("value", "within"), [(1e-5, True), (3e-5, False), (math.inf, False), (-math.inf, False), (math.nan, False)])
def test_the_comparison_tells_right_from_wrong(value: float, within: bool) -> None:
    truth = torch.tensor([0.5, -math.inf])
    out = torch.tensor([0.5 + value, -math.inf])
    case = Case("two numbers", lambda generator, dtype: (truth,))
    op = Op(lambda x: (x,), lambda x: Plan((out,), ()), (case,), ())
    assert compare("given", op, case, torch.float32, CPU).within is within
    swapped = Op(lambda x: (x,), lambda x: Plan((torch.tensor([0.5, 0.0]),), ()), (case,), ())
    assert not compare("finite for infinite", swapped, case, torch.float32, CPU).within


def test_distant_rows_are_where_32_bits_do_not_reach() -> None:
    rows = torch.arange(12.0).view(2, 3, 2)
    far = distant(rows)
    assert far.stride(0) > 2**31 and torch.equal(far, rows)


def test_an_unknown_target_is_named() -> None:
    op = find("gather")
    with pytest.raises(InputError, match="sm_80, sm_90, gfx942; got 'sm_1'"):
        resources(op, op.builds[0], torch.bfloat16, "sm_1")
