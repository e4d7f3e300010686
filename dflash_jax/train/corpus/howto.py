"""Everyday tasks explained step by step, in chat and plain form."""

from __future__ import annotations

from random import Random

from dflash_jax.train.corpus.grammar import block, compile_all, finish, pick, say

# Task (verb phrase); needed things; steps; why it is worth it; tip. One record per paragraph, one field per line.
_RAW = """
make a cup of tea
a kettle, fresh water, tea leaves and a cup
{fill the kettle with|pour} fresh cold water{| into the kettle}; {bring the water to a boil|heat the water until it bubbles}; {put|place} the tea leaves {in the cup|in a small sieve}; pour the hot water {over the leaves|slowly over the tea}; wait for {three|four} minutes; {take out the leaves|remove the leaves} and {add honey or milk|taste it}
warm the cup first so that the tea stays hot
a warm drink calms the mind

plant a tree
a young tree, a shovel, water and a stake
choose a {sunny|quiet} place with {enough|plenty of} room; dig a hole {twice as wide as|wider than} the roots; {loosen the roots|shake the roots free} {carefully|with your fingers}; set the tree {straight|upright} in the hole; fill the hole with {loose|good} soil and press it down; {give it|pour on} a full bucket of water; tie the tree to a stake {so that the wind cannot move it|with a soft band}
water the tree every week during the first summer
one tree gives shade and clean air for many years

wash a bicycle
a bucket, warm water, soap, a sponge and an old cloth
{rinse|spray} the bicycle with {clean|a little} water; {mix|stir} soap into a bucket of warm water; wash the frame {with a sponge|from top to bottom}; {scrub|brush} the wheels and the chain; {rinse off|wash away} the soap; dry everything with an old cloth; put {a few drops of|a little} oil on the chain
never use a strong jet of water on the bearings
a clean bicycle runs better and lasts longer

bake a simple bread
flour, water, yeast, salt and a baking tin
mix the flour with {salt and yeast|yeast and a pinch of salt}; add {warm water|a cup of warm water} little by little; knead the dough for ten minutes; let it rest {in a warm place|under a cloth} for an hour; shape {the dough into a loaf|a round loaf}; bake it for {forty|forty-five} minutes; let the bread cool {on a rack|before you cut it}
knock on the bottom, and if it sounds hollow, the bread is done
homemade bread smells wonderful and needs only a few things

fry an egg
an egg, a pan, a little butter and salt
{put|set} the pan on {medium|low} heat; melt {a little|some} butter; {crack|break} the egg on the edge of the pan; let the egg slide in {gently|without breaking the yolk}; wait until the white is {firm|no longer clear}; {sprinkle it with|add} a little salt; lift it out with a {flat spoon|spatula}
use low heat so that the edges do not burn
an egg makes a quick and filling meal

pack a suitcase
a suitcase, clothes, a list and small bags
write a list of {the things you need|everything you need}; check the weather {at your destination|of the place}; lay {out the clothes|all clothes} on the bed; put heavy things {at the bottom|near the wheels}; roll shirts {instead of folding them|tightly}; fill the gaps {with socks|with small things}; close the suitcase and {weigh it|lift it once}
keep papers and medicine in your hand luggage
good packing saves time and trouble on the trip

clean a window
a bucket, warm water, a little soap and a dry cloth
{remove|wipe off} the dust {from the frame|with a dry cloth}; mix warm water with a little soap; wet the glass {from top to bottom|with a sponge}; rub off {spots|sticky marks} gently; pull the water down with a {rubber blade|wiper}; dry the edges {with a cloth|with old newspaper}; look at the glass from {the side|both sides}
work on a cloudy day, because the sun dries the soap too fast
clean windows let in more light

grow tomatoes
seeds, soil, small pots and sticks
fill small pots with {fine|fresh} soil; press {two|three} seeds into each pot; keep the soil {moist|damp} and warm; move the young plants {outside|into bigger pots} after the last frost; tie {the stems|them} to sticks; water the {roots|soil} and not the leaves; pick the fruit {when it is fully red|when it feels soft}
pinch off the side shoots so that the plant keeps its strength
tomatoes from the garden taste sweeter than bought ones

fix a flat tyre
a pump, tyre levers, a patch and glue
turn the bicycle {upside down|over}; take off the wheel; lift {the tyre|one side of the tyre} off with the levers; {pull out|take out} the inner tube; pump it up and {listen for|look for} the hole; {roughen|sand} the spot and spread the glue; press on the patch {firmly|for a minute}; put everything back and pump up the tyre
hold the tube under water, because the bubbles show the hole
fixing it yourself costs almost nothing

write a letter
paper, a pen, an envelope and a stamp
think about {what you want to say|the person who will read it}; write the date {at the top|in the corner}; {begin|start} with a friendly greeting; tell your news {in short sentences|in a clear order}; ask {a question|how the other person is}; {end|close} with good wishes and your name; {fold|put} the paper into the envelope and add a stamp
read the letter once aloud before you send it
a letter by hand shows that you took your time

build a sandcastle
a bucket, a small shovel, water and shells
find a place {near the water|where the sand is wet}; {dig|draw} a wide circle for the moat; pile up wet sand {in the middle|as a hill}; fill the bucket and press the sand {down|firmly}; turn the bucket over {quickly|in one move} and lift it; {carve|cut} windows {with a spoon|with a stick}; decorate the walls with shells
keep the sand wet, because dry sand falls apart
it is a joyful game for the whole family

make vegetable soup
carrots, potatoes, an onion, water and salt
wash {all vegetables|the vegetables} well; {peel|clean} the carrots and potatoes; cut everything into {small|even} pieces; {fry|brown} the onion in a little oil; add the vegetables and {cover them with|pour in} water; let the soup {simmer|cook slowly} for twenty minutes; {season it with|add} salt and herbs
cut hard vegetables smaller so that all are ready together
soup warms you up and uses what you have

learn new words
a notebook, a pencil and ten minutes a day
choose {five|six} words {a day|each day}; write each word {on a card|in a notebook}; put {the meaning|a small picture} on the back; say the word {aloud|three times}; use it in a {short|funny} sentence; repeat the words {the next morning|before you sleep}; mix old words with new ones
short daily practice beats one long evening
every new word opens a small door

calm a crying baby
a quiet room, a soft blanket and patience
check whether the baby is {hungry|tired}; look at the {nappy|clothes}; hold the baby close {to your chest|in your arms}; {rock|sway} gently from side to side; {hum|sing} a quiet song; make the room {darker|less noisy}; put the baby down when it {is calm|sleeps}
stay calm yourself, because babies feel your mood
a calm baby helps the whole family rest

care for a cat
food, fresh water, a clean box and a soft place
{give it|offer} fresh water every day; feed it {twice a day|at the same hours}; clean the box {every morning|daily}; brush its fur {gently|once a week}; play with it {for ten minutes|in the evening}; let it rest {in a quiet corner|where it likes}; visit the vet {once a year|for a check}
let the cat come to you instead of lifting it
a cat that feels safe is a friendly companion

paint a wall
paint, a roller, tape and old sheets
move the furniture {away|into the middle}; cover the floor {with old sheets|with paper}; {wash off|wipe away} the dust; put tape {along the edges|around the windows}; stir the paint {well|slowly}; paint the corners {first|with a brush}; roll the paint on {in even lines|from top to bottom}; let it dry and {add|paint} a second coat
take the tape off before the paint is fully dry
fresh colour makes a room feel new

prepare for a test
your notes, a plan and a quiet desk
{collect|gather} all your notes; make {a list of topics|a plan for the week}; {begin|start} with the hardest topic; explain it {aloud|to a friend}; do {some old tests|a few exercises}; take {short breaks|a break every half hour}; sleep well {the night before|before the big day}
teach the topic to somebody else to find the gaps
a good plan takes away the fear

make a paper boat
a sheet of paper and a flat table
fold the paper {in half|across the middle}; fold the two upper corners {to the middle|down}; fold {up|back} the lower edges on both sides; open it {like a hat|in the middle} and press it into a square; fold the corners {up|upwards} to make a triangle; open it {once more|again} into a square; pull the two tips {apart|outwards}
use thin paper, because thick paper is hard to fold
it costs nothing and really floats

set up a tent
a tent, poles, pegs and a hammer
choose a {flat|dry} place; {remove|pick up} stones and sticks; {spread out|unroll} the tent; {connect|join} the poles; push the poles {through the loops|into the corners}; {raise|lift} the tent together; hammer in the pegs {at an angle|one by one}; {tighten|pull} the ropes
turn the door away from the wind
a well built tent keeps you dry all night

save money
a notebook, a jar and a clear goal
write down {everything you spend|what you earn}; {set|choose} a clear goal; put {a small sum|some coins} aside first; buy only {what you need|things on your list}; wait {one day|a week} before a big purchase; compare {prices|two shops}; count your savings {every month|on Sunday}
put the money away on the first day of the month
savings give freedom and a quiet mind

wash a dog
warm water, mild shampoo and two towels
brush the fur {well|first}; {fill|prepare} a tub with warm water; wet the dog {slowly|from back to front}; rub in the shampoo {gently|with both hands}; keep {soap|water} away from the eyes; rinse {twice|until the water is clear}; dry the dog {with a towel|in a warm room}
give a small treat at the end
a clean dog feels well and smells better

cook rice
rice, water, salt and a pot with a lid
measure {one cup|a cup} of rice; {rinse|wash} it until the water is clear; put it {in a pot|into the pot} with two cups of water; add {a pinch of|a little} salt; {bring it|heat it} to a boil; {lower|turn down} the heat and {close|cover} the pot; wait {fifteen|eighteen} minutes; loosen the rice with a fork
do not lift the lid while it cooks
rice goes with almost every dish

start a small garden
seeds, a spade, good soil and water
find a {sunny|warm} spot; pull out {weeds|the grass}; dig {the soil|the earth} over; mix in {compost|good soil}; draw {straight|long} lines with a stick; put in the seeds {not too deep|one by one}; cover them and {water them|press the soil}; mark {each row|the rows} with a label
begin with radishes, because they grow fast
a garden gives food and joy

sew on a button
a needle, thread, scissors and the button
{cut|take} a piece of thread {as long as your arm|of the right colour}; pull it through the needle; {make|tie} a knot at the end; {place|hold} the button {on the right spot|in place}; push the needle {up|through} a hole from below; go down through the other hole; repeat this {five|six} times; {tie|fasten} the thread on the back
leave a little space between the button and the cloth
it saves a good shirt in five minutes

make a fruit salad
apples, bananas, berries, a lemon and a bowl
wash the fruit {well|in cold water}; {peel|take off} the skin where it is thick; cut {everything|the fruit} into small pieces; {remove|throw away} the seeds; put it all into a {large|wide} bowl; {squeeze|pour} lemon juice over it; {mix|stir} gently; {cool it|chill it} for half an hour
add the soft fruit last so that it keeps its shape
it is fresh, sweet and healthy

find a lost key
a lamp, patience and a good memory
stop and {take a deep breath|stay calm}; think of {the last time|the moment} you used it; {empty|check} all your pockets; look under {cushions|papers} and {behind|below} the furniture; walk {the same way|back} step by step; ask {the others|your family}; {shine|point} a lamp {under the bed|into dark corners}
look twice in the place where it should be
most lost things are closer than we think

take good photos
a camera or a phone and good light
{clean|wipe} the lens; find {soft|good} light; {move|go} closer to your subject; look at the {background|edges}; hold {the camera|your hands} still; take {several|three or four} pictures; try {another|a lower} angle; choose the best one {later|at home}
the hour before sunset has the best light
good pictures keep good days alive

sleep better
a dark room, fresh air and a fixed hour
go to bed at the same {hour|time}; {turn off|put away} all screens an hour before; drink no coffee {in the afternoon|after lunch}; {open|air} the window for ten minutes; make the room {dark|cool}; read {a few pages|something quiet}; breathe {slowly|deeply} and {relax|let go of} your shoulders
write tomorrow's tasks on paper to free your head
good sleep makes the next day easier

make friends
an open mind, time and a smile
{smile|look up} and say hello; ask {a simple question|for a name}; {listen|pay attention} to the answer; {tell|say} something about yourself; find {a common hobby|something you both like}; {invite|ask} the person to {a game|a walk}; {keep|remember} your promises; be {patient|kind}
remember names, because everyone likes to hear their own
friends make good days better and bad days shorter

light a campfire
dry wood, small twigs, matches and stones
check whether fires are {allowed|safe} there; {clear|clean} the ground; lay {a ring of|some} stones; {build|make} a small pile of dry grass; put thin twigs {on top|around it}; light it {from below|on the windy side}; add {thicker|larger} wood slowly; {pour water on|put out} the fire before you leave
keep a full bucket of water near the fire
a fire gives warmth and a good place for stories
"""


