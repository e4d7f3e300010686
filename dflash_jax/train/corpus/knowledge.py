"""Descriptions, comparisons, recommendations: answers that follow from the knowledge tables."""

from __future__ import annotations

from random import Random

from dflash_jax.train.corpus.facts import ANIMALS, JOBS, PLACES, SIZES
from dflash_jax.train.corpus.grammar import article, block, finish, pick, say

AUDIENCES = (
    "my little sister",
    "a school report",
    "my class",
    "a curious child",
    "a poster",
    "my nephew",
    "a short talk",
    "a visitor",
    "my grandfather",
    "a quiz",
    "a picture book",
    "my friend",
    "a letter",
    "a student",
    "a magazine",
    "my niece",
    "a radio show",
    "a beginner",
    "my son",
    "a blog",
)


def animal_context(row: tuple[str, ...]) -> dict[str, str]:
    """Slots for an animal."""
    names = (
        "x",
        "xs",
        "young",
        "class",
        "size",
        "active",
        "home",
        "food",
        "diet",
        "body",
        "ability",
        "habit",
        "fact",
    )
    c = dict(zip(names, row, strict=True))
    c["size"] = SIZES[int(row[4])]
    c["when"] = {"day": "during the day", "night": "at night", "evening": "in the morning and evening"}[
        row[5]
    ]
    c["eater"] = {"plants": "plant eater", "meat": "meat eater", "both": "eater of plants and animals"}[
        row[8]
    ]
    return c


def place_context(row: tuple[str, ...]) -> dict[str, str]:
    """Slots for a place."""
    names = (
        "x",
        "prep",
        "see1",
        "see2",
        "see3",
        "sound",
        "act1",
        "act2",
        "bring",
        "best",
        "worker",
        "inout",
        "likes",
    )
    c = dict(zip(names, row, strict=True))
    c["at"] = f"{row[1]} the {row[0]}"
    c["rain"] = "is fine even on rainy days" if row[11] == "indoor" else "is best in good weather"
    return c


def job_context(row: tuple[str, ...]) -> dict[str, str]:
    """Slots for a job."""
    names = ("x", "xs", "where", "do1", "do2", "do3", "tools", "needs", "helps", "hard", "nice")
    return dict(zip(names, row, strict=True))


