"""The words of the starter: everyday English, of no domain, and words made of syllables that nobody knows.

The tokenizer takes its pieces from them, and the examples their names. Which words stand together is random, so nothing
is said about what they mean.
"""

from __future__ import annotations

import random

# ruff: noqa: SIM905 (words read better as a line than as a list)

SMALL = """
the of to in a is and for it on with as at by from this that be are or an not what which how many much who where when
please give me tell show find get look up need want we our my your you i do does has have was will can should there all
only with its their them they if then than out one no yes
""".split()
"""Words that hold sentences together, one token each."""

KEYWORDS = """
name description parameters type object properties string integer number boolean array items required enum true false
null default title id key value error result answer ok done list function arguments
""".split()
"""Words of tools' schemas and of their answers, one token each."""

COMMON = """
able about above across act add after again age ago air along also always amount angle animal another any apart apple
area arm around arrive art ask autumn away baby back bag ball band bank bar base basket bath beach bean bear beat
beautiful because become bed before begin behind bell below bend best better between big bird birth bit black blade
block blood blow blue board boat body bone book border born both bottle bottom box boy brake branch brass bread break
breath brick bridge bright bring broken brother brown brush bucket build bulb burn burst business butter button buy
cake call camera canvas card care carry cart case cat catch cause center certain chain chair chalk chance change
cheap check cheese chest chief child circle city clean clear clock close cloth cloud coal coat code coffee coin cold
collar color come comfort common company compare complete condition consider contain control cook copper copy cord
cork corner cost cotton count country course cover crack cream cross crowd cry cup current curve cushion cut daily
damage dance danger dark date daughter day dead deal dear death debt decide deep degree deliver design desire detail
develop different dinner direct dirt discover distance divide doctor dog door doubt down dozen draw dress drink drive
drop dry dust each ear early earth east easy eat edge effect egg eight either elbow electric element else empty end
engine enough enter equal even evening event ever every example exchange exist expect expert eye face fact fall false
family far farm fast father fear feather feel few field fight figure fill final fine finger finish fire first fish
fit five fix flag flame flat flight float floor flow flower fly fold follow food foot force forest fork form forward
four frame free fresh friend front fruit full future game garden gas gate general glass glove go goat gold good grain
grass gray great green grip ground group grow guess guide gun hair half hammer hand hang happen happy harbor hard
harmony hat head hear heart heat heavy help high hill history hold hole hollow home hook hope horn horse hospital
hour house hundred ice idea important impulse inch include increase industry ink insect inside instrument iron island
join journey judge jump just keep kettle kick kind kiss kitchen knee knife knot know known lake lamp land language
large last late laugh law lead leaf learn leather left leg length less letter level library lift light like limit line
linen lip liquid little live lock long loose loss loud love low machine main make manager map mark market mass match
material may meal measure meat medical meet memory metal method middle mile military milk mind mine minute mist mix
modern moment money monkey month moon more morning most mother motion mountain mouth move music nail narrow nation
natural near neck necessary needle nerve net never new news next night nine noise normal north nose note nothing now
nut object observe ocean odd off offer office often oil old open operate opinion opposite orange order organ other
oven over own owner page pain paint pair paper parallel parcel park part party pass past paste pattern pay peace pen
pencil people period person phone picture piece pig pin pipe place plane plant plate play pleasure plow pocket point
poison polish poor porter position possible pot potato powder power present price print prison private probable
problem process produce profit program promise protect public pull pump push put quality quarter queen question quick
quiet quite rail rain raise range rate ray reach read ready reason receipt record red region regular relation rely
remain repeat reply report reserve rest return reward rhythm rice rich right ring rise river road rod roll roof room
root rough round row rub rule run safe sail salt same sand save scale school science sea seat second secret section
seed seem select self sell send sense separate serious seven shade shake shape sharp sheep shelf ship shirt shock
shoe shop short shut side sign silk silver simple sing sister sit six size skin skirt sky sleep slip slope slow small
smash smell smile smoke smooth snake snow soap social society sock soft solid some son song sort sound soup south
space spade special speed spell spend sponge spoon spring square stage stamp stand star start state station steam
steel stem step stick still stitch stock stocking stomach stone stop store storm story straight strange stream street
stretch strong structure student study substance such sudden sugar suggest summer sun supply support sure surface
surprise sweet swim system table tail take talk tall taste tax teach team teeth ten tend test theory thick thin thing
think thought thousand thread three through thumb thunder ticket tight till time tin tired today together tomorrow
tongue tool top total touch toward tower town track trade train transport travel tray tree trick trip trouble trousers
true turn twist two umbrella under unit until use usual valley value various verse very vessel view violent visit
voice walk wall war warm wash waste watch water wave wax way weather week weight well west wet wheel while whip
whistle white wide wild wind window wine wing winter wire wise woman wonder wood wool word work world worm wound write
wrong year yellow yesterday young zone
""".split()
"""Names of things and of columns, and what fills a sentence."""

VERBS = """
get find look check fetch show read search query add set send make list count open load pick move tell ask call take
give keep use put compute resolve lookup describe submit update create
""".split()
"""What the names of tools may begin with."""

_STARTS = """
b c d f g h j k l m n p r s t v w z bl br ch cl cr dr fl fr gl gr pl pr sh sk sl sm sn sp st str th tr qu
""".split()
_MIDDLES = "a e i o u a e i o u ai ea ee ie oo ou y".split()
_ENDS = "b ck d f g l ll m n nd ng nt p r rd rk rm rn rt s ss st t x".split()


def made(rng: random.Random) -> str:
    """Return a word of one to three syllables that means nothing."""
    parts = [rng.choice(_STARTS) + rng.choice(_MIDDLES) for _ in range(rng.choice((1, 2, 2, 2, 3)))]
    if rng.random() < 0.6:
        parts.append(rng.choice(_ENDS))
    return "".join(parts)


def word(rng: random.Random) -> str:
    """Return a common word or one that means nothing."""
    return rng.choice(COMMON) if rng.random() < 0.5 else made(rng)
