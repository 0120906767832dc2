"""School algebra with worked steps, shaped like MATH500: equations, sequences, functions."""

from collections.abc import Callable
from random import Random

from acceptmoe.targets.arithmetic import (
    worked_difference,
    worked_product,
    worked_quotient,
    worked_sum,
)
from acceptmoe.targets.problem import Problem

_LETTERS = "xyzabcdkmnpqrstuvw"

# What a family returns: the question, the lines of the solution, the answer.
_Exercise = tuple[str, list[str], int]


def _letter(rng: Random) -> str:
    return rng.choice(_LETTERS)


def _solve(rng: Random, letter: str, equation: str) -> str:
    return rng.choice(
        (
            f"Solve for {letter}: {equation}",
            f"Find {letter} if {equation}.",
            f"What is the value of {letter} when {equation}?",
            f"If {equation}, what is {letter}?",
        )
    )


def _linear(rng: Random) -> _Exercise:
    x = _letter(rng)
    value, a = rng.randint(2, 11), rng.randint(2, 8)
    product = a * value
    if rng.random() < 0.5 and product >= 4:
        b = rng.randint(1, min(product - 1, 30))
        c = product - b
        lines = [f"{a}{x}-{b}={c}", f"{a}{x}={worked_sum(c, b)}"]
        equation = f"{a}{x}-{b}={c}"
    else:
        b = rng.randint(1, 99 - product)
        c = product + b
        lines = [f"{a}{x}+{b}={c}", f"{a}{x}={worked_difference(c, b)}"]
        equation = f"{a}{x}+{b}={c}"
    lines.append(f"{x}={worked_quotient(product, a)}")
    return _solve(rng, x, equation), lines, value


def _quotient(rng: Random) -> _Exercise:
    x = _letter(rng)
    a, q = rng.randint(2, 9), rng.randint(2, 12)
    if rng.random() < 0.5:
        b = rng.randint(1, 40)
        equation, undo = f"{x}/{a}+{b}={q + b}", worked_difference(q + b, b)
    else:
        b = rng.randint(1, q - 1)
        equation, undo = f"{x}/{a}-{b}={q - b}", worked_sum(q - b, b)
    lines = [equation, f"{x}/{a}={undo}", f"{x}={worked_product(q, a)}"]
    return _solve(rng, x, equation), lines, q * a


def _bracket(rng: Random) -> _Exercise:
    x = _letter(rng)
    a, inner = rng.randint(2, 9), rng.randint(3, 9)
    if rng.random() < 0.5:
        b = rng.randint(1, inner - 1)
        equation, undo, value = f"{a}({x}+{b})={a * inner}", worked_difference(inner, b), inner - b
        inside = f"{x}+{b}"
    else:
        b = rng.randint(1, 30)
        equation, undo, value = f"{a}({x}-{b})={a * inner}", worked_sum(inner, b), inner + b
        inside = f"{x}-{b}"
    lines = [equation, f"{inside}={worked_quotient(a * inner, a)}", f"{x}={undo}"]
    return _solve(rng, x, equation), lines, value


def _both_sides(rng: Random) -> _Exercise:
    x = _letter(rng)
    value, c = rng.randint(2, 9), rng.randint(2, 5)
    a = c + rng.randint(2, 4)
    b = rng.randint(1, 20)
    d = (a - c) * value + b
    equation = f"{a}{x}+{b}={c}{x}+{d}"
    lines = [
        equation,
        f"{a}{x}-{c}{x}={a - c}{x}",
        f"{a - c}{x}={worked_difference(d, b)}",
        f"{x}={worked_quotient(d - b, a - c)}",
    ]
    return _solve(rng, x, equation), lines, value