_ANIMAL_PARTS = {
    "intro": block("""
@ [x] is @ [size] [class] {that|which} lives in [home].
{The [x] is|The [x] is known as} @ [size] [class]. It lives in [home].
[xs] are [size] [class]s. {They live|You can find them} in [home].
In [home] {lives|you can find} the [x], @ [size] [class].
"""),
    "body": block("""
It has [body]{|, which make it easy to recognise}.
You can {recognise|tell} {it|@ [x]} by [body].
{Its|The} body is {well suited to|made for} its life: it has [body].
With [body], it {looks quite special|is easy to recognise}.
"""),
    "food": block("""
It {mostly eats|feeds on|eats} [food], so it is @ [eater].
{Its food is|For food, it looks for} [food]. {That makes it|So it is} @ [eater].
As @ [eater], it {eats|looks for} [food].
@ [x] {eats|likes to eat} [food], {and looks for them|mostly} [when].
"""),
    "active": block("""
It is {active|awake} mainly [when].
{People see it|You can see it} {most often|mainly} [when].
{Most of its work|Its search for food} {happens|takes place} [when].
"""),
    "ability": block("""
{Amazingly|Remarkably}, {it|@ [x]} can [ability].
{One of its skills|Its best skill} is {this|simple to describe}: it can [ability].
{Few animals|Not many animals} can do the same: @ [x] can [ability].
It is {famous|well known} because it can [ability].
"""),
    "habit": block("""
[xs] are also known for {one habit|a special habit}: they [habit_pl].
It {likes to|will often|tends to} [habit].
{When it can|Most of the time}, it will [habit].
"""),
    "young": block("""
{A young [x]|A baby [x]} is called @ [young].
@ [young] is {the young of @ [x]|a young [x]}.
The young [x] is called @ [young]{, and it needs much care|}.
"""),
    "fact": block("""
{Did you know this|Here is a surprising fact}? [fact].
{It may surprise you that|Many people do not know that} [fact].
{A nice detail|An interesting detail}: [fact].
"""),
    "end": block("""
{All this makes|That is why many people find} the [x] {interesting|a wonderful animal}.
{So|Now} you know {the most important things|a little more} about [xs].
If you {meet|see} one, {watch it quietly|keep some distance} and {enjoy the moment|do not disturb it}.
"""),
}
_PLACE_PARTS = {
    "intro": block("""
The [x] is @ {good|wonderful|lovely|interesting} place{| to visit}{ with|, and there you can see} [see1].
{When you arrive|If you are} [at], you {first see|notice} [see1].
[at], {everything begins with|the first things you see are} [see1].
"""),
    "see": block("""
There {are also|is more to see, too}: [see2], and even [see3].
{If you look closely|A little further on}, you {find|discover} [see2] and [see3].
{Do not miss|Look out for} [see2], and {look for|remember} [see3].
"""),
    "sound": block("""
{All around|Everywhere}, you {hear|can hear} [sound].
{Close your eyes for a moment|Stand still}, and you {will|can} hear [sound].
The {typical sound|sound you will remember} is that of [sound].
"""),
    "act": block("""
Visitors can [act1] or [act2].
{Many people come|People like to come} here to [act1], {but|while} others {prefer to|would rather} [act2].
{You can|It is a good place to} [act1], and {you can also|it is even better to} [act2].
"""),
    "bring": block("""
{You should|It is wise to} {bring|take} [bring].
{Do not forget|Remember to pack} [bring].
{All you need is|What you need is} [bring].
"""),
    "best": block("""
The best time {for a visit|to go there} is [best], and it [rain].
{Go there|Visit it} in [best] if you can, {because then it is at its best|when it is most beautiful}.
It is {most|especially} beautiful in [best], {and it [rain]|although people come all year}.
"""),
    "worker": block("""
{If you have questions|If you need help}, ask the [worker].
The [worker] {knows every corner|can tell you many stories}.
{You may|You will probably} meet the [worker], who {works there|is always busy}.
"""),
    "end": block("""
{In short|All in all}, the [x] is {right|perfect} for people who {like|love} [likes].
{Anyone|Everybody} who {likes|loves} [likes] will {feel at home|be happy} there.
After a {day|visit} [at], you will {sleep well|have a lot to tell}.
"""),
}
_JOB_PARTS = {
    "intro": block("""
@ [x] works [where].
{The work of @ [x]|The job of @ [x]} {takes place|is done} [where].
[xs] {usually|mostly} work [where].
"""),
    "do": block("""
{They|People in this job} [do1], [do2] and [do3].
{On a normal day|During the day}, @ [x] {has to|must} [do1], [do2] and [do3].
The {main tasks|most important tasks} are to [do1], to [do2] and to [do3].
"""),
    "tools": block("""
For this, [xs] {use|need} [tools].
{The most important tools|The usual tools} are [tools].
Without [tools], {nothing works|the work would be impossible}.
"""),
    "needs": block("""
{The job|This work} {takes|needs|asks for} [needs].
{To do it well|For this}, {one needs|a person needs} [needs].
{A good [x]|Whoever wants to become @ [x]} needs [needs].
"""),
    "helps": block("""
The work {helps|is important for} [helps].
{Without [xs]|If there were no [xs]}, {life would be harder for|there would be nobody to help} [helps].
{It is a job that helps|[xs] help} [helps].
"""),
    "hard": block("""
{The hardest part is|The difficult side of the job is} [hard].
{Not everything is easy|It is not always easy}: {the hard part is|think of} [hard].
{Many find that|Some say that|For most people,} the {hardest|most tiring} part is [hard].
"""),
    "nice": block("""
{The best part|The reward} is [nice].
But [nice] {makes up for it|makes it all worth the effort}.
{What most [xs] love is|The nicest thing is} [nice].
"""),
    "end": block("""
{So|In short}, {being @ [x]|the life of @ [x]} is {demanding but rewarding|never boring}.
{If you like such work|If that sounds good to you}, {talk to @ [x]|visit one at work} and {ask questions|watch for a day}.
{That is|This is} why {many people respect|we should thank} [xs].
"""),
}
_ASK_ANIMAL = block("""
{Tell me|Please tell me|What can you tell me} about [xs]{|.}
{Describe|Please describe} the [x]{| for [aud]}{|.}
{Write|I need} a short text about the [x] for [aud]{|.}
{What is|What kind of animal is} @ [x]?
{How does @ [x] live|How do [xs] live}?
I need {some facts|a few facts} about [xs] for [aud]. {Can you help|What should I know}?
""")
_ASK_PLACE = block("""
{Describe|Please describe} the [x]{| for [aud]}{|.}
What is it like [at]?
{What can I|What can one} {see|do|see and do} [at]?
{Write|I need} a short text about the [x] for [aud]{|.}
{I want to visit|We are going to} the [x]. {What should I know|What can we expect}?
""")
_ASK_JOB = block("""
What does @ [x] do?
{Describe|Please describe|Explain} the {job|work} of @ [x]{| for [aud]}{|.}
{Tell me|Please tell me} about the {work|job} of @ [x]{|.}
{Write|I need} a short text about [xs] for [aud]{|.}
{What is it like to be|Is it hard to be} @ [x]?
{I want to become|My brother wants to be} @ [x]. What should {I|we} know?
""")
# A question about one aspect; the answer begins with that aspect.
_FOLLOW = {
    "animal": {
        "food": block("What {does @ [x] eat|do [xs] eat}?"),
        "active": block("When {is @ [x]|are [xs]} active?"),
        "ability": block("What can @ [x] do {well|better than others}?"),
        "young": block("{What is a young [x] called|What do you call a baby [x]}?"),
        "body": block("What does @ [x] look like?"),
    },
    "place": {
        "bring": block("What should I {bring|take} to the [x]?"),
        "best": block("When is the best time to visit the [x]?"),
        "act": block("What can {I|we} do [at]?"),
        "worker": block("Who works [at]?"),
    },
    "job": {
        "tools": block("{What tools does @ [x] use|Which tools do [xs] need}?"),
        "hard": block("What is {hard|difficult} about {being @ [x]|the work of @ [x]}?"),
        "needs": block("What {does one need|do I need} to become @ [x]?"),
        "nice": block("What is the best part of being @ [x]?"),
    },
}
TOPICS = {
    "animal": (ANIMALS, animal_context, _ANIMAL_PARTS, _ASK_ANIMAL),
    "place": (PLACES, place_context, _PLACE_PARTS, _ASK_PLACE),
    "job": (JOBS, job_context, _JOB_PARTS, _ASK_JOB),
}


