"""The names that the training scenes are made of: objects, shapes, colours, words, places, and what is held out of training."""

from dataclasses import dataclass

__all__ = [
    "COLOURS", "HELD_OUT_PHOTOS", "HELD_OUT_SHAPES", "NUMBERS", "OBJECTS", "PHOTOS", "PLACES", "SHAPES", "TABLETOP", "WORDS",
    "Kind", "article", "held_out_pair", "place_of", "plural", "preposition",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object: its English name, the emoji that draws it, and its colour where nobody would argue about it."""

    name: str
    emoji: str
    colour: str = ""


_OBJECTS = """
dog:dog cat:cat2:orange elephant:elephant:grey penguin:penguin cow:cow2 pig:pig:pink rabbit:rabbit2:grey tiger:tiger2:orange
monkey:monkey:brown bear:bear:brown lion:lion_face fox:fox_face:orange panda:panda_face owl:owl:brown duck:duck eagle:eagle
fish:fish:blue octopus:octopus turtle:turtle:green snail:snail:brown bee:bee butterfly:butterfly:orange spider:spider:grey crab:crab:red
whale:whale:blue dolphin:dolphin:blue camel:camel giraffe:giraffe_face apple:apple:red banana:banana:yellow grapes:grapes:purple
strawberry:strawberry:red lemon:lemon:yellow pineapple:pineapple watermelon:watermelon cherries:cherries:red carrot:carrot:orange
corn:corn:yellow pizza:pizza burger:hamburger hotdog:hotdog bread:bread egg:egg cookie:cookie:brown doughnut:doughnut cake:cake
coffee:coffee popcorn:popcorn mushroom:mushroom:red tree:evergreen_tree:green cactus:cactus:green sunflower:sunflower:yellow
rose:rose:red car:car:red bus:bus taxi:taxi:yellow truck:truck train:train2 bike:bike airplane:airplane rocket:rocket
helicopter:helicopter:yellow ship:ship boat:boat tractor:tractor:green ambulance:ambulance:white house:house tent:tent:orange
umbrella:umbrella:purple key:key:yellow lock:lock bell:bell:yellow book:book guitar:guitar:red drum:drum_with_drumsticks:red
trumpet:trumpet:yellow violin:violin:brown clock:alarm_clock:red watch:watch camera:camera television:tv laptop:computer phone:phone:red
hammer:hammer scissors:scissors axe:axe bulb:bulb:yellow candle:candle:white chair:chair:brown bed:bed door:door:brown gift:gift
balloon:balloon:red crown:crown:yellow ring:ring shirt:shirt jeans:jeans:blue dress:dress:blue boot:boot:brown hat:tophat:black
glasses:eyeglasses basketball:basketball:orange football:soccer trophy:trophy:yellow kite:kite anchor:anchor snowman:snowman:white
cloud:cloud:white moon:full_moon rainbow:rainbow bucket:bucket:blue broom:broom ladder:ladder toilet:toilet:white bomb:bomb:black
magnet:magnet:red pencil:pencil2:yellow mailbox:mailbox:blue teddy:teddy_bear:brown
"""

OBJECTS: tuple[Kind, ...] = tuple(Kind(*entry.split(":")) for entry in _OBJECTS.split())

SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross", "heart", "hexagon")

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 32, 38), "green": (40, 160, 60), "blue": (38, 84, 212), "yellow": (245, 212, 36), "orange": (245, 134, 24),
    "purple": (132, 46, 168), "pink": (244, 130, 178), "brown": (124, 78, 40), "white": (248, 248, 248), "black": (18, 18, 18),
    "grey": (132, 132, 132),
}  # fmt: skip

WORDS = tuple(
    """STOP TAXI EXIT OPEN SALE CAFE BANK FIRE HELP PARK HOTEL PIZZA MUSIC WATER LEFT RIGHT CLOSED SCHOOL POLICE
    COFFEE BREAD MILK SHOP LOVE HOME GAME NEWS GOLD ZERO BLUE LUNCH DANGER PUSH PULL FREE HELLO WELCOME NORTH SOUTH ROBOT""".split()
)
NUMBERS = tuple(str(n) for n in range(100))

PLACES = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")

PHOTOS: dict[str, tuple[str, str]] = {
    "astronaut.png": ("astronaut", "a smiling astronaut in an orange space suit"),
    "chelsea.png": ("cat", "the face of a cat with brown and white fur"),
    "camera.png": ("man", "a man looking through a camera on a tripod, in black and white"),
    "coins.png": ("coins", "rows of old coins, in black and white"),
    "moon.png": ("moon", "the rocky surface of the moon, in black and white"),
    "hubble_deep_field.jpg": ("galaxies", "many galaxies in dark space"),
    "brick.png": ("bricks", "a wall of bricks"),
    "grass.png": ("grass", "a field of grass"),
    "gravel.png": ("stones", "many small stones"),
    "retina.jpg": ("eye", "the inside of an eye"),
    "coffee.png": ("coffee", "a cup of coffee with a spoon on a wooden table"),
    "rocket.jpg": ("rocket", "a white rocket on its launch pad"),
    "motorcycle_left.png": ("motorcycle", "a red motorcycle in a garage"),
}
"""File of scikit-image -> (main object, caption), written by looking at each photo."""

TABLETOP = (
    "backboard", "ball", "basketball", "bin", "block", "bottle", "box", "button", "cabinet", "coffee machine", "dial", "door", "drawer",
    "faucet", "hammer", "handle", "hoop", "knob", "lever", "lid", "lock", "mug", "nail", "peg", "plate", "plug", "puck", "ring", "shelf",
    "socket", "stick", "wall", "window",
)  # fmt: skip
"""What lies on the tables of the robot simulators."""

HELD_OUT_PHOTOS = ("coffee.png", "rocket.jpg", "motorcycle_left.png")
"""Never seen in training, neither as a background nor as a photo."""

HELD_OUT_SHAPES = frozenset(
    {("red", "star"), ("blue", "circle"), ("green", "triangle"), ("yellow", "square"), ("purple", "heart"), ("orange", "hexagon")}
)
"""(colour, shape) pairs that training never shows."""


def held_out_pair(first: str, second: str) -> bool:
    """True for about one in ten unordered pairs of names: training never shows both in one scene."""
    a, b = sorted((first, second))
    return sum(ord(c) * (i + 1) for i, c in enumerate(a + "+" + b)) % 10 == 3


def place_of(x: float, y: float) -> str:
    """The name of the ninth of the picture that holds the point (x, y), both in [0, 1]."""
    return PLACES[min(2, int(y * 3)) * 3 + min(2, int(x * 3))]


def preposition(place: str) -> str:
    """`place` as an adverbial phrase: "at the top left", "in the centre", "on the right"."""
    return f"in the {place}" if place == "centre" else f"on the {place}" if place in ("left", "right") else f"at the {place}"


def article(noun: str) -> str:
    """`noun` with its indefinite article; plural nouns stay bare."""
    last = noun.split()[-1]
    if last in ("grapes", "cherries", "scissors", "jeans", "glasses", "coffee", "popcorn", "bread", "corn"):
        return noun
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def plural(noun: str) -> str:
    """The plural of a (possibly coloured) noun of this vocabulary."""
    if noun.endswith(("grapes", "cherries", "scissors", "jeans", "glasses", "popcorn", "fish", "corn")):
        return noun
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"