def _system(rng: Random) -> _Exercise:
    x, y = rng.sample(_LETTERS, 2)
    small = rng.randint(1, 8)
    large = small + rng.randint(1, 9 - small) if small < 9 else 9
    total, gap = large + small, large - small
    question = f"{x}+{y}={total} and {x}-{y}={gap}."
    lines = [
        f"2{x}={worked_sum(total, gap)}",
        f"{x}={worked_quotient(2 * large, 2)}",
    ]
    if rng.random() < 0.5:
        return f"{question} Find {x}.", lines, large
    lines.append(f"{y}={worked_difference(total, large)}")
    return f"{question} Find {y}.", lines, small


def _evaluate(rng: Random) -> _Exercise:
    x = _letter(rng)
    value = rng.randint(2, 7)
    a, b = rng.randint(2, 6), rng.randint(1, 9)
    square = value * value
    if rng.random() < 0.5:
        expression = f"{x}^2+{a}{x}"
        lines = [
            f"{x}^2={worked_product(value, value)}",
            f"{a}{x}={worked_product(a, value)}",
            worked_sum(square, a * value),
        ]
        answer = square + a * value
    else:
        expression = f"{x}^2+{b}"
        lines = [f"{x}^2={worked_product(value, value)}", worked_sum(square, b)]
        answer = square + b
    question = rng.choice(
        (
            f"Evaluate {expression} at {x}={value}.",
            f"What is {expression} when {x}={value}?",
            f"Compute {expression} for {x}={value}.",
        )
    )
    return question, lines, answer


def _composition(rng: Random) -> _Exercise:
    x = _letter(rng)
    a, b = rng.randint(2, 4), rng.randint(1, 9)
    c, d = rng.randint(2, 3), rng.randint(1, 6)
    value = rng.randint(1, 5)
    inner = c * value + d
    outer = a * inner + b
    lines = [
        f"g({value}): {worked_product(c, value)}, {worked_sum(c * value, d)}",
        f"f({inner}): {worked_product(inner, a)}, {worked_sum(a * inner, b)}",
    ]
    return (
        f"f({x})={a}{x}+{b} and g({x})={c}{x}+{d}. Find f(g({value})).",
        lines,
        outer,
    )


def _sequence(rng: Random) -> _Exercise:
    first, step, n = rng.randint(1, 20), rng.randint(2, 9), rng.randint(3, 9)
    gain = (n - 1) * step
    question = rng.choice(
        (
            f"A sequence starts at {first} and grows by {step}. What is term {n}?",
            f"Find term {n} of the arithmetic sequence {first}, {first + step}, "
            f"{first + 2 * step}, ...",
        )
    )
    lines = []
    if "arithmetic" in question:
        lines.append(f"step: {worked_difference(first + step, first)}")
    lines += [
        f"{n}-1={n - 1}",
        worked_product(n - 1, step),
        worked_sum(first, gain),
    ]
    return question, lines, first + gain


def _mean(rng: Random) -> _Exercise:
    mean = rng.randint(3, 9)
    first = rng.randint(1, 2 * mean - 1)
    second = rng.randint(1, 3 * mean - first - 1)
    third = 3 * mean - first - second
    lines = [
        worked_sum(first, second),
        worked_sum(first + second, third),
        worked_quotient(3 * mean, 3),
    ]
    word = rng.choice(("mean", "average"))
    return f"What is the {word} of {first}, {second} and {third}?", lines, mean


def _rectangle(rng: Random) -> _Exercise:
    width, height = rng.randint(2, 9), rng.randint(2, 9)
    unit = rng.choice(("m", "cm", "feet", "km"))
    if rng.random() < 0.5:
        lines = [f"height: {worked_quotient(width * height, width)}"]
        lines.append(worked_sum(width, height))
        lines.append(worked_product(width + height, 2))
        return (
            f"A rectangle has area {width * height} and width {width} {unit}. Find its perimeter.",
            lines,
            2 * (width + height),
        )
    half = width + height
    lines = [
        f"half: {worked_quotient(2 * half, 2)}",
        f"height: {worked_difference(half, width)}",
        f"area: {worked_product(width, height)}",
    ]
    return (
        f"A rectangle has perimeter {2 * half} and width {width} {unit}. Find its area.",
        lines,
        width * height,
    )