def describe(rng: Random, topic: str, row: tuple[str, ...], first: str | None = None) -> str:
    """A description; ``first`` names the aspect asked for, which then opens the answer."""
    _, context, parts, _ = TOPICS[topic]
    c = context(row)
    if topic == "animal":
        c["habit_pl"] = (
            c["habit"].replace(" its ", " their ").replace(" it ", " they ").replace("hears", "hear")
        )
        c["habit_pl"] = c["habit_pl"].replace("it feels", "they feel").replace("they feels", "they feel")
    middle = [name for name in parts if name not in ("intro", "end")]
    if first is None:
        order = ["intro", *_loose_order(rng, middle), "end"]
    else:
        rest = [name for name in middle if name != first]
        del rest[int(rng.random() * len(rest))]
        order = [first, "intro", *_loose_order(rng, rest), "end"]
    texts = []
    for name in order:
        choices = parts[name]
        text = say(choices, c, rng)
        texts.append(_name_subject(text, row[0]) if name == first and topic == "animal" else text)
    return finish(" ".join(texts))


def _name_subject(text: str, name: str) -> str:
    """An opening sentence cannot begin with "it": say the animal's name instead."""
    for old, new in (("It ", f"@ {name} "), ("Its ", f"the {name}'s "), ("With ", "with ")):
        if text.startswith(old):
            return new + text[len(old) :]
    return text.replace("it ", f"@ {name} ", 1) if name not in text else text


