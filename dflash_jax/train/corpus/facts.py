"""Small knowledge tables: animals, places, jobs. Every fact is simple, true and used consistently."""

from __future__ import annotations

from dflash_jax.train.corpus.words import table

# name; plural; young; kind; size 1-7; active; home; food; diet class; body; ability; habit; fact
ANIMALS = table("""
fox; foxes; kit; mammal; 3; night; forests, fields and even cities; mice, berries and insects; both
a bushy tail and pointed ears; hear a mouse under deep snow; dig a den in the ground
a fox uses its tail as a blanket on cold nights

owl; owls; owlet; bird; 2; night; forests and old barns; mice and other small animals; meat
large eyes and soft feathers; fly almost without a sound; rest on a branch all day
an owl can turn its head almost all the way around

elephant; elephants; calf; mammal; 7; day; grasslands and forests; grass, leaves and bark; plants
a long trunk and large ears; lift a whole tree trunk; live in a family led by an old female
an elephant can remember a water hole for many years

penguin; penguins; chick; bird; 3; day; cold coasts and islands; fish and small sea animals; meat
a thick coat of feathers and short wings; swim fast under water; stand close together to stay warm
a penguin cannot fly at all

dolphin; dolphins; calf; mammal; 5; day; warm and cool seas; fish and squid; meat
smooth skin and a strong tail; jump high out of the water; swim in a group called a pod
a dolphin breathes air through a hole on its head

bee; bees; larva; insect; 1; day; gardens, meadows and hives; nectar and pollen; plants
four thin wings and a striped body; find the way back to the hive from far away
work together in a large colony; a bee dances to show the others where the flowers are

frog; frogs; tadpole; amphibian; 1; night; ponds and wet meadows; flies, worms and other small animals; meat
wet skin and long back legs; jump many times its own length; sleep in the mud during winter
a frog drinks water through its skin

horse; horses; foal; mammal; 6; day; farms and open grasslands; grass, hay and oats; plants
long legs and a thick mane; run for many miles; live in a herd
a horse can sleep standing up

wolf; wolves; pup; mammal; 4; night; forests, hills and cold plains; deer and smaller animals; meat
strong legs and a thick grey coat; smell an animal from over a mile away; hunt in a pack
a wolf howls to call its family

bear; bears; cub; mammal; 6; day; forests and mountains; berries, roots, fish and honey; both
thick fur and long claws; climb trees and catch fish; sleep through most of the winter
a bear can smell food from miles away

rabbit; rabbits; kit; mammal; 2; evening; meadows and gardens; grass, herbs and carrots; plants
long ears and a short tail; run in quick turns; live in tunnels called burrows
the front teeth of a rabbit never stop growing

squirrel; squirrels; kit; mammal; 2; day; woods and parks; nuts, seeds and buds; plants
a fluffy tail and sharp claws; climb straight up a tree; hide nuts for the winter
a squirrel forgets some nuts and new trees grow from them

turtle; turtles; hatchling; reptile; 3; day; rivers, ponds and seas; water plants, worms and small fish; both
a hard shell and short legs; hold its breath for a long time; warm itself on a sunny rock
the shell of a turtle is part of its body

eagle; eagles; eaglet; bird; 4; day; mountains and high cliffs; fish, rabbits and other animals; meat
a hooked beak and strong claws; see a rabbit from two miles away; build a very large nest
an eagle uses the same nest year after year

cat; cats; kitten; mammal; 2; evening; houses, barns and streets; meat and fish; meat
soft paws and long whiskers; see well in dim light; sleep for most of the day
a cat often lands on its feet after a fall

dog; dogs; puppy; mammal; 4; day; homes all over the world; meat and grain; both
a wet nose and a wagging tail; follow a smell for miles; guard the house and play with people
the nose of a dog has its own pattern, like a fingerprint

cow; cows; calf; mammal; 6; day; farms and green pastures; grass and hay; plants
a large body and four stomach rooms; give many litres of milk each day; chew the same food twice
a cow has best friends in the herd

camel; camels; calf; mammal; 6; day; hot and dry deserts; dry grass and thorny plants; plants
one or two humps and wide feet; walk for days without water; carry people and heavy bags
the hump of a camel stores fat and not water

bat; bats; pup; mammal; 1; night; caves, attics and hollow trees; insects and fruit; both
wings of thin skin and large ears; find insects in the dark by sound; sleep upside down
a bat is the only mammal that can really fly

spider; spiders; spiderling; arachnid; 1; night; corners, gardens and forests; flies and other insects; meat
eight legs and several eyes; spin a strong web; wait quietly for something to land in the web
the silk of a spider is stronger than steel of the same weight

ant; ants; larva; insect; 1; day; soil, woods and gardens; seeds, sugar and dead insects; both
six legs and a thin waist; carry things much heavier than itself; follow a trail of scent
an ant colony can have thousands of workers

whale; whales; calf; mammal; 7; day; deep oceans; tiny sea animals and fish; meat
a huge body and a wide tail; sing songs that travel for miles; swim from cold seas to warm seas every year
the blue whale is the largest animal that has ever lived

shark; sharks; pup; fish; 6; night; oceans all over the world; fish and seals; meat
rows of sharp teeth and rough skin; smell tiny amounts of blood in the water; swim almost all the time
a shark has no bones in its body

octopus; octopuses; hatchling; mollusc; 3; night; rocks and reefs in the sea; crabs and shellfish; meat
eight arms and a soft body; change its colour in a second; hide in small caves
an octopus has three hearts

parrot; parrots; chick; bird; 2; day; warm forests; seeds, nuts and fruit; plants
bright feathers and a curved beak; copy the sound of human words; fly in noisy groups
a parrot can live for more than fifty years

duck; ducks; duckling; bird; 2; day; ponds, lakes and rivers; water plants, seeds and snails; both
flat feet and a wide beak; swim and dive without getting wet feathers; lead its young in a line
a duck rubs oil on its feathers to keep them dry

sheep; sheep; lamb; mammal; 5; day; hills and farms; grass and clover; plants
thick wool and small hooves; remember the faces of other animals; stay close to the flock
the wool of a sheep keeps growing all its life

goat; goats; kid; mammal; 4; day; mountains and farms; leaves, grass and twigs; plants
two horns and a short beard; climb very steep rocks; test new things with its lips
the eyes of a goat have flat, wide pupils

deer; deer; fawn; mammal; 5; evening; woods and meadows; grass, leaves and buds; plants
thin legs and large ears; jump over a high fence; hide in the bushes when it hears a noise
a male deer grows new antlers every year

hedgehog; hedgehogs; hoglet; mammal; 2; night; gardens and hedges; beetles, worms and snails; meat
thousands of short spines; roll into a tight ball; sleep through the winter in a pile of leaves
a young hedgehog is born with soft spines

lion; lions; cub; mammal; 6; evening; open grasslands; zebras and other large animals; meat
a strong body and, in males, a thick mane; roar so loudly that it is heard five miles away; live in a group called a pride
the female lions do most of the hunting

tiger; tigers; cub; mammal; 6; night; forests and tall grass; deer and wild pigs; meat
orange fur with black stripes; swim across wide rivers; live alone for most of its life
no two tigers have the same stripes

giraffe; giraffes; calf; mammal; 7; day; open grasslands with trees; leaves from tall trees; plants
a very long neck and brown spots; reach leaves that no other animal can reach; sleep for only a short time each day
the tongue of a giraffe is dark blue

kangaroo; kangaroos; joey; mammal; 5; evening; dry plains and open woods; grass and leaves; plants
big back legs and a strong tail; jump over a fence in one leap; carry its young in a pouch
a newborn kangaroo is as small as a bean

crocodile; crocodiles; hatchling; reptile; 6; night; warm rivers and swamps; fish, birds and other animals; meat
a long jaw and hard skin; stay under water for an hour; lie still in the sun
a crocodile carries its young in its mouth without hurting them

snake; snakes; hatchling; reptile; 3; day; fields, forests and deserts; mice, frogs and eggs; meat
dry scales and no legs; swallow food larger than its head; lie on a warm stone
a snake smells with its tongue

butterfly; butterflies; caterpillar; insect; 1; day; gardens and meadows; nectar from flowers; plants
four wings with bright patterns; taste with its feet; rest with closed wings
a butterfly begins its life as a caterpillar

snail; snails; hatchling; mollusc; 1; night; wet gardens and woods; leaves and soft fruit; plants
a round shell and two pairs of feelers; climb up a smooth wall; hide in its shell on dry days
a snail leaves a line of slime behind it

mouse; mice; pup; mammal; 1; night; fields, barns and houses; seeds, grain and crumbs; both
round ears and a thin tail; squeeze through a very small hole; build a nest of grass and paper
a mouse can sing in tones too high for people

swan; swans; cygnet; bird; 4; day; lakes and slow rivers; water plants and small animals; both
a long neck and white feathers; fly far although it is heavy; stay with one partner for years
a young swan is grey and not white

seal; seals; pup; mammal; 5; day; cold seas and rocky beaches; fish and squid; meat
smooth fur and strong flippers; dive for half an hour; rest on the ice or on rocks
a seal can sleep under water

crab; crabs; larva; crustacean; 1; night; beaches and the sea floor; shellfish, worms and plants; both
a hard shell and two claws; walk sideways very fast; bury itself in the sand
a crab grows a new shell when the old one is too small

donkey; donkeys; foal; mammal; 5; day; farms and dry hills; hay, grass and straw; plants
long ears and a grey coat; carry heavy loads over rough paths; stop when it feels unsafe
a donkey can hear another donkey from far across the desert

monkey; monkeys; infant; mammal; 3; day; warm forests; fruit, leaves and insects; both
clever hands and a long tail; swing from branch to branch; clean the fur of its friends
a monkey warns its group with special calls
""")
SIZES = ("", "very small", "small", "middle-sized", "fairly large", "large", "very large", "enormous")

