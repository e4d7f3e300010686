"""Word lists of the corpus: names, objects, adjectives, adverbs, weather, feelings.

``LISTS`` holds the lists that templates may draw from freely as ``<name_of_list>``.
"""

from __future__ import annotations

from random import Random


def split_words(text: str) -> tuple[str, ...]:
    """The comma-separated entries of ``text``."""
    return tuple(" ".join(entry.split()) for entry in text.split(",") if entry.strip())


def table(text: str) -> tuple[tuple[str, ...], ...]:
    """Rows separated by blank lines, fields by ';' or a line break."""
    rows = []
    for row in text.strip().split("\n\n"):
        fields = [" ".join(field.split()) for line in row.split("\n") for field in line.split(";")]
        rows.append(tuple(field for field in fields if field))
    if len({len(row) for row in rows}) != 1:
        widths = [(row[0], len(row)) for row in rows]
        raise ValueError(f"table rows differ in width: {widths}")
    return tuple(rows)


GIRLS = split_words("""
Mila, Anna, Rosa, Ella, Nora, Lucy, Ida, Maya, Zoe, Clara, Emma, Lily, Ruby, Alice, Hana, Sofia, Leila, Greta, Ines,
Tara, Nina, Vera, Olive, Priya, Amara, Freya, Daisy, Elsa, Fiona, Grace, Helen, Iris, Julia, Kate, Laura, Maria, Nadia,
Paula, Rita, Sara, Tessa, Uma, Violet, Wanda, Yara, Zara, Beth, Cora, Dina, Eve, Flora, Gina, Hilda, Ivy, Jane, Kira,
Luna, Molly, Noor, Penny, Rose, Sally, Tina, Willa
""")
BOYS = split_words("""
Tom, Ben, Leo, Max, Sam, Oscar, Finn, Hugo, Jack, Adam, Noah, Liam, Omar, Ravi, Kenji, Pavel, Marco, Felix, Henry, Otto,
Paul, Simon, Theo, Victor, Walter, Yusuf, Arthur, Bruno, Carl, David, Emil, Frank, George, Harry, Ivan, Jonas, Karim,
Luis, Mateo, Nils, Oliver, Peter, Quentin, Robin, Stefan, Tariq, Umar, Vincent, Will, Abel, Boris, Colin, Dario, Eli,
Fred, Gus, Ian, Joel, Kurt, Martin, Ned, Rafael, Toby, Zane
""")
_SYLLABLES = split_words(
    "ba, bo, da, de, fi, go, ja, ka, ko, la, lo, ma, mi, na, no, pa, pi, ra, ro, sa, ta, ti, va, zo"
)
_ENDINGS = split_words("bin, dor, fan, lek, mar, nix, ra, rin, sha, ton, vik, wen, zu")


def invented_name(rng: Random) -> str:
    """A name no list holds, so that the model learns to copy unknown words from the prompt."""
    syllables = [_SYLLABLES[int(rng.random() * len(_SYLLABLES))] for _ in range(1 + int(rng.random() * 2))]
    return ("".join(syllables) + _ENDINGS[int(rng.random() * len(_ENDINGS))]).capitalize()


# Portable things and what one does with them: "used it to ..."
OBJECTS = tuple(
    (name.strip(), use.strip())
    for name, use in (
        line.split(":")
        for line in """
lantern: light up dark paths
kite: follow the wind
drum: keep the beat at parties
compass: find the way home
blanket: keep warm on cold nights
teapot: make tea for visitors
violin: play slow songs in the evening
camera: take pictures of birds
umbrella: stay dry in the rain
bicycle: ride to school
notebook: write down new ideas
map: plan long walks
whistle: call the dog
basket: carry apples from the garden
hammer: fix loose boards
ladder: reach the highest shelf
mirror: check a new hat
clock: be on time
candle: read after sunset
bell: call everyone to dinner
rope: tie up the boat
bucket: bring water to the plants
shovel: dig holes for young trees
scarf: keep out the winter wind
hat: hide from the sun
coat: stay warm in the snow
pair of boots: walk through deep mud
pair of gloves: throw snowballs
pair of glasses: read small letters
backpack: carry lunch up the hill
flute: play along with the birds
guitar: sing with friends
trumpet: wake the whole street
piano: practise old tunes
harmonica: play by the campfire
telescope: look at the moon
microscope: study tiny leaves
magnet: pick up lost pins
magnifying glass: look at insects
flashlight: look under the bed
radio: listen to the news
globe: dream about other countries
puzzle: pass a rainy afternoon
ball: play in the park
doll: play house
toy train: travel around the kitchen
toy boat: sail across the pond
model plane: race the swallows
sled: slide down the hill
pair of skates: glide over the ice
skateboard: roll down the street
tent: sleep under the stars
hammock: rest in the shade
fishing rod: fish from the bridge
net: catch butterflies and let them go
jar: collect shiny stones
box: keep old letters safe
chest: store warm clothes
key: open the garden gate
lock: close the shed
coin: make wishes at the fountain
ring: remember a good friend
necklace: look nice at the dance
bracelet: count the days of summer
watch: time the races
wallet: save money for a trip
letter: learn the news from far away
postcard: remember the sea
book: learn about the stars
diary: remember every day
pencil: draw the people on the bus
paintbrush: paint the sunset
box of crayons: draw funny animals
chalk board: practise sums
sewing kit: mend torn sleeves
needle: sew on buttons
quilt: build a cosy den
pillow: take a nap after lunch
broom: sweep the front steps
watering can: water the roses
rake: gather the autumn leaves
wheelbarrow: move heavy stones
saw: cut old branches
toolbox: repair broken chairs
paint pot: freshen up the fence
birdcage: shelter a hurt sparrow
bird feeder: feed the robins in winter
beehive: make honey
flower pot: grow herbs on the window sill
vase: brighten up the table
bowl: mix the batter
frying pan: make pancakes on Sundays
kettle: boil water for tea
spoon: stir the soup
cake tin: bake birthday cakes
rolling pin: roll out the dough
cookbook: try a new soup every week
lunch box: take sandwiches to work
water bottle: drink on long walks
thermos: keep cocoa hot
wagon: pull the little ones around
cart: bring vegetables to the market
canoe: explore the quiet river
paddle: steer past the rocks
oar: row to the island
anchor: keep the boat in place
flag: show the way to the camp
puppet: act out funny plays
mask: play tricks on friends
costume: play a king on stage
crown: play a queen on stage
chess set: play against grandfather
deck of cards: learn magic tricks
top hat: do magic tricks
marble: play in the school yard
feather: tickle sleeping friends
seashell: hear the sound of the sea
crystal: make little rainbows
snow globe: think of winter in July
music box: fall asleep
alarm clock: get up before sunrise
calculator: check long sums
ruler: draw straight lines
lamp: read late at night
carpet: cover the cold floor
rocking chair: rest on the porch
cushion: sit by the fire
trophy: remember the big race
medal: remember the school games
ticket: get into the show
passport: travel across the border
robot: sort buttons by colour
windmill: grind corn
weather vane: see where the wind comes from
spade: dig up potatoes
horn: warn ships in the fog
drum kit: play in a band
ukulele: cheer up tired people
megaphone: cheer at the games
picnic basket: carry food to the meadow
walking stick: climb steep hills
raincoat: jump into puddles
apron: cook without a mess
gold medal: feel brave
story book: read to little children
stamp album: learn about far places
photo album: remember old friends
treasure map: look for hidden caves
paper lantern: decorate the garden
paper boat: race along the stream
clay pot: keep water cool
wooden horse: ride to imaginary lands
wool hat: warm both ears
silver spoon: taste the jam
stone: skip across the lake
""".strip().splitlines()
    )
)

