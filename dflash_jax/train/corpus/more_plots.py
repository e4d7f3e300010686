"""Further story plots; see ``plots`` for the form."""

from __future__ import annotations

from dflash_jax.train.corpus.plots import _plot

MORE_PLOTS = (
    _plot(
        "gift",
        """
who looks for a present for [frole] [friend]
who makes a present for [frole] [friend]
and a birthday present
""",
        """
{Soon it would be|In <number> days it was} the birthday of [friend], [frole], and [name] {had no present|needed a present}.
[friend], [frole], {had a birthday|turned a year older} that <season>. [name] wanted to {give|find} [hthem] something <good>.
--
[name] knew that [friend] {needed|wished for} @ [obj] to [use].
"{What does [hthey] need|What could it be}?" thought [name]. "[friend] could use @ [obj] to [use]."
--
So, on a [weather] [daytime], [they] went to [place] and looked at [sight1].
One [weather] [daytime], [name] {walked|ran} to [place] with <number> coins in [their] pocket.
--
There was @ [thing], but it {cost too much|was far too expensive}. [name] felt <sad>.
[They] asked the [worker] for @ [obj], but the [worker] {shook [wtheir] head|had none left}. [name] {sighed|was <sad>}.
--
[name] sat down near [sight2], listened to [sound], and {thought hard|thought for <while>}.
Then [name] had an idea. "I will make {one|it} {myself|with my own hands}!" [they] {said|decided}.
--
At home, [they] {looked for|collected} {paper, wood and string|old cloth and some paint}, and {worked <adverb>|began to work}.
[They] cut, glued and painted <adverb> for <while>. {Once|Twice}, it {broke|fell apart}, but [name] {started again|did not give up}.
--
<soon>, @ [thing] stood on the table. It was not perfect, but it was made with love.
<soon>, it was finished: @ [thing], {a bit crooked|wrapped in <colour> paper} and full of love.
--
On the birthday, [friend] {opened|unwrapped} it <adverb> and {hugged|looked at} [name]. "{It is the best present of all|You made
    this for me}!"
When [friend] saw it, [hthey] {laughed|smiled} with joy. "Now I can [use]," [hthey] {said|cried}.
--
They {ate|shared} [food] and {sang|danced} until late, and [name] felt <happy>.
There was [food] and <drink> for everyone, and [friend] {showed|used} the [obj] all {day|evening}.
""",
        """
[name] learned that {a present does not have to cost much|the heart counts more than the price}.
Since then, [name] has made every present with [their] own hands.
""",
        """
[name] needed a present for [friend], [frole]. @ [thing] was too expensive, so [name] made one.
For the birthday of [friend], [name] made @ [thing], and [friend] loved it.
""",
    ),
    _plot(
        "repair",
        """
who repairs @ [broken] [obj]
who fixes an old [obj]
with a broken [obj]
""",
        """
[name] had @ [thing] and used it to [use], {but one <season> it broke|until it broke}.
"{Oh no|What a pity}!" cried [name] one [weather] [daytime]. The [thing] had {fallen down|broken into two pieces}.
--
{A new one cost too much|There was no other one in the house}, and [name] {thought about it all day|did not know what to do}. [They] felt <sad>.
Without it, nobody could [use]. {Everyone|The whole family} {was <sad>|missed it}.
--
"Throw it away," {said a neighbour|everyone said}, but [name] {did not want to|kept the pieces in a box}.
Some people {said|thought} that it was {only rubbish now|too old}, but [name] {shook [their] head|had another plan}.
--
So [they] {took|carried} it to [place], because [friend], [frole], {worked|was often} there.
[They] {packed|put} it into a bag and walked to [friend], [frole], {who lived near [place]|who was [at_place]}.
--
[friend] {looked at|turned} it <adverb> and {said|nodded}, "{It is only a small part|We can fix this}. {Hold the light|Watch my hands}."
"{I have seen worse|Old things deserve a second life}," said [friend] and {took out|looked for} {a tiny screw|some glue}.
--
[name] {held the light|passed the tools} and {watched|learned}, while they {could hear|listened to} [sound].
First, they cleaned every part. Then they {glued|tied} the pieces together <adverb>.
They tried {one way|glue}, but it {did not hold|broke again}. Then [name] {had an idea|found a better way}: a piece of {wire|leather}.
--
<soon>, the [obj] {was whole again|looked as good as new}. [name] could use it to [use].
<soon>, it worked. "{Now I can [use] again|It is even better than before}!" [they] {cried|said}.
--
"{What do I owe you|How can I thank you}?" asked [name]. "{A smile is enough|Just help someone else}," said [friend].
To say thanks, [name] {brought|gave} [friend] [food] the next {day|morning}. Both were <happy>.
""",
        """
[name] {learned|found out} that {many broken things can be saved|repairing is better than throwing away}.
Since that day, [name] {repairs things for the whole street|always tries to fix things first}.
""",
        """
The [obj] of [name] was broken. Instead of throwing it away, [name] repaired it with [friend], [frole].
[name] used @ [thing] to [use]. When it broke, [friend] helped [them] repair it.
""",
    ),
    _plot(
        "deliver",
        """
who brings @ [thing] to [friend]
who has to carry @ [thing] to [place]
and a long way to [place]
""",
        """
One [weather] [daytime], [name] had an important task: [they] had to bring @ [thing] to [friend], [frole].
"Please take this [thing] to [friend]," {said|asked} [their] <relative> one [weather] [daytime]. "[Hthey] is [at_place]."
--
[friend] {needed|was waiting for} it [at_place], because [hthey] wanted to [use].
It was {a long way|far} to [place], but [friend] needed the [obj] to [use].
--
[name] {packed|took} [food] and {set off|went on [their] way} <adverb>.
[They] {wrapped it in a cloth|put it into a bag} and {walked|marched} <adverb> past [sight1].
--
After <while>, {the path split in two|the road was under water|a tree lay across the road}. {What now|Which way was right}? [name]
    felt <sad>.
Halfway there, {the wind became stronger|it began to rain}, and [name] {had to wait|looked for shelter} under @ <look> roof.
--
@ <small_animal> {sat|was sitting} <spot>, and [name] {followed it|stopped to watch it} for <while>.
Then [they] heard [sound]. {That had to be|It came from} [place]! [name] walked {faster|on}.
{An old woman|A farmer|A child} {pointed to the left|showed [them] the way} and said, "{It is not far now|Go past [sight2]}."
--
[They] was {hungry|tired}, but [they] {did not stop|held the [obj] tight} and {sang a song|counted the steps}.
"{I promised it|[friend] is waiting}," [name] {told [themself]|said aloud} and went on <adverb>.
--
<soon>, [they] {arrived [at_place]|reached [place]}, where [friend] {stood|waited} near [sight2].
<soon>, [name] saw [sight1] and knew that [they] {was there|had arrived}. [friend] {waved|came running}.
--
"{You came all this way|Just in time}!" {cried|said} [friend]. [Hthey] took the [obj] and was <happy>.
[friend] {hugged|thanked} [them] and {at once|right away} used the [obj] to [use].
--
They {ate|shared} [food], and [friend] {told stories|made a fire} until [name] {was warm again|had rested}.
{On the way home|That night}, [name] felt <happy>, {although [their] feet hurt|and the stars were shining}.
""",
        """
[name] learned that {a promise gives strength|every long way is made of small steps}.
Since then, {everyone knows that [name] keeps [their] word|people trust [name] with important things}.
""",
        """
[name] had to bring @ [thing] to [friend] [at_place]. The way was hard, but [they] kept [their] promise.
[friend] needed @ [thing] to [use]. [name] carried it all the way to [place].
""",
    ),
    _plot(
        "contest",
        """
who takes part in @ [contest]
who wants to win @ [contest]
and the big [contest]
""",
        """
Every <season>, there was @ [contest] {near|close to} [place], and [name] wanted to {win|take part}.
One [weather] [daytime], [name] {read|saw a sign} about @ [contest] [at_place] {and signed up|and could not think of anything else}.
--
[They] [prepare]. {[their] <relative> cheered|Nothing could stop [them]}.
For <number> weeks, [name] [prepare]. [They] {felt <happy>|hardly slept}.
--
[friend], [frole], {wanted to win, too|was taking part as well}. "{May the best one win|Good luck}," [hthey] said.
[friend], [frole], {helped|trained with} [them]. "{Enjoy it|Do your best}, and {do not look at the others|the rest will follow}."
--
On the big day, the weather was <weather>, and {a crowd|half the town} stood [at_place], near [sight1].
Then the day came. {[name] heard|There was the sound of} [sound], and {people|everyone} {waited|gathered} near [sight2].
--
[name] {started well|was calm at first}. But then {it happened|came the trouble}: [trouble].
{Everything went well|It looked good}, but suddenly [trouble]. [name] {felt|became} <sad>.
--
"{Go on|Do not stop}!" {called|shouted} [friend]. [name] {breathed deeply|closed [their] eyes for a moment}.
[They] {wanted|was about} to give up. Then [they] {saw|heard} [friend], who {waved|smiled} <adverb>.
--
[name] {did not give up|went on} and, in the end, [result].
And {what a surprise|it went well}: [name] [result].
--
{Everyone|The crowd} clapped, and [friend] {was the first to hug [them]|gave [them] @ <look> <object>}.
The [worker] shook [their] hand and said, "{That was brave|I have never seen anything like it}."
--
Afterwards, they {ate|shared} [food], and [name] felt <happy>.
In the evening, there was [food] and <drink>, and [name] told the story {again and again|to everyone}.
""",
        """
[name] {learned|found} that {trying is more important than winning|joy and effort are worth more than a prize}.
Next year, [name] {and [friend] will be there again|wants to take part again}.
""",
        """
[name] took part in @ [contest]. Although [trouble], [they] did not give up and [result].
At the [contest] near [place], [trouble], but in the end [name] [result].
""",
    ),
    _plot(
        "rescue",
        """
who helps a hurt [pet]
who saves @ [pet] [at_place]
and a little [pet]
""",
        """
One [weather] [daytime], [name] {was walking|was} [at_place] when [they] {heard|noticed} a thin cry <spot>.
It was a [weather] [daytime], and [name] {looked at|stood near} [sight1]. Something moved <spot>.
--
It was @ [pet]. {It could not move|It was cold and weak}, and it looked {afraid|up with wide eyes}.
There sat a {small|young} [pet], {wet and shaking|with one hurt leg}. [name] felt <sad> for it.
--
"{Do not be afraid|I will help you}," [name] {whispered|said} <adverb>. {The [pet] kept still|It became calm}.
[They] {knelt|bent} down <adverb> and {held out|opened} [their] hand. {The [pet] came closer|It did not run away}.
--
[name] {put|laid} it into [their] <look> {hat|scarf|basket|apron|jacket|box}, {on soft grass|on dry leaves}, {and listened to [sound]|and covered it}.
[They] {looked around|thought fast}. There was only @ <look> {hat|scarf|basket|apron|jacket|box}, but it {made a good bed|was better than nothing}.
--
Then [they] {ran|carried it} to [friend], [frole], who knew {a lot about|how to care for} animals.
Luckily, [friend], [frole], was {near [place]|not far away}. [name] {called|asked} [hthem] for help.
--
"{It needs rest and warmth|It will get well}," {said|explained} [friend]. "{Give it water|Feed it} every {hour|<number> hours}."
[friend] {looked at|examined} it <adverb>. "{Nothing is broken|It is only a small wound}," [hthey] said.
--
For <number> days, [name] {fed|watched} it, even at night, and {told it stories|talked to it <adverb>}.
[name] gave it water and {small bits of food|crumbs}, and every day it {grew stronger|ate a little more}.
--
<soon>, the [pet] {was healthy|could move again}, and [name] {took|carried} it back to [place].
On @ <weather> <daytime>, it was time to say goodbye [at_place], next to [sight2].
--
It {looked back|turned around} once and {was gone|disappeared} near [sight1]. [name] felt {both sad and happy|<happy>}.
{The [pet] stayed for a moment|For a moment, nothing happened}. Then it {left|was free}, and [name] {waved|smiled}.
At home, [friend] had {made|prepared} [food]. "{You did well|You have a good heart}," [hthey] said.
""",
        """
[name] {learned|understood} that {even small hands can do great things|help is sometimes a matter of patience}.
Sometimes @ [pet] {sits|waits} at [their] window, and [name] {is sure|believes} that it is the same one.
""",
        """
[name] found a hurt [pet] [at_place]. With the help of [friend], [they] cared for it until it was healthy.
@ [pet] needed help. [name] carried it to [friend], [frole], fed it, and set it free [at_place].
""",
    ),
    _plot(
        "confess",
        """
who breaks the [obj] of [friend]
who {tells|must tell} the truth about a broken [obj]
and a broken [obj]
""",
        """
[friend], [frole], had @ [thing] and used it to [use].
{The pride|The favourite thing} of [friend], [frole], was @ [thing]. [Hthey] used it to [use].
--
One [weather] [daytime], [name] {played|ran around} with it [at_place], {although it was not allowed|without asking}.
On a [weather] [daytime], [name] {took|borrowed} it {without a word|in secret} and {carried|brought} it to [place].
--
{Suddenly|Then} it {slipped out of [their] hands|fell down} near [sight1] and broke.
There was a {loud crack|terrible noise}. The [obj] lay {in two pieces|broken} on the ground near [sight1].
--
[name] felt <sad> and hid the pieces <spot>.
{Nobody had seen it|No one was there}. "{Nobody will know|I will say nothing}," [they] {thought|whispered}, and felt <sad>.
--
{At dinner|That evening}, [friend] {looked for|asked about} the [obj]. "{How can I [use] now|Has anyone seen it}?" [hthey] said.
{Soon|The next day}, [friend] {missed it|noticed that it was gone} and {searched|asked} everywhere.
--
[name] could not {sleep|eat}. Even [food] {had no taste|did not taste good}.
All night long, [name] {lay awake|thought about it} and {heard|imagined} [sound].
--
{In the morning|At last}, [name] {took a deep breath|brought the pieces} and said, "{I broke it|It was my fault}, and I am sorry."
"{I have to tell you something|Please listen}," [name] {began|said} <adverb>, and told [friend] {the truth|everything}.
--
[friend] was {quiet|silent} for a moment. Then [hthey] {said|answered}, "{Thank you for the truth|That took courage}."
"{I am sad about the [obj]|It is only a thing}," said [friend]. "But {I am glad that you told me|you are honest}."
--
Together, they {glued the pieces|repaired it} <adverb>, and then they {ate|had} [food].
[name] {worked|helped} [at_place] for <number> days to pay for {a new one|the repair}, and felt <happy>.
""",
        """
[name] learned that {the truth is lighter than a secret|one lie makes the heart heavy}.
Since then, [name] always {asks before borrowing something|tells the truth at once}.
""",
        """
[name] broke the [thing] of [friend] and hid it. In the end, [they] told the truth, and [friend] forgave [them].
[friend] missed [htheir] [obj], because [name] had broken it [at_place]. [name] said sorry.
""",
    ),
    _plot(
        "garden",
        """
who grows @ [plant]
who plants @ [plant]
and @ [plant]
""",
        """
One <season>, [name] {found|got} {a small seed|a tiny plant} {from [friend], [frole]|[at_place]}. It was @ [plant].
"{What will it be|What is this}?" asked [name] when [frole] [friend] {gave|handed} [them] a small bag. "@ [plant]," was the answer.
--
[They] {planted|put} it {in good soil|into the earth} on a [weather] [daytime] and [care].
[name] {dug a hole|looked for a sunny place} with @ [thing], planted it, and [care].
--
{Nothing happened|Nothing could be seen} for <number> days. [name] {felt|became} <sad>.
Every morning, [name] {went|ran out} to see it, but there was only {brown earth|a thin green line}.
--
Then [trouble]. "{All the work for nothing|What can I do}?" [name] {sighed|asked}.
When it {had grown a little|was as long as a finger}, [trouble], and [name] felt <sad>.
--
[They] {asked|went to} the [worker] [at_place], {behind|next to} [sight1]. "{Be patient|Plants are stronger than they look}," said
    the [worker].
[friend] {came|looked at it} and said, "{Do not give up|It only needs time}. {Talk to it|Give it less water}."
--
So [name] {went on|waited} <adverb>, {put up a small fence|brought fresh soil}, and {sang to it|listened to [sound]}.
[They] {built|made} a small {roof|fence} for it and {watched over it|stayed with it} for <while>.
--
The <season> came, and the [plant] {grew|became stronger} day by day.
<weather> days and <weather> days {went by|passed}, and the [plant] {grew|stretched} towards the light.
--
<soon>, the [plant] [result]. {People came from [place] to see it|Even [friend] was surprised}.
And one <daytime>, [name] {rubbed [their] eyes|could not believe it}: the [plant] [result].
--
[name] was <happy> and {invited|called} [friend] {for|to eat} [food] next to it.
They {sat down beside it|celebrated} with [food] and <drink>, and [name] felt <happy>.
""",
        """
[name] learned that {patience is part of every garden|good things grow slowly}.
{Next year|In the new year}, [name] wants to {plant <number> more|give seeds to all the neighbours}.
""",
        """
[name] planted @ [plant] and [care]. Although [trouble], [they] was patient, and it [result].
[name] got @ [plant] from [friend]. After some trouble, it [result].
""",
    ),
    _plot(
        "mystery",
        """
who hears a strange noise [at_place]
who solves a riddle [at_place]
and the strange noise [at_place]
""",
        """
One [weather] [daytime], [name] heard a strange noise [at_place]. It was not {the wind|the rain} and not [sound].
{For days|For <number> nights}, there had been a strange noise [at_place], and {nobody|no one} knew {why|what it was}.
--
"{It is a ghost|Something lives there}," people {said|whispered}, and they {stayed at home|shook their heads}.
"{It is a ghost|Something lives there}," said the [worker] and {stayed at home|shook [wtheir] head}.
The [worker] {was <sad>|locked the door} and {said|warned}, "{Do not go there|It comes every night}."
--
[name] was a little {afraid|nervous}, but also curious. [They] {took|packed} @ [thing] and [food].
"{There must be a reason|I want to know it}," [name] {said|thought}, and took [their] [thing] along.
--
[friend], [frole], {came along|went with [them]}. {Together|Side by side}, they walked past [sight1].
At the {gate|corner}, [they] met [friend], [frole]. "{I will come with you|Two are braver than one}," [hthey] said.
--
They {waited|sat still} near [sight2] for <while>, {until|and then} the noise came {again|closer}.
There it was again! {[friend] held [their] hand|They stopped breathing}, and [name] {pointed|looked} {to the left|into the dark}.
--
The noise came from a place [spot]. [name] went closer, <adverb>, step by step.
[They] followed the noise <adverb>. It {became|grew} louder [spot].
--
There was no ghost at all: it was only @ [pet], {caught in a net|playing with a tin can}!
And {what did they see|then they both laughed}: @ [pet] {sat there|was building a nest} and {pushed|rolled} @ <look> <object>.
--
[name] {set it free|gave it some crumbs}, and {the noise was over|it was quiet again}.
"So you are the ghost!" {laughed|cried} [friend], and [name] {fed|freed} the [pet] <adverb>.
--
{The next day|Later}, they told the [worker], who laughed and gave them <drink>.
They {shared|ate} [food] next to [sight3], and [name] felt <happy>.
""",
        """
[name] learned that {one should look before one is afraid|most ghosts are smaller than they sound}.
Since then, {people call [name] the finder of riddles|nobody [at_place] has been afraid of noises}.
""",
        """
[name] heard a strange noise [at_place]. [They] went there with [friend] and found out that it was only @ [pet].
A strange noise [at_place] made people afraid. [name] and [friend] found @ [pet].
""",
    ),
)
