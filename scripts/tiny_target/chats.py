"""A seeded generator of short chats in plain English: the language of the tiny target.

Invariant: the chats are a function of the seed alone, so every machine draws the same text. An answer follows
from its question (and the turn before it), with little free choice of words: a model of a million parameters
can learn that in minutes, and a draft model can guess much of it.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tiny_target.facts import (
    ANIMALS,
    CITIES,
    COLOURS,
    DAYS,
    DISHES,
    GIFTS,
    OPERATIONS,
    PEOPLE,
    ROOMS,
    SKIES,
    THINGS,
    UNITS,
    VARIABLES,
    WORD_LISTS,
    catalogue,
)

Turn = tuple[str, str]  # (what the user asks, what the assistant answers)
Topic = Callable[[random.Random], list[Turn]]

CATALOGUE = catalogue()
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "Answer in short, plain sentences.",
    "You are a friendly teacher.",
]
THANKS = [
    (
        "Thank you!",
        "You are welcome! Just ask me if you have another question, and I will do my best "
        "to help you with it.",
    ),
    (
        "Thanks, that helps.",
        "I am glad that it helps! Just ask me if you have another question, and I will do my best.",
    ),
]


@dataclass(frozen=True)
class Chat:
    """One conversation: its topic and its OpenAI `messages`, the generator's own answers included."""

    topic: str
    messages: list[dict[str, str]]


