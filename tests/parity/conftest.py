"""A model of transformers and ours from the folder that it wrote."""

import pytest
import torch

from mmsdk.apps.checkpoints.seeing import WRITERS, Replica
from mmsdk.families import open_model
from mmsdk.models.types import VLM


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Replica, VLM]:
    """Both of the family that a test is parametrised by."""
    folder = tmp_path_factory.mktemp(request.param)
    return WRITERS[request.param](folder), open_model(str(folder), torch.float32, torch.device("cpu"))
