"""Story plots: for each, the phrase that asks for it, and its stages with alternative sentences."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_jax.train.corpus.grammar import Template, block
from dflash_jax.train.corpus.words import table


@dataclass(frozen=True)
class Plot:
    """``ask`` completes "a story about a girl ..."; ``stages`` are told in order; ``recap`` sums up the story."""

    name: str
    ask: list[Template]
    stages: list[list[Template]]
    lesson: list[Template]
    recap: list[Template]


def _plot(name: str, ask: str, story: str, lesson: str, recap: str) -> Plot:
    return Plot(name, block(ask), [block(stage) for stage in story.split("--")], block(lesson), block(recap))


# thing to build; material; what it is for; what goes wrong first
BUILDS = table("""
raft; logs and rope; cross the river; the knots came loose

tree house; old boards and nails; watch the stars; one board was too short

birdhouse; thin wood and glue; give the birds a home; the roof let in the rain

snow fort; blocks of snow; hide during snowball fights; one wall fell over

bridge; planks and stones; reach the other bank; the planks were too thin

kite; paper and light sticks; fly above the roofs; the paper tore

wooden bench; boards and screws; sit together in the evening; one leg was too short

little boat; pine wood and tar; sail around the island; water came in through a crack

scarecrow; straw and old clothes; keep the crows away; the straw fell out

swing; a board and two ropes; fly up to the leaves; one rope was too thin

sand castle; wet sand and shells; surprise the other children; a wave washed it away

drum; an old tin and leather; play at the party; the leather was too loose
""")

# skill; what practice looks like; what the teacher says; proof
SKILLS = table("""
swim; kicked and splashed in the shallow water; breathe out under water; swam all the way to the pier

ride a bicycle; fell into the grass again and again; look ahead and not down; rode around the whole square

whistle; blew until the air ran out; make your lips small and round; whistled a whole song

bake bread; burned the first two loaves; let the dough rest; pulled a golden loaf out of the oven

play the violin; made sounds like an angry cat; hold the bow lightly; played a slow waltz without a mistake

juggle; dropped the balls on every foot in the room; throw the next ball when the first one is at the top
juggled three balls for a whole minute

skate; sat down on the ice twenty times; bend your knees; made a perfect circle on the ice

draw horses; rubbed a hole into the paper; begin with simple circles; drew a horse that seemed to run

play chess; lost every game; think about the next two moves; won a long game

dance; stepped on many toes; listen to the drum first; danced until the music stopped

climb; slid back down the wall; use your legs more than your arms; reached the top without a rest

sing; forgot the words each time; stand straight and breathe deeply; sang in front of everybody

knit; made more knots than rows; count every stitch; finished a long warm scarf

speak in front of people; forgot every word; look at one friendly face; gave a short and funny speech

row a boat; turned in small circles; pull both oars at the same time; rowed straight across the lake

read maps; walked in the wrong direction; find north first; led the whole group home
""")

# fear; when it came; advice; brave act
FEARS = table("""
the dark; when the lamps went out; count slowly and listen; walked through the dark hall to close the window

thunder; when black clouds came up; count the seconds after the flash; sang loudly until the storm was over

deep water; when the boat left the shore; hold on to something that floats; jumped from the pier

high places; when the path went up; look at the next step only; climbed the ladder to save a kitten

big dogs; when a dog came around the corner; stand still and speak softly; let a big dog sniff one open hand

strangers; when guests came to the house; begin with a simple hello; welcomed a lost traveller

spiders; when something moved on the wall; look closely before you run; carried a spider outside in a glass

speaking in class; when the teacher asked a question; take one deep breath; read a whole poem aloud

the attic; when the floor creaked at night; take a lamp and a friend; found out that the noise was only the wind

getting lost; when the streets looked the same; remember one tall building; found the way home alone
""")

# contest; preparation; trouble; result
CONTESTS = table("""
running race; ran around the field every morning; one shoe came off; crossed the line in second place

cooking contest; tried a new soup every day; the salt fell into the pot; won the prize for the best idea