def _consecutive(rng: Random) -> _Exercise:
    x = _letter(rng)
    value = rng.randint(2, 9)
    total = 3 * value + 3
    lines = [
        f"{x}+{x}+1+{x}+2={total}",
        f"3{x}={worked_difference(total, 3)}",
        f"{x}={worked_quotient(total - 3, 3)}",
    ]
    if rng.random() < 0.5:
        lines.append(worked_sum(value, 2))
        which, answer = "largest", value + 2
    else:
        which, answer = "smallest", value
    return (
        f"Three consecutive numbers {x}, {x}+1, {x}+2 add up to {total}. Find the {which} one.",
        lines,
        answer,
    )


def _remainder(rng: Random) -> _Exercise:
    divisor, q = rng.randint(3, 9), rng.randint(2, 9)
    rest = rng.randint(1, divisor - 1)
    number = divisor * q + rest
    lines = [worked_product(q, divisor), worked_difference(number, divisor * q)]
    question = rng.choice(
        (
            f"What is the remainder when {number} is divided by {divisor}?",
            f"Find {number} mod {divisor}.",
        )
    )
    return question, lines, rest


def _proportion(rng: Random) -> _Exercise:
    x = _letter(rng)
    a, b, factor = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    lines = [f"factor: {worked_quotient(b * factor, b)}", f"{x}={worked_product(a, factor)}"]
    return _solve(rng, x, f"{a}/{b}={x}/{b * factor}"), lines, a * factor


def _roots(rng: Random) -> _Exercise:
    x = _letter(rng)
    small = rng.randint(1, 7)
    large = rng.randint(small + 1, 9)
    lines = [
        f"({x}-{small})({x}-{large})=0",
        f"{worked_sum(small, large)}, {worked_product(small, large)}",
    ]
    which = rng.choice(("smaller", "larger"))
    lines.append(f"{x}={small} or {x}={large}")
    return (
        f"Find the {which} root of {x}^2-{small + large}{x}+{small * large}=0.",
        lines,
        small if which == "smaller" else large,
    )


def _percentage(rng: Random) -> _Exercise:
    percent, parts = rng.choice(((50, 2), (25, 4), (20, 5), (10, 10)))
    share = rng.randint(2, 9)
    number = share * parts
    lines = [f"{percent}%=1/{parts}", worked_quotient(number, parts)]
    if rng.random() < 0.5:
        return f"What is {percent}% of {number}?", lines, share
    lines.append(worked_difference(number, share))
    return f"Reduce {number} by {percent}%.", lines, number - share


def _combine(rng: Random) -> _Exercise:
    x = _letter(rng)
    a, b, value = rng.randint(2, 5), rng.randint(2, 4), rng.randint(2, 9)
    total = (a + b) * value
    lines = [f"{a}{x}+{b}{x}={a + b}{x}", f"{x}={worked_quotient(total, a + b)}"]
    return _solve(rng, x, f"{a}{x}+{b}{x}={total}"), lines, value


_FAMILIES: tuple[Callable[[Random], _Exercise], ...] = (
    _linear,
    _linear,
    _quotient,
    _bracket,
    _both_sides,
    _system,
    _evaluate,
    _composition,
    _sequence,
    _mean,
    _rectangle,
    _consecutive,
    _remainder,
    _proportion,
    _roots,
    _percentage,
    _combine,
)


def algebra_problem(rng: Random) -> Problem:
    """Draw one algebra exercise with its worked solution."""
    question, lines, answer = rng.choice(_FAMILIES)(rng)
    steps = "\n".join(lines)
    return Problem(
        task="algebra",
        prompt=f"Exercise: {question}\nSteps:\n",
        solution=f"{steps}\nAnswer: {answer}",
        answer=answer,
    )
