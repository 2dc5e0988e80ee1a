"""openpi's own client, as robots run it: fetched at first use, unpacked beside the tests and imported from there."""

import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from mmsdk.errors import WeightsError
from mmsdk.weights.artefact import Artefact, ensure
from mmsdk.weights.fetch import Wheel

# Not a dependency: its metadata asks for a NumPy below 2, which these four files do not need.
CLIENT = Artefact(
    package=Wheel("openpi-client", "0.1.2", 13_952),
    members=r"(openpi_client/(?:__init__|base_policy|msgpack_numpy|websocket_client_policy)\.py)",
    path="",
    files=4,
    size=4_150,
    sha256="06f92067d68baa338b6427a1f562ce5230defb476050e1bc6de6056223108611",
    licence="Apache-2.0",
)


@pytest.fixture(scope="session")
def openpi_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The package `openpi_client` with its modules msgpack_numpy and websocket_client_policy imported."""
    try:
        kept = ensure(CLIENT)
    except WeightsError as error:
        if os.environ.get("CI"):
            pytest.fail(f"openpi's client is required in CI: {error}")
        pytest.skip(f"needs openpi's client: {error}")
    # a copy, for an import leaves compiled files behind
    folder = shutil.copytree(kept, tmp_path_factory.mktemp("openpi") / "client")
    sys.path.insert(0, str(folder))
    for name in ("msgpack_numpy", "websocket_client_policy"):
        importlib.import_module(f"openpi_client.{name}")
    yield importlib.import_module("openpi_client")
    sys.path.remove(str(folder))
