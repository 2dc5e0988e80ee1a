from mmsdk.answer import Answer as Answer
from mmsdk.chat import Chat as Chat
from mmsdk.encoded import Encoded as Encoded
from mmsdk.errors import BudgetError as BudgetError
from mmsdk.errors import InputError as InputError
from mmsdk.errors import MmsdkError as MmsdkError
from mmsdk.errors import ModelError as ModelError
from mmsdk.errors import PluginError as PluginError
from mmsdk.errors import SafetyError as SafetyError
from mmsdk.errors import WeightsError as WeightsError
from mmsdk.errors import WireError as WireError
from mmsdk.generate.config import GenerationConfig as GenerationConfig
from mmsdk.legibility import LegibilityWarning as LegibilityWarning
from mmsdk.pipeline import Pipeline as Pipeline
from mmsdk.pipeline import pipeline as pipeline
from mmsdk.vision.intake import Access as Access
from mmsdk.vision.intake import Frames as Frames
from mmsdk.vision.intake import Limits as Limits
from mmsdk.vision.intake import Sampling as Sampling
from mmsdk.vision.intake import load as load
from mmsdk.vision.intake import load_image as load_image
from mmsdk.vision.intake import load_video as load_video
from mmsdk.vision.types import Image as Image
from mmsdk.vision.types import Video as Video
from mmsdk.vision.types import VisualTokens as VisualTokens

__version__: str