boat race; painted the boat and oiled the oars; the wind turned around; came in first by the length of one oar

drawing contest; filled three notebooks with sketches; a cup of water fell over the picture
turned the stain into a cloud and won a prize

singing contest; practised the same song every night; the piano stopped in the middle; sang on without the piano

chess tournament; studied old games; the best player sat down at the table; lost the last game but won a friend

kite contest; tied a longer tail to the kite; the string got caught in a tree; flew higher than anyone else

spelling contest; learned ten hard words a day; the first word was completely new; spelled the last word correctly

swimming race; swam twenty lengths a day; the water was icy cold; finished right behind the winner

dance contest; danced in the kitchen every evening; the floor was wet; made up a new step and earned loud applause
""")

# plant; care; trouble; result
PLANTS = table("""
sunflower; watered it every morning; a strong wind bent the stem; grew taller than the door

pumpkin; put straw around it; snails ate the leaves; was so big that two people had to carry it

tomato plant; tied it to a stick; the leaves turned yellow; carried a bowl full of sweet tomatoes

apple tree; dug a deep hole for the roots; a goat ate the first leaves; was full of white blossoms

rose bush; cut the dry twigs; the frost came late; had one perfect red flower

bean plant; built a high frame; the birds picked at the seeds; climbed up to the window

lemon tree; kept it in a warm room; the soil dried out; smelled sweet in the whole house

strawberry bed; pulled out the weeds; ants moved in; was covered with red berries
""")

PLOTS = (
    _plot(
        "lost",
        """
who loses @ [thing] [at_place]
who cannot find [their] [thing] [at_place]
and a lost [obj] [at_place]
""",
        """
[name] {owned|had|loved} @ [thing] and used it to [use].
[their] {favourite|best|dearest} thing was @ [thing]. [They] used it to [use].
[name] took @ [thing] everywhere, because [they] used it to [use].
{For years|Since last <season>|For a long time}, [name] had used @ [thing] to [use].
--
One [weather] [daytime], [name] went to [place] and {came home|returned|walked back} without it.
On a [weather] [daytime], [they] {put it down|left it for a moment} [at_place] and {forgot it|could not find it again}.
But one [weather] [daytime], the [obj] {was gone|had disappeared} after a {long|short} visit to [place].
One [weather] [daytime] [at_place], [name] reached for the [obj], but {it was not there|it was gone}.
--
[name] {looked|searched} {<adverb>|everywhere|for <while>} near [sight1], but {found nothing|there was no [obj]}.
[They] {looked|searched} near [sight2] and behind [sight1], but {the [obj] stayed lost|it was not there}.
"{Where is it|Where can it be|Who has seen my [obj]}?" [they] {asked|whispered|cried}, and [they] felt <sad>.
[name] felt <sad>, because {nothing is as useful as @ [obj]|it had been a present|there was no other [obj] like it}.
--
Then [they] met [frole] [friend], who {asked what was wrong|had {time|good eyes} and a kind heart|saw [their] sad face}.
Just then, [friend], [frole], {came by|walked past|came along the path} and {stopped|listened|sat down}.
[They] {told|asked} [frole] [friend], who {was|happened to be} [at_place] that day.
--
"{Think back|Close your eyes and think|Let us go back step by step}," said [friend]. "Where did you use it last?"
"Let us {look|search} together," {said|offered} [friend]. "{Four eyes see more than two|Two pairs of eyes are better than
    one}."
[friend] {said|suggested}, "{Do not run around|Stay calm|Do not give up}. Start where you had it last."
--
They {walked back|went back|looked once more}, past [sight2], and {heard|listened to} [sound].
So they {checked|looked at} every corner again, from [sight1] to [sight3].
Together, they {followed [their] own footprints|asked everybody they met|searched for <while>}.
--
<soon>, [name] saw something <colour> <spot>. It was the [thing]!
<soon>, [friend] pointed to a place <spot>. There lay the [thing], {wet but safe|without a scratch|covered with dust}.
And there it was: the [thing] lay <spot>, {just as [they] had left it|where @ <small_animal> was looking at it}.
--
[name] {hugged|thanked} [friend] and felt <happy>. {Later|That evening}, they shared [food].
"{Thank you|You are a true friend}!" [they] {said|cried}. [They] invited [friend] to {eat|have} [food] at home.
[They] {laughed|smiled} and <adverb> {wiped|cleaned} the [obj]. Then [they] gave [friend] some [food].
""",
        """