# name; preposition; sights x3; sounds; activities x2; bring; best time; worker; indoor/outdoor; liked by
PLACES = table("""
forest; in; tall trees, soft moss and narrow paths; mushrooms and ferns; a small stream
birds singing in the branches; walk along the shady paths; look for animal tracks; good shoes and a bottle of water
autumn; forest ranger; outdoor; nature

beach; on; white sand, blue water and small boats; shells and smooth stones; a row of wooden huts
waves rolling onto the sand; swim in the sea; build castles of sand; a towel and a sun hat
summer; lifeguard; outdoor; swimming

library; in; long shelves, quiet desks and soft chairs; books about every subject; a large reading lamp
pages turning; read for hours; borrow a pile of books; a library card and a bag
winter; librarian; indoor; books

market; at; colourful stalls, busy people and baskets of fruit; fresh bread and cheese; a cart full of flowers
sellers calling out their prices; taste ripe fruit; talk with the farmers; a basket and some coins
summer; market seller; outdoor; food

museum; in; old paintings, quiet halls and glass cases; tools from long ago; the bones of a huge animal
soft steps on the stone floor; learn about the past; draw the statues; a notebook and a pencil
winter; museum guide; indoor; history

harbour; at; fishing boats, high masts and wet ropes; crates full of fish; an old lighthouse
gulls crying above the water; watch the ships come in; eat fried fish; a warm coat and a camera
spring; sailor; outdoor; boats

mountain; on; grey rocks, steep paths and far valleys; tiny flowers between the stones; a wooden hut
wind blowing over the ridge; climb to the top; enjoy the wide view; strong boots and warm clothes
summer; mountain guide; outdoor; climbing

farm; on; green fields, red barns and muddy tracks; hens and geese; a big old tractor
cows calling from the barn; feed the animals; pick fresh berries; old boots and a hat
spring; farmer; outdoor; animals

bakery; in; warm ovens, floury tables and golden loaves; rows of sweet buns; a large bag of flour
the bell over the door; smell the fresh bread; choose a cake; a bag and a little money
winter; baker; indoor; food

train station; at; long platforms, big clocks and hurrying people; heavy suitcases; a small coffee stand
trains rolling in; watch the trains; wait for a friend; a ticket and something to read
autumn; train driver; indoor; travel

park; in; green lawns, old benches and flower beds; ducks on the pond; a playground with swings
children laughing; have a picnic; play ball with friends; a blanket and some snacks
spring; gardener; outdoor; sports

castle; in; thick walls, high towers and dark stairs; old shields and swords; a deep well
doors creaking in the wind; explore the towers; imagine the life of a king; a map and a torch
summer; tour guide; indoor; history

lake; by; calm water, green reeds and a wooden pier; small fish near the shore; a blue rowing boat
frogs calling in the reeds; row across the water; fish from the pier; a rod and a sun hat
summer; fisher; outdoor; boats

zoo; at; wide enclosures, curious animals and shady paths; monkeys on ropes; a pool with seals
parrots screaming; watch the lions; learn about rare animals; a camera and some water
spring; zookeeper; outdoor; animals

school; at; bright classrooms, long corridors and a noisy yard; maps and charts; a green blackboard
the bell ringing; learn to read; make new friends; a pencil case and a lunch box
autumn; teacher; indoor; books

garden; in; neat rows of vegetables, roses and fruit trees; beans on high poles; a small tool shed
bees humming in the flowers; water the plants; sit in the shade; gloves and a watering can
summer; gardener; outdoor; nature

theatre; in; red curtains, gold lights and rows of seats; masks and costumes; a wide wooden stage
people clapping; watch a play; listen to the actors; a ticket and good clothes
winter; actor; indoor; music

hospital; in; clean rooms, white beds and wide doors; trays with medicine; a quiet waiting room
wheels rolling along the floor; visit a sick friend; thank the nurses; some flowers and a card
winter; nurse; indoor; helping people

desert; in; high dunes, hot stones and a wide sky; small plants with thorns; an old well
wind moving the sand; ride a camel; look at the stars; plenty of water and a scarf
winter; desert guide; outdoor; travel

cave; in; dark tunnels, wet walls and strange stones; sleeping bats; a silent pool
drops of water falling; explore with a lamp; listen to the echo; a helmet and a strong lamp
summer; cave guide; indoor; climbing

island; on; rocky shores, palm trees and empty beaches; crabs between the rocks; a wooden shelter
waves hitting the rocks; walk around the coast; collect shells; a boat and fresh water
summer; fisher; outdoor; boats

river; by; clear water, old bridges and green banks; fish under the stones; a slow water wheel
water running over stones; paddle a canoe; skip flat stones; dry clothes and a towel
summer; boat builder; outdoor; swimming

village square; in; stone houses, a fountain and wide steps; old people on benches; a tall clock tower
church bells; meet the neighbours; dance at the summer party; good shoes and a smile
summer; mayor; outdoor; music

toy shop; in; full shelves, bright boxes and wooden animals; trains on a small track; a giant teddy bear
music boxes playing; try new games; look for a present; some money and a list
winter; toy maker; indoor; games

swimming pool; at; blue water, wet tiles and a high slide; floating toys; a long row of showers
people splashing; learn to dive; race with friends; a towel and a swimming cap
summer; swimming teacher; indoor; swimming

fire station; at; red engines, long hoses and shiny poles; helmets on hooks; a large garage
the alarm ringing; see the ladder truck; ask about safety; curious questions and a camera
spring; firefighter; indoor; helping people

airport; at; huge halls, bright signs and long queues; suitcases on a moving belt; a glass tower
engines roaring; watch the planes take off; begin a long journey; a passport and a ticket
summer; pilot; indoor; travel

kitchen; in; copper pots, wooden spoons and a warm stove; jars full of spices; a big round table
soup bubbling in the pot; cook a family meal; learn a new recipe; an apron and clean hands
winter; cook; indoor; food

workshop; in; strong benches, sharp tools and piles of wood; boxes with nails; a noisy saw
a hammer knocking; build a chair; repair a broken toy; safety glasses and gloves
autumn; carpenter; indoor; making things

meadow; in; tall grass, wild flowers and low hills; butterflies and grasshoppers; a single oak tree
crickets singing; lie in the grass; fly a kite; a blanket and a kite
spring; beekeeper; outdoor; nature

music school; at; small practice rooms, shiny pianos and note stands; drums in a corner; a little concert hall
someone playing scales; take a lesson; sing in a choir; a notebook and clean hands
autumn; music teacher; indoor; music

sports field; on; green grass, white lines and wooden seats; balls and nets; a board for the score
players shouting; run a race; cheer for a team; sports shoes and water
summer; coach; outdoor; sports

post office; in; long counters, full shelves and yellow boxes; letters from far away; a set of old scales
stamps hitting paper; send a parcel; buy stamps; a pen and the right address
winter; mail carrier; indoor; travel

observatory; at; a round dome, star maps and a large telescope; models of planets; a narrow balcony
the dome turning slowly; look at the moon; learn the names of stars; a warm coat and patience
winter; astronomer; indoor; stars

game cafe; in; small tables, friendly people and shelves of games; dice and cards; a board with high scores
dice rolling; play chess; learn a new game; a friend and some time
winter; cafe owner; indoor; games

vineyard; in; long rows of vines, dry soil and stone walls; sweet grapes; a cool cellar
leaves moving in the wind; help with the harvest; taste grape juice; a hat and a small knife
autumn; wine grower; outdoor; food
""")

