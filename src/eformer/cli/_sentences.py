"""Sentences for the demo, eight in each of five topics."""

SENTENCES = (
    # cooking
    "Let the onions turn golden before you add the garlic.",
    "A pinch of salt brings out the taste of chocolate.",
    "She kneads the dough until it no longer sticks to her hands.",
    "The soup needs another hour on a low flame.",
    "Fry the mushrooms in butter and leave them alone for a while.",
    "He burned the rice because he forgot to turn down the stove.",
    "Fresh bread smells best when it comes out of the oven.",
    "Grandmother never wrote down her recipe for plum cake.",
    # weather
    "Dark clouds gather over the hills, and soon it will rain.",
    "The first snow of the winter fell during the night.",
    "A warm wind from the south has melted the ice on the lake.",
    "The storm tore the roof off the old barn.",
    "Fog hid the harbour until late in the morning.",
    "It has not rained for six weeks, and the fields are dry.",
    "Lightning struck the church tower yesterday evening.",
    "Tomorrow will be sunny, with a light breeze from the sea.",
    # sport
    "The goalkeeper saved a penalty in the last minute of the match.",
    "She won the marathon although she had fallen at the start.",
    "Our team lost three games in a row and the coach resigned.",
    "He trains in the pool every morning before school.",
    "The cyclists climbed the steepest pass of the whole race.",
    "A young player from a small club scored both goals.",
    "The tennis final had to be interrupted because of the heat.",
    "They ran the relay in less than forty seconds.",
    # computers
    "The program crashes whenever the file is empty.",
    "Back up your data before you update the operating system.",
    "A faster processor does not help if the memory is too slow.",
    "She found the bug by reading the log from the end.",
    "The server stopped answering after the disk was full.",
    "Passwords should be long, and never used twice.",
    "The compiler removes code that can never run.",
    "He wrote a small script that renames all of his photographs.",
    # music
    "The violinist tuned her instrument while the hall grew quiet.",
    "He plays the piano every evening after dinner.",
    "The choir practised the last movement for months.",
    "A drummer keeps the band together.",
    "The singer forgot the words and hummed the rest of the song.",
    "They recorded the whole album in a wooden church.",
    "Her first concert was sold out within an hour.",
    "An old guitar hung on the wall, and two strings were missing.",
)