From then on, [name] {always put the [obj] back in its place|looked after the [obj] very well}.
[name] learned that {it helps to stay calm|searching is easier with a friend|a calm head finds more than quick feet}.
""",
        """
[name] lost @ [thing] [at_place]. [friend], [frole], helped [them] look for it, and together they found it.
While [name] was [at_place], [their] [thing] got lost. With the help of [friend], [name] found it again.
""",
    ),
    _plot(
        "found",
        """
who finds @ [thing] [at_place]
who discovers @ [thing] [at_place]
and the owner of @ [thing]
""",
        """
One [weather] [daytime], [name] {walked|went|came} to [place], {listened to|heard} [sound], and saw something <spot>.
On a [weather] [daytime] [at_place], something <colour> {shone|lay|stuck out} <spot>. [name] {stopped|bent down} to look.
One [daytime], while [name] was [at_place], [they] {noticed|saw|found} something <spot>.
--
It was @ [thing]. {Anyone could use it to [use]|With it, one could [use]}.
[They] {picked it up|pulled it out} <adverb>. It was @ [thing], {almost new|still in good order|a little dirty}.
To [their] surprise, it was @ [thing]. "{How lucky|What a find}!" [they] {said|thought}.
--
[name] {wanted to keep it|liked it at once}, but {someone must be missing it|it belonged to someone else}, [they] thought.
"I could use it to [use]," [name] thought. But {then|after <while>} [they] {felt|became} <sad>, because it was not [theirs].
[They] turned it around and saw {a name|two letters|a small note} on the {back|side|bottom}. Somebody was missing it.
--
So [name] asked {the [worker]|everyone} [at_place], but {nobody|no one} knew the owner.
First, [they] {asked|went to} the [worker], who {looked at it <adverb>|shook [wtheir] head}. "{It is not mine|Sorry, I do not
    know}," was the answer.
[name] {put up a sign|wrote a note} near [sight1] and waited for <while>.
--
<soon>, [they] saw [friend], [frole], who looked <sad> and searched the ground.
<soon>, {a voice called|somebody called}. It was [friend], [frole]. "{Have you seen my [obj]?|I have lost my [obj]!|Where is my [obj]?}" [hthey] {said|cried}.
Then [frole] [friend] came {along|past [sight2]} and {asked|wanted to know} {if anyone had seen|about} @ [thing].
--
"{Is this yours|Does this belong to you}?" asked [name] and {held out|showed} the [obj]. [friend] {nodded|smiled|jumped} with joy.
[name] {held up|gave back} the [obj] <adverb>. "{My [obj]|You found it}!" cried [friend]. "{I need it|I use it} to [use]."
<adverb>, [name] put the [obj] into [friend]'s hands. [Hthey] {could hardly believe it|was <happy>}.
--
To say thank you, [friend] {gave|brought} [them] [food] and {told a funny story|a big smile}.
"{How can I thank you|You are very honest}," said [friend], and {they shared|offered} [food] and <drink>.
They sat down near [sight2] and {ate|shared} [food]. [name] felt <happy>.
""",
        """
[name] {learned|understood} that {giving something back feels better than keeping it|an honest heart makes new friends}.
Since that day, [name] and [friend] {have been good friends|often meet [at_place]}.
""",
        """
[name] found @ [thing] [at_place]. [They] did not keep it but gave it back to [friend], [frole].
When [name] was [at_place], [they] found @ [thing]. It belonged to [friend], and [name] returned it.
""",
    ),
    _plot(
        "build",
        """
who builds @ [build]
who wants to build @ [build]
and @ [build] made of [material]
""",
        """
