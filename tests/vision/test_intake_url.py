"""Addresses on the web, against a real server on this machine: what is fetched, what is refused, and where connections go."""

import io
import re
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from mmsdk.errors import InputError
from mmsdk.vision.intake import Access, Limits, load, load_video
from mmsdk.vision.intake.url import fetch

HERE = ("127.0.0.0/8",)
LIMITS = Limits(held_bytes=1000)
CLIP = Path(__file__).parents[2] / "apps" / "media" / "motion.mp4"


def png() -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (3, 2), (10, 20, 30)).save(file, "PNG")
    return file.getvalue()


class Site(BaseHTTPRequestHandler):
    """/png, /mp4; /to?ADDRESS a redirect; /404; /big too much; /lie less than it says; /slow a byte now and then; /packed gzip."""

    def do_GET(self) -> None:
        page, _, rest = self.path.partition("?")
        if page == "/to":
            self.answer(302, b"", Location=rest)
        elif page == "/png":
            self.answer(200, png())
        elif page == "/mp4":
            self.answer(200, CLIP.read_bytes())
        elif page == "/packed":
            self.answer(200, b"x", **{"Content-Encoding": "gzip"})
        elif page == "/big":
            self.answer(200, bytes(2000), length=rest != "untold")
        elif page == "/lie":
            self.answer(200, b"x" * 10, **{"Content-Length": "20"})
        elif page == "/slow":
            self.slow()
        else:
            self.answer(404, b"")

    def answer(self, status: int, body: bytes, length: bool = False, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def slow(self) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            for _ in range(100):
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.05)
        except OSError:
            return

    def log_message(self, *args: object) -> None:
        self.server.seen.append(self.headers["Host"])  # type: ignore[attr-defined]


@contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        server.seen = []  # type: ignore[attr-defined]
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def site() -> Iterator[ThreadingHTTPServer]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def port(site: ThreadingHTTPServer) -> int:
    return site.server_port


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """The same site by https, as a.example, and the certificate that vouches for it."""
    if not shutil.which("openssl"):
        pytest.skip("makes a certificate with openssl")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    make = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=a.example -addext subjectAltName=DNS:a.example -keyout {key} -out"
    subprocess.run([*make.split(), str(certificate)], capture_output=True, check=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with serving(tls) as server:
        yield server.server_port, certificate


def local(port: int, redirects: int = 0, seconds: float = 10.0) -> Access:
    return Access(hosts=(f"*:{port}", "*"), networks=HERE, redirects=redirects, seconds=seconds)


def at(*addresses: str) -> "Resolver":
    return Resolver(list(addresses))


class Resolver:
    """A resolver that gives one answer after the other, and the last for ever."""

    def __init__(self, answers: list[str]) -> None:
        self.answers, self.asked = answers, 0

    def __call__(self, host: str, port: int) -> list[str]:
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        return [answer]


def test_a_picture_comes_from_a_host_that_is_allowed(port: int) -> None:
    image = load(f"http://127.0.0.1:{port}/png", access=local(port))
    assert image.source == f"http://127.0.0.1:{port}/png"
    assert image.size == (2, 3)


def test_in_16_nothing_is_fetched_by_default(port: int) -> None:
    with pytest.raises(InputError, match=r"not among the hosts.*Access\(hosts"):
        load(f"http://127.0.0.1:{port}/png")


def test_in_16_a_private_address_is_refused_though_its_host_is_allowed(port: int) -> None:
    with pytest.raises(InputError, match=r"127\.0\.0\.1, which is not public"):
        fetch(f"http://127.0.0.1:{port}/png", Access(hosts=(f"*:{port}",)), LIMITS)


@pytest.mark.parametrize(
    "address",
    "10.0.0.1 127.0.0.1 169.254.169.254 192.168.1.1 0.0.0.0 100.64.0.1 224.0.0.1 ::1 fe80::1%eth0 fc00::1 :: ff02::1 "
    "::ffff:127.0.0.1 ::ffff:169.254.169.254 64:ff9b::7f00:1 2002:7f00:1:: ::127.0.0.1 ::ffff:0:10.0.0.1 64:ff9b:1::7f00:1".split(),
)
def test_in_16_every_kind_of_private_address_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="not public"):
        fetch("http://a.example/", Access(hosts=("*",)), LIMITS, at(address))


def test_in_16_a_redirect_to_a_private_address_is_refused(port: int) -> None:
    start = f"http://127.0.0.1:{port}/to?http://169.254.169.254/latest"
    with pytest.raises(InputError, match=r"redirects further than is followed.*169\.254"):
        fetch(start, local(port), LIMITS)
    with pytest.raises(InputError, match=r"169\.254\.169\.254, which is not public"):
        fetch(start, local(port, redirects=3), LIMITS)


