"""The hub's own client against a small hub on this machine: what is asked for and when, and how a network that fails is told."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from mmsdk.adapters import Adapters
from mmsdk.decoder.transformer import Decoder, DecoderConfig
from mmsdk.errors import ModelError, WeightsError
from mmsdk.families import open_model
from mmsdk.models.language import blind
from mmsdk.tokenizer import TextTokenizer
from mmsdk.weights.hub import resolve

COMMIT = "a" * 40
CPU = torch.device("cpu")


@dataclass
class Hub:
    """A hub with one repository, "org/model"; `asked` are the paths that were requested."""

    address: str
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def fetched(self) -> set[str]:
        """The files whose content or headers were requested."""
        return {path.rpartition("/")[2] for path in self.asked if "/resolve/" in path}

    def answer(self, path: str) -> tuple[int, bytes]:
        self.asked.append(path)
        listing = [{"type": "file", "path": name, "size": len(content), "oid": "0" * 40} for name, content in self.files.items()]
        if path.startswith("/api/models/org/model/tree/"):
            return 200, json.dumps(listing).encode()
        if path.startswith("/api/models/org/model/revision/"):
            return 200, json.dumps({"id": "org/model", "sha": COMMIT, "siblings": []}).encode()
        name = path.rpartition("/")[2]
        return (200, self.files[name]) if "/resolve/" in path and name in self.files else (404, b"{}")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that the client is set to, with an empty cache; to a proxied request it answers that it may not."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = served.answer(self.path)
            self.send_response(status)
            self.send_header("ETag", f'"{self.path.rpartition("/")[2]}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815 - the server's own names

        def do_CONNECT(self) -> None:
            self.send_error(403)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "ENDPOINT", served.address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", served.address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    close_session()
    yield served
    close_session()
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_family_that_cannot_be_run_is_refused_before_its_weights_are_fetched(hub: Hub) -> None:
    hub.files = {"config.json": b'{"model_type": "unheard-of"}', "model.safetensors": bytes(1000)}
    with pytest.raises(ModelError, match="org/model is of the family 'unheard-of'"):
        open_model("org/model", torch.float32, CPU)
    assert hub.fetched() == {"config.json"}


def test_a_repository_that_names_no_family_is_refused_before_its_weights_are_fetched(hub: Hub) -> None:
    hub.files = {"model.safetensors": bytes(1000), "tokenizer.json": b"{}"}
    with pytest.raises(ModelError, match=r"org/model has no config\.json"):
        open_model("org/model", torch.float32, CPU)
    assert hub.fetched() == set()


def test_what_was_fetched_in_part_is_completed_and_used_again_without_a_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"config.json": b"{}", "model.safetensors": b"weights", "code.py": b"raise SystemExit"}
    assert [path.name for path in resolve("org/model", ["config.json"]).iterdir()] == ["config.json"]
    folder = resolve("org/model")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"config.json": b"{}", "model.safetensors": b"weights"}
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("org/model") == folder == resolve("org/model", ["config.json"]) and not hub.asked


def test_of_an_adapter_settings_and_safetensors_are_fetched_and_nothing_else(hub: Hub) -> None:
    decoder = Decoder(DecoderConfig(vocabulary=8, width=8, layers=1, heads=2, kv_heads=1, head_dim=4, inner=8, context=8))
    vlm = blind("text alone", decoder, TextTokenizer(Tokenizer(WordLevel({"a": 0}))), "", {}, frozenset())
    hub.files = {"adapter_config.json": b"{}", "adapter_model.bin": b"a pickle", "code.py": b"raise SystemExit", "model.safetensors": b""}
    with pytest.raises(ModelError, match="peft_type"):
        Adapters().load("org/model", "it", vlm)
    assert hub.fetched() == {"adapter_config.json"}


def test_a_gguf_file_that_is_asked_for_is_fetched_with_the_rest(hub: Hub) -> None:
    hub.files = {"config.json": b'{"model_type": "llama"}', "text.gguf": b"GGUF", "other.gguf": b"GGUF"}
    with pytest.raises(WeightsError, match=r"text\.gguf is damaged"):
        open_model("org/model", torch.float32, CPU, gguf_file="text.gguf")
    assert hub.fetched() == {"config.json", "text.gguf"}


def test_a_hub_that_is_not_asked_or_not_reached_is_told_with_the_ways_around_it(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    close_session()
    around = r"copy that folder .* or give the folder that `hf download org/model --local-dir FOLDER` makes elsewhere$"
    far = r"the hub: it cannot be reached \(ConnectError: .*; see that this machine has a network"
    with pytest.raises(WeightsError, match=f"{far}, {around}"):
        resolve("org/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsError, match=rf"the hub: HF_HUB_OFFLINE is set, .*; set HF_HUB_OFFLINE=0, {around}") as told:
        resolve("org/model")
    assert "\n" not in str(told.value) and str(constants.HF_HUB_CACHE) in str(told.value)


def test_a_proxy_that_refuses_is_a_weights_error(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, hub.address)
    close_session()
    with pytest.raises(WeightsError, match=r"org/model is no folder here and cannot be fetched from the hub: ProxyError"):
        resolve("org/model")


@pytest.mark.parametrize("proxy", ["gopher://127.0.0.1:1", "socks5://127.0.0.1:1"])
def test_a_proxy_that_cannot_be_used_is_a_weights_error(hub: Hub, monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    close_session()
    with pytest.raises(WeightsError, match="org/model is no folder here and cannot be fetched"):
        resolve("org/model")


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, '{"model_type": 7}'])
def test_a_config_that_says_nothing_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        open_model(str(tmp_path), torch.float32, CPU)