[name] {dreamed of|wanted to build|had always wanted} @ [build], {big enough|good enough} to [purpose].
One [weather] [daytime], [name] had {an idea|a plan}: [they] would build @ [build] to [purpose].
"I will build @ [build]," [name] said one [weather] [daytime]. "Then I can [purpose]."
--
For that, [they] needed [material]. [They] {collected|found|gathered} them near [place].
[They] {made|drew} a {small|careful|simple} plan and {looked for|collected} [material] [at_place].
[name] went to [place], where [they] found [material] {behind|next to} [sight1].
--
[They] worked <adverb> for <while>, but [fail].
The first try {went wrong|was not good}: [fail]. [name] felt <sad>.
After <while>, {it looked good|it was almost ready}. Then [fail], and [name] {sighed|sat down in the dust}.
--
[friend], [frole], {heard the noise|saw it} and came {over|closer}. "{May I help|Do you need a hand}?" [hthey] asked.
Then [frole] [friend] {stopped by|came to look}. "{Do not worry|It happens to everyone}," [hthey] said.
[name] {went to|asked} [friend], [frole], who {knew a lot about such things|had built many things before}.
--
[friend] {showed|taught} [them] how to {measure twice and cut once|work more slowly|make it stronger}.
"{Take your time|Begin with the lowest part}," said [friend], and {brought @ <look> [obj] as well|[hthey] rolled up [htheir]
    sleeves}.
