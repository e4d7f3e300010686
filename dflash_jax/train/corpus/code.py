"""Small Python functions with a docstring, an explanation and an example whose output is computed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from dflash_jax.train.corpus.grammar import block, finish, pick, say
from dflash_jax.train.corpus.words import split_words

_FRUIT = split_words("apple, pear, plum, lemon, cherry, banana, melon, fig, grape, peach, orange, berry")
_WORDS = _FRUIT + split_words(
    "river, cloud, stone, garden, window, level, noon, radar, tree, lamp, music, summer, kayak"
)

_NUMBER_LISTS = ("numbers", "values", "items", "data", "scores")
_TEXTS = ("text", "word", "line", "sentence")


def _ints(rng: Random) -> tuple[Any, ...]:
    return ([int(rng.random() * 20) for _ in range(3 + int(rng.random() * 3))],)


def _word(rng: Random) -> tuple[Any, ...]:
    return (pick(rng, _WORDS),)


def _word_list(rng: Random) -> tuple[Any, ...]:
    return (rng.sample(_FRUIT, 3),)


def _phrase(rng: Random) -> tuple[Any, ...]:
    return (" ".join(pick(rng, _WORDS) for _ in range(2 + int(rng.random() * 2))),)


def _number(rng: Random) -> tuple[Any, ...]:
    return (1 + int(rng.random() * 12),)


def _two_numbers(rng: Random) -> tuple[Any, ...]:
    return (1 + int(rng.random() * 20), 1 + int(rng.random() * 20))


# name | argument names | body with {x} (and {y}) for arguments | what it returns | how it works | example arguments
_TABLE: tuple[tuple[str, tuple[str, ...], str, str, str, Callable[[Random], tuple]], ...] = (
    ("add_all", _NUMBER_LISTS, "total = 0\nfor n in {x}:\n    total += n\nreturn total", "the sum of {x}",
     "It starts with a total of zero, goes through the list and adds every number", _ints),
    ("largest", _NUMBER_LISTS, "best = {x}[0]\nfor n in {x}:\n    if n > best:\n        best = n\nreturn best",
     "the largest number in {x}", "It remembers the best number so far and replaces it when a larger one comes", _ints),
    ("smallest", _NUMBER_LISTS, "best = {x}[0]\nfor n in {x}:\n    if n < best:\n        best = n\nreturn best",
     "the smallest number in {x}", "It remembers the best number so far and replaces it when a smaller one comes", _ints),
    ("count_even", _NUMBER_LISTS, "count = 0\nfor n in {x}:\n    if n % 2 == 0:\n        count += 1\nreturn count",
     "how many numbers in {x} are even", "It adds one to a counter for each number that can be divided by two", _ints),
    ("only_odd", _NUMBER_LISTS, "return [n for n in {x} if n % 2 == 1]", "the odd numbers in {x}",
     "It builds a new list and keeps only numbers with a remainder of one", _ints),
    ("double_all", _NUMBER_LISTS, "result = []\nfor n in {x}:\n    result.append(2 * n)\nreturn result",
     "a list with every number of {x} doubled", "It multiplies each number by two and puts it at the end of a new list", _ints),
    ("square_all", _NUMBER_LISTS, "return [n * n for n in {x}]", "the squares of {x}",
     "It multiplies every number by itself and collects the results in a new list", _ints),
    ("average", _NUMBER_LISTS, "return sum({x}) / len({x})", "the average of {x}",
     "It adds all the numbers and divides the sum by how many there are", _ints),
    ("sort_down", _NUMBER_LISTS, "return sorted({x}, reverse=True)", "{x} from the largest to the smallest",
     "It sorts the list and turns the order around", _ints),
    ("last_item", _NUMBER_LISTS, "return {x}[-1]", "the last number of {x}",
     "It uses the index minus one, which counts from the end of the list", _ints),
    ("span", _NUMBER_LISTS, "return max({x}) - min({x})", "the distance between the largest and the smallest of {x}",
     "It finds the largest and the smallest number and subtracts one from the other", _ints),
    ("unique", _NUMBER_LISTS, "seen = []\nfor n in {x}:\n    if n not in seen:\n        seen.append(n)\nreturn seen",
     "{x} without repeated numbers", "It keeps a list of what it has seen and adds a number only once", _ints),
    ("count_vowels", _TEXTS, "count = 0\nfor letter in {x}:\n    if letter in \"aeiou\":\n        count += 1\nreturn count",
     "the number of vowels in {x}", "It looks at each letter and counts those that are vowels", _word),
    ("reverse", _TEXTS, "return {x}[::-1]", "{x} backwards", "It takes a slice with a step of minus one, which reads from the end", _word),
    ("is_palindrome", _TEXTS, "return {x} == {x}[::-1]", "whether {x} reads the same in both directions",
     "It turns the text around and compares both versions", _word),
    ("first_letter", _TEXTS, "return {x}[0].upper()", "the first letter of {x} as a capital",
     "It takes the letter at index zero and makes it a capital letter", _word),
    ("count_letters", _TEXTS, "counts = {{}}\nfor letter in {x}:\n    counts[letter] = counts.get(letter, 0) + 1\nreturn counts",
     "how often each letter occurs in {x}", "It keeps a dictionary and adds one to the entry of each letter", _word),
    ("remove_vowels", _TEXTS, "result = \"\"\nfor letter in {x}:\n    if letter not in \"aeiou\":\n        result += letter\nreturn result",
     "{x} without vowels", "It copies every letter that is not a vowel to a new text", _word),
    ("shout", _TEXTS, "return {x}.upper() + \"!\"", "{x} in capitals with an exclamation mark",
     "It makes all letters capital and adds one sign at the end", _word),
    ("count_words", _TEXTS, "return len({x}.split())", "the number of words in {x}",
     "It splits the text at the spaces and counts the parts", _phrase),
    ("longest_word", _TEXTS, "best = \"\"\nfor word in {x}.split():\n    if len(word) > len(best):\n        best = word\nreturn best",
     "the longest word in {x}", "It splits the text and keeps the word with the most letters", _phrase),
    ("title_case", _TEXTS, "return \" \".join(part.capitalize() for part in {x}.split())", "{x} with a capital for each word",
     "It splits the text, changes the first letter of each part and joins the parts again", _phrase),
    ("word_lengths", _TEXTS, "return [len(part) for part in {x}.split()]", "the length of each word in {x}",
     "It splits the text and measures every part", _phrase),
    ("join_names", ("names", "words", "fruits"), "return \", \".join({x})", "all {x} in one text with commas",
     "It puts a comma and a space between the parts", _word_list),
    ("sort_by_length", ("names", "words", "fruits"), "return sorted({x}, key=len)", "{x} from the shortest to the longest",
     "It sorts the list and uses the length of each word as the key", _word_list),
    ("number_items", ("names", "words", "fruits"), "result = {{}}\nfor i, item in enumerate({x}, 1):\n    result[i] = item\nreturn result",
     "a dictionary that numbers {x}", "It counts from one and stores each word under its number", _word_list),
    ("factorial", ("n", "number", "limit"), "result = 1\nfor i in range(2, {x} + 1):\n    result *= i\nreturn result",
     "the product of all numbers from one to {x}", "It starts with one and multiplies by each following number", _number),
    ("sum_up_to", ("n", "number", "limit"), "total = 0\nfor i in range(1, {x} + 1):\n    total += i\nreturn total",
     "the sum of all numbers from one to {x}", "It adds the numbers one after the other in a loop", _number),
    ("countdown", ("n", "number", "start"), "result = []\nwhile {x} > 0:\n    result.append({x})\n    {x} -= 1\nreturn result",
     "the numbers from {x} down to one", "It stores the number and makes it smaller by one until it is zero", _number),
    ("is_prime", ("n", "number", "value"), "if {x} < 2:\n    return False\nfor d in range(2, {x}):\n    if {x} % d == 0:\n        return False\nreturn True",
     "whether {x} is a prime number", "It tries every smaller number and stops when one divides without a remainder", _number),
    ("divisors", ("n", "number", "value"), "return [d for d in range(1, {x} + 1) if {x} % d == 0]", "all divisors of {x}",
     "It tries every number up to the given one and keeps those that leave no remainder", _number),
    ("fibonacci", ("n", "count", "length"), "a, b = 0, 1\nresult = []\nfor _ in range({x}):\n    result.append(a)\n    a, b = b, a + b\nreturn result",
     "the first {x} Fibonacci numbers", "It keeps the last two numbers and adds them to get the next one", _number),
    ("is_even", ("n", "number", "value"), "return {x} % 2 == 0", "whether {x} is even",
     "It checks whether the remainder after dividing by two is zero", _number),
    ("to_fahrenheit", ("celsius", "degrees", "temperature"), "return {x} * 9 / 5 + 32", "{x} in degrees Fahrenheit",
     "It multiplies by nine, divides by five and adds thirty-two", _number),
    ("distance", ("a, b", "x, y", "first, second"), "return abs({x} - {y})", "the distance between {x} and {y}",
     "It subtracts one number from the other and removes the sign", _two_numbers),
    ("bigger", ("a, b", "x, y", "first, second"), "if {x} > {y}:\n    return {x}\nreturn {y}", "the larger of {x} and {y}",
     "It compares the two numbers and returns the one that is larger", _two_numbers),
    ("common_divisor", ("a, b", "x, y", "first, second"), "while {y}:\n    {x}, {y} = {y}, {x} % {y}\nreturn {x}",
     "the greatest common divisor of {x} and {y}", "It replaces the pair by the smaller number and the remainder until nothing is left", _two_numbers),
    ("area", ("width, height", "a, b", "length, width"), "return {x} * {y}", "the area of a rectangle with sides {x} and {y}",
     "It multiplies the two sides", _two_numbers),
)  # fmt: skip
FUNCTIONS = tuple(row[0] for row in _TABLE)
_BY_NAME = {row[0]: row for row in _TABLE}
VARIANTS = tuple(f"{place}{noun}" for place in ("", "a friend's ", "a school ", "a small ") for noun in (
    "program", "project", "lesson", "game", "website", "report", "tool",
))  # fmt: skip

_ASK = block("""
Write a {|small |short |simple }{|Python }function [name] that returns [what]{|.}
{Write|I need} a {|Python }function for [use]. It should return [what].
{How do I|How can I} write a function in Python that returns [what]?
{Please write|Can you write|Could you write} a function that returns [what] for [use]{|. Explain it, too}[mark]
{Show me|Give me} a Python function [name] and explain it{|.}
""")
_LEAD = block("""
{Here is|This is} a {|small |short |simple }function {that|which} returns [what]:
{Sure, here|Of course, here|Here} is the function:
{You can write it like this|This function does it|A simple way is this}:
The function [tick] returns [what]:
""")
_WHY = block("""
[how].
{This is how it works|The idea is simple}: [howlow].
{The function works like this|It works as follows}: [howlow].
""")
_EXAMPLE = block("""
For example, [call] returns [output].
{If you call|With} [call], {the result is|you get} [output].
{As an example|To test it}, [call] gives [output].
""")
_SECOND = block("""
{Another example|Here is one more example}: [call] returns [output].
{In the same way|Likewise}, [call] returns [output].
{And if you call|And with} [call], {the result is|you get} [output].
""")
_DOC = ("Return {}.", "Return {}.", "Compute and return {}.", "Find {}.")
_CLOSE = block("""
{You can use it|Use it} in [use] {as it is|without any changes}.
{It needs no other modules|It works without any import}.
{Try it|Test it} with {other values|your own values} as well.
{The name says what it does|The code is short}, so it is easy to {read|remember}.
""")


def function(rng: Random, name: str, use: str) -> tuple[str, str, str]:
    """(request, source code, answer) for the function ``name``."""
    _, arguments, body, what, how, example = _BY_NAME[name]
    signature = pick(rng, arguments)
    x, _, y = signature.partition(", ")
    lines = body.format(x=x, y=y).split("\n")
    returns = what.format(x=x, y=y)
    source = f'def {name}({signature}):\n    """{pick(rng, _DOC).format(returns)}"""\n    ' + "\n    ".join(
        lines
    )
    values, other = example(rng), example(rng)
    while other == values:
        other = example(rng)
    first, second = (
        (f"`{name}({', '.join(map(_show, v))})`", f"`{_show(_run(source, name, v))}`")
        for v in (values, other)
    )
    plain_what = (
        what.format(x=_plain_argument(x), y="the second number")
        if not y
        else what.format(x="one number", y="another")
    )
    c = {
        "name": name, "tick": f"`{name}`", "what": plain_what, "use": use.replace("@ ", ""), "how": how,
        "howlow": how[0].lower() + how[1:], "call": first[0], "output": first[1],
    }  # fmt: skip
    c["use"] = "a " + use if not use.startswith("a ") else use
    template = pick(rng, _ASK)
    c["mark"] = "?" if template.source.startswith("{Please") else "."
    request = finish(template.expand(c, rng))
    if c["mark"] == "?" and (request.startswith("Please") or "Explain it" in request):
        request = request[:-1] + "."
    prose = f"{finish(say(_WHY, c, rng))} {say(_EXAMPLE, c, rng)} "
    c["call"], c["output"] = second
    prose += f"{say(_SECOND, c, rng)} {finish(say(_CLOSE, c, rng))}"
    return request, source, f"{finish(say(_LEAD, c, rng))}\n\n```python\n{source}\n```\n\n{prose}"


_CACHE: dict[str, Any] = {}


def _run(source: str, name: str, values: tuple[Any, ...]) -> Any:
    """The result of calling the generated function; compiled once per distinct source."""
    if source not in _CACHE:
        scope: dict[str, Any] = {}
        exec(compile(source, name, "exec"), scope)
        _CACHE[source] = scope[name]
    return _CACHE[source](*(list(v) if isinstance(v, list) else v for v in values))


def _show(value: Any) -> str:
    """``repr`` with double quotes, as the rest of the code is written."""
    return repr(value).replace("'", '"')


def _plain_argument(name: str) -> str:
    """How the argument is called in prose."""
    if name in _NUMBER_LISTS:
        return "a list of numbers"
    if name in _TEXTS:
        return "a text"
    return {"names": "names", "words": "words", "fruits": "words"}.get(name, "a number")
