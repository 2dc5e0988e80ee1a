"""What a server takes on, and from whom."""

from dataclasses import dataclass

from mmsdk.errors import InputError
from mmsdk.vision.intake import Access, Limits, Sampling, Ways
from mmsdk.vision.values import real, shown, whole

__all__ = ["LONGEST", "Settings"]

LONGEST = 86_400.0
INSTEAD = "send what is there as a data: URI"
WAYS = Ways(
    host=f"{INSTEAD}, or start the server with --allow-host HOST",
    network=f"{INSTEAD}, or start the server with --allow-host HOST --allow-network ADDRESS",
    between=" --allow-network ",
    redirect="send the address that it leads to",
    slow=INSTEAD,
)
"""What clients of a server are told to do about an address that it does not fetch from."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Bounds on requests; what goes over one is refused, with a status that fits and a message that names it.

    `rows` are answered at one time and `waiting` more may wait (429 beyond). `body`: bytes of a request (413). `media`: pictures and
    clips of one request, `pixels` of all of them together once decoded, `frames` that are taken of a clip. `tokens`: of an answer.
    `seconds`: from the first byte of a request to the last of its answer, of which its body may take `arrival` to come and a form that it
    wants `forming` to be compiled, once it is begun, for which it waits twice as long at most (429). `grace`: seconds that what runs is
    given when the server ends.
    `pool`: tokens of all who are answered together, 0 for the engine's own choice.

    `hosts` and `networks` are those that media may be fetched from, see `mmsdk.vision.intake.Access`: by default none. `keys`: with any,
    clients bring one of them, and those of one share no memory with those of another. `origins` are web pages whose scripts may ask.
    """

    rows: int = 8
    waiting: int = 24
    body: int = 32 * 2**20
    media: int = 16
    pixels: int = 2**25
    frames: int = 8
    tokens: int = 1024
    seconds: int | float = 300.0
    arrival: int | float = 30.0
    forming: int | float = 10.0
    grace: int | float = 60.0
    pool: int = 0
    hosts: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in {
            "waiting": 0,
            "media": 0,
            "pool": 0,
            **dict.fromkeys(("rows", "body", "pixels", "frames", "tokens"), 1),
        }.items():
            if not whole(getattr(self, name), least):
                raise InputError(f"it is {shown(getattr(self, name))}, expected a whole number of at least {least}", item=name)
        for name, floor in {"seconds": 0.001, "arrival": 0.001, "forming": 0.001, "grace": 0.0}.items():
            if not floor <= real(getattr(self, name)) <= LONGEST:
                raise InputError(f"it is {shown(getattr(self, name))}, expected from {floor:g} to {LONGEST:,.0f} seconds", item=name)
        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in self.keys):
            raise InputError("a key is printable ASCII without spaces, since it travels in a header", item="keys")
        Access(hosts=self.hosts, networks=self.networks)

    @property
    def access(self) -> Access:
        """What addresses of media may reach."""
        return Access(hosts=self.hosts, networks=self.networks, seconds=min(10.0, float(self.seconds)), ways=WAYS)

    @property
    def sampling(self) -> Sampling:
        """Which frames of a clip are taken."""
        return Sampling(frames=self.frames)

    def limits(self, pixels: int) -> Limits:
        """Those of one picture or clip, where so many pixels are left to its request."""
        return Limits(held_bytes=self.body, pixels=pixels, clip_pixels=pixels)
