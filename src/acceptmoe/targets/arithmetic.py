"""Worked arithmetic on numbers up to two digits, written digit by digit.

A model of a few million parameters does not learn two-digit sums from ten million tokens, but it
does learn the tables of one digit; spelling out units, carry and tens reduces one to the other.
"""


def worked_sum(a: int, b: int) -> str:
    """Return `a+b` worked out, the result last.

    >>> worked_sum(37, 25)
    '37+25: 7+5=12, 1+3+2=6, so 62'
    """
    if a < 10 and b < 10:
        return f"{a}+{b}={a + b}"
    units = a % 10 + b % 10
    steps = [f"{a % 10}+{b % 10}={units}"]
    tens = [part for part in (units // 10, a // 10, b // 10) if part]
    if len(tens) > 1:
        steps.append("+".join(map(str, tens)) + f"={sum(tens)}")
    return f"{a}+{b}: {', '.join(steps)}, so {a + b}"


def worked_difference(a: int, b: int) -> str:
    """Return `a-b` (a at least b) worked out, the result last.

    >>> worked_difference(62, 25)
    '62-25: 12-5=7, 6-1-2=3, so 37'
    """
    if a < 10 and b < 10:
        return f"{a}-{b}={a - b}"
    borrow = int(a % 10 < b % 10)
    minuend = a % 10 + 10 * borrow
    steps = [f"{minuend}-{b % 10}={minuend - b % 10}"]
    taken = [part for part in (borrow, b // 10) if part]
    if taken:
        tens = "".join(f"-{part}" for part in taken)
        steps.append(f"{a // 10}{tens}={a // 10 - sum(taken)}")
    return f"{a}-{b}: {', '.join(steps)}, so {a - b}"


def worked_product(a: int, b: int) -> str:
    """Return `a*b` (b one digit) worked out, the result last.

    >>> worked_product(24, 3)
    '24*3: 4*3=12, 2*3+1=7, so 72'
    """
    if a < 10:
        return f"{a}*{b}={a * b}"
    units = a % 10 * b
    carry = f"+{units // 10}" if units >= 10 else ""
    tens = a // 10 * b + units // 10
    return f"{a}*{b}: {a % 10}*{b}={units}, {a // 10}*{b}{carry}={tens}, so {a * b}"


def worked_quotient(a: int, b: int) -> str:
    """Return `a/b` for an exact division.

    >>> worked_quotient(42, 7)
    '42/7=6'
    """
    return f"{a}/{b}={a // b}"