@pytest.mark.parametrize(
    ("hop", "told"),
    [
        ("http://c.example/x", "10.0.0.1, which is not public"),
        ("http://d.example/x", "d.example:80 is not among the hosts"),
        ("http://b.example:22/x", "b.example:22 is not among the hosts"),
        ("http://10.0.0.1/x", "10.0.0.1, which is not public"),
        ("//c.example/x", "10.0.0.1, which is not public"),
    ],
)
def test_in_16_every_hop_is_checked_as_the_first_is(site: ThreadingHTTPServer, hop: str, told: str) -> None:
    """Two hops that are allowed, then one that is not: by its network, its host, its port; nothing is asked of it."""
    here = site.server_port
    known = {"a.example": "127.0.0.1", "b.example": "127.0.0.1", "c.example": "10.0.0.1", "d.example": "127.0.0.1"}
    asked: list[str] = []

    def resolver(host: str, port: int) -> list[str]:
        asked.append(host)
        return [known.get(host, host)]

    hosts = (f"a.example:{here}", f"b.example:{here}", "b.example", "c.example", "10.0.0.1")
    access = Access(hosts=hosts, networks=HERE, redirects=5)
    start = f"http://a.example:{here}/to?http://b.example:{here}/to?{hop}"
    site.seen.clear()  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=told):
        fetch(start, access, LIMITS, resolver)
    assert site.seen == [f"a.example:{here}", f"b.example:{here}"]  # type: ignore[attr-defined]
    assert asked[:2] == ["a.example", "b.example"] and len(asked) <= 3


