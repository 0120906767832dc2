"""Small Python functions described in one sentence, shaped like HumanEval and MBPP.

A function is composed of parts (what to keep, what to make of it, how to gather the results), so
that thousands of different functions come out of a few dozen phrases. The same functions are asked
in two ways: signature and docstring (the body is wanted), or a sentence and three assertions (the
whole function is wanted, and its name stands in the assertions only).
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from acceptmoe.targets.problem import Case, Problem

_NUM_HIDDEN_CASES = 5
_MAX_ASSERTIONS_PROMPT = 300  # characters; a few functions answer with long lists

_LISTS = [
    "nums",
    "values",
    "numbers",
    "items",
    "data",
    "scores",
    "points",
    "prices",
    "sizes",
    "ages",
]
_TEXTS = ["text", "line", "phrase", "message", "title", "note"]
_WORD_LISTS = ["words", "names", "tags", "labels", "keys", "terms"]
_INTS = ["n", "m", "a", "b", "x", "y"]
_LIMITS = ["k", "limit", "bound", "size", "level", "mark"]
_WORDS = [
    "tree",
    "sun",
    "moon",
    "river",
    "stone",
    "apple",
    "bread",
    "noon",
    "level",
    "radar",
    "eye",
    "door",
    "east",
    "sea",
    "star",
    "ice",
    "oat",
    "ant",
    "egg",
    "salt",
    "rice",
    "trip",
    "road",
    "rain",
    "snow",
    "tea",
    "cat",
    "dog",
    "sheep",
    "otter",
    "eagle",
    "tiger",
    "ox",
    "robin",
    "island",
    "orange",
    "table",
    "image",
    "idea",
    "inn",
    "oil",
    "ship",
    "soap",
    "test",
    "taste",
    "tool",
    "roof",
    "rope",
    "rose",
    "art",
    "area",
    "iron",
    "silo",
    "tot",
    "refer",
    "pop",
]
_VERBS = [
    "get",
    "find",
    "make",
    "compute",
    "build",
    "take",
    "pick",
    "give",
    "read",
    "solve",
    "check",
    "scan",
    "apply",
    "run",
    "use",
    "do",
    "sort",
    "form",
]
_NOUNS = [
    "result",
    "list",
    "total",
    "part",
    "group",
    "stuff",
    "things",
    "parts",
    "output",
    "answer",
    "series",
    "entry",
    "table",
    "row",
    "field",
    "block",
    "set",
    "report",
    "record",
    "batch",
]


@dataclass(frozen=True)
class _Function:
    """One function before it is asked for: `sentence` has the form 'the sum of ...'."""

    params: tuple[str, ...]
    sentence: str
    body: tuple[str, ...]
    draw_arguments: Callable[[Random], tuple[Any, ...]]


@dataclass(frozen=True)
class _Part:
    """A phrase and the expression it stands for; `param` is an extra parameter it reads."""

    phrase: str
    code: str
    param: str | None = None


def _draw_int(rng: Random) -> int:
    return rng.randint(-9, 12)


def _draw_ints(rng: Random) -> list[int]:
    return [_draw_int(rng) for _ in range(rng.randint(1, 4))]


def _draw_word(rng: Random) -> str:
    return rng.choice(_WORDS)


def _draw_words(rng: Random) -> list[str]:
    return [_draw_word(rng) for _ in range(rng.randint(1, 3))]


def _draw_text(rng: Random) -> str:
    words = [_draw_word(rng) for _ in range(rng.randint(1, 3))]
    return " ".join(word.capitalize() if rng.random() < 0.3 else word for word in words)


def _number_test(rng: Random, limit: str) -> _Part:
    """What is kept of a list of integers, as a clause about its numbers."""
    c = rng.randint(2, 9)
    return rng.choice(
        (
            _Part("even", "n % 2 == 0"),
            _Part("odd", "n % 2 == 1"),
            _Part("positive", "n > 0"),
            _Part("negative", "n < 0"),
            _Part(f"divisible by {c}", f"n % {c} == 0"),
            _Part(f"not divisible by {c}", f"n % {c} != 0"),
            _Part(f"larger than {c}", f"n > {c}"),
            _Part(f"smaller than {c}", f"n < {c}"),
            _Part(f"at least {c}", f"n >= {c}"),
            _Part(f"at most {c}", f"n <= {c}"),
            _Part(f"larger than {limit}", f"n > {limit}", limit),
            _Part(f"smaller than {limit}", f"n < {limit}", limit),
            _Part(f"at least {limit}", f"n >= {limit}", limit),
            _Part(f"different from {limit}", f"n != {limit}", limit),
        )
    )


def _number_map(rng: Random, limit: str) -> _Part:
    """What is made of each number, as a noun phrase in the plural."""
    c = rng.randint(2, 9)
    return rng.choice(
        (
            _Part("squares", "n * n"),
            _Part("cubes", "n ** 3"),
            _Part("doubles", "2 * n"),
            _Part("halves, rounded down,", "n // 2"),
            _Part("absolute values", "abs(n)"),
            _Part("negatives", "-n"),
            _Part("last digits", "abs(n) % 10"),
            _Part("strings", "str(n)"),
            _Part(f"remainders by {c}", f"n % {c}"),
            _Part(f"multiples by {c}", f"{c} * n"),
            _Part(f"values plus {c}", f"n + {c}"),
            _Part(f"values minus {c}", f"n - {c}"),
            _Part(f"values plus {limit}", f"n + {limit}", limit),
            _Part(f"values minus {limit}", f"n - {limit}", limit),
            _Part(f"products with {limit}", f"n * {limit}", limit),
        )
    )


def _word_test(rng: Random, limit: str) -> _Part:
    letter = rng.choice("aeiostr")
    c = rng.randint(2, 5)
    return rng.choice(
        (
            _Part(f"that start with '{letter}'", f"w.startswith('{letter}')"),
            _Part(f"that end with '{letter}'", f"w.endswith('{letter}')"),
            _Part(f"that contain '{letter}'", f"'{letter}' in w"),
            _Part(f"without '{letter}'", f"'{letter}' not in w"),
            _Part(f"longer than {c}", f"len(w) > {c}"),
            _Part(f"shorter than {c}", f"len(w) < {c}"),
            _Part(f"of length {c}", f"len(w) == {c}"),
            _Part(f"longer than {limit}", f"len(w) > {limit}", limit),
            _Part(f"of length {limit}", f"len(w) == {limit}", limit),
            _Part("of even length", "len(w) % 2 == 0"),
            _Part("that are palindromes", "w == w[::-1]"),
        )
    )


def _word_map(rng: Random) -> _Part:
    c = rng.randint(2, 4)
    return rng.choice(
        (
            _Part("upper case forms", "w.upper()"),
            _Part("capitalized forms", "w.capitalize()"),
            _Part("reversed forms", "w[::-1]"),
            _Part("lengths", "len(w)"),
            _Part("first letters", "w[0]"),
            _Part("last letters", "w[-1]"),
            _Part(f"first {c} letters", f"w[:{c}]"),
            _Part("doubled forms", "w + w"),
            _Part("sorted letters", "''.join(sorted(w))"),
        )
    )


def _char_test(rng: Random) -> _Part:
    letter = rng.choice("aeiostr")
    return rng.choice(
        (
            _Part("vowels", "c in 'aeiou'"),
            _Part("upper case letters", "c.isupper()"),
            _Part("lower case letters", "c.islower()"),
            _Part("letters", "c.isalpha()"),
            _Part("spaces", "c == ' '"),
            _Part(f"characters other than '{letter}'", f"c != '{letter}'"),
            _Part(f"characters equal to '{letter}'", f"c == '{letter}'"),
            _Part(f"characters after '{letter}'", f"c > '{letter}'"),
        )
    )


def _extra(parts: tuple[_Part, ...]) -> tuple[str, ...]:
    """The extra parameters of the parts, each once."""
    return tuple(dict.fromkeys(part.param for part in parts if part.param is not None))


def _gathered(variables: str, source: str, test: _Part, made: str) -> list[str]:
    """The lines that collect `made` from what passes the test."""
    return [
        "result = []",
        f"for {variables} in {source}:",
        f"    if {test.code}:",
        f"        result.append({made})",
        "return result",
    ]


def _with_limit(draw: Callable[[Random], Any], extra: tuple[str, ...], top: int = 6) -> Any:
    return lambda rng: (draw(rng), *(rng.randint(1, top) for _ in extra))


def _list_function(rng: Random) -> _Function:
    values, limit = rng.choice(_LISTS), rng.choice(_LIMITS)
    test, made = _number_test(rng, limit), _number_map(rng, limit)
    kind = rng.choice(
        (
            "map",
            "filter",
            "both",
            "both",
            "sum",
            "sum",
            "count",
            "any",
            "all",
            "first",
            "max",
            "positions",
            "product",
            "replace",
            "split",
        )
    )
    kept = f"those numbers that are {test.phrase}"
    if " " not in test.phrase and rng.random() < 0.5:
        kept = f"the {test.phrase} numbers"
    if kind == "map":
        extra = _extra((made,))
        sentence = f"the {made.phrase} of {values}"
        body = [f"return [{made.code} for n in {values}]"]
    elif kind == "filter":
        extra = _extra((test,))
        sentence = f"a list of {kept} in {values}"
        body = [f"return [n for n in {values} if {test.code}]"]
    elif kind == "both":
        extra = _extra((test, made))
        sentence = f"the {made.phrase} of {kept} in {values}"
        body = _gathered("n", values, test, made.code)
    elif kind == "sum":
        if made.code.startswith("str"):
            made = _Part("squares", "n * n")
        extra = _extra((test, made))
        sentence = f"the sum of the {made.phrase} of {kept} in {values}"
        body = [
            "total = 0",
            f"for n in {values}:",
            f"    if {test.code}:",
            f"        total += {made.code}",
            "return total",
        ]
    elif kind == "product":
        extra = _extra((test,))
        sentence = f"the product of {kept} in {values}"
        body = [
            "result = 1",
            f"for n in {values}:",
            f"    if {test.code}:",
            "        result *= n",
            "return result",
        ]
    elif kind == "count":
        extra = _extra((test,))
        sentence = f"how many of the numbers in {values} are {test.phrase}"
        body = [
            "count = 0",
            f"for n in {values}:",
            f"    if {test.code}:",
            "        count += 1",
            "return count",
        ]
    elif kind in ("any", "all"):
        extra = _extra((test,))
        which = "some number" if kind == "any" else "every number"
        sentence = f"whether {which} in {values} is {test.phrase}"
        condition = test.code if kind == "any" else f"not {test.code}"
        body = [
            f"for n in {values}:",
            f"    if {condition}:",
            f"        return {kind == 'any'}",
            f"return {kind != 'any'}",
        ]
    elif kind == "first":
        extra = _extra((test,))
        sentence = f"the first number in {values} that is {test.phrase}, or None"
        body = [f"for n in {values}:", f"    if {test.code}:", "        return n", "return None"]
    elif kind == "max":
        which = rng.choice(("largest", "smallest"))
        extra = _extra((test,))
        sentence = f"the {which} of {kept} in {values}, or None"
        call = "max" if which == "largest" else "min"
        body = [
            f"kept = [n for n in {values} if {test.code}]",
            "if not kept:",
            "    return None",
            f"return {call}(kept)",
        ]
    elif kind == "positions":
        extra = _extra((test,))
        sentence = f"the positions of {kept} in {values}"
        body = _gathered("i, n", f"enumerate({values})", test, "i")
    elif kind == "replace":
        extra = _extra((test,))
        new = rng.choice(("0", "1", "None"))
        sentence = f"{values} with {new} in place of {kept}"
        body = [f"return [{new} if {test.code} else n for n in {values}]"]
    else:
        extra = _extra((test,))
        sentence = f"a list of {kept} in {values} and a list of the others"
        body = [
            "yes, no = [], []",
            f"for n in {values}:",
            f"    if {test.code}:",
            "        yes.append(n)",
            "    else:",
            "        no.append(n)",
            "return yes, no",
        ]
    return _Function((values, *extra), sentence, tuple(body), _with_limit(_draw_ints, extra))


def _order_function(rng: Random) -> _Function:
    values, limit = rng.choice(_LISTS), rng.choice(_LIMITS)
    c = rng.randint(2, 4)
    sentence, code, has_limit = rng.choice(
        (
            (f"{values} in reverse order", f"{values}[::-1]", False),
            (f"{values} sorted from small to large", f"sorted({values})", False),
            (f"{values} sorted from large to small", f"sorted({values}, reverse=True)", False),
            (f"{values} sorted by absolute value", f"sorted({values}, key=abs)", False),
            (f"every item of {values} at an even position", f"{values}[::2]", False),
            (f"every item of {values} at an odd position", f"{values}[1::2]", False),
            (f"the first {c} items of {values}", f"{values}[:{c}]", False),
            (f"the last {c} items of {values}", f"{values}[-{c}:]", False),
            (f"{values} without its first {c} items", f"{values}[{c}:]", False),
            (f"{values} without its last {c} items", f"{values}[:-{c}]", False),
            (f"the first {limit} items of {values}", f"{values}[:{limit}]", True),
            (f"{values} without its first {limit} items", f"{values}[{limit}:]", True),
            (
                f"{values} rotated to the left by {limit}",
                f"{values}[{limit}:] + {values}[:{limit}]",
                True,
            ),
            (f"{values} repeated {c} times", f"{values} * {c}", False),
            (f"{values} with {limit} at the end", f"{values} + [{limit}]", True),
            (f"{values} with {limit} at the front", f"[{limit}] + {values}", True),
            (f"the {limit} largest items of {values}", f"sorted({values})[-{limit}:]", True),
            (f"the {limit} smallest items of {values}", f"sorted({values})[:{limit}]", True),
            (f"the distinct items of {values} in order", f"sorted(set({values}))", False),
            (f"how many distinct items {values} has", f"len(set({values}))", False),
            (
                f"the gap between the largest and smallest of {values}",
                f"max({values}) - min({values})",
                False,
            ),
            (f"the mean of {values}, rounded down", f"sum({values}) // len({values})", False),
            (f"whether {values} is sorted", f"{values} == sorted({values})", False),
            (f"how often {limit} occurs in {values}", f"{values}.count({limit})", True),
            (
                f"the position of the largest item of {values}",
                f"{values}.index(max({values}))",
                False,
            ),
        )
    )
    extra = (limit,) if has_limit else ()
    return _Function(
        (values, *extra), sentence, (f"return {code}",), _with_limit(_draw_ints, extra, 4)
    )


def _running_function(rng: Random) -> _Function:
    values, limit = rng.choice(_LISTS), rng.choice(_LIMITS)
    kind = rng.choice(("sums", "maxima", "minima", "unique", "until", "steps", "nonrepeat"))
    extra: tuple[str, ...] = ()
    if kind == "sums":
        sentence = f"the running sums of {values}"
        body = [
            "total = 0",
            "result = []",
            f"for n in {values}:",
            "    total += n",
            "    result.append(total)",
            "return result",
        ]
    elif kind in ("maxima", "minima"):
        call = "max" if kind == "maxima" else "min"
        sentence = f"the running {kind} of {values}"
        body = [
            f"best = {values}[0]",
            "result = []",
            f"for n in {values}:",
            f"    best = {call}(best, n)",
            "    result.append(best)",
            "return result",
        ]
    elif kind == "unique":
        sentence = f"{values} without repeated items"
        body = [
            "result = []",
            f"for n in {values}:",
            "    if n not in result:",
            "        result.append(n)",
            "return result",
        ]
    elif kind == "nonrepeat":
        sentence = f"{values} without items equal to the one before"
        body = [
            "result = []",
            f"for n in {values}:",
            "    if not result or result[-1] != n:",
            "        result.append(n)",
            "return result",
        ]
    elif kind == "steps":
        sentence = f"the differences between neighbors in {values}"
        body = [f"return [b - a for a, b in zip({values}, {values}[1:])]"]
    else:
        test = _number_test(rng, limit)
        extra = _extra((test,))
        sentence = f"the numbers in {values} before the first that is {test.phrase}"
        body = [
            "result = []",
            f"for n in {values}:",
            f"    if {test.code}:",
            "        break",
            "    result.append(n)",
            "return result",
        ]
    return _Function((values, *extra), sentence, tuple(body), _with_limit(_draw_ints, extra))


def _pair_function(rng: Random) -> _Function:
    first, second = rng.sample(_LISTS, 2)
    sentence, code = rng.choice(
        (
            (
                f"the sums of pairs of {first} and {second}",
                f"[a + b for a, b in zip({first}, {second})]",
            ),
            (
                f"the products of pairs of {first} and {second}",
                f"[a * b for a, b in zip({first}, {second})]",
            ),
            (
                f"the differences of pairs of {first} and {second}",
                f"[a - b for a, b in zip({first}, {second})]",
            ),
            (
                f"the larger of each pair of {first} and {second}",
                f"[max(a, b) for a, b in zip({first}, {second})]",
            ),
            (
                f"the smaller of each pair of {first} and {second}",
                f"[min(a, b) for a, b in zip({first}, {second})]",
            ),
            (
                f"the dot product of {first} and {second}",
                f"sum(a * b for a, b in zip({first}, {second}))",
            ),
            (
                f"how many pairs of {first} and {second} are equal",
                f"sum(a == b for a, b in zip({first}, {second}))",
            ),
            (
                f"the items of {first} that are in {second}",
                f"[n for n in {first} if n in {second}]",
            ),
            (
                f"the items of {first} that are not in {second}",
                f"[n for n in {first} if n not in {second}]",
            ),
            (f"the items of {first} followed by those of {second}", f"{first} + {second}"),
            (f"the sorted items of {first} and {second}", f"sorted({first} + {second})"),
            (f"whether {first} and {second} share an item", f"any(n in {second} for n in {first})"),
            (f"whether {first} has a larger sum than {second}", f"sum({first}) > sum({second})"),
            (
                f"the longer of {first} and {second}",
                f"{first} if len({first}) >= len({second}) else {second}",
            ),
        )
    )
    return _Function(
        (first, second),
        sentence,
        (f"return {code}",),
        lambda draw: (
            [draw.randint(0, 6) for _ in range(draw.randint(1, 4))],
            [draw.randint(0, 6) for _ in range(draw.randint(1, 4))],
        ),
    )


def _words_function(rng: Random) -> _Function:
    words, limit = rng.choice(_WORD_LISTS), rng.choice(_LIMITS)
    test, made = _word_test(rng, limit), _word_map(rng)
    kind = rng.choice(
        ("map", "filter", "both", "both", "count", "join", "any", "dict", "first", "longest")
    )
    extra = _extra((test,))
    noun = rng.choice(("words", "strings"))
    if kind == "map":
        extra = ()
        sentence = f"the {made.phrase} of the {noun} in {words}"
        body = [f"return [{made.code} for w in {words}]"]
    elif kind == "filter":
        sentence = f"the {noun} in {words} {test.phrase}"
        body = [f"return [w for w in {words} if {test.code}]"]
    elif kind == "both":
        sentence = f"the {made.phrase} of the {noun} in {words} {test.phrase}"
        body = _gathered("w", words, test, made.code)
    elif kind == "count":
        sentence = f"how many {noun} in {words} there are {test.phrase}"
        body = [
            "count = 0",
            f"for w in {words}:",
            f"    if {test.code}:",
            "        count += 1",
            "return count",
        ]
    elif kind == "any":
        sentence = f"whether there are {noun} in {words} {test.phrase}"
        body = [
            f"for w in {words}:",
            f"    if {test.code}:",
            "        return True",
            "return False",
        ]
    elif kind == "join":
        name, mark = rng.choice(
            (("commas", ","), ("dashes", "-"), ("spaces", " "), ("slashes", "/"), ("stars", "*"))
        )
        sentence = f"the {noun} in {words} {test.phrase}, joined by {name}"
        body = [
            f"kept = [w for w in {words} if {test.code}]",
            f"return '{mark}'.join(kept)",
        ]
    elif kind == "dict":
        sentence = f"a dict from the {noun} in {words} {test.phrase} to their lengths"
        body = [
            "result = {}",
            f"for w in {words}:",
            f"    if {test.code}:",
            "        result[w] = len(w)",
            "return result",
        ]
    elif kind == "first":
        sentence = f"the first of the {noun} in {words} {test.phrase}, or None"
        body = [f"for w in {words}:", f"    if {test.code}:", "        return w", "return None"]
    else:
        which = rng.choice(("longest", "shortest"))
        call = "max" if which == "longest" else "min"
        extra = ()
        sentence = f"the {which} of the {noun} in {words}"
        body = [f"return {call}({words}, key=len)"]
    return _Function((words, *extra), sentence, tuple(body), _with_limit(_draw_words, extra, 5))


def _text_function(rng: Random) -> _Function:
    text, limit = rng.choice(_TEXTS), rng.choice(_LIMITS)
    extra: tuple[str, ...] = ()
    test = _char_test(rng)
    kind = rng.choice(("keep", "drop", "count", "places", "mark", "words", "simple", "simple"))
    if kind == "keep":
        sentence = f"only the {test.phrase} of {text}"
        body = [
            "result = ''",
            f"for c in {text}:",
            f"    if {test.code}:",
            "        result += c",
            "return result",
        ]
    elif kind == "drop":
        sentence = f"{text} without the {test.phrase}"
        body = [
            "result = ''",
            f"for c in {text}:",
            f"    if not {test.code}:",
            "        result += c",
            "return result",
        ]
    elif kind == "count":
        sentence = f"the number of {test.phrase} in {text}"
        body = [
            "count = 0",
            f"for c in {text}:",
            f"    if {test.code}:",
            "        count += 1",
            "return count",
        ]
    elif kind == "places":
        sentence = f"the positions of the {test.phrase} in {text}"
        body = _gathered("i, c", f"enumerate({text})", test, "i")
    elif kind == "mark":
        name, mark = rng.choice((("stars", "*"), ("dashes", "-"), ("dots", "."), ("hashes", "#")))
        sentence = f"{text} with {name} in place of the {test.phrase}"
        body = [
            "result = ''",
            f"for c in {text}:",
            f"    if {test.code}:",
            f"        result += '{mark}'",
            "    else:",
            "        result += c",
            "return result",
        ]
    elif kind == "words":
        made = _word_map(rng)
        sentence = f"the {made.phrase} of the words of {text}"
        body = [f"return [{made.code} for w in {text}.split()]"]
    else:
        sentence, code, has_limit = rng.choice(
            (
                (f"{text} in upper case", f"{text}.upper()", False),
                (f"{text} in lower case", f"{text}.lower()", False),
                (f"{text} read backwards", f"{text}[::-1]", False),
                (f"the number of words in {text}", f"len({text}.split())", False),
                (f"the number of distinct characters in {text}", f"len(set({text}))", False),
                (f"the words of {text} in reverse order", f"' '.join({text}.split()[::-1])", False),
                (
                    f"the words of {text} in sorted order",
                    f"' '.join(sorted({text}.split()))",
                    False,
                ),
                (f"the longest word of {text}", f"max({text}.split(), key=len)", False),
                (f"whether {text} is a palindrome", f"{text} == {text}[::-1]", False),
                (f"{text} with dashes in place of spaces", f"{text}.replace(' ', '-')", False),
                (f"the first {limit} characters of {text}", f"{text}[:{limit}]", True),
                (f"the last {limit} characters of {text}", f"{text}[-{limit}:]", True),
                (f"{text} repeated {limit} times", f"{text} * {limit}", True),
                (f"whether {text} is longer than {limit}", f"len({text}) > {limit}", True),
                (f"every second character of {text}", f"{text}[::2]", False),
                (f"{text} with swapped case", f"{text}.swapcase()", False),
            )
        )
        extra = (limit,) if has_limit else ()
        body = [f"return {code}"]
    return _Function((text, *extra), sentence, tuple(body), _with_limit(_draw_text, extra))


def _integer_function(rng: Random) -> _Function:
    a, b = rng.sample(_INTS, 2)
    c, d = rng.sample(range(2, 10), 2)
    kind = rng.choice(("one", "one", "two", "two", "range", "range", "branch", "digits"))
    if kind == "one":
        sentence, code = rng.choice(
            (
                (f"the square of {a}", f"{a} * {a}"),
                (f"the cube of {a}", f"{a} ** 3"),
                (f"the last digit of {a}", f"{a} % 10"),
                (f"{a} without its last digit", f"{a} // 10"),
                (f"the number of digits of {a}", f"len(str({a}))"),
                (f"the digits of {a} as a list", f"[int(c) for c in str({a})]"),
                (f"the digits of {a} in reverse order as a string", f"str({a})[::-1]"),
                (f"the sum of the digits of {a}", f"sum(int(c) for c in str({a}))"),
                (f"the largest digit of {a}", f"max(int(c) for c in str({a}))"),
                (f"whether {a} is divisible by {c} and {d}", f"{a} % {c} == 0 and {a} % {d} == 0"),
                (f"whether {a} is divisible by {c} or {d}", f"{a} % {c} == 0 or {a} % {d} == 0"),
                (f"{a} times {c} plus {d}", f"{c} * {a} + {d}"),
                (f"{a} minus {c}, times {d}", f"({a} - {c}) * {d}"),
                (f"{a} in binary as a string", f"bin({a})[2:]"),
                (f"the divisors of {a}", f"[i for i in range(1, {a} + 1) if {a} % i == 0]"),
                (f"the number of divisors of {a}", f"sum({a} % i == 0 for i in range(1, {a} + 1))"),
                (
                    f"whether {a} is a prime number",
                    f"{a} > 1 and all({a} % i for i in range(2, {a}))",
                ),
                (f"a countdown list from {a} to 1", f"list(range({a}, 0, -1))"),
            )
        )
        return _Function((a,), sentence, (f"return {code}",), lambda draw: (draw.randint(1, 60),))
    if kind == "two":
        sentence, code = rng.choice(
            (
                (f"the sum of {a} and {b}", f"{a} + {b}"),
                (f"the product of {a} and {b}", f"{a} * {b}"),
                (f"the distance between {a} and {b}", f"abs({a} - {b})"),
                (f"the larger of {a} and {b}", f"max({a}, {b})"),
                (f"the smaller of {a} and {b}", f"min({a}, {b})"),
                (f"the mean of {a} and {b}, rounded down", f"({a} + {b}) // 2"),
                (f"the remainder of {a} divided by {b}", f"{a} % {b}"),
                (f"{a} to the power of {b}", f"{a} ** {b}"),
                (f"the sum of the squares of {a} and {b}", f"{a} * {a} + {b} * {b}"),
                (f"the square of the sum of {a} and {b}", f"({a} + {b}) ** 2"),
                (f"whether {a} is divisible by {b}", f"{a} % {b} == 0"),
                (f"whether {a} and {b} have the same last digit", f"{a} % 10 == {b} % 10"),
                (f"whether {a} is larger than {b}", f"{a} > {b}"),
                (f"whether the sum of {a} and {b} is even", f"({a} + {b}) % 2 == 0"),
                (f"the quotient and remainder of {a} and {b}", f"{a} // {b}, {a} % {b}"),
                (f"the first {b} multiples of {a}", f"[{a} * i for i in range(1, {b} + 1)]"),
                (f"{c} times {a} plus {d} times {b}", f"{c} * {a} + {d} * {b}"),
                (f"{a} in hours and {b} in minutes as minutes", f"60 * {a} + {b}"),
            )
        )
        return _Function(
            (a, b),
            sentence,
            (f"return {code}",),
            lambda draw: (draw.randint(1, 20), draw.randint(1, 6)),
        )
    if kind == "range":
        test = rng.choice(
            (
                _Part("even", "i % 2 == 0"),
                _Part("odd", "i % 2 == 1"),
                _Part(f"divisible by {c}", f"i % {c} == 0"),
                _Part(f"not divisible by {c}", f"i % {c} != 0"),
            )
        )
        made = rng.choice(
            (_Part("", "i"), _Part("squares of the ", "i * i"), _Part("doubles of the ", "2 * i"))
        )
        span = f"{made.phrase}{test.phrase} numbers from 1 to {a}"
        if rng.random() < 0.5:
            return _Function(
                (a,),
                f"a list of the {span}",
                (f"return [{made.code} for i in range(1, {a} + 1) if {test.code}]",),
                lambda draw: (draw.randint(1, 15),),
            )
        body = (
            "total = 0",
            f"for i in range(1, {a} + 1):",
            f"    if {test.code}:",
            f"        total += {made.code}",
            "return total",
        )
        return _Function((a,), f"the sum of the {span}", body, lambda draw: (draw.randint(1, 15),))
    if kind == "branch":
        test = _number_test(rng, b)
        condition = test.code.replace("n", a, 1)
        yes, no = rng.sample(
            (
                _Part(f"{a} plus {c}", f"{a} + {c}"),
                _Part(f"{a} minus {c}", f"{a} - {c}"),
                _Part(f"{c} times {a}", f"{c} * {a}"),
                _Part(f"the square of {a}", f"{a} * {a}"),
                _Part(f"half of {a}, rounded down", f"{a} // 2"),
                _Part(f"minus {a}", f"-{a}"),
                _Part("0", "0"),
                _Part("'yes'", "'yes'"),
                _Part("'no'", "'no'"),
            ),
            2,
        )
        params = (a, *_extra((test,)))
        return _Function(
            params,
            f"{yes.phrase} if {a} is {test.phrase}, else {no.phrase}",
            (f"if {condition}:", f"    return {yes.code}", f"return {no.code}"),
            lambda draw: tuple(_draw_int(draw) for _ in params),
        )
    loops: tuple[tuple[str, tuple[str, ...]], ...] = (
        (
            f"the product of the numbers from 1 to {a}",
            ("result = 1", f"for i in range(1, {a} + 1):", "    result *= i", "return result"),
        ),
        (
            f"the first {a} Fibonacci numbers",
            (
                "result = [0, 1]",
                f"while len(result) < {a}:",
                "    result.append(result[-1] + result[-2])",
                f"return result[:{a}]",
            ),
        ),
        (
            f"how often {a} can be halved evenly",
            (
                "count = 0",
                f"while {a} % 2 == 0:",
                "    count += 1",
                f"    {a} //= 2",
                "return count",
            ),
        ),
        (
            f"the sum of the numbers from 1 to {a}",
            ("total = 0", f"for i in range(1, {a} + 1):", "    total += i", "return total"),
        ),
    )
    sentence, loop = rng.choice(loops)
    return _Function((a,), sentence, loop, lambda draw: (draw.randint(1, 12),))


def _dict_function(rng: Random) -> _Function:
    table = rng.choice(["table", "prices", "stock", "counts", "scores", "ages"])
    limit = rng.choice([name for name in _LIMITS if name != "k"])  # k is the key in these bodies
    c = rng.randint(2, 6)
    value = rng.choice((limit, str(c)))
    extra = (limit,) if value == limit else ()
    sentence, code, uses = rng.choice(
        (
            (
                f"the keys of {table} with values above {value}",
                f"[k for k, v in {table}.items() if v > {value}]",
                True,
            ),
            (
                f"the keys of {table} with values below {value}",
                f"[k for k, v in {table}.items() if v < {value}]",
                True,
            ),
            (
                f"the entries of {table} with values above {value}",
                "{k: v for k, v in " + f"{table}.items() if v > {value}" + "}",
                True,
            ),
            (
                f"{table} with {value} added to every value",
                "{k: v + " + f"{value} for k, v in {table}.items()" + "}",
                True,
            ),
            (
                f"{table} with every value times {value}",
                "{k: v * " + f"{value} for k, v in {table}.items()" + "}",
                True,
            ),
            (
                f"{table} with keys and values swapped",
                "{v: k for k, v in " + f"{table}.items()" + "}",
                False,
            ),
            (f"the sum of the values of {table}", f"sum({table}.values())", False),
            (f"the largest value of {table}", f"max({table}.values())", False),
            (f"the sorted keys of {table}", f"sorted({table})", False),
            (f"the key with the largest value in {table}", f"max({table}, key={table}.get)", False),
            (f"the number of entries of {table}", f"len({table})", False),
        )
    )
    extra = extra if uses else ()

    def draw_table(draw: Random) -> dict[str, int]:
        return {_draw_word(draw)[:3]: draw.randint(0, 9) for _ in range(draw.randint(1, 3))}

    return _Function((table, *extra), sentence, (f"return {code}",), _with_limit(draw_table, extra))


_FAMILIES: tuple[Callable[[Random], _Function], ...] = (
    _list_function,
    _list_function,
    _list_function,
    _order_function,
    _running_function,
    _pair_function,
    _words_function,
    _words_function,
    _text_function,
    _integer_function,
    _integer_function,
    _dict_function,
)


def _cases(rng: Random, function: _Function, name: str, program: str, count: int) -> list[Case]:
    """Draw different calls and let the reference answer them."""
    namespace: dict[str, Any] = {}
    exec(program, namespace)  # our own text, composed above
    cases: dict[str, Case] = {}
    for _ in range(count * 4):
        arguments = ", ".join(map(repr, function.draw_arguments(rng)))
        call = f"{name}({arguments})"
        if call not in cases:
            # Evaluated from its text: a function that changes its argument must not change it.
            cases[call] = Case(call, repr(eval(call, namespace)))
        if len(cases) == count:
            break
    return list(cases.values())


def _draw_function(rng: Random) -> tuple[_Function, str, str, str]:
    function = rng.choice(_FAMILIES)(rng)
    name = f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}"
    signature = f"def {name}({', '.join(function.params)}):\n"
    body = "\n".join(f"    {line}" for line in function.body)
    return function, name, signature, body


def docstring_problem(rng: Random) -> Problem:
    """Draw a function asked for by signature and docstring; the completion is its body."""
    function, name, signature, body = _draw_function(rng)
    preamble = f'{signature}    """Return {function.sentence}."""\n'
    cases = _cases(rng, function, name, preamble + body, _NUM_HIDDEN_CASES)
    return Problem("python-docstring", preamble, body, preamble=preamble, cases=tuple(cases))


def assertions_problem(rng: Random) -> Problem:
    """Draw a function asked for by a sentence and three assertions; the completion is all of it."""
    while True:
        problem = _draw_assertions_problem(rng)
        if len(problem.prompt) <= _MAX_ASSERTIONS_PROMPT:
            return problem


def _draw_assertions_problem(rng: Random) -> Problem:
    function, name, signature, body = _draw_function(rng)
    solution = signature + body
    cases = _cases(rng, function, name, solution, 3 + _NUM_HIDDEN_CASES)
    request = rng.choice(
        (
            f"Write a function of {_listed(function.params)} that returns {function.sentence}.",
            f"Given {_listed(function.params)}, return {function.sentence}.",
            f"Write Python code with arguments {_listed(function.params)} to return "
            f"{function.sentence}.",
        )
    )
    asserts = "\n".join(f"assert {case.call} == {case.expected}" for case in cases[:3])
    return Problem("python-asserts", f"{request}\n{asserts}\n", solution, cases=tuple(cases))


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(names)
