"""Arithmetic word problems with worked steps, shaped like GSM8K: small numbers, 2 to 6 steps."""

from collections.abc import Callable
from random import Random

from acceptmoe.targets.arithmetic import (
    worked_difference,
    worked_product,
    worked_quotient,
    worked_sum,
)
from acceptmoe.targets.problem import Problem

_SHE = [
    "Mia",
    "Anna",
    "Lena",
    "Sara",
    "Nora",
    "Ella",
    "Ruth",
    "Jane",
    "Kim",
    "Lucy",
    "Maria",
    "Rosa",
    "Tina",
    "Vera",
    "Wendy",
    "Zoe",
    "Alice",
    "Clara",
    "Diana",
    "Emma",
    "Grace",
    "Helen",
    "Iris",
    "Julia",
]
_HE = [
    "Tom",
    "Ben",
    "Sam",
    "Max",
    "Leo",
    "Paul",
    "Omar",
    "Ivan",
    "Jack",
    "Karl",
    "Luke",
    "Mark",
    "Noah",
    "Oscar",
    "Peter",
    "Ravi",
    "Simon",
    "Tim",
    "Victor",
    "Will",
    "Adam",
    "Carl",
    "David",
    "Eric",
]
_THINGS = [
    "apples",
    "pears",
    "plums",
    "lemons",
    "oranges",
    "cookies",
    "candies",
    "muffins",
    "marbles",
    "stickers",
    "stamps",
    "coins",
    "shells",
    "stones",
    "cards",
    "books",
    "pens",
    "pencils",
    "crayons",
    "balloons",
    "buttons",
    "beads",
    "toys",
    "blocks",
    "flowers",
    "roses",
    "eggs",
    "cakes",
    "ribbons",
    "badges",
]
_GOODS = [
    "pen",
    "book",
    "ball",
    "cap",
    "cup",
    "plate",
    "lamp",
    "toy",
    "scarf",
    "ticket",
    "sandwich",
    "juice",
    "cake",
    "kite",
    "brush",
    "bag",
    "mug",
    "poster",
    "chair",
    "plant",
]
_BOXES = ["boxes", "bags", "packs", "jars", "baskets", "trays", "crates"]
_MAKERS = (
    ("bakes", "loaves"),
    ("paints", "tiles"),
    ("sews", "shirts"),
    ("writes", "letters"),
    ("builds", "chairs"),
    ("folds", "napkins"),
    ("prints", "posters"),
    ("packs", "parcels"),
    ("solves", "puzzles"),
    ("knits", "socks"),
)
_VENUES = ("hall", "theater", "bus", "train", "stadium", "classroom", "cinema", "church")
_RIDES = ("bus", "train", "ferry", "tram", "boat")
_PACES = (
    ("walks", "km"),
    ("runs", "km"),
    ("cycles", "miles"),
    ("swims", "laps"),
    ("rows", "miles"),
)
_SPANS = ("day", "week", "morning", "evening")


