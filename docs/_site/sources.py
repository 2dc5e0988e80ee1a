"""What the files of methods and benches say of themselves, read without importing them: docstrings, knobs, papers, public names."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FAMILIES", "Family", "Field", "Method", "Public", "family_of", "methods"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Family:
    """A folder of methods: where its pages go, what it is called, what it is for, and how one of them is asked for.

    Without `plugins`, where every file is a method, only files that cite what they follow have a page. In `use`, which is Python, and
    `shell`, a command, {} is what asks for a method; `amount` stands behind its name, before knobs.
    """

    name: str
    title: str
    about: str
    folders: tuple[str, ...]
    plugins: bool = False
    use: str = ""
    shell: str = ""
    amount: str = ""

    def asked(self, name: str) -> str:
        """A method as it is asked for."""
        return f"{name}:{self.amount}" if self.amount else name


FAMILIES = (
    Family(
        "compress",
        "Visual-token compression",
        "Fewer tokens of a picture or a clip: in the encoder, behind it, in the decoder. See [Fewer visual tokens](../compression.md).",
        ("tokencomp/methods",),
        plugins=True,
        use='pipe("photo.jpg", "What is it?", compress="{}")',
        shell='mmsdk ask photo.jpg "What is it?" --compress {}',
        amount="0.25",
    ),
    Family(
        "video-attention",
        "Sparse attention for video diffusion",
        "Which blocks of keys each block of queries reads. See [Sparse attention](../sparse_attention.md).",
        ("mmsdk/diffusion/attention/methods",),
        plugins=True,
        use='handle = mmsdk.diffusion.sparsify(pipe, "{}")',
    ),
    Family(
        "attention",
        "Attention of decoders",
        "What a new token reads of everything before it. See [Attentions that remember less](../attention.md).",
        ("mmsdk/attention",),
    ),
    Family(
        "policies",
        "Which keys and values stay",
        "What a decoder keeps of what it has read. See [What the decoder remembers](../memory.md).",
        ("mmsdk/kv/policies",),
        plugins=True,
        use='pipe = mmsdk.pipeline(kv="{}")',
        shell='mmsdk ask photo.jpg "What is it?" --kv {}',
        amount="512",
    ),
    Family(
        "kv",
        "Memory of decoders",
        "How keys and values are kept. See [What the decoder remembers](../memory.md).",
        ("mmsdk/kv",),
    ),
    Family(
        "layers",
        "Layers of decoders",
        "What stands between two layers' attentions, and what their weights may be. See [Models](../models.md).",
        ("mmsdk/decoder",),
    ),
    Family(
        "step-caches",
        "Steps of video diffusion that are not computed",
        "What a step may take over from the one before it. See [Video generation](../video_generation.md).",
        ("mmsdk/diffusion/step_caches",),
        plugins=True,
        use='generate(model, noise, condition, schedule, cache="{}")',
    ),
    Family(
        "heads",
        "Action heads",
        "What the decoder knows, turned into a chunk of a robot's actions.",
        ("vla/heads",),
    ),
    Family(
        "chunking",
        "Chunks of actions",
        "How the next chunk goes on from the one that the robot executes.",
        ("vla/chunking",),
    ),
    Family(
        "robot-memory",
        "Memory of robot policies",
        "What a policy saw before, kept and read again. See [The memory of a robot's policy](../robot_memory.md).",
        ("vla/memory",),
    ),
)

BENCHES = Family("benches", "Benches", "", ("apps/bench",), plugins=True, shell="mmsdk bench {}")


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a dataclass: for a method, a knob. `default` is "" where it has none."""

    name: str
    kind: str
    default: str


@dataclass(frozen=True, slots=True)
class Public:
    """A name that a file exports: what it is called, how it is called with, what it says, and its fields, for a dataclass."""

    name: str
    call: str
    text: str
    fields: tuple[Field, ...]