They {used|took} @ [thing] {from [friend]'s house|that [friend] had brought} and {started|began} again.
--
Together, they worked until {the sun went down|it got dark|they were hungry}, while {they heard|they listened to} [sound].
All {day|afternoon}, they {laughed|sang|talked} and worked <adverb>. They ate [food] during the break.
This time, they {checked every part|worked step by step}, and {nothing went wrong|it held}.
--
<soon>, the [build] was {ready|finished}, and it was strong enough to [purpose].
<soon>, [name] {stood in front of|looked at} the finished [build]. "{We did it|It works}!" [they] cried.
<soon>, everyone came to see the [build]. It looked <good>, and [name] was <happy>.
""",
        """
[name] learned that {the first try is only the beginning|good work needs time and friends}.
Now [name] {and [friend]|and all the neighbours} use it to [purpose] {every week|whenever they like}.
""",
        """
[name] wanted to build @ [build] from [material]. At first, [fail], but [friend] helped, and it was finished.
With [material], [name] built @ [build]. The first try failed, yet [friend], [frole], showed [them] how to do it.
""",
    ),
    _plot(
        "learn",
        """
who learns to [skill]
who wants to learn to [skill]
who {cannot|does not know how to} [skill]
""",
        """
[name] wanted to [skill], but {it was not easy|nobody had ever shown [them] how}.
Every {day|evening}, [name] saw others [at_place] and {dreamed|wished}: "I want to [skill], too."
There was {just one thing|something} that [name] could not do: [they] could not [skill].
--
One [weather] [daytime], [they] {tried it|started} alone [at_place] and [practice].
On the first [weather] [daytime], [name] [practice]. [They] felt <sad>.
So [they] went to [place], far from [sight1], and [practice].
--
@ <small_animal> {watched|looked at} [them], and {somebody|someone} {laughed|giggled}. [name] {turned red|wanted to go home}.
"I will never {learn it|be able to do it}," [they] {said|thought} and {sat down|looked at the ground}.
"{This is too hard!|Why is it so difficult?}" [name] {sighed|asked} and {kicked a stone|rubbed [their] eyes}.
--
[friend], [frole], had seen everything. "{I needed a whole <season>, too|Everyone starts small}," [hthey] said <adverb>.
Then [frole] [friend] {came|walked} up to [them] and {said|told [them]}, "{I can show you|Let me help you}."
<soon>, [friend], [frole], sat down beside [them] and {offered|shared} [food].
--
"The trick is simple," [friend] {said|explained}. "You have to [tip]."
"{Remember one thing|Listen}: [tip]," said [friend]. [name] {nodded|tried it} <adverb>.
[friend] showed it <adverb> and said, "[tip]. {That is all|The rest is practice}."
--
From that {day|moment} on, [name] practised every <daytime>, {even on <weather> days|while others slept}.
Day after day, [name] went back to [place] and {tried again|practised for <while>}, {with|and listened to} [sound].
For <number> weeks, [they] practised <adverb>. {Each time|Every week}, it went a little better.
--
<soon>, [name] [proof]. {Everyone|[friend]} {clapped|cheered}.
And then, on @ <weather> <daytime>, [name] [proof]. "{I can do it|Look at me}!" [they] {cried|shouted}.
<soon>, it happened: [name] [proof]. [They] was so <happy> that [they] {danced|laughed aloud}.
""",
        """
[name] {learned|understood} that {practice matters more than luck|nobody is born a master|small steps lead far}.
Today, [name] {teaches others|shows younger ones how} to [skill].
""",
        """
[name] could not [skill] at first. [friend] told [them] to [tip], and after much practice [they] [proof].
[name] wanted to [skill]. With practice and the advice of [friend], [they] [proof].
""",
    ),
    _plot(
        "fear",
        """
who is afraid of [fear]
who overcomes [their] fear of [fear]
and [their] fear of [fear]
""",
        """
[name] was afraid of only one thing: [fear].
{Nobody knew|Only a few people knew} that [name] was {terribly|very} afraid of [fear].
[name] {laughed about|was not afraid of} many things, but {not|never} about [fear]. [They] was afraid of that.
--
[when], [they] {felt|became} <sad> and {hid|stayed} {behind [their] <look> <object>|in a corner}.
[their] heart {beat fast|beat like a drum} [when].
Each time, [when], [name] {closed [their] eyes|wanted to run away}.
--
One [weather] [daytime], [name] told [friend], [frole], about it [at_place].
[friend], [frole], {noticed it|saw it} one [weather] [daytime] [at_place]. "{What is wrong|Are you all right}?" [hthey] asked.
One [weather] [daytime], [name] and [frole] [friend] sat [at_place] and {ate|shared} [food]. [name] told [hthem] the secret.
--
"{I was afraid, too|Everybody is afraid of something}," said [friend]. "{It helped me|It helps} to [advice]."
[friend] did not laugh. "You can [advice]," [hthey] said. "{It works|Try it}."
"{Being afraid is no shame|Brave people are afraid, too}," [friend] {answered|said}. "Just [advice]."
--
[friend] {also|even} {gave|lent} [them] @ [thing]. "{It has helped me|Use it to [use]}," [hthey] said.
[They] {practised|tried it} <adverb>, {first with [friend] and then alone|again and again}.
For <number> days, [name] {thought about|repeated} these words <adverb>.
--
<soon>, the moment came. [name] took a deep breath and remembered: [advice].
<soon>, [their] {courage|strength} was tested. {All was quiet|There was nothing to hear} except [sound].
Then, on @ <weather> <daytime>, {nobody else was there|someone needed help}. [name] {trembled|waited}, but {only for a moment|did
    not run}.
--
And [they] [brave]. {Nothing bad happened|It was easier than [they] had thought}.
[name] [brave], <adverb> and without {stopping|help}.
With {cold hands|a beating heart}, [name] [brave].
--
"{You did it|I am proud of you}!" {said|cried} [friend], and [name] felt <happy>.
Everyone {talked about|heard of} it {near [sight1]|at dinner}, and there was [food] for all.
Afterwards, [name] {laughed|smiled} and felt <happy>. [They] thanked [friend].
""",
        """
[name] {learned|knew now} that {courage means going on although one is afraid|fear gets smaller when one looks at it}.
After that, [when], [name] only {smiled|took a deep breath}.
""",
        """
[name] was afraid of [fear]. [friend] told [them] to [advice], and in the end [they] [brave].
Because of the advice of [friend], [name], who was afraid of [fear], [brave].
""",
    ),
)
