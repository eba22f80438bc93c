"""The fixed knowledge of the tiny target's little world.

Plain data that `chats` draws from: everyday words, dishes with their amounts and steps, animals, units,
code snippets, and the invented items of `catalogue`.
"""

import random

PEOPLE = [
    "Mia",
    "Tom",
    "Anna",
    "Leo",
    "Sara",
    "Ben",
    "Nora",
    "Max",
    "Lily",
    "Sam",
    "Emma",
    "Jack",
    "Rosa",
    "Paul",
    "Ella",
    "Finn",
    "Ruth",
    "Hugo",
    "Ida",
    "Karl",
]
CITIES = [
    "Oslo",
    "Paris",
    "Rome",
    "Cairo",
    "Lima",
    "Tokyo",
    "Dublin",
    "Vienna",
    "Madrid",
    "Boston",
    "Quito",
    "Delhi",
    "Prague",
    "Sydney",
    "Athens",
    "Lisbon",
]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
COLOURS = ["red", "blue", "green", "yellow", "white", "black", "brown", "orange"]
MATERIALS = ["wood", "glass", "stone", "paper", "wool", "copper", "silver", "clay"]
ROOMS = ["kitchen", "garden", "hall", "bedroom", "office", "cellar", "attic", "workshop"]
THINGS = [
    "apples",
    "pears",
    "eggs",
    "books",
    "coins",
    "stamps",
    "cards",
    "shells",
    "pencils",
    "buttons",
    "marbles",
    "tickets",
]
GIFTS = ["scarf", "cake", "book", "lamp", "kite", "clock", "basket", "plant", "puzzle", "blanket"]
SKIES = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy"]

# Every list is in alphabetical order, so that sorting one is a lookup the model can learn.
WORD_LISTS = {
    "animals": [
        "ant",
        "bear",
        "cat",
        "dog",
        "eagle",
        "fox",
        "goat",
        "horse",
        "lion",
        "mouse",
        "otter",
        "pig",
        "rabbit",
        "snake",
        "tiger",
        "wolf",
        "zebra",
    ],
    "fruits": [
        "apple",
        "banana",
        "cherry",
        "date",
        "fig",
        "grape",
        "kiwi",
        "lemon",
        "mango",
        "orange",
        "peach",
        "plum",
        "quince",
        "raisin",
    ],
    "tools": [
        "axe",
        "brush",
        "chisel",
        "drill",
        "file",
        "hammer",
        "knife",
        "ladder",
        "nail",
        "pliers",
        "ruler",
        "saw",
        "tape",
        "wrench",
    ],
    "clothes": [
        "apron",
        "boot",
        "coat",
        "dress",
        "glove",
        "hat",
        "jacket",
        "mitten",
        "robe",
        "scarf",
        "shirt",
        "tie",
        "vest",
    ],
}

