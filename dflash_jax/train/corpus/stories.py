"""Short stories: a cast, a plot told in stages, and an end that follows from it."""

from __future__ import annotations

import re
from random import Random

from dflash_jax.train.corpus import plots, words
from dflash_jax.train.corpus.facts import JOBS, PLACES
from dflash_jax.train.corpus.grammar import block, draw_pair, finish, pick, say
from dflash_jax.train.corpus.more_plots import MORE_PLOTS

PLOTS = plots.PLOTS + MORE_PLOTS

_LIST_SEPARATOR = re.compile(", | and ")
_ARTICLE = re.compile("^(an?|the) ")
_PRONOUNS = {
    "girl": ("she", "her", "her", "hers", "herself"),
    "boy": ("he", "him", "his", "his", "himself"),
}
_RELATIVES = {
    "girl": ("mother", "grandmother", "sister", "aunt", "cousin", "neighbour", "best friend"),
    "boy": ("father", "grandfather", "brother", "uncle", "cousin", "neighbour", "best friend"),
}
_HERO_ANIMALS = words.split_words("""
    fox, bear, rabbit, hedgehog, mouse, squirrel, duck, cat, dog, frog, goat, sheep, owl, turtle, donkey, monkey
""")
_PETS = words.LISTS["small_animal"]

_OPEN = block("""
[name] was @ [hero] who lived {near|close to|not far from} [place].
{Once upon a time|Long ago|A long time ago|Once}, there was @ [hero] {named|called} [name], who lived {near|close to} [place].
{There was once|In a small town, there was} @ [hero] {named|called} [name]. [They] {often went to|loved} [place].
{Near|Close to} [place] lived @ [hero] {named|called} [name].
[name], @ [hero], lived in @ <look> house {near|not far from} [place].
This is the story of [name], @ [hero] {from the <look> house near|who lived near} [place].
In @ <colour> house {near|close to} [place] lived [name], @ [hero].
{Everyone|Everybody} {near|around} [place] knew [name], @ [hero] with @ <look> <object>.
""")
_HABIT = block("""
[They] {loved|liked} [sight2] there and {often|always} {listened to|heard} [sound].
{Every <daytime>|On <weather> days}, [they] {liked to|used to} [act1].
[They] {was known for|liked nothing more than} [their] <food> and {a good joke|long walks}.
{Most of all|More than anything}, [they] loved to [act1].
{People|The neighbours} said that [they] was the most [trait] [kind] {in town|of all}.
[They] was so [trait] that {everyone liked [them]|even the [worker] talked about it}.
[their] best friend was @ <small_animal>, {and together they liked to [act2]|which followed [them] everywhere}.
Whenever it was <weather>, [name] {went out to|wanted to} [act2].
""")
_END = block("""
{And|That night,} [name] slept {well|deeply} and dreamed of [sight1].
{It was|That was} @ <good> [daytime] that [name] {never forgot|would always remember}.
{Even today|Even now}, [name] and [friend] {like to talk|often talk} about that <season>.
That night, [name] wrote about it in @ <colour> diary and {fell asleep|smiled}.
And if you go to [place] on a [weather] [daytime], you {may meet [name]|can hear this story}.
{Outside|Above [place]}, the {moon|sun} {was shining|came out}, and [name] {hummed a song|went home} <adverb>.
{The end of the story|The rest} is simple: [name] and [friend] stayed friends.
""")


