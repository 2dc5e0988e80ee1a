"""Methods where kernels run: in Triton's interpreter, in a process of its own, every kernel that they use; the same choices as without.

On a GPU the kernels are taken because the tensors are there. Here the question is answered with yes for tensors of the processor.
"""

import json
import os
import subprocess
import sys

import pytest

from mmsdk import plugins
from mmsdk.tokencomp.types import Compressor

PACKAGE = "mmsdk.tokencomp.methods"
# those that learned their groups (braco) and those that prune by scores alone use what the others use
METHODS = ["cdpruner", "divprune", "fastvid", "p4q", "prumerge", "simplecluster", "visionzip", "vispruner"]
USED = ["assign_and_merge", "dpp_greedy", "drop_twins", "farthest_point", "gather", "pair_similarity"]

PROGRAM = """
import dataclasses, importlib, json, sys
import torch
from mmsdk import plugins
from mmsdk.tokencomp.budget import Budget
from mmsdk.vision.types import VisualTokens


def tokens(grid, seed, dtype, copies):
    n = grid[0] * grid[1] * grid[2]
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, 24, generator=generator)[torch.arange(n) % (n // 2 if copies else n)]
    return VisualTokens(
        features=features.to(dtype),
        positions=torch.cartesian_prod(*(torch.arange(size) for size in grid)).reshape(n, 3),
        weight=torch.randint(1, 5, (n,), generator=generator).float(),
        grid=grid,
        times=torch.arange(grid[0]) * 0.5,
        saliency=torch.rand(n, generator=generator),
        keys=torch.randn(n, 6, generator=generator).to(dtype),
    )


def batches():
    for grid, count, dtype, copies in [
        ((1, 4, 5), 7, torch.float32, False), ((2, 3, 3), 11, torch.bfloat16, True), ((1, 2, 3), 1, torch.float16, False),
    ]:
        yield [tokens(grid, seed, dtype, copies) for seed in (1, 2)], [Budget(count)] * 2


def run(name):
    method = plugins.load("mmsdk.tokencomp.methods", name)
    return [result for items, budgets in batches() for result in method(items, budgets)]


launched, methods, ops = [], *map(str.split, sys.argv[1:])
references = {name: run(name) for name in methods}
for op in ops:
    module = importlib.import_module("mmsdk.kernels.ops." + op)
    module.launchable = lambda tensor, op=op: launched.append(op) or True
# a slice of the cosines to centres, of which there are then many
sys.modules["mmsdk.kernels.ops.assign_and_merge"].ENTRIES = 100
found = {}
for name in methods:
    ours, theirs = run(name), references[name]
    found[name] = [
        torch.equal(a.audit.assignment, b.audit.assignment)
        and torch.equal(a.tokens.positions, b.tokens.positions)
        and torch.equal(a.tokens.weight, b.tokens.weight)
        and torch.allclose(a.tokens.features.float(), b.tokens.features.float(), rtol=1e-2, atol=1e-5)
        and a.tokens.features.dtype == b.tokens.features.dtype
        for a, b in zip(ours, theirs, strict=True)
    ]
print(json.dumps([found, sorted(set(launched))]))
"""


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, list[bool]], list[str]]:
    """For each method whether each of six results is the same, and which operations ran their kernels."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", PROGRAM, " ".join(METHODS), " ".join(USED)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    same, launched = json.loads(done.stdout.splitlines()[-1])
    return same, launched


def test_the_methods_are_there() -> None:
    assert all(isinstance(plugins.load(PACKAGE, name), Compressor) for name in METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_makes_the_same_of_its_tokens_by_kernels(name: str, found: tuple[dict[str, list[bool]], list[str]]) -> None:
    """PP-12: one token kept or more, copies among them, in three dtypes, two inputs side by side."""
    assert found[0][name] == [True] * 6


def test_every_kernel_for_methods_was_launched(found: tuple[dict[str, list[bool]], list[str]]) -> None:
    assert found[1] == USED