def _records() -> tuple[tuple, ...]:
    records = []
    for paragraph in _RAW.strip().split("\n\n"):
        task, needs, steps, tip, reason = paragraph.split("\n")
        records.append((task, needs, compile_all([s.strip() for s in steps.split(";")]), tip, reason))
    return tuple(records)


HOWTOS = _records()
AUDIENCES = (
    "my grandmother",
    "my little brother",
    "a child",
    "my friend",
    "a beginner",
    "my neighbour",
    "a new student",
    "my sister",
    "my uncle",
    "a busy person",
    "my father",
    "my class",
    "a visitor",
    "my cousin",
    "a young cook",
    "someone who is nervous",
    "my mother",
    "an old friend",
    "my team",
    "my daughter",
    "my son",
    "a tourist",
)

_INTRO = block("""
{Here is|This is} {an easy|a simple|a good} way to [task]{| [aud]}. You {will need|need} [needs].
To [task], you {will need|need} [needs]. {It is not hard|Anyone can do it}[aud2].
{Of course|Sure|Gladly}! {If you want to|To} [task], {first get|have ready} [needs].
It is {easy|not difficult} to [task] when you {know the steps|take your time}. {Get|Prepare} [needs] {first|before you begin}.
{Before you start to|If you want to} [task], {collect|get} [needs]. {Then follow these steps|The rest is simple}.
""")
_FIRST = compile_all(["First, ", "First of all, ", "To begin, ", "Start like this: ", "Begin like this: "])
_NEXT = compile_all(
    [
        "Then, ",
        "Next, ",
        "After that, ",
        "Now ",
        "In the next step, ",
        "When this is done, ",
        "As soon as you are ready, ",
        "Once that is finished, ",
        "",
    ]
)
_LAST = compile_all(["Finally, ", "In the end, ", "At the end, ", "As the last step, "])
_OUTRO = block("""
{A small tip|One more tip|My advice|A useful trick|Here is a tip}[aud3]: [tip]. {Remember|And remember}: [reason].
{It is worth it|It is worth the effort}, because [reason]. {A small tip|A last tip}[aud3]: [tip].
{Do not forget|Keep in mind}: [tip]. {You will see that|Soon you will notice that} [reason].
{Always|Please} remember one thing[aud3]: [tip]. {After all|In the end}, [reason].
""")