def cast(rng: Random, split: str) -> tuple[dict[str, str], plots.Plot]:
    """A plot and a full context for it; the pair (object, place name) obeys the split rule."""
    thing, place = draw_pair(rng, split, lambda r: pick(r, words.OBJECTS), lambda r: pick(r, PLACES))
    plot = pick(rng, PLOTS)
    c: dict[str, str] = {}
    draw = rng.random
    gender = "girl" if draw() < 0.5 else "boy"
    other = "boy" if gender == "girl" else "girl"
    c["name"] = _name(rng, gender)
    c["friend"] = _name(rng, other)
    for prefix, sex in (("", gender), ("h", other), ("w", pick(rng, ("girl", "boy")))):
        for slot, word in zip(("they", "them", "their", "theirs", "themself"), _PRONOUNS[sex], strict=True):
            c[prefix + slot] = word
    c["They"], c["Their"], c["Hthey"] = (c[s].capitalize() for s in ("they", "their", "hthey"))
    roll = draw()
    c["kind"] = gender if roll < 0.5 else pick(rng, _HERO_ANIMALS) if roll < 0.75 else pick(rng, JOBS)[0]
    c["trait"] = pick(rng, words.LISTS["trait"])
    c["hero"] = f"{c['trait']} {c['kind']}"
    c["obj"], c["use"] = thing
    c["look"] = pick(rng, words.LISTS["look"])
    while c["look"] in c["obj"]:  # no "silver silver spoon"
        c["look"] = pick(rng, words.LISTS["look"])
    c["thing"] = f"{c['look']} {c['obj']}"
    c["broken"] = pick(rng, ("broken", "torn", "cracked", "damaged"))
    c["place"] = "the " + place[0]
    c["at_place"] = f"{place[1]} the {place[0]}"
    c["sight1"], c["sight2"], c["sight3"] = (_definite(rng, sight) for sight in place[2:5])
    c["sound"] = place[5]
    c["act1"], c["act2"] = place[6:8]
    c["worker"] = place[10]
    c["frole"] = (
        f"{c['their']} {pick(rng, _RELATIVES[other])}" if draw() < 0.5 else "the " + pick(rng, JOBS)[0]
    )
    for slot in ("food", "weather", "daytime", "spot"):
        c[slot] = pick(rng, words.LISTS[slot])
    c["pet"] = pick(rng, _PETS)
    c["build"], c["material"], c["purpose"], c["fail"] = pick(rng, plots.BUILDS)
    c["skill"], c["practice"], c["tip"], c["proof"] = pick(rng, plots.SKILLS)
    c["fear"], c["when"], c["advice"], c["brave"] = pick(rng, plots.FEARS)
    if plot.name == "contest":
        c["contest"], c["prepare"], c["trouble"], c["result"] = pick(rng, plots.CONTESTS)
    else:
        c["plant"], c["care"], c["trouble"], c["result"] = pick(rng, plots.PLANTS)
    return c, plot


def _name(rng: Random, gender: str) -> str:
    if rng.random() < 0.06:
        return words.invented_name(rng)
    return pick(rng, words.GIRLS if gender == "girl" else words.BOYS)


def _definite(rng: Random, sight: str) -> str:
    """One of the things of a sight list with the definite article: "tall trees and a hut" -> "the hut"."""
    return "the " + _ARTICLE.sub("", pick(rng, _LIST_SEPARATOR.split(sight)))


def sentences(rng: Random, c: dict[str, str], plot: plots.Plot) -> list[str]:
    """The story, one entry per stage, finished prose."""
    told = [say(_OPEN, c, rng)]
    if rng.random() < 0.6:
        told.append(say(_HABIT, c, rng))
    told += [say(stage, c, rng) for stage in plot.stages]
    told.append(say(plot.lesson, c, rng))
    if rng.random() < 0.5:
        told.append(say(_END, c, rng))
    return [finish(text) for text in told]


def story(rng: Random, c: dict[str, str], plot: plots.Plot) -> str:
    """The story as two to four paragraphs or as one."""
    told = sentences(rng, c, plot)
    if rng.random() < 0.5:
        return " ".join(told)
    first = 2 + int(rng.random() * 2)
    second = len(told) - 2 - int(rng.random() * 2)
    parts = (told[:first], told[first:second], told[second:])
    return "\n\n".join(" ".join(part) for part in parts if part)
