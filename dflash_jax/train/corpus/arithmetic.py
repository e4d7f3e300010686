"""Arithmetic word problems with worked solutions. Every number in a solution is computed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from dflash_jax.train.corpus import words
from dflash_jax.train.corpus.grammar import block, finish, say

ITEMS = words.split_words("""
    apples, marbles, books, stamps, coins, shells, pencils, cookies, stickers, flowers, eggs, buttons, stones, cards,
    oranges, candles, postcards, nuts, balloons, cups, plums, keys, tickets, ribbons, feathers, crayons, lemons, beads
""")

_INTRO = block("""
Let us {solve this|do this|work it out} step by step.
{We can|Let us} {solve|answer} this in {small steps|order}.
{Here is how to solve it|This is how it works}, step by step.
To find the answer, {we go step by step|look at the numbers one after the other}.
{First, let us see|Let us begin with} what we know.
""")
_END = block("""
{So|Therefore}, the answer is [result].
The answer is [result].
{So|This means that} the {result|final answer} is [result].
""")

# Each problem: the question, the steps of the solution, and a sentence for the check.
_SUM = (
    block("""
[name] has [a] [item]. [friend] gives [them] [b] more, and later [they] {finds|buys} [c] more. How many [item] does [name] have now?
[name] {collected|found} [a] [item] on Monday, [b] on Tuesday and [c] on Wednesday. How many [item] is that in total?
"""),
    block("""
{At first|To begin with}, there are [a] [item]. {Then|After that}, [b] more are added: [a] + [b] = [ab]. {Later|Next}, there are [c] more:
    [ab] + [c] = [r].
We {add|start with} the first two numbers: [a] + [b] = [ab]. Then we add [c]: [ab] + [c] = [r].
"""),
    block("{We can check it backwards|To check}: [r] - [c] = [ab], and [ab] - [b] = [a]."),
)
_LESS = (
    block("""
[name] had [a] [item]. [They] gave [b] to [friend] and lost [c]. How many [item] are left?
There were [a] [item] in {a box|a basket|the shop}. [name] took [b] and [friend] took [c]. How many [item] {are left|remained}?
"""),
    block("""
There were [a] [item] {at the start|at first}. {Take away|Subtract} the first [b]: [a] - [b] = [ab]. Then {take away|subtract} [c]: [ab] -
    [c] = [r].
{Together|In total}, [b] + [c] = [bc] [item] {are gone|went away}. We subtract them from [a]: [a] - [bc] = [r].
"""),
    block("To check{| the result}, add the numbers again: [r] + [b] + [c] = [a]."),
)
_TIMES = (
    block("""
[name] has [b] {boxes|bags} with [c] [item] in each. [friend] adds [d] more [item]. How many [item] are there altogether?
There are [b] {rows|boxes} of [c] [item], and [name] brings [d] more. How many [item] are there in total?
"""),
    block("""
First, multiply: [b] times [c] [item] is [b] x [c] = [bc]. Then add the [d] [item] of the second part: [bc] + [d] = [r].
{Each group has|In each group there are} [c] [item], and there are [b] groups: [b] x [c] = [bc]. {With|Adding} [d] more, {we get|it is} [bc] +
    [d] = [r].
"""),
    block("{To check|We can check}: [r] - [d] = [bc], and [bc] divided by [b] is [c]."),
)
_SHARE = (
    block("""
[name] has [bc] [item] and wants to share them equally among [b] {friends|children}. How many [item] does each of them get?
[bc] [item] are packed into [b] {bags|boxes}, the same number in each. How many [item] are in one of them?
"""),
    block("""
The [item] are divided into [b] equal parts. We need a number that gives [bc] when multiplied by [b]. [b] x [c] = [bc], so [bc] /
    [b] = [c].
{Sharing equally|Equal parts} means division. We divide [bc] by [b]: [bc] / [b] = [c].
"""),
    block("{To check|We can check}: [b] groups of [c] [item] are [b] x [c] = [bc] [item]."),
)
_MONEY = (
    block("""
[name] buys [b] [item] for [c] {dollars|coins} each and pays with [big]. How much {money|change} does [they] get back?
One of the [item] costs [c] {dollars|coins}. [name] buys [b] and had [big] at first. How much money is left?
"""),
    block("""
{First, find|We begin with} the price of all the [item]: [b] x [c] = [bc]. Then subtract it from [big]: [big] - [bc] = [r].
[b] [item] at [c] each cost [b] x [c] = [bc]. [name] had [big], so [big] - [bc] = [r] {is left|remains}.
"""),
    block("{To check|We can check}: [bc] + [r] = [big]."),
)
_COMPARE = (
    block("""
[name] has [a] [item]. [friend] has [b] more than [name]. How many [item] do they have together?
[friend] found [b] more [item] than [name], who found [a]. How many did they find together?
"""),
    block("""
{First, find out|We begin with} how many [friend] has: [a] + [b] = [ab]. Then add both: [a] + [ab] = [r].
[name] has [a], and [friend] has [a] + [b] = [ab]. Together, {they have|that is} [a] + [ab] = [r].
"""),
    block("{To check|We can check}: [r] - [ab] = [a], which is the number of [item] of [name]."),
)
_KINDS: dict[str, tuple] = {
    "sum": _SUM, "less": _LESS, "times": _TIMES, "share": _SHARE, "money": _MONEY, "compare": _COMPARE,
}  # fmt: skip


def _numbers(kind: str, rng: Random) -> dict[str, int]:
    draw: Callable[[int, int], int] = lambda low, high: low + int(rng.random() * (high - low + 1))  # noqa: E731
    if kind in ("times", "share", "money"):
        b, c, d = draw(2, 9), draw(2, 12), draw(2, 20)
        n = {"b": b, "c": c, "d": d, "bc": b * c}
        if kind == "money":
            n["big"] = (n["bc"] // 10 + 1 + draw(0, 2)) * 10
            n["r"] = n["big"] - n["bc"]
        else:
            n["r"] = n["bc"] + d if kind == "times" else c
        return n
    if kind == "less":
        b, c = draw(2, 20), draw(2, 20)
        a = b + c + draw(1, 30)
        return {"a": a, "b": b, "c": c, "ab": a - b, "bc": b + c, "r": a - b - c}
    a, b, c = draw(2, 40), draw(2, 30), draw(2, 20)
    if kind == "compare":
        return {"a": a, "b": b, "ab": a + b, "r": a + a + b}
    return {"a": a, "b": b, "c": c, "ab": a + b, "r": a + b + c}


def problem(rng: Random, name: str, friend: str, item: str, girl: bool) -> tuple[str, str]:
    """(question, worked solution) about ``item``, a plural noun."""
    kind = tuple(_KINDS)[int(rng.random() * len(_KINDS))]
    ask, steps, check = _KINDS[kind]
    numbers = _numbers(kind, rng)
    c = {slot: str(value) for slot, value in numbers.items()}
    c.update(name=name, friend=friend, item=item)
    c["they"], c["them"], c["They"] = ("she", "her", "She") if girl else ("he", "him", "He")
    money = kind == "money"
    c["result"] = c["r"] if money else f"{c['r']} {item}"
    if numbers["r"] == 1 and not money:
        c["result"] = "1"
    question = finish(say(ask, c, rng))
    parts = [say(_INTRO, c, rng), say(steps, c, rng), say(check, c, rng), say(_END, c, rng)]
    return question, finish(" ".join(parts))