@pytest.mark.parametrize(
    "host", ["2130706433", "0x7f.1", "127.1", "0177.0.0.1", "localhost.", "127。0。0。1", "[::1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "0"]
)
def test_in_16_other_spellings_of_this_machine_are_refused(host: str) -> None:
    with pytest.raises(InputError, match=r"not public|not known|not among"):
        load(f"http://{host}/a.png", access=Access(hosts=("*",)))


def test_in_16_https_is_checked_by_name_and_never_left_for_http(
    secure: tuple[int, Path], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, certificate = secure
    here = at("127.0.0.1")
    with pytest.raises(InputError, match="cannot be fetched.*certificate"):
        fetch(f"https://a.example:{tls}/png", local(tls), LIMITS, here)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert fetch(f"https://a.example:{tls}/png", local(tls), LIMITS, here) == png()
    assert fetch(f"https://a.example:{tls}/to?/png", local(tls, redirects=1), LIMITS, here) == png()
    with pytest.raises(InputError, match="cannot be fetched.*certificate"):
        fetch(f"https://b.example:{tls}/png", local(tls), LIMITS, here)
    with pytest.raises(InputError, match="redirects from https to an address that is not https"):
        fetch(f"https://a.example:{tls}/to?http://a.example:{port}/png", local(tls, redirects=3), LIMITS, here)


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://127.0.0.1:70/x", "http://user:word@127.0.0.1/"])
def test_in_16_a_redirect_to_another_kind_of_address_is_refused(port: int, target: str) -> None:
    with pytest.raises(InputError) as error:
        fetch(f"http://127.0.0.1:{port}/to?{target}", local(port, redirects=3), LIMITS)
    assert "word" not in str(error.value)


def test_in_16_redirects_that_are_allowed_are_followed_and_counted(port: int) -> None:
    twice = f"http://127.0.0.1:{port}/to?http://127.0.0.1:{port}/to?/png"
    assert fetch(twice, local(port, redirects=2), LIMITS) == png()
    with pytest.raises(InputError, match=r"redirects further than is followed \(at most 1\).*Access\(redirects=\.\.\.\) follows more"):
        fetch(twice, local(port, redirects=1), LIMITS)


def test_in_17_the_connection_goes_to_the_address_that_was_checked(port: int) -> None:
    # the second answer would be a private address that is not allowed
    resolver = at("127.0.0.1", "10.0.0.1")
    assert fetch(f"http://a.example:{port}/png", local(port), LIMITS, resolver) == png()
    assert resolver.asked == 1


def test_in_17_one_private_address_among_public_ones_refuses_the_host() -> None:
    with pytest.raises(InputError, match="not public"):
        fetch("http://a.example/", Access(hosts=("*",)), LIMITS, lambda host, port: ["93.184.216.34", "127.0.0.1"])


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("/404", "answered 404"),
        ("/big", "2,000 bytes, but at most 1,000"),
        ("/big?untold", "1,001 bytes, but at most 1,000"),
        ("/lie", "ended 10 bytes early|cannot be fetched"),
        ("/packed", "packed content"),
        ("/to", "without saying where"),
    ],
)
def test_answers_that_cannot_be_used_are_named(port: int, page: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fetch(f"http://127.0.0.1:{port}{page}", local(port, redirects=2), LIMITS)


def test_a_slow_answer_is_cut_off_in_time(port: int) -> None:
    start = time.monotonic()
    with pytest.raises(InputError, match=r"not complete within 0\.3 s"):
        fetch(f"http://127.0.0.1:{port}/slow", local(port, seconds=0.3), LIMITS)
    assert time.monotonic() - start < 3


def test_nobody_there_is_an_error_with_a_name() -> None:
    with pytest.raises(InputError, match="cannot be fetched"):
        fetch("http://127.0.0.1:1/x", Access(hosts=("*:1",), networks=HERE), LIMITS)


@pytest.mark.parametrize("url", ["http://", "http://[::1", "http://a.example:99999/", "http:///x", f"http://{'a' * 70}.example/"])
def test_damaged_addresses_are_errors(url: str) -> None:
    with pytest.raises(InputError):
        fetch(url, Access(hosts=("*",)), LIMITS, at("10.0.0.1"))


@pytest.mark.parametrize(
    ("entry", "host", "port", "admitted"),
    [
        ("a.example", "a.example", 443, True),
        ("a.example", "A.example", 80, False),
        ("a.example", "a.example", 8080, False),
        ("a.example:8080", "a.example", 8080, True),
        ("*.example", "b.a.example", 443, True),
        ("*.example", "example", 443, False),
        ("*.example", "badexample", 443, False),
        ("a.example", "evil-a.example", 443, False),
        ("*", "anything", 80, True),
        ("*", "anything", 22, False),
    ],
)
def test_hosts_are_named_exactly(entry: str, host: str, port: int, admitted: bool) -> None:
    # hosts arrive in lower case
    assert Access(hosts=(entry,)).admits(host, port) is admitted


@pytest.mark.parametrize(
    ("host", "port", "addresses"),
    [
        ("a.example", 443, ["10.0.0.1", "8.8.8.8", "fd00::1"]),
        ("a.example", 8080, ["::ffff:10.0.0.1"]),
        ("127.0.0.1", 80, ["127.0.0.1"]),
        ("::1", 80, ["::1"]),
        ("::1", 8080, ["::1"]),
        ("fe80::1", 443, ["fe80::1%eth0"]),
        ("a.example", 80, []),
    ],
)
def test_what_is_advised_about_a_host_opens_it(host: str, port: int, addresses: list[str]) -> None:
    """Its words, taken at face value."""
    said = Access().opening(host, port, addresses)
    hosts, *networks = (tuple(re.findall(r'"([^"]+)"', part)) for part in re.findall(r"(?:hosts|networks)=\(([^)]*)\)", said))
    access = Access(hosts, *networks)
    assert access.admits(host, port) and all(map(access.reaches, addresses))


def test_a_picture_from_the_web_equals_the_same_picture_here(port: int) -> None:
    here = load(png())
    there = load(f"http://127.0.0.1:{port}/png", access=local(port))
    assert np.array_equal(here.pixels.numpy(), there.pixels.numpy())


def test_a_clip_from_the_web_equals_the_same_clip_here_and_is_held_to_the_same_limits(port: int) -> None:
    """Also IN-16: by a redirect that is allowed, from hosts that are named, to no private address, and within size and time."""
    here = load_video(CLIP)
    for page in ("mp4", f"to?http://127.0.0.1:{port}/mp4"):
        there = load_video(f"http://127.0.0.1:{port}/{page}", access=local(port, redirects=1))
        assert torch.equal(there.frames, here.frames) and torch.equal(there.times, here.times)
    with pytest.raises(InputError, match="at most 1,000"):
        load_video(f"http://127.0.0.1:{port}/mp4", access=local(port), limits=LIMITS)
    with pytest.raises(InputError, match="not complete within"):
        load_video(f"http://127.0.0.1:{port}/slow", access=local(port, seconds=0.2))
    with pytest.raises(InputError, match="redirects further"):
        load_video(f"http://127.0.0.1:{port}/to?http://127.0.0.1:{port}/mp4", access=local(port))
    for access, told in ((Access(), "not among the hosts"), (Access(hosts=(f"*:{port}",)), "not public")):
        with pytest.raises(InputError, match=told):
            load_video(f"http://127.0.0.1:{port}/mp4", access=access)
