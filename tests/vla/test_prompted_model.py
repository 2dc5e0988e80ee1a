"""Actions from a model of ours through the pipeline's stages: every compressor leaves the expert as much as it leaves an answer."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from mmsdk import plugins
from mmsdk.compress import METHODS
from mmsdk.errors import InputError, ModelError
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.vision.types import Image
from mmsdk.vla.heads.expert import ExpertConfig
from mmsdk.vla.heads.flow import FlowHead, euler, noise_of
from mmsdk.vla.heads.pi0 import Pi0, Pi0Config
from mmsdk.vla.prompted_model import PromptedModel
from mmsdk.vla.types import Effort, Observation, Request, Stamp

CAMERAS = ("top", "wrist")
# An actor is trained for one vision transformer.
REFUSED = {"dora": "was trained for vision transformers|takes none out"}


@pytest.fixture(scope="module")
def head() -> FlowHead:
    torch.manual_seed(0)
    network = Pi0(Pi0Config(ExpertConfig(16, 3, 4, 2, 12, 24), chunk=6, action_dim=4, state_dim=4)).eval()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    return FlowHead(network, dims=3, steps=4)


def asked(picture: Callable[[int], Image], first: int = 0, words: str = "lift it", effort: Effort = Effort.FULL) -> Request:
    images = {name: picture(first + number) for number, name in enumerate(CAMERAS)}
    observation = Observation(images, torch.tensor([0.1, -0.2, 0.3, 0.0]), words, Stamp(1.0, seed=5))
    return Request(observation, torch.zeros(0, 4), effort=effort)


def test_a_chunk_is_the_pipelines_context_and_the_head_put_together(small: Mini, head: FlowHead, picture: Callable[[int], Image]) -> None:
    model, request = PromptedModel(small, head, CAMERAS), asked(picture)
    context = model.seen(request.observation)
    expected = euler(head.network.velocity(context, request.observation.state[None]), noise_of(5, (1, 6, 4)), 4)[0, :, :3]
    torch.testing.assert_close(model(request).actions, expected)
    told = Pipeline(small)([([picture(0), picture(1)], "lift it")], max_tokens=1)[0]
    assert not isinstance(told, Exception) and int(context.cache.position[0]) == told.tokens.prompt
    for other in (asked(picture, first=7), asked(picture, words="drop it"), asked(picture, effort=Effort.FEWER_STEPS)):
        assert torch.equal(model(other).actions, expected) == (other.effort == Effort.FEWER_STEPS)


@pytest.mark.parametrize("method", plugins.available(METHODS))
def test_every_compressor_works_on_what_a_robot_sees(method: str, small: Mini, head: FlowHead, picture: Callable[[int], Image]) -> None:
    # three layers are no four stages
    spec = method if method == "identity" else f"{method}:0.5{',stages=2' * (method == 'pyramiddrop')}"
    model, request = PromptedModel(small, head, CAMERAS, spec), asked(picture)
    if method in REFUSED:
        with pytest.raises(ModelError, match=REFUSED[method]):
            model(request)
        return
    chunk = model(request)
    assert chunk.actions.shape == (6, 3) and bool(chunk.actions.isfinite().all())
    answer = Pipeline(small)([picture(0), picture(1)], "lift it", compress=spec, max_tokens=1)
    # the expert's last layer reads as many tokens as an answer's does
    plain = PromptedModel(small, head, CAMERAS)
    held, whole = (int(each.seen(request.observation).cache.view(2).lengths[0]) for each in (model, plain))
    assert held == whole - answer.tokens.visual + answer.tokens.kept
    assert torch.equal(chunk.actions, model(request).actions)
    assert method == "identity" or not torch.equal(chunk.actions, plain(request).actions)


def test_what_cannot_be_seen_or_said_is_named(small: Mini, head: FlowHead, picture: Callable[[int], Image]) -> None:
    with pytest.raises(InputError, match="no picture of back; there is top, wrist"):
        PromptedModel(small, head, ("top", "back"))(asked(picture))
    with pytest.raises(InputError, match="tokens"):
        PromptedModel(small, head, CAMERAS)(asked(picture, words="lift it " * 400))