# name; plural; works where; does x3; tools; needs; helps; hard part; pleasant part
JOBS = table("""
baker; bakers; in a bakery; mix flour and water; shape the dough; bake bread and cakes
an oven, bowls and a rolling pin; strong arms and good timing; people who want fresh bread
getting up in the middle of the night; the smell of warm bread

teacher; teachers; at a school; explain new ideas; ask good questions; read homework
books, a board and coloured pens; patience and a clear voice; children who want to learn
keeping a large class quiet; the moment when a child understands something

doctor; doctors; in a hospital; listen to patients; look for the cause of an illness; choose the right medicine
a stethoscope, tests and notes; years of study and a calm mind; people who are ill
giving bad news; seeing a patient get well

farmer; farmers; on a farm; plough the fields; feed the animals; bring in the harvest
a tractor, tools and seeds; strength and knowledge of the weather; everyone who eats
working in all kinds of weather; watching the plants grow

firefighter; firefighters; at a fire station; drive the fire engine; put out fires; rescue people
hoses, ladders and helmets; courage and a strong body; people in danger
walking into thick smoke; saving a life

carpenter; carpenters; in a workshop; measure the boards; saw the wood; build tables and doors
a saw, a hammer and a ruler; steady hands and a good eye; families who need furniture
fixing a mistake after the cut; touching a smooth table top

gardener; gardeners; in parks and gardens; plant flowers; cut the hedges; water the beds
a spade, gloves and a hose; patience and knowledge of plants; people who enjoy green places
kneeling on wet ground; the colours of spring

nurse; nurses; in a hospital; check the patients; give medicine; change bandages
a watch, charts and clean gloves; kindness and attention; people who are weak or in pain
working through the night; a thankful smile

pilot; pilots; in the air; check the plane; read the weather report; land safely
instruments, maps and a radio; good eyes and a clear head; travellers who go far
flying through a storm; the view above the clouds

cook; cooks; in a kitchen; cut vegetables; stir the sauces; arrange the plates
knives, pans and a stove; a good sense of taste; hungry guests
standing in the heat for hours; an empty plate that comes back

librarian; librarians; in a library; sort the books; help readers find a title; plan reading hours
a computer, shelves and labels; order and a good memory; people who love to read
finding a book that stands in the wrong place; talking about good stories

police officer; police officers; in towns and cities; walk through the streets; solve crimes; direct the traffic
a radio, a notebook and a car; fairness and courage; everyone in the town
staying calm in a fight; bringing a lost child home

sailor; sailors; on a ship; steer the ship; tie the ropes; watch the weather
ropes, sails and a compass; balance and teamwork; towns across the sea
being away from home for months; a quiet sea at sunrise

tailor; tailors; in a small shop; measure the cloth; cut the pieces; sew them together
needles, thread and scissors; careful fingers; people who need clothes that fit
sewing very thin cloth; seeing someone wear the new coat

painter; painters; in a studio; mix the colours; draw the first lines; paint the picture
brushes, paint and canvas; imagination and practice; people who enjoy beautiful things
beginning with an empty canvas; the last stroke of the brush

musician; musicians; on stages and in studios; practise every day; learn new songs; play for an audience
an instrument, notes and a tuner; a good ear and patience; people who love to listen
playing the same part a hundred times; the applause after a concert

mail carrier; mail carriers; on the streets; sort the letters; carry the heavy bag; bring parcels to the door
a bag, a bicycle and a list; strong legs and a good memory; people who wait for news
walking through rain and snow; a happy face at the door

fisher; fishers; on the sea; mend the nets; sail out early; sort the fish
a boat, nets and hooks; patience and knowledge of the sea; markets and restaurants
pulling nets with cold hands; a full net in the morning light

dentist; dentists; in a dental office; look at teeth; fill small holes; teach people to brush well
a mirror, a drill and a bright lamp; steady hands and a gentle voice; people with toothache
calming a nervous patient; a healthy smile

programmer; programmers; at a desk; write code; search for errors; test new features
a computer, a keyboard and notes; logic and patience; people who use computers
finding a hidden mistake; a program that finally works

scientist; scientists; in a laboratory; ask a question; plan an experiment; write down the results
microscopes, glass tubes and data; curiosity and exact work; everyone who needs new knowledge
repeating a failed test; a surprising discovery

vet; vets; in an animal clinic; examine animals; give injections; advise the owners
bandages, medicine and a scale; a love of animals and quick thinking; pets and farm animals
not being able to ask the patient; a dog that can run again

bus driver; bus drivers; on the road; follow the timetable; open the doors; drive through the traffic
a bus, mirrors and a ticket machine; attention and calm nerves; people who travel to work
driving through heavy traffic; a friendly good morning

builder; builders; on a building site; mix the cement; lay the bricks; put up the walls
a trowel, a crane and a helmet; strength and balance; people who need a home
working high above the ground; a finished house

astronaut; astronauts; in space; train for years; do experiments; repair the station
a space suit, a rocket and a radio; fitness and a cool head; scientists on Earth
living far from family; seeing the whole Earth at once

journalist; journalists; in a news office; ask questions; check the facts; write reports
a notebook, a recorder and a phone; curiosity and honesty; people who want to know the truth
finishing before the deadline; a story that helps someone

mechanic; mechanics; in a garage; listen to the engine; change worn parts; test the brakes
wrenches, oil and a lift; technical skill; drivers with broken cars
finding a strange noise; an engine that runs smoothly

beekeeper; beekeepers; near fields and woods; check the hives; protect the bees; collect the honey
a veil, a smoker and gloves; calm movements; gardens and fruit farms
getting stung; the first jar of honey

photographer; photographers; in a studio and outdoors; set up the lights; wait for the right moment; choose the best picture
a camera, lenses and lamps; a good eye; families and newspapers
waiting for the right light; a picture that tells a story

clown; clowns; in a circus; paint a funny face; practise jokes; make balloons into animals
a red nose, big shoes and balloons; humour and timing; people who need a laugh
making a sad child smile; a tent full of laughter

judge; judges; in a court; listen to both sides; study the law; make a fair decision
law books, files and a hammer; wisdom and patience; people who have a quarrel
deciding a difficult case; doing what is right

plumber; plumbers; in houses; find the leak; change old pipes; connect the taps
pipes, pliers and tape; practical skill; families with water problems
lying under a cold sink; hearing that the dripping has stopped

shoemaker; shoemakers; in a small workshop; cut the leather; sew the seams; glue the soles
leather, glue and a knife; exact hands; people with worn shoes
repairing a very old boot; a pair of shoes that lasts for years

lifeguard; lifeguards; at the beach; watch the swimmers; check the flags; pull people out of the water
a whistle, a board and a tower; sharp eyes and fast swimming; swimmers in trouble
staying alert all day; a safe summer

weather forecaster; weather forecasters; at a weather station; read the data; draw weather maps; warn people of storms
satellites, computers and charts; knowledge of the air; farmers and travellers
predicting a sudden storm; being right about a sunny weekend

jeweller; jewellers; in a small shop; melt gold and silver; set bright stones; polish the rings
tiny pliers, a lamp and a lens; fine fingers and good eyes; people who want a special gift
working with very small parts; a ring that shines
""")