LISTS: dict[str, tuple[str, ...]] = {
    "object": tuple(name for name, _ in OBJECTS),
    "look": split_words("""
        red, blue, green, yellow, purple, golden, silver, white, black, brown, orange, pink, grey, tiny, small, little,
        big, huge, heavy, light, old, new, shiny, dusty, wooden, painted, striped, simple, beautiful, strange, lovely,
        pretty, plain, bright, colourful, elegant, useful, unusual, old-fashioned, sturdy, handmade, round
    """),
    "trait": split_words("""
        curious, shy, brave, patient, clever, gentle, cheerful, careful, quiet, honest, kind, stubborn, lively, polite,
        proud, dreamy, hard-working, friendly, generous, thoughtful, playful, restless, calm, bold, forgetful, impatient
    """),
    "adverb": split_words("""
        slowly, quickly, quietly, carefully, happily, bravely, gently, patiently, eagerly, calmly, cheerfully, softly,
        proudly, politely, nervously, steadily, silently, warmly, firmly, kindly
    """),
    "happy": split_words("""
        happy, glad, proud, delighted, cheerful, thrilled, grateful, relieved, overjoyed, excited, pleased, hopeful
    """),
    "sad": split_words("""
        sad, worried, upset, disappointed, lonely, nervous, tired, unhappy, miserable, anxious, gloomy, frustrated
    """),
    "weather": split_words("""
        sunny, rainy, windy, foggy, snowy, cloudy, stormy, misty, warm, cold, frosty, hot, chilly, bright, grey, mild
    """),
    "daytime": split_words("morning, afternoon, evening, day"),
    "season": split_words("spring, summer, autumn, winter"),
    "food": split_words("""
        apple pie, vegetable soup, warm bread, pancakes, honey cake, cheese sandwiches, roasted potatoes, plum cake,
        noodles, tomato soup, berry tarts, lemon biscuits, fresh rolls, rice pudding, corn bread, mushroom stew,
        carrot cake, baked beans, fruit salad, dumplings, chocolate cake, cinnamon buns, waffles, pumpkin soup,
        nut cookies, cherry jam, omelettes, grilled corn, popcorn, pea soup
    """),
    "drink": split_words("""
        hot cocoa, mint tea, apple juice, lemonade, cold milk, ginger tea, berry juice, fresh water, orange juice
    """),
    "relative": split_words("""
        mother, father, grandmother, grandfather, sister, brother, aunt, uncle, cousin, neighbour, teacher, best friend
    """),
    "number": split_words("two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, twenty"),
    "small_animal": split_words("""
        sparrow, squirrel, mouse, hedgehog, beetle, butterfly, rabbit, frog, cat, dog, robin, snail, bee, duck, lizard
    """),
    "colour": split_words(
        "red, blue, green, yellow, purple, golden, silver, white, black, brown, orange, pink, grey"
    ),
    "good": split_words("""
        wonderful, lovely, perfect, great, happy, peaceful, special, beautiful, pleasant, good, memorable, splendid
    """),
    "while": split_words("""
        a few minutes, half an hour, an hour, a long time, a moment, two hours, most of the morning, a while, some time
    """),
    "soon": split_words("""
        soon, before long, a little later, after a while, at last, in the end, by noon, by sunset, the next day,
        that evening, two days later, within an hour
    """),
    "spot": split_words("""
        under a bench, behind a wall, beside a big rock, under an old tree, behind a wooden door, near the fence,
        in a dark corner, on top of a barrel, next to a puddle, inside a hollow log, under a pile of leaves, by the gate,
        between two crates, in the tall grass, behind a curtain of ivy
    """),
}