class _Work:
    """The worked steps of one problem; each step line ends in the number that the next one uses."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, a: int, b: int, what: str) -> int:
        self.lines.append(f"{what}: {worked_sum(a, b)}.")
        return a + b

    def subtract(self, a: int, b: int, what: str) -> int:
        self.lines.append(f"{what}: {worked_difference(a, b)}.")
        return a - b

    def multiply(self, a: int, b: int, what: str) -> int:
        self.lines.append(f"{what}: {worked_product(a, b)}.")
        return a * b

    def divide(self, a: int, b: int, what: str) -> int:
        self.lines.append(f"{what}: {worked_quotient(a, b)}.")
        return a // b


# What a family returns: the story with its question, the steps, the answer.
_Story = tuple[str, _Work, int]


def _person(rng: Random) -> tuple[str, str]:
    if rng.random() < 0.5:
        return rng.choice(_SHE), "She"
    return rng.choice(_HE), "He"


def _other(rng: Random, name: str) -> str:
    return rng.choice([other for other in _SHE + _HE if other != name])


def _holding(rng: Random) -> _Story:
    name, pronoun = _person(rng)
    things = rng.choice(_THINGS)
    work = _Work()
    have = rng.randint(5, 50)
    story = [
        rng.choice(
            (
                f"{name} has {have} {things}.",
                f"{name} starts with {have} {things}.",
                f"There are {have} {things} on the table of {name}.",
            )
        )
    ]
    for _ in range(rng.choice((2, 2, 3))):
        kind = rng.choice(("gain", "lose", "pack"))
        if kind == "pack" and have <= 60:
            boxes, each = rng.randint(2, 5), rng.randint(2, 7)
            box = rng.choice(_BOXES)
            story.append(
                rng.choice(
                    (
                        f"{pronoun} buys {boxes} {box} with {each} {things} each.",
                        f"{pronoun} gets {boxes} {box} of {each} {things}.",
                    )
                )
            )
            bought = work.multiply(boxes, each, f"In the {box}")
            have = work.add(have, bought, "Together")
        elif kind == "lose" and have >= 8:
            lost = rng.randint(2, min(have - 2, 35))
            friend = _other(rng, name)
            phrase, what = rng.choice(
                (
                    (f"{pronoun} gives {lost} of them to {friend}.", f"After giving to {friend}"),
                    (f"{pronoun} loses {lost} of them.", "After losing some"),
                    (f"{pronoun} sells {lost} of them to {friend}.", "After selling"),
                    (f"Then {friend} takes {lost} away.", f"After {friend} takes some"),
                )
            )
            story.append(phrase)
            have = work.subtract(have, lost, what)
        else:
            if have > 80:
                continue
            more = rng.randint(3, min(99 - have, 35))
            friend = _other(rng, name)
            phrase, what = rng.choice(
                (
                    (f"{pronoun} buys {more} more.", "After buying"),
                    (f"{pronoun} finds {more} more.", "After finding"),
                    (f"{friend} gives {name} another {more}.", f"With those of {friend}"),
                    (f"{pronoun} receives {more} from {friend}.", f"With those of {friend}"),
                )
            )
            story.append(phrase)
            have = work.add(have, more, what)
    story.append(
        rng.choice(
            (
                f"How many {things} does {name} have now?",
                f"How many {things} are there in the end?",
                f"How many {things} does {name} end up with?",
            )
        )
    )
    return " ".join(story), work, have


def _comparison(rng: Random) -> _Story:
    name, _ = _person(rng)
    friend = _other(rng, name)
    things = rng.choice(_THINGS)
    work = _Work()
    kind = rng.choice(("more", "fewer", "times"))
    if kind == "more":
        have, gap = rng.randint(5, 35), rng.randint(2, 25)
        relation = f"{gap} more {things} than {name}"
        theirs = work.add(have, gap, friend)
    elif kind == "fewer":
        have = rng.randint(12, 55)
        gap = rng.randint(2, have - 5)
        relation = f"{gap} fewer {things} than {name}"
        theirs = work.subtract(have, gap, friend)
    else:
        factor = rng.randint(2, 5)
        have = rng.randint(3, 96 // (factor + 1))
        relation = f"{factor} times as many {things} as {name}"
        theirs = work.multiply(have, factor, friend)
    story = f"{name} has {have} {things}. {friend} has {relation}."
    if have + theirs <= 99 and rng.random() < 0.6:
        question = rng.choice(
            (
                f"How many {things} do they have together?",
                f"How many {things} do {name} and {friend} have in total?",
            )
        )
        return f"{story} {question}", work, work.add(have, theirs, "Together")
    given = rng.randint(1, min(theirs - 1, 20))
    question = f"{friend} loses {given} {things}. How many {things} does {friend} have left?"
    return f"{story} {question}", work, work.subtract(theirs, given, "Left")


def _shopping(rng: Random) -> _Story:
    name, pronoun = _person(rng)
    first, second = rng.sample(_GOODS, 2)
    work = _Work()
    count, price = rng.randint(2, 6), rng.randint(2, 8)
    many, cost = rng.randint(2, 5), rng.randint(2, 9)
    unit = rng.choice(("dollars", "euros", "coins"))
    if rng.random() < 0.5:
        paid = rng.randint(count * price + 1, 99)
        story = rng.choice(
            (
                f"A {first} costs {price} {unit}. {name} buys {count} of them and pays with "
                f"{paid} {unit}. How much change does {name} get?",
                f"{name} has {paid} {unit}. {pronoun} buys {count} {first}s for {price} {unit} "
                f"each. How many {unit} are left?",
            )
        )
        total = work.multiply(count, price, f"The {first}s cost")
        return story, work, work.subtract(paid, total, "Left")
    story = rng.choice(
        (
            f"{name} buys {count} {first}s for {price} {unit} each and {many} {second}s for "
            f"{cost} {unit} each. How much does {name} pay?",
            f"A {first} costs {price} {unit} and a {second} costs {cost} {unit}. How much do "
            f"{count} {first}s and {many} {second}s cost?",
        )
    )
    one = work.multiply(count, price, f"The {first}s cost")
    two = work.multiply(many, cost, f"The {second}s cost")
    return story, work, work.add(one, two, "Together")


def _output(rng: Random) -> _Story:
    name, pronoun = _person(rng)
    verb, things = rng.choice(_MAKERS)
    span = rng.choice(("hour", "day", "week"))
    work = _Work()
    rate, spans = rng.randint(2, 12), rng.randint(2, 8)
    made = work.multiply(rate, spans, f"In {spans} {span}s")
    story = f"{name} {verb} {rate} {things} every {span} for {spans} {span}s."
    if rng.random() < 0.5:
        bad = rng.randint(1, made - 1) if made <= 20 else rng.randint(2, 20)
        ending = rng.choice(
            (
                f"{pronoun} throws {bad} of them away. How many {things} are left?",
                f"{bad} of the {things} are damaged. How many {things} are good?",
            )
        )
        return f"{story} {ending}", work, work.subtract(made, bad, "Left")
    goal = 99 if made > 90 else rng.randint(made + 2, 99)
    ending = f"{pronoun} needs {goal} {things}. How many more {things} does {name} need?"
    return f"{story} {ending}", work, work.subtract(goal, made, "Still needed")


def _sharing(rng: Random) -> _Story:
    name, pronoun = _person(rng)
    things = rng.choice(_THINGS)
    work = _Work()
    people, each = rng.randint(2, 9), rng.randint(2, 9)
    total = people * each
    group = rng.choice(("friends", "children", "cousins", "neighbors", "pupils"))
    question = f"How many {things} does each of them get?"
    if rng.random() < 0.5 and total >= 8:
        extra = rng.randint(2, 20)
        start = total + extra
        story = rng.choice(
            (
                f"{name} has {start} {things}. {pronoun} keeps {extra} and shares the rest equally "
                f"among {people} {group}.",
                f"Of {start} {things}, {name} puts {extra} aside and divides the others evenly "
                f"between {people} {group}.",
            )
        )
        rest = work.subtract(start, extra, "To share")
    else:
        one = rng.randint(1, total - 1)
        story = (
            f"{name} has {one} red and {total - one} blue {things}. {pronoun} shares all of them "
            f"equally among {people} {group}."
        )
        rest = work.add(one, total - one, "To share")
    return f"{story} {question}", work, work.divide(rest, people, "Each")


def _seats(rng: Random) -> _Story:
    venue = rng.choice(_VENUES)
    work = _Work()
    rows, seats = rng.randint(2, 9), rng.randint(4, 11)
    total = work.multiply(seats, rows, "Seats")
    story = rng.choice(
        (
            f"A {venue} has {rows} rows with {seats} seats each.",
            f"In a {venue} there are {rows} rows of {seats} seats.",
        )
    )
    taken = rng.randint(2, total - 1)
    if rng.random() < 0.5:
        story += f" {taken} seats are taken. How many seats are free?"
        return story, work, work.subtract(total, taken, "Free")
    taken = rng.randint(1, total // 2)
    late = rng.randint(1, total - taken - 1)
    story += f" {taken} people sit down and then {late} more come. How many seats stay empty?"
    people = work.add(taken, late, "People")
    return story, work, work.subtract(total, people, "Empty")


def _distance(rng: Random) -> _Story:
    name, pronoun = _person(rng)
    verb, unit = rng.choice(_PACES)
    span = rng.choice(_SPANS)
    work = _Work()
    pace, spans = rng.randint(2, 9), rng.randint(2, 6)
    further, times = rng.randint(2, 9), rng.randint(2, 4)
    first = work.multiply(pace, spans, f"First {unit}")
    second = work.multiply(further, times, f"Then {unit}")
    story = (
        f"{name} {verb} {pace} {unit} each {span} for {spans} {span}s. Then {pronoun.lower()} "
        f"{verb} {further} {unit} each {span} for {times} {span}s."
    )
    question = rng.choice(
        (f"How many {unit} is that in total?", f"How many {unit} does {name} do altogether?")
    )
    return f"{story} {question}", work, work.add(first, second, "Total")


def _ages(rng: Random) -> _Story:
    name, _ = _person(rng)
    friend = _other(rng, name)
    work = _Work()
    age = rng.randint(5, 30)
    kind = rng.choice(("older", "younger", "times"))
    if kind == "older":
        gap = rng.randint(2, 30)
        story = f"{name} is {age} years old. {friend} is {gap} years older."
        theirs = work.add(age, gap, friend)
    elif kind == "younger":
        gap = rng.randint(1, age - 2)
        story = f"{name} is {age} years old. {friend} is {gap} years younger."
        theirs = work.subtract(age, gap, friend)
    else:
        factor = rng.randint(2, 3)
        story = f"{name} is {age} years old. {friend} is {factor} times as old."
        theirs = work.multiply(age, factor, friend)
    if age + theirs <= 99 and rng.random() < 0.4:
        question = f"What is the sum of the ages of {name} and {friend}?"
        return f"{story} {question}", work, work.add(age, theirs, "Sum")
    if theirs > 88 or rng.random() < 0.3:
        years = rng.randint(1, min(theirs - 1, 9))
        question = f"How old was {friend} {years} years ago?"
        return f"{story} {question}", work, work.subtract(theirs, years, "Then")
    years = rng.randint(2, 11)
    question = f"How old will {friend} be in {years} years?"
    return f"{story} {question}", work, work.add(theirs, years, "Then")


def _saving(rng: Random) -> _Story:
    name, pronoun = _person(rng)
    good = rng.choice(_GOODS)
    unit = rng.choice(("dollars", "euros", "coins"))
    span = rng.choice(("week", "month", "day"))
    work = _Work()
    rate, spans = rng.randint(2, 9), rng.randint(2, 8)
    start = rng.randint(2, 25)
    story = rng.choice(
        (
            f"{name} has {start} {unit} and saves {rate} {unit} every {span} for {spans} {span}s.",
            f"{name} saves {rate} {unit} a {span}. {pronoun} already has {start} {unit} and saves "
            f"for {spans} {span}s.",
        )
    )
    saved = work.multiply(rate, spans, "Saved")
    total = work.add(start, saved, "Together")
    price = rng.randint(3, min(total - 1, 60))
    if rng.random() < 0.6:
        story += f" Then {pronoun.lower()} buys a {good} for {price} {unit}. How much is left?"
        return story, work, work.subtract(total, price, "Left")
    return f"{story} How many {unit} does {name} have then?", work, total


def _groups(rng: Random) -> _Story:
    work = _Work()
    size, groups = rng.randint(2, 9), rng.randint(2, 9)
    total = size * groups
    one = rng.randint(1, total - 1)
    pair = rng.choice(
        (
            ("boys", "girls"),
            ("cats", "dogs"),
            ("cows", "goats"),
            ("men", "women"),
            ("ducks", "geese"),
        )
    )
    place = rng.choice(("class", "club", "village", "park", "camp", "farm"))
    unit = rng.choice(("teams", "groups", "tents", "rows"))
    story = (
        f"In a {place} there are {one} {pair[0]} and {total - one} {pair[1]}. They form {unit} of "
        f"{size}. How many {unit} are there?"
    )
    everyone = work.add(one, total - one, "All")
    return story, work, work.divide(everyone, size, f"The {unit}")


def _passengers(rng: Random) -> _Story:
    ride = rng.choice(_RIDES)
    work = _Work()
    on_board = rng.randint(10, 50)
    story = [f"A {ride} leaves with {on_board} people."]
    for stop in ("first", "second")[: rng.randint(1, 2)]:
        leave = rng.randint(2, on_board - 2)
        join = rng.randint(2, 30)
        story.append(f"At the {stop} stop {leave} get off and {join} get on.")
        on_board = work.subtract(on_board, leave, f"Stop {1 if stop == 'first' else 2} off")
        on_board = work.add(on_board, join, "Then on")
    story.append(f"How many people are on the {ride} now?")
    return " ".join(story), work, on_board


def _weights(rng: Random) -> _Story:
    work = _Work()
    unit = rng.choice(("kg", "grams", "pounds"))
    box = rng.choice(("box", "bag", "crate", "parcel", "sack"))
    heavy, count = rng.randint(3, 12), rng.randint(2, 6)
    empty = rng.randint(2, 25)
    story = (
        f"A {box} weighs {empty} {unit} when empty. {count} stones of {heavy} {unit} each are put "
        f"into it. How much does the {box} weigh now?"
    )
    stones = work.multiply(heavy, count, "Stones")
    return story, work, work.add(empty, stones, "Total")


_FAMILIES: tuple[Callable[[Random], _Story], ...] = (
    _holding,
    _holding,
    _comparison,
    _shopping,
    _output,
    _sharing,
    _seats,
    _distance,
    _ages,
    _saving,
    _groups,
    _passengers,
    _weights,
)


def word_problem(rng: Random) -> Problem:
    """Draw one word problem with its worked solution."""
    story, work, answer = rng.choice(_FAMILIES)(rng)
    steps = "\n".join(work.lines)
    return Problem(
        task="word-problems",
        prompt=f"Problem: {story}\nSteps:\n",
        solution=f"{steps}\nAnswer: {answer}",
        answer=answer,
    )
