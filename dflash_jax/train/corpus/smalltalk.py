"""Greetings, questions about the model itself, topics it does not know, and recommendations."""

from __future__ import annotations

from random import Random

from dflash_jax.train.corpus import words
from dflash_jax.train.corpus.facts import PLACES
from dflash_jax.train.corpus.grammar import block, finish, pick, say

_ASK_HELLO = block("""
{Hello|Hi|Hey|Good morning|Good evening}{|!|.} {How are you?|Who are you?|What can you do?|}
{Who are you|What are you|What can you do|How can you help me|What is your name}?
{Thank you|Thanks}{|!|, that was helpful.|, that is all.}
{Tell me something|Tell me about yourself|Introduce yourself}{|.}
""")
_HELLO = block("""
{Hello|Good to see you|Welcome}! I am a {small|little} language model, {and I was trained on simple texts|made to show fast text
    generation}.
I am a {small|little} language model. I {run|work} on {one computer|a single machine} and {write simple English|like short sentences}.
""")
_CAN = block("""
I can {write short stories|tell stories about animals and people}, explain {everyday tasks|how things are done}, and {compare animals,
    places and jobs|describe animals and places}.
{You can ask me|Ask me} to {tell a story|explain a task}, to {solve a small problem with numbers|describe a job}, or to write a
    {short|small} Python function.
My {favourite|usual} topics are [t1], [t2] and [t3]. I {also know|can also do} {a little arithmetic|a little Python}.
""")
_LIMIT = block("""
There are many things I do not know, {so please check important facts|and I can be wrong}.
I am {not very large|quite small}, so {please do not trust me with important things|my knowledge has limits}.
""")
_OFFER = block("""
{What would you like to|What shall we} {hear about|talk about} {today|first}? {Perhaps|Maybe} a story about @ [animal] {named|called} [name]?
{Shall I|Would you like me to} tell you about the [place], or {explain|show you} how to {make a cup of tea|plant a tree|bake a simple
    bread}?
{Just tell me|Tell me} a name, an animal or a place, and I will {begin|write a story about it}.
""")
TOPICS = words.split_words("""
    politics, football results, the stock market, quantum physics, Roman history, film stars, chemistry, law, taxes,
    the capital of France, car engines, video games, fashion, religion, Latin grammar, nuclear power, mobile phones,
    world records, music theory, black holes, philosophy, economics, the French Revolution, medicine, geology, airports,
    the weather tomorrow, train times, your favourite singer, dinosaurs, the Olympic Games, volcanoes, credit cards,
    the president, computer chips, Shakespeare, algebra, biology, electricity, Mars, the human brain, vitamins
""")
_ASK_UNKNOWN = block("""
{What do you know about|Tell me about|Explain|Can you explain|What can you say about} [topic]{|?}
{I have a question about|I want to learn about|My homework is about} [topic]. {Can you help|What should I know}?
{What is|Who knows about|Why is everyone talking about} [topic]?
""")
_UNKNOWN = block("""
{I am sorry, but|Unfortunately,} I {do not know enough|know only little} about [topic]. {I am a small model|My knowledge is small}, and {a
    wrong answer would not help you|I do not want to guess}.
I {was not trained on|have not learned much about} [topic], {and I do not know enough|so I cannot say much about it}. {I would only be guessing|It is better to say so than to
    invent something}.
""")
_SOURCE = block("""
{A good library|An encyclopedia|A teacher|An expert} can {tell you more|help you better} {with this question|than I can}.
{Please ask|It is better to ask} {a person who studied it|a good teacher|an expert}, or {look it up in|read} a {recent|good} book.
""")


def hello(rng: Random, name: str, animal: str) -> tuple[str, str]:
    """A greeting or a question about the model, and what the model says about itself."""
    c = _context(rng, name, animal)
    return _tidy(say(_ASK_HELLO, c, rng)), finish(
        " ".join(say(part, c, rng) for part in (_HELLO, _CAN, _LIMIT, _OFFER))
    )


def unknown(rng: Random, topic: str, name: str, animal: str) -> tuple[str, str]:
    """A question outside the model's small world, and an honest answer."""
    c = _context(rng, name, animal) | {"topic": topic}
    text = finish(" ".join(say(part, c, rng) for part in (_UNKNOWN, _SOURCE, _CAN, _OFFER)))
    return _tidy(say(_ASK_UNKNOWN, c, rng)), text


def _context(rng: Random, name: str, animal: str) -> dict[str, str]:
    topics = rng.sample(
        ("animals", "places", "jobs", "cooking", "gardens", "friendship", "small adventures", "seasons"), 3
    )
    return {
        "name": name,
        "animal": animal,
        "place": pick(rng, PLACES)[0],
        **dict(zip(("t1", "t2", "t3"), topics, strict=True)),
    }


def _tidy(text: str) -> str:
    return finish(text.strip())


