"""The grammar of the sentences that the embedded model knows: commands, numbers, times and names.

A sentence is a template (``"Set the {room} lamp to {percent}."``) whose slots are filled at random. A
slot is a list of texts, which may contain slots, or a function of the random generator. Numbers and
digits are spelled out. Capitals and punctuation follow Whisper's style.

A fixed share of all sentences is never used for training: see :func:`is_held_out`.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Sequence

HELD_OUT_ONE_IN = 24

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEENS = (
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen",
    "eighteen", "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth",
    "eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth",
    "eighteenth",
    "nineteenth", "twentieth",
)  # fmt: skip


def cardinal(number: int) -> str:
    """Spell a number below one thousand: 325 is "three hundred twenty-five"."""
    if not 0 <= number < 1000:
        raise ValueError(f"cardinal() spells 0 to 999, not {number}")
    if number >= 100:
        rest = f" {cardinal(number % 100)}" if number % 100 else ""
        return f"{DIGITS[number // 100]} hundred{rest}"
    if number >= 20:
        unit = f"-{DIGITS[number % 10]}" if number % 10 else ""
        return TENS[number // 10 - 2] + unit
    return TEENS[number - 10] if number >= 10 else DIGITS[number]


def ordinal_day(day: int) -> str:
    """Spell a day of the month: 31 is "thirty-first"."""
    if day <= 20:
        return ORDINALS[day - 1]
    return "thirtieth" if day == 30 else f"{TENS[day // 10 - 2]}-{ORDINALS[day % 10 - 1]}"


def _number(low: int, high: int) -> Callable[[random.Random], str]:
    return lambda rng: cardinal(rng.randint(low, high))


def _digit_string(rng: random.Random) -> str:
    """Return digits in groups, as in a phone number, with commas between the groups."""
    groups = rng.choice(((3,), (4,), (3, 3), (3, 4), (2, 2, 2), (3, 3, 4)))
    return ", ".join(" ".join(rng.choice(DIGITS) for _ in range(size)) for size in groups)


def _clock(rng: random.Random) -> str:
    hour = cardinal(rng.randint(1, 12))
    kind = rng.randrange(6)
    if kind == 0:
        return f"{hour} o'clock"
    if kind == 1:
        return f"half past {hour}"
    if kind == 2:
        return rng.choice(("a quarter to ", "a quarter past ")) + hour
    if kind == 3:
        return rng.choice(("noon", "midnight"))
    minute = rng.choice((10, 15, 20, 25, 30, 40, 45, 50, 55, rng.randint(11, 59)))
    return f"{hour} {cardinal(minute)}"


def _date(rng: random.Random) -> str:
    return f"the {ordinal_day(rng.randint(1, 31))} of {rng.choice(MONTHS)}"


MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October",
    "November", "December",
)  # fmt: skip

ROUND_LEVELS = (5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 75, 80, 90)

SLOTS: dict[str, Sequence[str] | Callable[[random.Random], str]] = {
    "small": _number(1, 12),
    "number": _number(2, 99),
    "big": lambda rng: cardinal(rng.randint(100, 999)),
    "level": lambda rng: cardinal(rng.choice((*ROUND_LEVELS, rng.randint(1, 99)))),
    "decimal": lambda rng: f"{cardinal(rng.randint(0, 40))} point {rng.choice(DIGITS)}",
    "digits": _digit_string,
    "time": _clock,
    "date": _date,
    "month": MONTHS,
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "when": (
        "today", "tomorrow", "tonight", "this morning", "this afternoon", "this evening", "on {day}",
        "next week",
    ),
    "at": ("at {time}", "{when} at {time}", "on {day} at {time}", "in {duration}"),
    "name": (
        "Anna", "Peter", "Maria", "David", "Sarah", "Thomas", "Julia", "Daniel", "Emma", "Robert",
        "Laura", "Martin",
        "Olivia", "Henry", "Sophie", "Victor", "Alice", "George", "Helen", "Oscar",
    ),
    "person": (
        "{name}", "{name}", "{name}", "my mother", "my father", "my brother", "my sister",
        "the doctor",
    ),
    "room": (
        "kitchen", "bedroom", "bathroom", "living room", "garage", "hallway", "office", "garden",
        "basement",
    ),
    "light": ("light", "lights", "lamp"),
    "machine": (
        "heater", "fan", "radio", "television", "oven", "camera", "alarm", "speaker", "dishwasher",
        "printer",
    ),
    "opening": ("door", "window", "blinds", "curtains", "gate"),
    "color": ("red", "green", "blue", "white", "yellow", "orange", "purple"),
    "unit": ("seconds", "minutes", "hours", "days"),
    "duration": (
        "{number} {unit}", "{small} {unit}", "one minute", "one hour", "half an hour",
        "{level} minutes",
    ),
    "degrees": ("{number} degrees",),
    "percent": ("{level} percent", "one hundred percent"),
    "distance": ("{number} meters", "{number} kilometers", "{number} miles", "{big} meters"),
    "sensor": ("temperature", "pressure", "humidity", "voltage", "current", "distance", "speed"),
    "part": ("motor", "battery", "engine", "board", "sensor", "network", "display", "pump", "valve", "fan"),
    "side": ("left", "right"),
    "direction": ("forward", "backward", "left", "right", "straight ahead"),
    "place": (
        "home", "the station", "the airport", "the hospital", "the office", "the school",
        "the market", "the hotel",
        "the bridge",
    ),
    "food": (
        "milk", "bread", "coffee", "tea", "sugar", "butter", "cheese", "rice", "apples", "bananas",
        "tomatoes", "eggs",
    ),
    "errand": (
        "buy {food}", "water the plants", "feed the cat", "walk the dog", "take the medicine",
        "call {person}",
        "pay the bill", "clean the {room}", "charge the battery",
    ),
    "music": ("jazz", "some music", "the news", "my favorite song", "classical music", "rock music"),
    "please": ("", "", "", "", ", please"),
    "state": ("on", "off"),
    "weather": ("rain", "snow", "be cold", "be warm", "be sunny", "be windy"),
}  # fmt: skip

TEMPLATES: dict[str, float] = {
    # smart home
    "Turn {state} the {light}{please}.": 2,
    "Turn {state} the {room} {light}{please}.": 3,
    "Turn the {machine} {state}{please}.": 2,
    "Turn {state} the {machine} in the {room}.": 3,
    "Switch {state} the {machine} {at}.": 2,
    "Set the {room} {light} to {percent}.": 3,
    "Set the temperature to {degrees}{please}.": 2,
    "Set the {room} temperature to {decimal} degrees.": 2,
    "Make the {room} {light} {color}.": 2,
    "Change the color to {color}{please}.": 1,
    "Dim the lights in the {room}{please}.": 1,
    "Open the {room} {opening}{please}.": 2,
    "Close the {opening} in the {room}{please}.": 2,
    "Lock the {room} door {at}.": 1,
    "Unlock the front door for {name}.": 1,
    "Is the {room} {opening} open?": 1,
    "Is the {machine} still on?": 1,
    # timers, dates, clock
    "Set a timer for {duration}{please}.": 3,
    "Set an alarm for {time}{please}.": 2,
    "Wake me up {at}{please}.": 2,
    "Remind me to {errand} {at}.": 4,
    "Don't forget to {errand} {when}.": 2,
    "What time is it in the {room}?": 0.3,
    "What time is it now?": 0.2,
    "What is the date {when}?": 0.5,
    "It is {time}.": 1,
    "The meeting with {person} is {at}.": 3,
    "Today is {day}, {date}.": 3,
    "The birthday of {name} is on {date}.": 3,
    "Cancel the timer for {duration}.": 1,
    "How many {unit} are left?": 0.5,
    # people and messages
    "Call {person}{please}.": 2,
    "Call {name} at {digits}.": 3,
    "Send a message to {person}: I will be late.": 1,
    "Tell {person} that I am at {place}.": 2,
    "Good morning, {name}.": 1,
    "Good evening, {name}.": 1,
    "Hello {name}, how are you {when}?": 1,
    "Thank you very much, {name}.": 1,
    "My name is {name}.": 1,
    "{name} and {name} are in the {room}.": 2,
    "Where is {person} {when}?": 1,
    # numbers
    "My number is {digits}.": 4,
    "The code is {digits}.": 4,
    "The answer is {number}.": 1,
    "The answer is {big}.": 2,
    "Dial {digits}{please}.": 3,
    "How much is {number} plus {number}?": 2,
    "How much is {big} minus {number}?": 1,
    "Count from {small} to {number}.": 1,
    # boards and machines
    "Read the {sensor} of the {part}.": 2,
    "Read channel {number}{please}.": 1,
    "The {sensor} is {decimal}.": 3,
    "The {sensor} of the {part} is {big}.": 2,
    "Set pin {number} to {small}.": 2,
    "Set the {part} speed to {percent}.": 2,
    "Start the {part}{please}.": 2,
    "Stop the {part} after {duration}.": 2,
    "Restart the {part} in the {room}.": 1,
    "Check the {part} and the {part}.": 2,
    "The {part} is ready.": 1,
    "Show me the status of the {part}.": 2,
    "Save the file to folder {number}.": 1,
    # vehicles
    "Drive to {place}{please}.": 2,
    "Drive {distance} {direction}.": 2,
    "Turn {side} after {distance}.": 2,
    "Turn {side} at {place}, then go {direction}.": 2,
    "How far is it to {place}?": 1,
    "We will arrive at {place} {at}.": 3,
    "Open the {side} window{please}.": 1,
    "Stop at {place}{please}.": 1,
    # music, shopping, weather, answers
    "Play {music} in the {room}{please}.": 2,
    "Play the {side} speaker at {percent}.": 1,
    "Turn the volume up to {number}.": 1,
    "Next song{please}.": 0.3,
    "Add {food} and {food} to the shopping list.": 3,
    "Add {small} {food} to the list.": 1,
    "We need {food}, {food} and {food}.": 3,
    "Will it {weather} {when}?": 3,
    "It will {weather} on {day}.": 2,
    "Yes{please}.": 0.2,
    "No, thank you.": 0.2,
    "Stop.": 0.1,
    "I am in the {room} with {person}.": 2,
    "Wait for {duration}, then turn {state} the {machine}.": 3,
}

_SLOT = re.compile(r"\{(\w+)\}")


def _fill(text: str, rng: random.Random) -> str:
    """Replace the slots of ``text`` until none is left."""

    def choose(match: re.Match[str]) -> str:
        slot = SLOTS[match.group(1)]
        return slot(rng) if callable(slot) else rng.choice(slot)

    while _SLOT.search(text):
        text = _SLOT.sub(choose, text)
    return text


def sentence(rng: random.Random) -> str:
    """Return a random sentence."""
    template = rng.choices(list(TEMPLATES), weights=list(TEMPLATES.values()))[0]
    text = _fill(template, rng)
    return text[0].upper() + text[1:]


def is_held_out(text: str) -> bool:
    """Return whether a sentence is held out for the evaluation. This depends only on its text."""
    return len(text.split()) >= 3 and zlib.crc32(text.encode()) % HELD_OUT_ONE_IN == 0


def sentences(count: int, *, seed: int, held_out: bool) -> list[str]:
    """Return ``count`` random sentences for training or evaluation; held-out ones are all different."""
    rng = random.Random(seed)
    found: list[str] = []
    seen: set[str] = set()
    while len(found) < count:
        text = sentence(rng)
        if is_held_out(text) == held_out and not (held_out and text in seen):
            found.append(text)
            seen.add(text)
    return found


def vocabulary(sample: int = 200_000, seed: int = 0) -> list[str]:
    """Return the words of the grammar in lower case, found in many random sentences."""
    rng = random.Random(seed)
    words: set[str] = set()
    for _ in range(sample):
        words.update(re.findall(r"[a-z']+", sentence(rng).lower()))
    return sorted(words)
