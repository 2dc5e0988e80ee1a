"""The default robot policy: mini's eyes and words, a glance, and pi0's action expert at a small size, trained here on Meta-World's MT10.

    from mmsdk.vla.default import default_policy

    policy = default_policy()                        # a `Policy` for `mmsdk.vla.envs.metaworld.sawyer()`
    chunk = policy(request)                          # or ControlLoop(robot, policy, hz=20)

`python -m mmsdk.apps.train_robot` makes the weights: safetensors whose metadata holds the sizes and the statistics of the training data.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from mmsdk.compress import CompressionSpec, compression
from mmsdk.errors import ModelError, WeightsError
from mmsdk.models.mini.words import BOS
from mmsdk.precision import resolve_dtype
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.weights import vit_from_onnx
from mmsdk.vla.chunking.rtc import Anew, Chunking
from mmsdk.vla.contract import Contract
from mmsdk.vla.envs.metaworld import CAMERAS, sawyer
from mmsdk.vla.envs.metaworld_orders import SIDE
from mmsdk.vla.flow_model import FlowModel
from mmsdk.vla.heads.expert import ExpertConfig
from mmsdk.vla.heads.flow import FlowHead
from mmsdk.vla.heads.glance import Glance, GlanceConfig
from mmsdk.vla.heads.minisight import Lexicon, MiniSight
from mmsdk.vla.heads.pi0 import Pi0, Pi0Config
from mmsdk.vla.lint import Normalization
from mmsdk.vla.policy import RobotPolicy, load_policy
from mmsdk.vla.statistics import Statistics, parse_statistics
from mmsdk.weights.bundle import pull

__all__ = ["MIDDLE", "WEIGHTS", "Learned", "action_network", "default_policy", "eyes", "read_learned", "write_learned"]

WEIGHTS = Path(__file__).with_name("sawyer_mt10.safetensors")
MIDDLE = (5,)
"""The encoder's further layer, as mini's projector reads it: half-way features tell place and stroke."""
_PATCH = 14


@dataclass(frozen=True, slots=True)
class Learned:
    """What training makes: the glance, the action expert, and the statistics that states and actions are normalised by."""

    glance: Glance
    network: Pi0
    statistics: Mapping[str, Statistics]
    made: str = ""


def default_policy(
    robot: Contract | None = None,
    *,
    chunking: Chunking = Anew(),
    compress: CompressionSpec = "identity",
    steps: int = 5,
    dtype: str | torch.dtype = "auto",
    weights: str | Path = WEIGHTS,
) -> RobotPolicy:
    """The policy as it ships, for the arm that it was trained on or another `robot` whose contract matches.

    `chunking` says how a chunk takes up what is being executed, `compress` what is kept of each camera's visual tokens, `steps` how finely
    the flow is walked; `dtype` is the encoder's. Raises WeightsError where weights cannot be had, InputError for a contract or a
    compression that does not fit.
    """
    learned, parts = read_learned(Path(weights)), pull("mini")
    sight = MiniSight(eyes(parts["encoder"], dtype), learned.glance, Lexicon.of(parts["language"]), compression(compress))
    contract = sawyer()
    head = FlowHead(learned.network, contract.action_size, steps)
    model = FlowModel(sight, head, sight.lexicon.tokenizer, "pi0", CAMERAS, SIDE, (BOS,), chunking=chunking)
    normalization = Normalization("mean_std", "mean_std", learned.statistics, eps=1e-6)
    return load_policy(model, contract, contract if robot is None else robot, normalization)


def eyes(path: Path, dtype: str | torch.dtype = "auto") -> Encoder:
    """mini's image encoder as the policy looks through it: a picture is as many patches as fit into it without resizing."""
    vit = vit_from_onnx(path).to(resolve_dtype(dtype, torch.device("cpu")))
    return Encoder(Dinov2(vit, MIDDLE), Preprocess(area=(SIDE // _PATCH) ** 2), batch=16)


def action_network(config: GlanceConfig, chunk: int, contract: Contract) -> Pi0:
    """pi0's suffix at the size of this glance, whose decoder it meets layer by layer."""
    sizes = config.heads, config.heads, config.width // config.heads
    expert = ExpertConfig(config.width, config.layers, *sizes, config.inner)
    return Pi0(Pi0Config(expert, chunk, contract.action_size, contract.state_size))


def write_learned(path: Path, learned: Learned) -> None:
    """What ships, in 16 bits, whole or not at all."""
    tensors = {f"glance.{name}": tensor for name, tensor in learned.glance.state_dict().items()}
    tensors |= {f"network.{name}": tensor for name, tensor in learned.network.state_dict().items()}
    statistics = {group: {name: vector.tolist() for name, vector in each.items()} for group, each in learned.statistics.items()}
    facts = {
        "glance": json.dumps(asdict(learned.glance.config)),
        "chunk": str(learned.network.chunk),
        "statistics": json.dumps(statistics),
        "made": learned.made,
    }
    part = path.with_suffix(".part")
    save_file({name: tensor.detach().half().contiguous() for name, tensor in tensors.items()}, part, metadata=facts)
    part.replace(path)


def read_learned(path: Path) -> Learned:
    """Read it. Raises WeightsError for a file that is missing or damaged, ModelError for one that is no such policy."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - the file is no mapping
    except (OSError, safetensors.SafetensorError) as error:
        raise WeightsError(f"{path} is missing or damaged ({error}); make it with `python -m mmsdk.apps.train_robot`") from None
    try:
        sizes, chunk, statistics = json.loads(facts["glance"]), int(facts["chunk"]), json.loads(facts["statistics"])
        config = GlanceConfig(**{each.name: int(sizes[each.name]) for each in fields(GlanceConfig)})
    except (KeyError, ValueError, TypeError) as error:
        raise ModelError(f"{path} does not say what it holds: {error!r}") from None
    glance, network = Glance(config), action_network(config, chunk, sawyer())
    for name, module in (("glance", glance), ("network", network)):
        _fill(module, {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}, path)
    return Learned(glance.eval(), network.eval(), parse_statistics(statistics, item=str(path)), facts.get("made", ""))


def _fill(module: Glance | Pi0, tensors: Mapping[str, Tensor], path: Path) -> None:
    wanted = module.state_dict()
    wrong = sorted(wanted.keys() ^ tensors.keys()) or [name for name, tensor in tensors.items() if tensor.shape != wanted[name].shape]
    if wrong:
        raise ModelError(f"{path}: {wrong[0]} is missing, of another shape, or no tensor of this policy")
    module.load_state_dict(dict(tensors))
    module.requires_grad_(False)