PEOPLE = words.split_words("""
    mother, father, grandmother, grandfather, sister, brother, aunt, uncle, cousin, neighbour, teacher, best friend,
    colleague, daughter, son, nephew, niece, boss
""")
LIKES = tuple(sorted({row[12] for row in PLACES}))
# A present for each interest: what and why.
GIFTS = {
    "nature": ("a bird feeder", "a book about trees"), "swimming": ("a soft towel", "a good pair of goggles"),
    "books": ("a story book", "a reading lamp"), "food": ("a cookbook", "a box of spices"),
    "history": ("an old map", "a museum ticket"), "boats": ("a model ship", "a waterproof coat"),
    "climbing": ("a strong rope", "a warm hat"), "animals": ("a book about rare animals", "a zoo ticket"),
    "travel": ("a small globe", "a light backpack"), "sports": ("a new ball", "a pair of running shoes"),
    "music": ("a harmonica", "a concert ticket"), "helping people": ("a first aid kit", "a thick notebook"),
    "games": ("a chess set", "a deck of cards"), "making things": ("a small toolbox", "a set of brushes"),
    "stars": ("a small telescope", "a star map"),
}  # fmt: skip
_ASK_TRIP = block("""
My [person] likes [like]. {Where should we go|Which place should we visit} on @ [weather] day?
{Recommend|Please recommend|Suggest} a place for my [person], who {likes|loves} [like]{|.}
{Where can I go|Can you recommend a place to go} with my [person]? [They] {likes|loves} [like].
""")
_TRIP = block("""
{I would recommend|A good choice is|How about|My suggestion is} the [place]{, because|:} your [person] {likes|loves} [like]{, and it is just right for
    that|}.
{For someone who|If your [person]} {likes|loves} [like], {I recommend|I would choose} the [place].
""")
_TRIP_MORE = (
    block("{There,|[at],} you {can see|will find} [see1], {and also|as well as} [see2]."),
    block("You can [act1] {together|with your [person]}, or {you can|simply} [act2]."),
    block(
        "{Take|Bring} [bring]. {The best time is|It is especially nice in} [best]{|, but other days are fine, too}."
    ),
    block("{In|If you have} [weather] weather, [rain]."),
    block(
        "{Ask the [worker]|The [worker] will be happy} {for advice|to help} {if you are not sure|if you need anything}."
    ),
    block(
        "{I hope you both have|Have} a [good] {day|time}{ there|}! {Your [person] will remember it|It will be a day to remember}."
    ),
)
_ASK_GIFT = block("""
{What|Which present} can I give {to |}my [person], who {likes|loves} [like]?
{I need|I am looking for} a present for my [person]. [They] {likes|loves} [like].
{Recommend|Suggest} a gift for my [person], who {likes|loves} [like]{|.}
""")
_GIFT = (
    block("""
{Since|As} your [person] {likes|loves} [like], I {would suggest|recommend} [gift1].
{A good idea|A fine present} for someone who {likes|loves} [like] {would be|is} [gift1].
"""),
    block(
        "{It is useful|It shows that you thought about it}, and your [person] can {use|enjoy} it {for years|again and again}."
    ),
    block(
        "{Another idea is|You could also think of} [gift2], which {is easy to find and |}{fits|has to do with} [like], too."
    ),
    block(
        "{You could|Why not} {add a card|write a few lines} {with a personal message|about a day you spent together}."
    ),
    block(
        "{You might also|Or} {go|plan a visit} {together|with your [person]} to the [place], {where one can|because there you can} [act1]."
    ),
    block(
        "{Wrap it in <colour> paper|Put @ <colour> ribbon around it}, and {hand it over|give it} with a smile."
    ),
    block(
        "{I am sure|I think} that your [person] will be {happy|delighted|very pleased|pleasantly surprised}. {The thought counts most|A present from the heart is always right}."
    ),
)


def recommend(rng: Random, person: str, like: str) -> tuple[str, str]:
    """A request for a place or a present, and a recommendation that follows from the interest."""
    row = pick(rng, [row for row in PLACES if row[12] == like])
    weather = pick(rng, words.LISTS["weather"])
    wet = weather in ("rainy", "snowy", "stormy", "cold", "frosty", "chilly", "windy", "foggy")
    c = {"person": person, "like": like, "place": row[0], "see1": row[2], "see2": row[3], "act1": row[6], "act2": row[7],
         "bring": row[8], "best": row[9], "worker": row[10], "at": f"{row[1]} the {row[0]}", "weather": weather,
         "gift1": GIFTS[like][0], "gift2": GIFTS[like][1], "good": pick(rng, words.LISTS["good"])}  # fmt: skip
    c["They"] = {
        "mother": "She",
        "sister": "She",
        "aunt": "She",
        "daughter": "She",
        "niece": "She",
        "grandmother": "She",
    }.get(
        person,
        "He"
        if person in ("father", "brother", "uncle", "son", "nephew", "grandfather")
        else pick(rng, ("She", "He")),
    )
    indoor = row[11] == "indoor"
    c["rain"] = (
        "you will stay dry and warm inside" if indoor and wet else "it is pleasant inside as well" if indoor
        else "put on a warm coat" if wet else "it is lovely outside"
    )  # fmt: skip
    if rng.random() < 0.5:
        question, parts = _ASK_TRIP, (_TRIP, *_TRIP_MORE)
    else:
        question, parts = _ASK_GIFT, _GIFT
    return finish(say(question, c, rng)), finish(" ".join(say(part, c, rng) for part in parts))