def answer(rng: Random, record: tuple, audience: str | None) -> str:
    """The explanation as prose or as a numbered list."""
    task, needs, steps, tip, reason = record
    c = {"task": task, "needs": needs, "tip": tip, "reason": reason}
    who = _second_person(audience)
    c["aud"] = f"with {who}" if who else "step by step"
    c["aud2"] = f", and {who} will like it" if who else ""
    c["aud3"] = f" for {who}" if who else ""
    texts = [step.expand(c, rng) for step in steps]
    if rng.random() < 0.4:
        body = "\n".join(f"{i}. {text[0].upper()}{text[1:]}." for i, text in enumerate(texts, 1))
        return f"{finish(say(_INTRO, c, rng))}\n\n{body}\n\n{finish(say(_OUTRO, c, rng))}"
    told, used = [say(_FIRST, c, rng) + texts[0]], ""
    for text in texts[1:-1]:
        lead = say(_NEXT, c, rng)
        while lead == used:
            lead = say(_NEXT, c, rng)
        used = lead
        told.append(lead + text)
    told.append(say(_LAST, c, rng) + texts[-1])
    return finish(" ".join([say(_INTRO, c, rng), *(text + "." for text in told), say(_OUTRO, c, rng)]))


def plain(rng: Random, record: tuple) -> str:
    """The same explanation as a short article with a title."""
    title = pick(rng, ("How to {}", "A short guide: how to {}", "Step by step: how to {}")).format(record[0])
    return f"{title}\n\n{answer(rng, record, None)}"


def _second_person(audience: str | None) -> str:
    """The audience as seen from the one who answers: my brother becomes your brother."""
    return "your" + audience[2:] if audience and audience.startswith("my ") else audience or ""


_ASK = block("""
{How do I|How can I|How do you|How does one} [task]?
{Explain|Please explain|Tell me} how to [task]{|, step by step}{|.}
{Explain to|Please explain to|Tell} [audience] how to [task]{|.}
What is the best way to [task]?
{I would like to|I need to} [task]. {Please help|Can you help me|How do I begin}?
{I want to|We want to} [task]. {What should I do|What do I need|How does it work}?
{Give me|Write} {instructions|simple steps|a guide} for [audience] {on|about} how to [task]{|.}
{My plan for today is to|Today I will} [task]. {What are the steps|How do I begin}?
{Can you explain|Could you show|Can you tell} [audience] how to [task]?
""")


def question(rng: Random, record: tuple, audience: str) -> tuple[str, bool]:
    """A request for the explanation, and whether it names the audience."""
    text = finish(say(_ASK, {"task": record[0], "audience": audience}, rng)).replace(
        "Please help?", "Please help."
    )
    return text, audience in text