def _loose_order(rng: Random, names: list[str]) -> list[str]:
    """The usual order with one or two neighbours swapped: varied, yet each aspect is easy to foresee."""
    names = list(names)
    for _ in range(2):
        i = int(rng.random() * (len(names) - 1))
        names[i], names[i + 1] = names[i + 1], names[i]
    return names


def ask(rng: Random, topic: str, row: tuple[str, ...], audience: str) -> str:
    """A request for a description."""
    _, context, _, questions = TOPICS[topic]
    return finish(say(questions, {**context(row), "aud": audience}, rng))


def follow_up(rng: Random, topic: str, row: tuple[str, ...]) -> tuple[str, str]:
    """A question about one aspect and the name of that aspect."""
    aspect = pick(rng, tuple(_FOLLOW[topic]))
    return finish(say(_FOLLOW[topic][aspect], TOPICS[topic][1](row), rng)), aspect


_ASK_COMPARE = block("""
{Compare|Please compare} [x1] and [x2]{|.}
What is the difference between [x1] and [x2]?
{How does|In what way does} [x1] differ from [x2]?
{What do [x1] and [x2] have in common|Are [x1] and [x2] similar}?
[X1] or [x2]: what are the {main|most important} differences?
""")


def ask_compare(rng: Random, a: tuple[str, ...], b: tuple[str, ...], topic: str) -> str:
    """A request to compare two rows of one table."""
    x1, x2 = (f"the {row[0]}" if topic == "place" else f"@ {row[0]}" for row in (a, b))
    return finish(say(_ASK_COMPARE, {"x1": x1, "x2": x2, "X1": x1}, rng))


_COMPARE_END = block("""
{So|In short}, [the1] and [the2] {have [little] in common|are [alike]}, {but|and} {each is interesting in its own way|both are worth
    knowing}.
{All in all|In the end}, {it is easy to tell them apart|the differences are clear}, {and|but} {both are interesting|each has its
    place}.
{Which one is better|Which one you prefer} depends on {you|what you like}: {both|the two} have {good sides|their own charm}.
""")
_COMPARE_ANIMAL = {
    "start": block("""
[The1] and [the2] {are both animals|can both be found in nature}, but {they differ in many ways|there are clear differences}.
{There are several differences between|It is interesting to compare} [the1] and [the2].
"""),
    "same_class": block("{Both are|They have one thing in common: both are} [class1]s."),
    "class": block("[The1] is @ [class1], {while|but} [the2] is @ [class2]."),
    "bigger": block("[The1] is {[much]larger than|the larger of the two, [much]bigger than} [the2]."),
    "smaller": block("[The1] is [much]smaller than [the2]."),
    "same_size": block("{They are|Both are} of {about the same|similar} size."),
    "home": block("""
[The1] lives in [home1], {while|but} you find [the2] in [home2].
{You find|People see} [the1] in [home1]{. The home of [the2] is different:|, and [the2] in} [home2].
"""),
    "food": block("""
[The1] eats [food1], {while|whereas} [the2] {eats|prefers} [food2].
{For food|When it is hungry}, [the1] looks for [food1], {but|while} [the2] {looks for|wants} [food2].
"""),
    "same_when": block("{Both are|Each of them is} active [when1]."),
    "when": block("[The1] is active [when1], {but|while} [the2] {is|is more} active [when2]."),
    "body": block("{You can recognise|You know} [the1] by [body1], and [the2] by [body2]."),
    "ability": block("""
[The1] can [ability1]. [The2], {however|on the other hand}, can [ability2].
{A special skill of|The strength of} [the1] is that it can [ability1], {while|but} [the2] can [ability2].
"""),
    "young": block(
        "The young of [the1] is called @ [young1], {while|but} that of [the2] is called @ [young2]."
    ),
}
_COMPARE_PLACE = {
    "start": block("""
[The1] and [the2] are {very different|two different} places{, but both are worth a visit|}.
{It is easy|It is not hard} to tell [the1] and [the2] apart.
"""),
    "see": block("[At1], you {see|find} [see11], {while|but} [at2] there are [see12]."),
    "sound": block(
        "{The sounds are different|They sound different}, too: [sound1] [at1], and [sound2] [at2]."
    ),
    "act": block("[At1], you can [act11], {while|but} [at2] you can [act12]."),
    "bring": block("For [the1], {bring|you need} [bring1]. For [the2], {take|you need} [bring2]."),
    "same_best": block("{Both are|The two are} at their best in [best1]."),
    "best": block(
        "[The1] is most beautiful in [best1], {but|while} [the2] {is at its best|should be visited} in [best2]."
    ),
    "worker": block("[At1] you {may|will} meet the [worker1], and [at2] the [worker2]."),
    "likes": block("{Go to|Choose} [the1] if you like [likes1], and [the2] if you {prefer|like} [likes2]."),
}
_COMPARE_JOB = {
    "start": block("""
[The1] and [the2] {both do useful work|have different jobs}, {and|but} their days {look different|are not the same}.
{There are many differences between|Let us compare} the work of [the1] and that of [the2].
"""),
    "where": block("[The1] works [where1], {while|but} [the2] works [where2]."),
    "do": block("[The1] has to [do11] and [do21]{. The other|, while [the2]} has to [do12] and [do22]."),
    "tools": block(
        "{The tools differ as well|They also use different tools}: [tools1] for [the1], {and|but} [tools2] for [the2]."
    ),
    "needs": block("[The1] needs [needs1], {while|and} [the2] needs [needs2]."),
    "helps": block("[The1] helps [helps1]. [The2] helps [helps2]."),
    "hard": block("{The hardest part for|What is hard for} [the1] is [hard1]. For [the2], it is [hard2]."),
    "nice": block("[The1] enjoys [nice1], and [the2] {loves|enjoys} [nice2]."),
}