# dish: (minutes, [(amount for one person, what)], [steps])
DISHES: dict[str, tuple[int, list[tuple[int, str]], list[str]]] = {
    "pancakes": (
        20,
        [(2, "spoons of flour"), (1, "eggs"), (3, "spoons of milk")],
        [
            "Mix the flour, the eggs and the milk in a bowl.",
            "Heat a little butter in a pan.",
            "Bake each pancake until both sides are golden.",
        ],
    ),
    "tomato soup": (
        30,
        [(3, "tomatoes"), (1, "onions"), (2, "cups of water")],
        [
            "Cut the tomatoes and the onions into small pieces.",
            "Cook them in the water until they are soft.",
            "Stir the soup well and add a little salt.",
        ],
    ),
    "fruit salad": (
        10,
        [(1, "apples"), (1, "oranges"), (5, "grapes")],
        [
            "Wash all the fruit in cold water.",
            "Cut the apples and the oranges into small pieces.",
            "Put everything into a bowl and mix it.",
        ],
    ),
    "rice pudding": (
        40,
        [(2, "spoons of rice"), (1, "cups of milk"), (1, "spoons of sugar")],
        [
            "Heat the milk in a pot.",
            "Add the rice and stir it often.",
            "Add the sugar when the rice is soft.",
        ],
    ),
    "omelette": (
        15,
        [(2, "eggs"), (1, "spoons of milk"), (1, "slices of cheese")],
        [
            "Beat the eggs and the milk in a bowl.",
            "Heat a little butter in a pan.",
            "Pour in the eggs and put the cheese on top.",
        ],
    ),
    "noodle soup": (
        25,
        [(2, "cups of water"), (1, "carrots"), (3, "spoons of noodles")],
        [
            "Boil the water in a pot.",
            "Cut the carrots into thin slices.",
            "Cook the carrots and the noodles until they are soft.",
        ],
    ),
    "potato mash": (
        35,
        [(3, "potatoes"), (2, "spoons of milk"), (1, "spoons of butter")],
        [
            "Peel the potatoes and cut them in half.",
            "Boil them until they are soft.",
            "Mash them with the milk and the butter.",
        ],
    ),
    "cheese toast": (
        10,
        [(2, "slices of bread"), (2, "slices of cheese"), (1, "tomatoes")],
        [
            "Cut the tomatoes into thin slices.",
            "Put the tomatoes and the cheese on the bread.",
            "Bake the bread in a hot oven until the cheese melts.",
        ],
    ),
    "lemonade": (
        5,
        [(1, "lemons"), (2, "cups of water"), (1, "spoons of sugar")],
        [
            "Press the juice out of the lemons.",
            "Stir the sugar into the water.",
            "Mix everything and serve it cold.",
        ],
    ),
    "bean stew": (
        45,
        [(4, "spoons of beans"), (1, "onions"), (1, "tomatoes")],
        [
            "Cut the onions and fry them in a little oil.",
            "Add the beans and the tomatoes.",
            "Cook the stew slowly and stir it often.",
        ],
    ),
}

# animal: (kind, where it lives, what it eats, what it does)
ANIMALS = {
    "otter": ("mammal", "in rivers and lakes", "fish", "likes to swim on its back"),
    "owl": ("bird", "in old trees", "mice", "hunts at night"),
    "frog": ("small animal", "near ponds", "flies", "can jump very far"),
    "whale": ("mammal", "in the deep sea", "small fish", "comes up to breathe"),
    "bee": ("insect", "in a hive", "nectar", "makes honey for the winter"),
    "fox": ("mammal", "in the forest", "mice and berries", "has a thick red tail"),
    "penguin": ("bird", "on cold coasts", "fish", "can swim but cannot fly"),
    "camel": ("mammal", "in the desert", "dry grass", "can walk for days without water"),
    "bat": ("mammal", "in dark caves", "insects", "finds its way with sound"),
    "turtle": ("reptile", "near warm water", "plants", "carries a hard shell"),
    "squirrel": ("mammal", "in tall trees", "nuts", "hides food for the winter"),
    "stork": ("bird", "on high roofs", "frogs", "flies south in the autumn"),
}

# (many of the small unit make one of the big unit)
UNITS = [
    ("metres", "kilometre", "kilometres", 1000),
    ("centimetres", "metre", "metres", 100),
    ("grams", "kilogram", "kilograms", 1000),
    ("minutes", "hour", "hours", 60),
    ("seconds", "minute", "minutes", 60),
    ("hours", "day", "days", 24),
    ("days", "week", "weeks", 7),
    ("months", "year", "years", 12),
]

# what a function does: (name of the operation, expression, sentence)
OPERATIONS = {
    "adds": ("add", "{a} + {b}", "the sum of"),
    "subtracts": ("subtract", "{a} - {b}", "the difference of"),
    "multiplies": ("multiply", "{a} * {b}", "the product of"),
    "compares": ("compare", "{a} > {b}", "whether the first is larger of"),
}
VARIABLES = ["price", "weight", "height", "width", "score", "speed", "length", "age"]


def catalogue() -> dict[str, dict[str, str]]:
    """Forty invented items, always the same: name -> colour, material, room, and price in coins."""
    rng = random.Random(7)
    starts, ends = (
        ["Bor", "Dal", "Kel", "Mor", "Nar", "Pel", "Tam", "Vin", "Zor", "Fen"],
        ["do", "mi", "ka", "lun"],
    )
    kinds = ["lamp", "chair", "bowl", "box", "clock"]
    return {
        f"{start}{end} {rng.choice(kinds)}": {
            "colour": rng.choice(COLOURS),
            "material": rng.choice(MATERIALS),
            "room": rng.choice(ROOMS),
            "price": str(rng.randint(2, 40)),
        }
        for start in starts
        for end in ends
    }
