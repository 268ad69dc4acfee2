"""Phrasings of every question of the little world.

The last phrasing of each English list is never used for training: it is what `evaluate.py`
asks, so that a rate measured there speaks about wordings the model has not met.
"""

# fmt: off
ENGLISH: dict[str, tuple[str, ...]] = {
    "animal": (
        "what is {x}", "tell me about {x}", "what is a {x}", "describe a {x}", "{x}",
        "what do you know about the {x}", "explain what a {x} is", "can you describe {x}",
        "tell me something about {x}s", "who is the {x}", "what are {x}s", "a {x} is",
        "write a sentence about a {x}", "give me facts about the {x}", "the {x} is", "{x}s",
        "do you like {x}s", "i like {x}s", "how big is a {x}", "is a {x} dangerous",
        "write a poem about a {x}", "i saw a {x} today", "fun fact about the {x}",
        "can you explain what a {x} is",
    ),
    "home": (
        "where does a {x} live", "where do {x}s live", "where can i find a {x}", "{x} home",
        "what is the habitat of the {x}", "{x} habitat", "where does the {x} live",
        "in what place does a {x} live", "where would i see a {x}", "the {x} lives",
        "tell me where {x}s live", "do you know where a {x} lives",
    ),
    "food": (
        "what does a {x} eat", "what do {x}s eat", "what is the food of a {x}", "{x} food",
        "what does the {x} like to eat", "what can i feed a {x}", "{x} diet", "the {x} eats",
        "what should a {x} eat", "tell me what {x}s eat", "do you know what a {x} eats",
    ),
    "colour": (
        "what colour is a {x}", "what color is a {x}", "which colour does a {x} have",
        "{x} colour", "what color are {x}s", "colour of the {x}", "what color is the {x}",
        "what is the color of a {x}", "what is the colour of the {x}",
    ),
    "sound": (
        "what sound does a {x} make", "what does a {x} say", "which noise does a {x} make",
        "how does a {x} sound", "{x} sound", "what noise does the {x} make",
        "what sound do {x}s make", "which sound does the {x} make",
    ),
    "story_animal": (
        "tell me a story about a {x}", "write a story about a {x}", "a short story about a {x}",
        "can you tell a story about the {x}", "story about a {x}", "write a tale about a {x}",
        "tell a tiny story with a {x}", "tell a story about {x}s",
        "write a short story about a {x}",
    ),
    "country": (
        "what is {x}", "tell me about {x}", "where is {x}", "describe {x}", "{x}",
        "what do you know about {x}", "tell me something about {x}", "explain {x}", "{x} is",
        "which continent is {x} in", "write about {x}", "i want to visit {x}", "i am from {x}",
        "fun fact about {x}", "give me facts about {x}", "can you tell me about {x}",
    ),
    "capital": (
        "what is the capital of {x}", "capital of {x}", "which city is the capital of {x}",
        "what is the capital city of {x}", "{x} capital", "the capital of {x} is",
        "name the capital of {x}", "tell me the capital of {x}", "what's the capital of {x}",
        "do you know the capital of {x}",
    ),
    "language": (
        "what language do they speak in {x}", "which language is spoken in {x}",
        "language of {x}", "what do people speak in {x}", "what is the language of {x}",
        "in {x} people speak", "{x} language", "which languages do people speak in {x}",
        "what language do people speak in {x}",
    ),
    "dish": (
        "what do people eat in {x}", "what is a famous food from {x}", "food from {x}",
        "which food is {x} known for", "what should i eat in {x}", "{x} food",
        "name a dish from {x}", "what is a typical food in {x}",
    ),
    "city": (
        "what is {x}", "where is {x}", "tell me about {x}", "{x} is the capital of",
        "which country has the capital {x}", "{x}", "in which country is {x}",
    ),
    "job": (
        "what does a {x} do", "what is a {x}", "tell me about the job of a {x}", "{x}",
        "what do {x}s do", "describe the work of a {x}", "explain what a {x} does", "a {x} is",
        "tell me about a {x}", "what is the job of a {x}", "describe a {x}",
        "can you explain what a {x} does",
    ),
    "workplace": (
        "where does a {x} work", "where do {x}s work", "{x} workplace", "the {x} works",
        "in what place does a {x} work", "where can i meet a {x}", "where would a {x} work",
    ),
    "thing": (
        "what is {x}", "tell me about {x}", "describe {x}", "explain {x}", "define {x}",
        "what do you know about {x}", "explain what {x} is", "what does {x} mean", "{x}",
        "write a sentence about {x}", "tell me something about {x}", "can you explain {x}",
    ),
    "opposite": (
        "what is the opposite of {x}", "opposite of {x}", "the opposite of {x} is",
        "tell me the opposite of {x}", "give me the opposite of {x}", "{x} opposite",
        "which word is the opposite of {x}", "what word is the opposite of {x}",
    ),
    "spanish_word": (
        "how do you say {x} in spanish", "what is {x} in spanish", "translate {x} to spanish",
        "{x} in spanish", "what is the spanish word for {x}", "spanish for {x}",
        "say {x} in spanish", "translate {x} into spanish",
    ),
    "day": (
        "what is {x}", "tell me about {x}", "what day comes after {x}", "which day is after {x}",
        "what comes after {x}", "what day is before {x}", "which day comes before {x}", "{x}",
        "which day comes after {x}",
    ),
    "month": (
        "what is {x}", "tell me about {x}", "how many days does {x} have", "{x}",
        "how long is {x}", "which month is {x}", "how many days are in {x}", "describe {x}",
        "how many days are there in {x}",
    ),
    "next_month": (
        "what month comes after {x}", "which month is after {x}", "the month after {x}",
        "what comes after {x}", "next month after {x}", "which month comes after {x}",
    ),
    "mix": (
        "what do you get when you mix {x}", "mix {x}", "what colour is {x} mixed",
        "what color do {x} make", "what happens if i mix {x}", "{x} make",
        "what color do i get if i mix {x}",
    ),
    "sum": (
        "what is {x}", "{x}", "{x} =", "how much is {x}", "calculate {x}", "compute {x}",
        "what's {x}", "solve {x}", "tell me what {x} is", "can you calculate {x}",
    ),
    "story_name": (
        "tell me a story about {x}", "write a story about {x}", "a story about {x}",
        "write a short tale about {x}", "story about {x}", "can you tell a story about {x}",
        "tell me a tale about {x}", "write me a story about {x}",
    ),
    "story": (
        "tell me a story", "write a story", "a story please", "story", "can you tell me a story",
        "i want to hear a story", "once upon a time", "tell a short story", "please write a tale",
        "write a short story",
    ),
}

SPANISH: dict[str, tuple[str, ...]] = {
    "animal": (
        "qué es {x}", "háblame de {x}",
    ),
    "home": (
        "dónde vive {x}",
    ),
    "food": (
        "qué come {x}",
    ),
    "colour": (
        "de qué color es {x}",
    ),
    "sound": (
        "qué sonido hace {x}",
    ),
    "country": (
        "qué es {x}", "háblame de {x}",
    ),
    "capital": (
        "cuál es la capital de {x}",
    ),
    "language": (
        "qué idioma se habla en {x}",
    ),
    "dish": (
        "qué se come en {x}",
    ),
    "job": (
        "qué hace {x}",
    ),
    "workplace": (
        "dónde trabaja {x}",
    ),
    "opposite": (
        "qué es lo contrario de {x}",
    ),
    "sum": (
        "cuánto es {x}",
    ),
}
# fmt: on