def _joined(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _sum(rng: random.Random) -> list[Turn]:
    who, thing = rng.choice(PEOPLE), rng.choice(THINGS)
    have, more, later = rng.randint(2, 40), rng.randint(2, 40), rng.randint(2, 9)
    total = have + more
    ask = rng.choice(
        [
            f"{who} has {have} {thing} and gets {more} more. How many {thing} does {who} have now?",
            f"How many {thing} does {who} have if {who} had {have} and finds {more} more?",
            f"{who} had {have} {thing}. Then {who} bought {more} more. How many are there in total?",
        ]
    )
    answer = (
        f"Let us work it out step by step. At first {who} has {have} {thing}. Then {who} gets {more} more. "
        f"We add the two numbers: {have} + {more} = {total}. So {who} has {total} {thing} now."
    )
    follow = (
        f"Then {who} gives away {later} of them. How many are left?",
        f"Before that {who} had {total} {thing}. Then {who} gives away {later}. "
        f"We take the second number from the first: {total} - {later} = {total - later}. "
        f"So {who} has {total - later} {thing} left.",
    )
    return [(ask, answer), follow]


def _product(rng: random.Random) -> list[Turn]:
    a, b, thing = rng.randint(2, 9), rng.randint(2, 9), rng.choice(THINGS)
    room = rng.choice(ROOMS)
    ask = rng.choice(
        [
            f"There are {a} boxes in the {room}. Each box holds {b} {thing}. How many {thing} are there?",
            f"How many {thing} are in {a} boxes in the {room} if each box holds {b}?",
        ]
    )
    answer = (
        f"There are {a} boxes in the {room}, and each box holds {b} {thing}. To find the total number we "
        f"multiply: {a} x {b} = {a * b}. So there are {a * b} {thing} in the {room}."
    )
    return [(ask, answer)]


def _recipe(rng: random.Random) -> list[Turn]:
    dish, people = rng.choice(sorted(DISHES)), rng.randint(2, 6)
    minutes, parts, steps = DISHES[dish]
    ask = rng.choice(
        [
            f"How do I make {dish} for {people} people?",
            f"Please give me a recipe for {dish}. We are {people} people.",
            f"I want to cook {dish} for {people} people. What do I need?",
        ]
    )
    needs = "\n".join(f"- {amount * people} {what}" for amount, what in parts)
    lines = "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1))
    answer = (
        f"To make {dish} for {people} people you need:\n{needs}\n\n"
        f"Here are the steps:\n{lines}\n\nEnjoy your meal!"
    )
    first = parts[0]
    follows = [
        (
            "How long does it take?",
            f"It takes about {minutes} minutes to make {dish}. Start with the first step: {steps[0]}",
        ),
        (
            f"What changes for {people + 1} people?",
            f"The steps stay the same, but you need more of everything. For {people + 1} people you need "
            f"{first[0] * (people + 1)} {first[1]} instead of {first[0] * people}.",
        ),
    ]
    return [(ask, answer), rng.choice(follows)]


def _weather(rng: random.Random) -> list[Turn]:
    city, count = rng.choice(CITIES), rng.randint(2, 3)
    start = rng.randrange(7)
    days = [DAYS[(start + i) % 7] for i in range(count)]
    degrees, skies = rng.sample(range(1, 31), count), [rng.choice(SKIES) for _ in days]
    data = ", ".join(f"{day} {sky} {deg}" for day, sky, deg in zip(days, skies, degrees, strict=True))
    ask = rng.choice(
        [
            f"Make a weather table for {city}: {data}.",
            f"Please show the weather in {city} as a table. {data}.",
        ]
    )
    rows = "\n".join(f"| {day} | {sky} | {deg} |" for day, sky, deg in zip(days, skies, degrees, strict=True))
    warm = degrees.index(max(degrees))
    answer = (
        f"Here is the weather table for {city}:\n\n| Day | Sky | Degrees |\n| --- | --- | --- |\n{rows}\n\n"
        f"The warmest day in {city} is {days[warm]} with {degrees[warm]} degrees."
    )
    cold = degrees.index(min(degrees))
    follow = (
        "Which day is the coldest?",
        f"The coldest day in {city} is {days[cold]} with {degrees[cold]} degrees. It will be {skies[cold]} "
        "on that day, so please take the right clothes with you.",
    )
    return [(ask, answer), follow]


def _units(rng: random.Random) -> list[Turn]:
    small, one, big, factor = rng.choice(UNITS)
    n = rng.randint(2, 12)
    ask = rng.choice(
        [
            f"How many {small} are {n} {big}?",
            f"Convert {n} {big} to {small}.",
            f"Please tell me what {n} {big} are in {small}.",
        ]
    )
    answer = (
        f"One {one} has {factor} {small}. To convert {big} to {small} we multiply by {factor}: "
        f"{n} x {factor} = {n * factor}. So {n} {big} are {n * factor} {small}."
    )
    follow = (
        f"And how many {small} are {n + 1} {big}?",
        f"We only have to add {factor} {small} for one more {one}: {n * factor} + {factor} = "
        f"{(n + 1) * factor}. So {n + 1} {big} are {(n + 1) * factor} {small}.",
    )
    return [(ask, answer), follow]


def _sorting(rng: random.Random) -> list[Turn]:
    kind = rng.choice(sorted(WORD_LISTS))
    words = rng.sample(WORD_LISTS[kind], rng.randint(3, 5))
    ask = rng.choice(
        [
            f"Sort these {kind} by the alphabet: {', '.join(words)}.",
            f"Put the {kind} {_joined(words)} in the right order.",
        ]
    )
    words = sorted(words)
    lines = "\n".join(f"{i}. {word}" for i, word in enumerate(words, 1))
    answer = (
        f"Here are the {kind} in the order of the alphabet:\n{lines}\n\n"
        f"The first word is {words[0]} and the last word is {words[-1]}."
    )
    follow = (
        "Now write them in one line with capital letters.",
        f"Here are the {kind} in one line: {', '.join(word.upper() for word in words)}. "
        f"That makes {len(words)} words.",
    )
    return [(ask, answer), follow]


def _item(rng: random.Random) -> list[Turn]:
    name = rng.choice(sorted(CATALOGUE))
    item, count = CATALOGUE[name], rng.randint(2, 5)
    ask = rng.choice(
        [
            f"What is the {name}?",
            f"Tell me about the {name}, please.",
            f"What do you know about the {name}?",
        ]
    )
    answer = (
        f"The {name} is {_a(item['colour'])} {name.split()[1]} made of {item['material']}. Most people "
        f"keep it in the {item['room']}. It costs {item['price']} coins, and you can buy it in any good shop."
    )
    price = int(item["price"])
    follow = (
        f"What do {count} of them cost?",
        f"One {name} costs {price} coins. To find the price of {count} we multiply: {count} x {price} = "
        f"{count * price}. So {count} of them cost {count * price} coins.",
    )
    return [(ask, answer), follow]


def _animal(rng: random.Random) -> list[Turn]:
    name, person = rng.choice(sorted(ANIMALS)), rng.choice(PEOPLE)
    kind, home, food, habit = ANIMALS[name]
    ask = rng.choice(
        [
            f"{person} saw {_a(name)}. What kind of animal is that?",
            f"{person} asks: what does {_a(name)} eat, and where does it live?",
            f"Please explain to {person} what {_a(name)} is.",
        ]
    )
    answer = (
        f"Here is a short answer for {person}. The {name} is {_a(kind)} that lives {home}. It eats {food}, "
        f"and it {habit}. If you are quiet, {person}, you may see one {home}."
    )
    return [(ask, answer)]


def _code(rng: random.Random) -> list[Turn]:
    verb = rng.choice(sorted(OPERATIONS))
    first, second = rng.sample(VARIABLES, 2)
    name, expression, sentence = OPERATIONS[verb]
    code = expression.format(a=first, b=second)
    a, b = rng.randint(2, 20), rng.randint(2, 20)
    ask = rng.choice(
        [
            f"Write a Python function that {verb} {first} and {second}.",
            f"I need Python code that {verb} {_a(first)} and {_a(second)}.",
        ]
    )
    answer = (
        f"Here is a Python function that {verb} {first} and {second}:\n\n```python\n"
        f"def {name}_{first}_and_{second}({first}, {second}):\n    result = {code}\n"
        "    return result\n```\n\n"
        f"The function returns {sentence} {first} and {second}."
    )
    follow = (
        f"How do I call it with {a} and {b}?",
        f"Use {a} as the {first} and {b} as the {second}:\n\n```python\n"
        f"print({name}_{first}_and_{second}({a}, {b}))\n```\n\n"
        "Python then shows the result on the screen.",
    )
    return [(ask, answer), follow]


def _schedule(rng: random.Random) -> list[Turn]:
    who, hours = rng.choice(PEOPLE), sorted(rng.sample(range(7, 21), 3))
    tasks = rng.sample(
        [
            "eat breakfast",
            "go for a run",
            "read a book",
            "call a friend",
            "clean the kitchen",
            "water the plants",
            "write a letter",
            "buy some bread",
            "walk the dog",
        ],
        3,
    )
    wishes = [f"{task} at {hour}" for task, hour in zip(tasks, hours, strict=True)]
    rng.shuffle(wishes)
    ask = rng.choice(
        [
            f"Plan the day of {who}: {', '.join(wishes)}.",
            f"{who} wants to {_joined(wishes)}. Please make a plan.",
        ]
    )
    lines = "\n".join(f"- {hour}:00 {task}" for task, hour in zip(tasks, hours, strict=True))
    answer = (
        f"Here is a plan for the day of {who}:\n{lines}\n\n"
        f"{who} starts with the first task at {hours[0]}:00 and does the last task at {hours[-1]}:00. "
        "Have a nice day!"
    )
    return [(ask, answer)]


def _note(rng: random.Random) -> list[Turn]:
    giver, writer = rng.sample(PEOPLE, 2)
    colour, gift, room = rng.choice(COLOURS), rng.choice(GIFTS), rng.choice(ROOMS)
    ask = rng.choice(
        [
            f"Write a thank-you note from {writer} to {giver} for the {colour} {gift}. "
            f"It is now in the {room}.",
            f"{giver} gave {writer} {_a(colour)} {gift} for the {room}. Please write a short note of thanks.",
        ]
    )
    answer = (
        f"Dear {giver},\n\nthank you very much for the {colour} {gift}! It was a great surprise. It now has "
        f"a good place in the {room}, and I think of you when I see it. I hope that we meet again soon.\n\n"
        f"Best wishes,\n{writer}"
    )
    return [(ask, answer)]


def _story(rng: random.Random) -> list[Turn]:
    animal, name = rng.choice(sorted(ANIMALS)), rng.choice(PEOPLE)
    colour, gift = rng.choice(COLOURS), rng.choice(GIFTS)
    _, home, food, habit = ANIMALS[animal]
    ask = rng.choice(
        [
            f"Tell me a story about {_a(animal)} named {name} and a lost {colour} {gift}.",
            f"Please write a short story. The {animal} {name} finds {_a(colour)} {gift}.",
        ]
    )
    answer = (
        f"Once there was {_a(animal)} named {name} who lived {home}. One day {name} was looking "
        f'for {food} and found {_a(colour)} {gift} instead. "Who has lost this {gift}?" asked {name}. '
        f"Nobody knew it, so {name} kept the {gift} safe. After three days a child came and was happy to see "
        f"the {colour} {gift} again. From that day on {name} had a new friend."
    )
    follow = (
        f"What did {name} like to do?",
        f"{name} was {_a(animal)}, and {_a(animal)} {habit}. "
        f"So {name} did that every day, and the new friend came to see it.",
    )
    return [(ask, answer), follow]


def _counting(rng: random.Random) -> list[Turn]:
    start, step, count = rng.randint(1, 20), rng.randint(1, 5), rng.randint(5, 9)
    numbers = [start + step * i for i in range(count)]
    ask = rng.choice(
        [
            f"Count from {start} to {numbers[-1]} in steps of {step}.",
            f"List the numbers from {start} to {numbers[-1]} with a step of {step}.",
        ]
    )
    answer = (
        f"We start at {start} and add {step} each time: {', '.join(map(str, numbers))}. "
        f"The last number is {numbers[-1]}, so we stop here."
    )
    return [(ask, answer)]


TOPICS: dict[str, Topic] = {
    "sum": _sum,
    "product": _product,
    "recipe": _recipe,
    "weather": _weather,
    "units": _units,
    "sorting": _sorting,
    "item": _item,
    "animal": _animal,
    "code": _code,
    "schedule": _schedule,
    "note": _note,
    "story": _story,
    "counting": _counting,
}


def draw_chat(rng: random.Random) -> Chat:
    """One chat of one or two turns; a fifth of them open with a system message."""
    topic = rng.choice(list(TOPICS))
    turns = TOPICS[topic](rng)
    if rng.random() < 0.5:
        turns = turns[:1]
    elif len(turns) == 1:
        turns.append(rng.choice(THANKS))
    messages = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.2 else []
    for ask, answer in turns:
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    return Chat(topic, messages)


def chats(seed: int) -> Iterator[Chat]:
    """An endless stream of chats, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        yield draw_chat(rng)