@dataclass(frozen=True, slots=True)
class Method:
    """A file: its docstring, whether that follows a publication, what it exports, and where it works, as its class declares."""

    name: str
    file: str
    text: str
    public: tuple[Public, ...]
    place: str

    @property
    def first(self) -> str:
        """The docstring's first sentence or line, without what names its source in brackets."""
        line = self.text.partition("\n\n")[0].replace("\n", " ")
        return re.sub(r" ?[\[(](published|[^()\[\]]*(arXiv|section|source)[^()\[\]]*)[\])]", "", line).strip()

    @property
    def papers(self) -> list[str]:
        """The numbers on arXiv that it names, in their order."""
        return list(dict.fromkeys(re.findall(r"\b\d{4}\.\d{5}\b", self.text)))

    @property
    def mark(self) -> str:
        """Whether it follows what is published, in parts, or is mostly our reconstruction; "" where it does not say."""
        text = " ".join(self.text.lower().split())
        if "reconstruction" in text and re.search(r"everything else is|ours, a reconstruction|reconstruction, all", text):
            return "reconstruction"
        if "published" not in text:
            return ""
        return "published, parts ours" if re.search(r"\bours?\b|reconstruction", text) else "published"


def methods(family: Family) -> list[Method]:
    """Every method of a family, by name."""
    files = [path for folder in family.folders for path in sorted((ROOT / folder).glob("[a-z]*.py"))]
    found = [_method(path) for path in files]
    return [method for method in found if family.plugins or re.search(r"arXiv|\[published\]|published", method.text)]


def family_of(name: str) -> Family:
    """The family of that name."""
    return next(family for family in (*FAMILIES, BENCHES) if family.name == name)


def _method(path: Path) -> Method:
    body = ast.parse(path.read_text(encoding="utf-8"))
    defined = {node.name: node for node in body.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    constants = dict(_constants(body.body))
    public = tuple(_public(defined[name], constants) for name in _exported(body.body) if name in defined)
    classes = [node for name, node in defined.items() if isinstance(node, ast.ClassDef) and name in _exported(body.body)]
    place = _place(classes[0]) if classes else ""
    return Method(path.stem, path.relative_to(ROOT).as_posix(), ast.get_docstring(body) or "", public, place)


def _public(node: ast.ClassDef | ast.FunctionDef, constants: dict[str, str]) -> Public:
    text = ast.get_docstring(node) or ""
    if isinstance(node, ast.FunctionDef):
        return Public(node.name, _call(node), text, ())
    fields = tuple(_fields(node, constants)) if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list) else ()
    made = next((part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)
    return Public(node.name, _call(made, node.name) if made else "", text, fields)


def _call(node: ast.FunctionDef, name: str = "") -> str:
    """How it is called, on one line."""
    arguments = ast.unparse(node.args).removeprefix("self").removeprefix(", ")
    returned = f" -> {ast.unparse(node.returns)}" if node.returns and not name else ""
    return f"{name or node.name}({arguments}){returned}"


def _fields(node: ast.ClassDef, constants: dict[str, str]) -> Iterator[Field]:
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and "ClassVar" not in ast.unparse(part.annotation):
            default = "" if part.value is None else ast.unparse(part.value)
            yield Field(part.target.id, ast.unparse(part.annotation), constants.get(default, default))


def _constants(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, ast.unparse(node.value)


def _exported(body: Sequence[ast.stmt]) -> list[str]:
    (listed,) = [node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"] or [
        ast.List([])
    ]
    return [str(part.value) for part in getattr(listed, "elts", []) if isinstance(part, ast.Constant)]


def _place(node: ast.ClassDef) -> str:
    """Where a compressor works, by the protocol that it keeps."""
    names = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    declared = {ast.unparse(part.target): ast.unparse(part.value) for part in node.body if isinstance(part, ast.AnnAssign) and part.value}
    if {"enter", "layers", "score"} <= names:
        return "between the decoder's layers, for the question"
    if {"plan", "join"} <= names:
        return "in the encoder"
    asks = ", for the question" if declared.get("asks") == "True" else ""
    sides = {
        "'before'": "on the encoder's tokens",
        "'behind'": "on embeddings, behind the projector",
        "'either'": "before or behind the projector",
    }
    return f"{sides[declared['side']]}{asks}" if declared.get("side") in sides else ""