def compare(rng: Random, topic: str, a: tuple[str, ...], b: tuple[str, ...]) -> str:
    """A comparison whose claims (larger, same time, ...) follow from the table."""
    context = TOPICS[topic][1]
    c: dict[str, str] = {}
    for index, row in (("1", a), ("2", b)):
        c.update({slot + index: text for slot, text in context(row).items()})
        c["the" + index] = c["The" + index] = "@ " + row[0] if topic == "job" else "the " + row[0]
    same = 0
    if topic == "place":
        c["At1"], c["At2"] = c["at1"], c["at2"]
        parts, best = _COMPARE_PLACE, "same_best" if a[9] == b[9] else "best"
        same = (a[9] == b[9]) + (a[11] == b[11])
        order = ["start", *_loose_order(rng, ["see", "sound", "act", "bring", best, "worker"]), "likes"]
    elif topic == "job":
        parts = _COMPARE_JOB
        order = ["start", *_loose_order(rng, ["where", "do", "tools", "needs", "helps", "hard", "nice"])]
        del order[1 + int(rng.random() * 7)]
    else:
        parts = _COMPARE_ANIMAL
        gap = int(a[4]) - int(b[4])
        c["much"] = "much " if abs(gap) > 2 else ""
        size = "bigger" if gap > 0 else "smaller" if gap < 0 else "same_size"
        kind, when = ("same_class" if a[3] == b[3] else "class"), ("same_when" if a[5] == b[5] else "when")
        same = (gap == 0) + (a[3] == b[3]) + (a[5] == b[5]) + (a[8] == b[8])
        order = ["start", kind, *_loose_order(rng, [size, "home", "food", when, "body", "ability", "young"])]
        del order[3 + int(rng.random() * 5)]
    c["little"], c["alike"] = ("a lot", "quite similar") if same >= 2 else ("little", "very different")
    texts = [say(parts[name], c, rng) for name in order]
    return finish(" ".join([*texts, say(_COMPARE_END, c, rng)]))


def title(topic: str, row: tuple[str, ...]) -> str:
    """A heading for a plain article."""
    return {"animal": f"The {row[0]}", "place": f"The {row[0]}", "job": f"The work of {article(row[0])}"}[
        topic
    ]
