#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Word problems with checkable answers: the text from which the embedded model learns and by which it is judged.

    python3 test/model/make/problems.py --seed 7 --n 10000 --jsonl      {"prompt","answer"} lines
    python3 test/model/make/problems.py --seed 7 --n 20                 the same, readable, with the worked reply
    python3 test/model/make/problems.py --check --n 200000              verifies every equation of 200,000 replies

Standard library only; the same seed gives the same problems on every machine.

A template below is a function that draws names, things and numbers, and returns (prompt, steps). Steps are the sentences of
the worked reply; each holds one equation "a op b = c", and the result of the last one is the answer. Numbers are small (nearly all
results under 1,000) and divisions exact, because the model that learns this has about 3.5 million parameters and has to be right
to the last digit. A template asks in several wordings, so that the model reads the story instead of recognising the sentence.
"""
import argparse
import json
import random
import re
import sys

FEMALE = """Ada Aisha Alma Amara Anna Ava Bella Bianca Carla Carmen Chloe Clara Dana Daria Elena Ella Emma Erin Eva Fatima Fiona
Freya Gina Grace Greta Hana Hanna Holly Ida Ines Irene Iris Ivy Jade Jana Jenna Jun Julia Kara Kate Keiko Lara Leah Lena Lily Lina Lucy
Maya Maria Marta Mei Mia Mina Mira Nadia Nina Nora Olga Olivia Paula Petra Priya Rita Rosa Ruby Ruth Sara Selma Sofia Stella Suzy Tara
Tess Tina Uma Vera Wendy Yara Yuna Zoe""".split()
MALE = """Adam Ahmed Alan Alex Amir Andre Anton Arun Ben Boris Bruno Carl Carlos Chris Dan Daniel David Diego Dylan Eli Emil Eric
Ethan Felix Finn Frank Fred George Greg Gus Hans Harry Hugo Ian Igor Ivan Jack Jakob James Jay Jim Joe Joel John Jonas Juan Karl Kai
Ken Kevin Kofi Leo Liam Louis Luca Luke Marco Mark Martin Max Mike Milo Nick Noah Oleg Omar Oscar Otto Pablo Paul Pedro Peter Raj
Ravi Rob Ryan Sam Samir Sean Simon Tariq Theo Tim Tom Tony Victor Walter Will Yusuf""".split()

RARE_FEMALE = """Natalia Weng Betty Alexis Mila Antonia Zara Ingrid Beatrix Tatiana Valentina Philippa Rosalind Ursula Yolanda Abigail
Cordelia Eleanor Gwendolyn Isabel Katrin Matilda Ophelia Susanna Vivian""".split()
RARE_MALE = """Tobias Kylar Xavier Dimitri Magnus Winston Gabriel Cedric Quentin Thaddeus Vikram Zachary Benedict Desmond Fernando Harold
Jeremy Leopold Nathaniel Percy Rafael Terrence Wesley Julius Albert""".split()
KIN = "brother sister mother father aunt uncle cousin teacher neighbor best+friend".split()
MONTHS = "January February March April May June July August September October November December".split()

SMALL = """apples pears oranges lemons peaches plums bananas cookies candies marbles stickers stamps coins cards beads buttons
shells pencils pens crayons erasers balloons badges pebbles walnuts chestnuts muffins cupcakes lollipops postcards magnets keychains
bottle+caps toy+cars paper+clips rubber+bands clips eggs books tickets flowers stones rings bells keys cans bottles chocolates donuts
nuts feathers leaves ribbons stars tokens dice tiles nails screws bolts seeds rocks photos comics kites whistles bracelets blocks
strawberries potatoes carrots onions toys hats shirts cups spoons""".split()
EDIBLE = set("""apples pears oranges lemons peaches plums bananas cookies candies walnuts chestnuts muffins cupcakes lollipops eggs
chocolates donuts nuts strawberries carrots""".split())
FRUIT = "apples pears oranges lemons peaches plums mangoes kiwis apricots figs tomatoes pumpkins melons cherries limes".split()
WARES = """notebooks pencils pens rulers erasers folders markers candles mugs plates bowls spoons cups socks scarves hats belts
towels pillows toys puzzles balls lamps brushes plants vases frames baskets""".split()
FOOD = "sandwiches burgers salads pies wraps pancakes waffles tacos bagels hot+dogs".split()
FLOWER = "roses tulips daisies lilies sunflowers orchids violets carnations".split()
BOXES = "boxes bags baskets crates jars packs trays bins drawers buckets".split()
PLACES = "fair museum park zoo cinema circus stadium show concert boat+trip castle aquarium".split()
JOBS = "gardener painter tutor waiter driver cleaner baker babysitter cashier carpenter".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
FRIENDS = ["friends", "cousins", "classmates", "neighbors", "children"]
TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
PART = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}


class Draw(random.Random):
    """The random source, with the vocabulary of the stories."""

    def n(self, lo, hi):
        return lo + int(self.random() * (hi - lo + 1))

    def pick(self, *choices):
        """One of the arguments; a single list or tuple is taken as the choices themselves."""
        if len(choices) == 1:
            choices = choices[0]
        return choices[int(self.random() * len(choices))]

    def thing(self, words):
        return self.pick(words).replace("+", " ")

    def two(self, words):
        a = self.thing(words)
        b = self.thing(words)
        while a == b:
            b = self.thing(words)
        return a, b

    def who(self, *others):
        while True:
            rare, she = self.random() < 0.08, self.random() < 0.5
            p = Person(self.pick(RARE_FEMALE if rare else FEMALE), "she", "her", "her") if she else \
                Person(self.pick(RARE_MALE if rare else MALE), "he", "his", "him")
            if all(p.name != o.name for o in others):
                return p

    def day(self):
        return self.pick(DAYS)


def one(things):
    """The singular of one of the words above."""
    irregular = {"scarves": "scarf", "cookies": "cookie", "pies": "pie", "dice": "die", "leaves": "leaf", "lenses": "lens"}
    first, _, last = things.rpartition(" ")
    if last in irregular:
        last = irregular[last]
    elif last.endswith("ies"):
        last = last[:-3] + "y"
    elif last.endswith(("ches", "shes", "toes", "oxes", "sses")):
        last = last[:-2]
    else:
        last = last[:-1]
    return (first + " " if first else "") + last


class Person:
    def __init__(self, name, he, his, him):
        self.name, self.he, self.his, self.him, self.He = name, he, his, him, he.capitalize()

    def __str__(self):
        return self.name


def add(a, b):
    return f"{a} + {b} = {a + b}"


def sub(a, b):
    assert a >= b
    return f"{a} - {b} = {a - b}"


def mul(a, b):
    return f"{a} * {b} = {a * b}"


def div(a, b):
    assert a % b == 0
    return f"{a} / {b} = {a // b}"


TEMPLATES = []


def template(f):
    TEMPLATES.append(f)
    return f


# ---------------------------------------------------------------------------------------------------------------------
# Having, getting and giving
# ---------------------------------------------------------------------------------------------------------------------
@template
def boxes_and_more(r):
    w, it, bx, n, k, e = r.who(), r.thing(SMALL), r.thing(BOXES), r.n(2, 12), r.n(2, 15), r.n(2, 60)
    q = r.pick(f"{w} has {n} {bx} with {k} {it} each. {w.He} gets {e} more {it}. How many {it} does {w.he} have now?",
               f"There are {n} {bx} of {it} and each holds {k}. {w} adds {e} {it}. How many {it} are there altogether?",
               f"{w} buys {n} {bx} of {it}. Every one of the {bx} has {k} {it} in it. At home {w.he} already has {e} {it}. "
               f"How many {it} does {w} have in total?")
    return q, [f"The {bx} hold {mul(n, k)} {it}.", f"With {e} more there are {add(n * k, e)}."]


@template
def boxes_and_less(r):
    w, it, bx, n, k = r.who(), r.thing(SMALL), r.thing(BOXES), r.n(2, 12), r.n(3, 15)
    v, e = r.who(w), r.n(2, n * k - 1)
    q = r.pick(f"{w} fills {n} {bx} with {k} {it} each. Then {w.he} gives {e} {it} to {v}. How many {it} are left?",
               f"{w} has {n} {bx}. There are {k} {it} in each. {v} takes {e} of the {it}. How many {it} remain?",
               f"{v} gives {w} {n} {bx} of {k} {it}. {w} loses {e} {it} on the way home. How many {it} does {w} still have?")
    return q, [f"The {bx} hold {mul(n, k)} {it}.", f"After {e} are gone, {sub(n * k, e)} are left."]


GET = [("gets", "got"), ("finds", "found"), ("buys", "bought"), ("wins", "won"), ("collects", "collected"), ("receives", "received"),
       ("makes", "made"), ("picks up", "picked up")]
DROP = [("loses", "lost"), ("gives away", "gave away"), ("sells", "sold"), ("throws away", "threw away"), ("drops", "dropped"),
        ("uses", "used")]


def pile_event(r, w, it, have, past):
    """One thing that happens to a pile of `have`: (what w does, the equation, what is there afterwards)."""
    def verb(present_and_past):
        return present_and_past[past]

    kind = r.n(0, 6)
    parts = [k for k in PART if have % k == 0 and have > 2 * k]
    if kind <= 1 and have < 700 or kind >= 5 and not parts or kind in (2, 3) and have <= 4 or kind == 4 and have >= 120:
        k = r.n(2, 90)
        return f"{verb(r.pick(GET))} {k} " + r.pick(f"{it}", f"more {it}", "more"), add(have, k), have + k
    if kind <= 3:
        k = r.n(2, have - 2)
        if r.random() < 0.3:
            what = f"{verb(('gives', 'gave'))} {k} " + \
                r.pick(f"{it} to {r.who(w)}", f"of the {it} to {r.who(w)}", "to a friend", f"to {w.his} {r.thing(KIN)}",
                       f"{it} to {w.his} {r.thing(KIN)}")
        elif it in EDIBLE and r.random() < 0.5:
            what = f"{verb(('eats', 'ate'))} {k} " + r.pick(f"{it}", "of them", f"of the {it}")
        else:
            what = f"{verb(r.pick(DROP))} {k} " + r.pick(f"{it}", "of them", f"of the {it}")
        return what, sub(have, k), have - k
    if kind == 4:
        k = r.n(2, 4)
        what = f"{verb(('doubles', 'doubled'))} the number of {it}" if k == 2 else \
            f"{verb(('works', 'worked'))} hard and {verb(('ends', 'ended'))} up with {TIMES[k]} as many {it}"
        return what, mul(have, k), have * k
    k = r.pick(parts)
    what = r.pick(f"{verb(('keeps', 'kept'))} only {PART[k]} of them",
                  f"{verb(('splits', 'split'))} the {it} into {k} equal piles and {verb(('keeps', 'kept'))} one pile")
    return what, div(have, k), have // k


@template
def gain_lose_chain(r, events=None):
    """The general story: two to four things happen to one pile, which may have been counted in boxes first."""
    w, it, past = r.who(), r.thing(SMALL), r.random() < 0.4
    events = events or r.n(2, 4)
    has = "had" if past else "has"
    if events > 1 and r.random() < 0.4:
        n, k, bx = r.n(2, 12), r.n(2, 15), r.thing(BOXES)
        have, events, steps = n * k, events - 1, [mul(n, k)]
        story = r.pick(f"{w} {has} {n} {bx} with {k} {it} each", f"{w} {has} {n} {bx} of {k} {it}",
                       f"{w} {has} {n} {bx}. Each of them {'held' if past else 'holds'} {k} {it}")
    else:
        have, steps = r.n(5, 80), []
        story = r.pick(f"{w} {has} {have} {it}", f"{w} {'started' if past else 'starts'} with {have} {it}",
                       f"{w} {'owned' if past else 'owns'} {have} {it}")
    joined = "Each of" in story                          # no second "and" in one sentence, no "and" after another subject
    for _ in range(events):
        what, step, have = pile_event(r, w, it, have, past)
        if not joined and " and " not in what and r.random() < 0.3:
            story += " and " + r.pick("", "then ") + what
            joined = True
        else:
            story += ". " + r.pick(w.He, w.He, w.He, f"Then {w.he}", w.name, f"After that {w.he}") + " " + what
            joined = " and " in what
        steps.append(step)
    q = r.pick(f"How many {it} does {w} have now?", f"How many {it} are left?", f"How many {it} does {w.he} have in the end?",
               f"How many {it} does {w.he} have?")
    return f"{story}. {q}", [f"{x}." for x in steps[:-1]] + [f"In the end, {steps[-1]} {it}."]


@template
def share_equally(r):
    w, it, bx, p = r.who(), r.thing(SMALL), r.thing(BOXES), r.n(2, 9)
    each = r.n(2, 20)
    n = r.pick([n for n in range(2, 13) if (p * each) % n == 0 and p * each > n])
    k, fr = p * each // n, r.pick(FRIENDS)
    q = r.pick(f"{w} has {n} {bx} of {it} with {k} in each. {w.He} shares all the {it} equally among {p} {fr}. "
               f"How many {it} does each one get?",
               f"{p} {fr} share {n} {bx} of {k} {it} equally. How many {it} does each of them receive?",
               f"There are {k} {it} in each of {n} {bx}. If {w} deals them out evenly to {p} {fr}, how many {it} does each get?")
    return q, [f"There are {mul(n, k)} {it}.", f"Each one gets {div(n * k, p)}."]


@template
def share_after_eating(r):
    w, it, p, each, e = r.who(), r.thing(SMALL), r.n(2, 9), r.n(2, 20), r.n(2, 30)
    t, fr = p * each + e, r.pick(FRIENDS)
    q = r.pick(f"{w} has {t} {it}. {w.He} keeps {e} and divides the rest equally among {p} {fr}. How many does each one get?",
               f"{w} found {t} {it}. {e} of them were broken, so {w.he} threw those away. {p} {fr} share the others equally. "
               f"How many {it} does each one get?",
               f"Out of {t} {it}, {w} puts {e} aside. The remaining {it} are split evenly between {p} {fr}. How many {it} "
               f"does each receive?")
    return q, [f"{sub(t, e)} {it} are shared.", f"Each one gets {div(t - e, p)}."]


@template
def compare_three(r):
    a, d, k = r.n(3, 60), r.n(2, 40), r.n(2, 4)
    x = r.who()
    y = r.who(x)
    z, it = r.who(x, y), r.thing(SMALL)
    b = a + d
    q = r.pick(f"{x} has {a} {it}. {y} has {d} more than {x}. {z} has {TIMES[k]} as many as {y}. How many {it} does {z} have?",
               f"{y} has {d} more {it} than {x}, and {z} has {TIMES[k]} as many {it} as {y}. If {x} has {a} {it}, how many "
               f"does {z} have?")
    return q, [f"{y} has {add(a, d)} {it}.", f"{z} has {mul(b, k)}."]


@template
def compare_three_total(r):
    a, k = r.n(4, 60), r.n(2, 4)
    d = r.n(2, a * k - 1)
    x = r.who()
    y = r.who(x)
    z, it = r.who(x, y), r.thing(SMALL)
    b = a * k
    c = b - d
    q = r.pick(f"{x} has {a} {it}. {y} has {TIMES[k]} as many as {x}. {z} has {d} fewer than {y}. How many {it} do they have "
               f"altogether?",
               f"{x} collected {a} {it}, {y} collected {TIMES[k]} as many as {x}, and {z} collected {d} fewer than {y}. "
               f"How many {it} did the three of them collect in total?")
    return q, [f"{y} has {mul(a, k)} {it}.", f"{z} has {sub(b, d)}.", f"{add(a, b)}.", f"Together they have {add(a + b, c)}."]


@template
def half_as_many_next(r):
    w, it, k = r.who(), r.thing(SMALL), r.n(2, 5)
    a = k * r.n(3, 40)
    t1, t2 = r.pick([f"on {d}" for d in r.two(DAYS)], [f"in {m}" for m in r.two(MONTHS)], ["in the morning", "in the afternoon"],
                    ["last week", "this week"], ["yesterday", "today"])
    verb = r.pick("sold", "packed", "made", "counted", "picked up", "delivered", "collected", "found")
    did = {"sold": "sell", "made": "make", "picked up": "pick up", "found": "find"}.get(verb, verb[:-2])
    q = r.pick(f"{t1[0].upper() + t1[1:]} {w} {verb} {a} {it}, and {t2} {w.he} {verb} {PART[k]} as many. "
               f"How many {it} was that in total?",
               f"{w} {verb} {a} {it} {t1} and {PART[k]} of that number {t2}. How many {it} was that altogether?",
               f"{w} {verb} {a} {it} {t1}, and then {w.he} {verb} {PART[k]} as many {it} {t2}. How many {it} did {w} {did} altogether "
               f"{t1} and {t2}?",
               f"{w} {verb} {a} {it} {t1}. {t2[0].upper() + t2[1:]} {w.he} {verb} {PART[k]} as many. How many {it} did {w.he} {did} in all?")
    return q, [f"{t2[0].upper() + t2[1:]} it was {div(a, k)} {it}.", f"In total it was {add(a, a // k)}."]


@template
def more_on_next_day(r):
    w, it, a, d, c = r.who(), r.thing(SMALL), r.n(5, 90), r.n(2, 50), r.n(2, 60)
    d1, d2 = r.two(DAYS)
    b = a + d
    q = r.pick(f"{w} made {a} {it} on {d1}. On {d2} {w.he} made {d} more than on {d1}. How many {it} did {w} make on the two "
               f"days together?",
               f"On {d1} {w} collected {a} {it}. On {d2} {w.he} collected {d} more {it} than on {d1}. How many {it} did {w.he} "
               f"collect in total?")
    if c <= a + b and r.random() < 0.5:
        q = q[:q.rindex("How many")] + f"Later {w.he} had to give back {c}. How many {it} were left from the two days?"
        return q, [f"On {d2} it was {add(a, d)}.", f"Together that is {add(a, b)}.", f"After giving back {c}, "
                       f"{sub(a + b, c)} were left."]
    return q, [f"On {d2} it was {add(a, d)}.", f"Together that is {add(a, b)}."]


@template
def trade(r):
    w = r.who()
    v, g = r.who(w), r.n(2, 9)
    it, ot = r.two(SMALL)
    k, a, b = r.n(2, 6), r.n(10, 60), r.n(2, 60)
    g = min(g, a - 1)
    q = r.pick(f"{w} has {a} {it} and {b} {ot}. {v} gives {k} {ot} for every one of the {it}. {w} trades {g} {it}. How many "
               f"{ot} does {w} have now?",
               f"{w} trades {it} for {ot}. For each of the {it} {w.he} gets {k} {ot}. {w.He} had {b} {ot} before and now gives "
               f"{v} {g} of {w.his} {a} {it}. How many {ot} does {w} have after the trade?")
    return q, [f"{w} gets {mul(g, k)} {ot}.", f"Now {w.he} has {add(b, g * k)} {ot}."]


@template
def lost_and_found(r):
    w, it, a = r.who(), r.thing(SMALL), r.n(20, 120)
    b = r.n(3, a - 2)
    c = r.n(2, 60)
    t = r.n(2, 4)
    left = a - b
    if r.random() < 0.5:
        q = f"{w} had {a} {it} but lost {b}. Then {w.he} found {c} {it} in the attic. How many {it} does {w} have today?"
        return q, [f"After the loss {w.he} had {sub(a, b)} {it}.", f"Now {w.he} has {add(left, c)}."]
    q = f"{w} had {a} {it} but lost {b}. {w.his.capitalize()} aunt then gave {w.him} {TIMES[t]} as many {it} " \
        f"as {w.he} had left. How many {it} does {w} have now?"
    return q, [f"{w} had {sub(a, b)} {it} left.", f"The aunt gave {mul(left, t)}.", f"Now {w.he} has {add(left, left * t)}."]


@template
def groups_of_two_kinds(r):
    w = r.who()
    a, b = r.two(SMALL)
    n, k, m, j = r.n(2, 9), r.n(2, 12), r.n(2, 9), r.n(2, 12)
    bx, cx = r.two(BOXES)
    q = r.pick(f"{w} has {n} {bx} with {k} {a} each and {m} {cx} with {j} {b} each. How many things does {w.he} have in all?",
               f"{w} packs {n} {bx} of {k} {a} and {m} {cx} of {j} {b}. How many {a} and {b} are there together?")
    return q, [f"There are {mul(n, k)} {a}.", f"There are {mul(m, j)} {b}.", f"Together that is {add(n * k, m * j)}."]


@template
def difference_of_two(r):
    x = r.who()
    y, it, bx = r.who(x), r.thing(SMALL), r.thing(BOXES)
    n, k = r.n(3, 12), r.n(3, 12)
    m, j = r.n(2, 9), r.n(2, 9)
    if n * k <= m * j:
        n, k, m, j = m, j, n, k
    if n * k == m * j:
        k += 1
    q = r.pick(f"{x} has {n} {bx} of {k} {it}. {y} has {m} {bx} of {j} {it}. How many more {it} does {x} have than {y}?",
               f"{y} owns {m} {bx} with {j} {it} each, while {x} owns {n} {bx} with {k} {it} each. How many fewer {it} does "
               f"{y} own than {x}?")
    return q, [f"{x} has {mul(n, k)} {it}.", f"{y} has {mul(m, j)}.", f"The difference is {sub(n * k, m * j)}."]


# ---------------------------------------------------------------------------------------------------------------------
# Money
# ---------------------------------------------------------------------------------------------------------------------
@template
def shop_change(r):
    w = r.who()
    a, b = r.two(WARES)
    n, p, m, c = r.n(2, 9), r.n(2, 12), r.n(2, 6), r.n(2, 15)
    t = n * p + m * c
    pay = next(x for x in (20, 50, 100, 150, 200, 300) if x > t)
    q = r.pick(f"{w} buys {n} {a} for ${p} each and {m} {b} for ${c} each. {w.He} pays with ${pay}. How much change does {w.he} "
               f"get?",
               f"In a shop, {a} cost ${p} each and {b} cost ${c} each. {w} takes {n} {a} and {m} {b} and pays ${pay}. How many "
               f"dollars does {w.he} get back?")
    return q, [f"The {a} cost {mul(n, p)} dollars.", f"The {b} cost {mul(m, c)}.", f"Together {add(n * p, m * c)}.",
               f"The change is {sub(pay, t)}."]


@template
def money_left(r):
    w, it, n, p = r.who(), r.thing(WARES), r.n(2, 10), r.n(2, 20)
    have = n * p + r.n(1, 90)
    q = r.pick(f"{w} has ${have}. {w.He} buys {n} {it} at ${p} each. How much money does {w.he} have left?",
               f"{w} goes shopping with ${have} and buys {n} {it}. Each costs ${p}. How many dollars are left?",
               f"{n} {it} at ${p} each are all that {w} buys. How much of {w.his} ${have} does {w.he} keep?")
    return q, [f"The {it} cost {mul(n, p)} dollars.", f"{w} has {sub(have, n * p)} dollars left."]


@template
def wages(r):
    w, job, h, d, p = r.who(), r.pick(JOBS), r.n(2, 8), r.n(2, 6), r.n(5, 20)
    t = h * d * p
    s = r.n(2, t - 1)
    q = r.pick(f"{w} works as a {job} for ${p} an hour. {w.He} works {h} hours a day for {d} days",
               f"As a {job}, {w} earns ${p} per hour. This week {w.he} works {d} days of {h} hours each")
    if r.random() < 0.5:
        return q + r.pick(". How much does {} earn?", ". How many dollars does {} make?").format(w.he), \
            [f"{w} works {mul(d, h)} hours.", f"{w.He} earns {mul(d * h, p)} dollars."]
    return q + f" and then spends ${s}. How much money is left?", \
        [f"{w} works {mul(d, h)} hours.", f"{w.He} earns {mul(d * h, p)} dollars.", f"After spending, {sub(t, s)} are left."]


@template
def overtime(r):
    w, h, p, e, o = r.who(), r.n(5, 40), r.n(5, 15), r.n(2, 9), r.n(2, 10)
    q = r.pick(f"{w} is paid ${p} an hour for normal work and ${p + o} an hour for extra work. {w.He} does {h} normal hours and "
               f"{e} extra hours. How much is {w.he} paid?",
               f"{w} worked {h} hours at ${p} per hour and another {e} hours at ${p + o} per hour. How much did {w.he} earn in all?")
    return q, [f"Normal work pays {mul(h, p)} dollars.", f"Extra work pays {mul(e, p + o)}.",
               f"Together {add(h * p, e * (p + o))}."]


@template
def saving_goal(r):
    w, it, s, n = r.who(), r.pick("bike", "guitar", "camera", "phone", "tent", "drone", "watch", "game"), r.n(5, 25), r.n(2, 12)
    more = r.n(3, 150)
    goal, g = s * n + more, r.n(2, 60)
    if g < more and r.random() < 0.5:
        q = f"A {it} costs ${goal}. {w} saves ${s} a week for {n} weeks and gets ${g} for {w.his} birthday. How much more money " \
            f"does {w.he} need?"
        return q, [f"{w} saves {mul(n, s)} dollars.", f"With the gift it is {add(n * s, g)}.",
                   f"{w.He} still needs {sub(goal, n * s + g)}."]
    q = r.pick(f"{w} wants a {it} that costs ${goal}. {w.He} saves ${s} every week. How much does {w.he} still need after {n} weeks?",
               f"{w} puts aside ${s} a week for {n} weeks to buy a {it}. The {it} costs ${goal}. How many dollars are missing?")
    return q, [f"{w} saves {mul(n, s)} dollars.", f"{w.He} still needs {sub(goal, n * s)}."]


@template
def weeks_to_goal(r):
    w, it, s, n, have = r.who(), r.pick("bike", "guitar", "camera", "phone", "tent", "drone", "watch", "jacket"), r.n(3, 25), \
        r.n(2, 15), r.n(5, 90)
    goal = s * n + have
    q = r.pick(f"{w} has ${have} and saves ${s} each week. How many weeks does it take until {w.he} can buy a {it} for ${goal}?",
               f"A {it} costs ${goal}. {w} already has ${have} and earns ${s} a week by walking dogs. After how many weeks can "
               f"{w.he} buy it?")
    return q, [f"{w} needs {sub(goal, have)} more dollars.", f"That takes {div(goal - have, s)} weeks."]


@template
def tickets(r):
    a, p, c, d, pl = r.n(2, 9), r.n(6, 20), r.n(2, 9), r.n(2, 8), r.thing(PLACES)
    q = r.pick(f"Tickets for the {pl} cost ${p} for adults and ${d} for children. How much do {a} adults and {c} children pay?",
               f"A family of {a} adults and {c} children goes to the {pl}. An adult ticket is ${p} and a child ticket is ${d}. "
               f"What is the total cost in dollars?",
               f"{r.who()} buys {a} adult tickets at ${p} and {c} child tickets at ${d} for the {pl}. How much is that together?")
    return q, [f"The adults pay {mul(a, p)} dollars.", f"The children pay {mul(c, d)}.", f"Together {add(a * p, c * d)}."]


@template
def discount(r):
    w, it, n, p = r.who(), r.thing(WARES), r.n(2, 12), r.n(6, 30)
    off = r.n(1, p - 3)
    q = r.pick(f"The price of {it} is ${p} each, but today each is ${off} cheaper. How much does {w} pay for {n} {it}?",
               f"{w} buys {n} {it}. They normally cost ${p} each, and {w.he} has a coupon for ${off} off each one. How much does "
               f"{w.he} pay?")
    return q, [f"Each costs {sub(p, off)} dollars.", f"{w} pays {mul(n, p - off)}."]


@template
def half_price(r):
    w, it, n, k = r.who(), r.thing(WARES), r.n(2, 12), r.n(2, 5)
    p = k * r.n(2, 15)
    q = r.pick(f"{it.capitalize()} usually cost ${p}. On {r.day()} they cost only {PART[k]} of that. How much do {n} {it} cost then?",
               f"A shop sells {it} at {PART[k]} of the old price of ${p}. How many dollars does {w} pay for {n} {it}?")
    return q, [f"Each costs {div(p, k)} dollars.", f"{n} cost {mul(n, p // k)}."]


@template
def profit(r):
    w, it, n, c = r.who(), r.thing(SMALL), r.n(3, 30), r.n(1, 6)
    p = c + r.n(1, 8)
    fee = r.n(1, max(1, n * (p - c) - 1))
    q = r.pick(f"{w} buys {n} {it} for ${c} each and sells them for ${p} each. The stall costs ${fee}. How much money does {w.he} "
               f"make in the end?",
               f"{w} makes {it} that cost ${c} each to make and sells them at ${p}. {w.He} sells {n} {it} and pays ${fee} for the "
               f"stand. What is the profit in dollars?")
    return q, [f"Each one brings {sub(p, c)} dollars.", f"{n} bring {mul(n, p - c)}.",
               f"After the fee, {sub(n * (p - c), fee)} are left."]


@template
def split_bill(r):
    p, each = r.n(2, 8), r.n(4, 30)
    t = p * each
    n, c = r.n(2, 8), r.n(2, 9)
    while n * c >= t:
        n, c = r.n(2, 8), r.n(1, 9)
        t += p
    rest, f = t - n * c, r.thing(FOOD)
    q = r.pick(f"{p} friends eat at a restaurant. They order {n} {f} at ${c} each and drinks for ${rest}. They split the bill "
               f"equally. How much does each one pay?",
               f"{n} {f} cost ${c} each and the cake costs ${rest}. {p} people share the cost evenly. How many dollars does "
               f"each person pay?")
    return q, [f"The {f} cost {mul(n, c)} dollars.", f"The bill is {add(n * c, rest)}.", f"Each one pays {div(t, p)}."]


@template
def phone_plan(r):
    w, base, inc, rate = r.who(), r.n(10, 40), r.n(20, 100), r.n(2, 6)
    x = r.n(2, 30)
    q = r.pick(f"A phone plan costs ${base} a month and includes {inc} minutes. Each extra minute costs ${rate}. {w} talks for "
               f"{inc + x} minutes. How much does {w.he} pay?",
               f"{w} pays ${base} for {inc} minutes of calls and ${rate} for each minute beyond that. This month {w.he} called for "
               f"{inc + x} minutes. What is the bill in dollars?")
    return q, [f"There are {sub(inc + x, inc)} extra minutes.", f"They cost {mul(x, rate)} dollars.",
               f"The bill is {add(base, x * rate)}."]


@template
def allowance(r):
    w, a, n = r.who(), r.n(3, 20), r.n(2, 12)
    s = r.n(1, a - 1)
    q = r.pick(f"{w} gets ${a} every week and spends ${s} of it. How much does {w.he} save in {n} weeks?",
               f"Each week {w} receives ${a} and uses ${s} for snacks. The rest goes into a jar. How many dollars are in the jar "
               f"after {n} weeks?")
    return q, [f"{w} saves {sub(a, s)} dollars a week.", f"In {n} weeks it is {mul(n, a - s)}."]


@template
def donation(r):
    k, each = r.n(2, 6), r.n(10, 60)
    t, it = k * each, r.pick("school", "church", "club", "choir", "team", "village")
    x = r.n(5, t - 4)
    q = r.pick(f"A {it} collects ${x} in the morning and ${t - x} in the afternoon. The money is divided equally among {k} "
               f"charities. How much does each charity get?",
               f"The {it} earned ${x} from a raffle and ${t - x} from a concert. It gives the same amount to each of {k} families. "
               f"How many dollars does each family receive?")
    return q, [f"Together it is {add(x, t - x)} dollars.", f"Each gets {div(t, k)}."]


@template
def bank(r):
    w, a, d, n = r.who(), r.n(50, 400), r.n(5, 30), r.n(2, 10)
    if r.random() < 0.5 and d * n < a:
        q = f"{w} has ${a} in the bank. {w.He} takes out ${d} every week. How much is left after {n} weeks?"
        return q, [f"In {n} weeks {w.he} takes out {mul(n, d)} dollars.", f"{sub(a, d * n)} are left."]
    q = f"{w} has ${a} in the bank and puts in ${d} every month. How much is in the bank after {n} months?"
    return q, [f"In {n} months {w.he} puts in {mul(n, d)} dollars.", f"Then there are {add(a, d * n)}."]


# ---------------------------------------------------------------------------------------------------------------------
# Farm, garden, kitchen
# ---------------------------------------------------------------------------------------------------------------------
@template
def garden_rows(r):
    w, f, n, k = r.who(), r.pick(FRUIT), r.n(2, 10), r.n(3, 12)
    e, g = r.n(1, n * k - 2), r.n(2, 8)
    left = n * k - e
    q = f"{w} plants {n} rows of {k} bushes. " + r.pick(f"{e} bushes dry out.", f"A storm destroys {e} of them.", f"Rabbits eat {e} "
                                                       f"of the bushes.")
    if left * g < 1000 and r.random() < 0.5:
        return q + f" Each bush that is left gives {g} {f}. How many {f} does {w.he} pick?", \
            [f"There were {mul(n, k)} bushes.", f"{sub(n * k, e)} are left.", f"They give {mul(left, g)} {f}."]
    return q + " How many bushes are left?", [f"There were {mul(n, k)} bushes.", f"{sub(n * k, e)} are left."]


@template
def legs(r):
    four, two = r.pick("cows", "sheep", "goats", "pigs", "horses", "donkeys"), r.pick("chickens", "ducks", "geese", "turkeys")
    a, b = r.n(2, 30), r.n(2, 30)
    parts = [(f"{a} {four}", f"The {four} have {mul(a, 4)} legs.", 4 * a), (f"{b} {two}", f"The {two} have {mul(b, 2)} legs.", 2 * b)]
    if r.random() < 0.5:
        parts.reverse()
    (x, first, n), (y, second, m) = parts
    q = r.pick(f"A farmer has {x} and {y}.", f"{r.who()} counts {x} and {y} on a farm.", f"There are {x} and {y} in a barn.",
               f"A farm has {x}. It also has {y}.") + " " + \
        r.pick("How many legs do the animals have altogether?", "How many legs are there in total?", "How many legs are there?",
               "How many legs do they have?", "How many legs is that?")
    return q, [first, second, f"Together {add(n, m)}."]


@template
def hens_and_eggs(r):
    w, h, e, d = r.who(), r.n(2, 12), r.n(1, 3), r.n(2, 10)
    t = h * e * d
    b = r.pick([x for x in (2, 3, 4, 5, 6, 10, 12) if t % x == 0] or [1])
    s = "s" if e > 1 else ""
    if b == 1:
        q = f"{w} has {h} hens. Each hen lays {e} egg{s} a day. How many eggs does {w.he} get in {d} days?"
        return q, [f"The hens lay {mul(h, e)} eggs a day.", f"In {d} days it is {mul(h * e, d)}."]
    q = r.pick(f"{w} has {h} hens. Each hen lays {e} egg{s} a day. {w.He} packs the eggs of {d} days into boxes of {b}. How many "
               f"boxes does {w.he} fill?",
               f"Every day each of the {h} hens lays {e} egg{s}. After {d} days {w} puts all the eggs into cartons of {b}. How many "
               f"cartons is that?")
    return q, [f"The hens lay {mul(h, e)} eggs a day.", f"In {d} days it is {mul(h * e, d)}.", f"That fills {div(t, b)}."]


@template
def fruit_into_baskets(r):
    w, f, n, k = r.who(), r.pick(FRUIT), r.n(2, 10), r.n(3, 20)
    t = n * k
    b = r.pick([x for x in range(2, 13) if t % x == 0])
    place = r.pick("trees", "bushes", "rows", "fields")
    q = r.pick(f"{w} picks {k} {f} from each of {n} {place} and puts {b} into every basket. How many baskets does {w.he} need?",
               f"There are {n} {place} with {k} {f} each. {w} puts all the {f} into baskets, {b} to a basket. How many baskets are "
               f"filled?")
    return q, [f"There are {mul(n, k)} {f}.", f"They fill {div(t, b)} baskets."]


@template
def picking_days(r):
    w, f, a, b = r.who(), r.pick(FRUIT), r.n(5, 90), r.n(5, 90)
    c = r.n(2, a + b - 2)
    d1, d2 = r.two(DAYS)
    q = r.pick(f"{w} picked {a} {f} on {d1} and {b} on {d2}. {c} of them were bad. How many good {f} did {w.he} have?",
               f"{w} picked {a} {f} on {d1} and {b} {f} on {d2}, and then sold {c} of them. How many {f} were left?")
    return q, [f"{w} picked {add(a, b)} {f}.", f"{sub(a + b, c)} were left."]


@template
def batches(r):
    w, c, n = r.who(), r.n(2, 12), r.n(2, 9)
    have = r.n(1, c * n - 1)
    ing, unit = r.pick(("flour", "cups"), ("sugar", "cups"), ("milk", "glasses"), ("butter", "spoons"), ("oats", "cups"))
    f = r.pick("cookies", "bread", "muffins", "pancakes", "cakes")
    q = r.pick(f"One batch of {f} needs {c} {unit} of {ing}. {w} wants to make {n} batches and has {have} {unit} of {ing}. How many "
               f"more {unit} does {w.he} need?",
               f"{w} bakes {n} batches of {f}. Each batch takes {c} {unit} of {ing}. {w.He} has only {have} {unit}. How many {unit} of "
               f"{ing} are missing?")
    return q, [f"{n} batches need {mul(n, c)} {unit}.", f"{w} needs {sub(n * c, have)} more."]


@template
def recipe_scale(r):
    w, s, k, e = r.who(), r.n(2, 8), r.n(2, 8), r.n(2, 9)
    f, ing = r.pick("soup", "cake", "salad", "stew", "pie", "pasta"), r.pick("eggs", "carrots", "onions", "potatoes", "tomatoes")
    q = r.pick(f"A {f} for {s} people needs {e} {ing}. How many {ing} does {w} need for {s * k} people?",
               f"{w} cooks {f} for {s * k} guests. The recipe is for {s} people and uses {e} {ing}. How many {ing} does {w.he} use?")
    return q, [f"The recipe is made {div(s * k, s)} times.", f"{w} needs {mul(k, e)} {ing}."]


@template
def pizza(r):
    w, n, s, p = r.who(), r.n(2, 9), r.pick(4, 6, 8, 10, 12), r.n(2, 12)
    each = r.n(1, 6)
    while p * each >= n * s:
        n += 1
    f = r.pick("pizzas", "cakes", "pies")
    q = r.pick(f"{w} orders {n} {f} that are cut into {s} slices each. {p} people eat {each} {'slice' if each == 1 else 'slices'} each. "
               f"How many slices are left?",
               f"At a party there are {n} {f} with {s} slices each. Each of the {p} guests eats {each}. How many slices remain?")
    return q, [f"There are {mul(n, s)} slices.", f"The people eat {mul(p, each)}.", f"{sub(n * s, p * each)} are left."]


@template
def bakery_trays(r):
    w, f, n, k, m = r.who(), r.pick("rolls", "buns", "muffins", "cookies", "croissants", "pretzels"), r.n(2, 9), r.n(4, 20), r.n(2, 9)
    t = (n + m) * k
    s = r.n(2, t - 1)
    q = r.pick(f"A bakery bakes {n} trays of {f} in the morning and {m} trays in the afternoon. Each tray holds {k} {f}. {s} {f} are "
               f"sold. How many are left?",
               f"{w} bakes {n} trays of {f} and later {m} more trays. There are {k} {f} on each tray. After {w.he} sells {s}, how many "
               f"{f} are left?")
    return q, [f"There are {add(n, m)} trays.", f"They hold {mul(n + m, k)} {f}.", f"{sub(t, s)} are left."]


@template
def pet_food(r):
    w, n, c, d = r.who(), r.n(2, 8), r.n(2, 5), r.n(2, 10)
    pet, t = r.pick("dogs", "cats", "rabbits", "horses", "parrots"), n * c * d
    b = r.pick([x for x in range(2, 13) if t % x == 0] or [1])
    q = r.pick(f"{w} has {n} {pet}. Each eats {c} cups of food a day. A bag holds {b} cups. How many bags does {w.he} need for {d} "
               f"days?",
               f"Each of {w}'s {n} {pet} gets {c} cups of food every day. How many bags of {b} cups are needed for {d} days?")
    return q, [f"They eat {mul(n, c)} cups a day.", f"In {d} days it is {mul(n * c, d)}.", f"That is {div(t, b)} bags."]


@template
def bouquets(r):
    w, n, p = r.who(), r.n(2, 12), r.n(3, 15)
    a, b = r.two(FLOWER)
    k = r.n(2, 12)
    x = r.n(1, k * n - 1)
    q = r.pick(f"{w} has {x} {a} and {k * n - x} {b}. {w.He} makes bouquets of {k} flowers and sells each for ${p}. How much money does "
               f"{w.he} get?",
               f"From {x} {a} and {k * n - x} {b}, {w} ties bouquets with {k} flowers each. A bouquet costs ${p}. How many dollars does "
               f"{w.he} earn by selling all of them?")
    return q, [f"There are {add(x, k * n - x)} flowers.", f"They make {div(k * n, k)} bouquets.", f"{w} gets {mul(n, p)} dollars."]


@template
def milk(r):
    w, n, l = r.who(), r.n(2, 15), r.n(3, 20)
    u = r.n(1, n * l - 1)
    x = r.pick("cows", "goats")
    q = r.pick(f"{w} has {n} {x}. Each gives {l} liters of milk a day. {w.He} uses {u} liters for cheese and sells the rest. How many "
               f"liters does {w.he} sell each day?",
               f"Each of {n} {x} gives {l} liters of milk. {w} keeps {u} liters. How many liters are left to sell?")
    return q, [f"The {x} give {mul(n, l)} liters.", f"{sub(n * l, u)} liters are sold."]


# ---------------------------------------------------------------------------------------------------------------------
# Time, distance, measures
# ---------------------------------------------------------------------------------------------------------------------
@template
def two_speeds(r):
    w, v, t, u, s = r.who(), r.n(3, 60), r.n(2, 6), r.n(3, 60), r.n(2, 6)
    how = r.pick("drives", "rides", "travels", "sails")
    q = r.pick(f"{w} {how} for {t} hours at {v} miles per hour and then for {s} hours at {u} miles per hour. How many miles is that?",
               f"First {w} {how} {t} hours at {v} km per hour, then {s} hours at {u} km per hour. How far does {w.he} get in total?")
    return q, [f"The first part is {mul(t, v)}.", f"The second part is {mul(s, u)}.", f"Together {add(t * v, s * u)}."]


@template
def trip_left(r):
    w, v, t, more = r.who(), r.n(4, 80), r.n(2, 7), r.n(3, 200)
    d = v * t + more
    q = r.pick(f"{w} is on a trip of {d} miles. {w.He} travels {v} miles every hour. How many miles are left after {t} hours?",
               f"The way to the sea is {d} km. {w} drives {v} km an hour for {t} hours. How many km are still to go?")
    return q, [f"In {t} hours it is {mul(t, v)}.", f"{sub(d, v * t)} are left."]


@template
def trip_time(r):
    w, v, t, a = r.who(), r.n(3, 60), r.n(2, 9), r.n(3, 90)
    d = v * t + a
    q = r.pick(f"{w} has to go {d} miles. {w.He} has done {a} miles already. How many hours does {w.he} need for the rest at {v} miles per "
               f"hour?",
               f"Of a path of {d} km, {w} has walked {a} km. {w.He} goes {v} km in an hour. How many hours does the rest take?")
    return q, [f"{sub(d, a)} are left.", f"That takes {div(d - a, v)} hours."]


@template
def reading(r):
    w, p, d, q2, m = r.who(), r.n(5, 40), r.n(2, 9), r.n(5, 30), r.n(2, 9)
    t = p * d + q2 * m
    q = r.pick(f"{w}'s book has {t} pages. {w.He} reads {p} pages a day for {d} days. After that {w.he} reads {q2} pages a day. How many "
               f"more days does {w.he} need to finish?",
               f"A book has {t} pages. For {d} days {w} reads {p} pages each day. Then {w.he} reads {q2} pages each day until the end. "
               f"How many days does the second part take?")
    return q, [f"{w} reads {mul(d, p)} pages.", f"{sub(t, p * d)} pages are left.", f"That takes {div(q2 * m, q2)} days."]


@template
def pages_left(r):
    w, p, d, more = r.who(), r.n(5, 40), r.n(2, 12), r.n(4, 200)
    t = p * d + more
    q = r.pick(f"{w} reads {p} pages of a book every evening. The book has {t} pages. How many pages are left after {d} evenings?",
               f"A report of {t} pages is printed at {p} pages a minute. How many pages are still missing after {d} minutes?")
    return q, [f"{mul(d, p)} pages are done.", f"{sub(t, p * d)} are left."]


@template
def tasks_minutes(r):
    w, a, b, c = r.who(), r.n(5, 60), r.n(5, 60), r.n(5, 60)
    x, y, z = r.pick(("homework", "cleaning", "piano"), ("cooking", "washing up", "ironing"), ("swimming", "running", "stretching"),
                     ("drawing", "reading", "chess"))
    t = a + b + c
    if r.random() < 0.5:
        q = f"{w} spends {a} minutes on {x}, {b} minutes on {y} and {c} minutes on {z}. How many minutes is that altogether?"
        return q, [f"{add(a, b)}.", f"Altogether {add(a + b, c)} minutes."]
    u = t + r.n(2, 60)
    q = f"{w} has {u} minutes. {w.He} spends {a} minutes on {x}, {b} on {y} and {c} on {z}. How many minutes are left?"
    return q, [f"{add(a, b)}.", f"Altogether {add(a + b, c)} minutes.", f"{sub(u, t)} are left."]


@template
def ages(r):
    x = r.who()
    y = r.who(x)
    z, a, k = r.who(x, y), r.n(3, 20), r.n(2, 4)
    b = a * k
    d = r.n(2, b - 1)
    n = r.n(2, 15)
    m = r.n(0, 2)
    s = f"{x} is {a} years old. {y} is {TIMES[k]} as old as {x}."
    if m == 0:
        return s + f" {z} is {d} years younger than {y}. How old is {z}?", \
            [f"{y} is {mul(a, k)} years old.", f"{z} is {sub(b, d)}."]
    if m == 1:
        return s + f" How old will {y} be in {n} years?", [f"{y} is {mul(a, k)} years old.", f"In {n} years it is {add(b, n)}."]
    return s + f" {z} is {d} years older than {y}. How old is {z} going to be in {n} years?", \
        [f"{y} is {mul(a, k)} years old.", f"{z} is {add(b, d)}.", f"In {n} years it is {add(b + d, n)}."]


@template
def rectangle(r):
    w, a, b, p = r.who(), r.n(3, 30), r.n(2, 25), r.n(2, 6)
    what = r.pick("garden", "field", "yard", "playground", "pool")
    unit = r.pick("meters", "feet", "yards")
    if r.random() < 0.6:
        q = r.pick(f"A {what} is {a} {unit} long and {b} {unit} wide. {w} runs around it {p} times. How many {unit} does {w.he} run?",
                   f"{w} builds a fence with {p} wires around a {what} of {a} by {b} {unit}. How many {unit} of wire does {w.he} need?")
        return q, [f"One side and the next are {add(a, b)}.", f"Once around is {mul(a + b, 2)}.", f"{p} times is {mul(2 * (a + b), p)}."]
    a, b = r.n(2, 12), r.n(2, 12)
    q = f"The floor of a room is {a} {unit} by {b} {unit}. Tiles cost ${p} for each square of one by one. How much do the tiles cost?"
    return q, [f"The floor has {mul(a, b)} squares.", f"The tiles cost {mul(a * b, p)} dollars."]


@template
def laps(r):
    w, m, n, d = r.who(), r.n(2, 20), r.n(2, 9), r.n(2, 7)
    e = r.n(2, 60)
    act = r.pick("runs", "swims", "cycles", "skates")
    q = r.pick(f"{w} {act} {n} laps a day for {d} days. One lap is {m} km. How many km is that?",
               f"{w} {act} {n} laps of {m} km every day. How many km is that in {d} days?")
    steps = [f"Each day it is {mul(n, m)} km.", f"In {d} days it is {mul(n * m, d)}."]
    if r.random() < 0.4:
        q = f"{w} {act} {n} laps of {m} km every day for {d} days. "
        return q + f"The week before it was {e} km. How many km is it in both weeks together?", \
            steps + [f"Together {add(n * m * d, e)}."]
    return q, steps


@template
def tank(r):
    a, k, t, o = r.n(10, 200), r.n(3, 20), r.n(2, 12), r.n(1, 3)
    what = r.pick("tank", "pool", "barrel", "pond")
    if o < k and r.random() < 0.5:
        q = f"A {what} holds {a} liters of water. Every minute {k} liters flow in and {o} {'liter flows' if o == 1 else 'liters flow'} " \
            f"out. How many liters are in the {what} after {t} minutes?"
        return q, [f"Each minute adds {sub(k, o)} liters.", f"{t} minutes add {mul(t, k - o)}.", f"Then there are {add(a, t * (k - o))}."]
    q = f"There are {a} liters in a {what}. A pump adds {k} liters a minute for {t} minutes. How many liters are there then?"
    return q, [f"The pump adds {mul(t, k)} liters.", f"Then there are {add(a, t * k)}."]


@template
def temperature(r):
    a, b, d = r.n(10, 40), r.n(2, 20), r.n(2, 15)
    c = r.n(2, a + b - 2)
    pl = r.pick("village", "city", "valley", "desert", "harbor")
    q = f"In the morning it is {a} degrees in the {pl}. By noon it is {b} degrees warmer, and by the evening {c} degrees colder than at " \
        f"noon. How many degrees is it in the evening?"
    steps = [f"At noon it is {add(a, b)} degrees.", f"In the evening it is {sub(a + b, c)}."]
    if r.random() < 0.3:
        q = q[:q.rindex("How many")] + f"At midnight it is {d} degrees warmer again. How many degrees is it at midnight?"
        steps.append(f"At midnight it is {add(a + b - c, d)}.")
    return q, steps


@template
def rope(r):
    w, n, k, e = r.who(), r.n(2, 12), r.n(2, 12), r.n(1, 20)
    t, it = n * k + e, r.pick("rope", "ribbon", "wire", "string", "cloth")
    unit = r.pick("meters", "feet", "inches")
    if r.random() < 0.5:
        q = f"{w} has {t} {unit} of {it}. {w.He} uses {e} {unit} and cuts the rest into pieces of {k} {unit}. How many pieces does {w.he} get?"
        return q, [f"{sub(t, e)} {unit} are left.", f"They make {div(n * k, k)} pieces."]
    q = f"{w} cuts {n} pieces of {k} {unit} from {t} {unit} of {it}. How many {unit} of {it} are left?"
    return q, [f"The pieces take {mul(n, k)} {unit}.", f"{sub(t, n * k)} are left."]


@template
def stack(r):
    w, n, h, m, g = r.who(), r.n(2, 12), r.n(2, 12), r.n(2, 12), r.n(2, 12)
    a, b = r.pick(("red", "blue"), ("green", "white"), ("wooden", "plastic"), ("big", "small"), ("yellow", "black"))
    q = r.pick(f"{w} builds a tower from {n} {a} blocks of {h} cm and {m} {b} blocks of {g} cm. How many cm high is the tower?",
               f"{a.capitalize()} blocks are {h} cm high and {b} blocks are {g} cm high. {w} stacks {n} {a} and {m} {b} blocks. How high is the "
               f"stack in cm?")
    return q, [f"The {a} blocks make {mul(n, h)} cm.", f"The {b} blocks make {mul(m, g)}.", f"The height is {add(n * h, m * g)}."]


@template
def crates_weight(r):
    n, k, m, j = r.n(2, 12), r.n(3, 20), r.n(2, 9), r.n(3, 20)
    x = r.pick("truck", "ship", "wagon", "cart")
    t = n * k + m * j
    lim = t + r.n(5, 90)
    q = r.pick(f"A {x} carries {n} crates of {k} kg and {m} crates of {j} kg. It can carry {lim} kg. How many more kg can it take?",
               f"A {x} can carry {lim} kg. It is loaded with {n} sacks of {k} kg and {m} sacks of {j} kg. How many kg are still free?")
    return q, [f"{mul(n, k)} kg.", f"{mul(m, j)} kg.", f"The load is {add(n * k, m * j)}.", f"{sub(lim, t)} kg are free."]


# ---------------------------------------------------------------------------------------------------------------------
# People, places, work, games
# ---------------------------------------------------------------------------------------------------------------------
@template
def bus(r):
    a, c = r.n(10, 50), r.n(2, 25)
    b = r.n(2, a - 1)
    d, v = r.n(2, 20), r.pick("bus", "tram", "train", "ferry")
    s = f"There are {a} people on a {v}. At the first stop {b} get off and {c} get on."
    now = a - b + c
    if r.random() < 0.5 and d < now:
        return s + f" At the second stop {d} more get off. How many people are on the {v} now?", \
            [f"{sub(a, b)} stay.", f"Then there are {add(a - b, c)}.", f"After the second stop there are {sub(now, d)}."]
    return s + f" How many people are on the {v} then?", [f"{sub(a, b)} stay.", f"Then there are {add(a - b, c)}."]


@template
def class_seats(r):
    n, k = r.n(3, 20), r.n(4, 20)
    e = r.n(1, n * k - 1)
    pl = r.pick("theater", "cinema", "classroom", "hall", "church", "tent")
    q = r.pick(f"A {pl} has {n} rows of {k} seats. {e} seats are taken. How many seats are free?",
               f"There are {n} rows with {k} chairs each in a {pl}. {e} people sit down. How many chairs are empty?")
    return q, [f"There are {mul(n, k)} seats.", f"{sub(n * k, e)} are free."]


@template
def seats_income(r):
    n, k, p = r.n(3, 12), r.n(4, 12), r.n(2, 9)
    e = r.n(max(1, n * k - 100), n * k - 2)
    s = n * k - e
    pl = r.pick("theater", "cinema", "hall", "circus", "tent")
    q = r.pick(f"A {pl} has {n} rows of {k} seats. {e} seats stay empty. Each guest pays ${p}. How much money does the {pl} take in?",
               f"All but {e} seats of a {pl} are sold at ${p} each. The {pl} has {n} rows with {k} seats. How many dollars are paid?")
    return q, [f"There are {mul(n, k)} seats.", f"{sub(n * k, e)} are sold.", f"That brings {mul(s, p)} dollars."]


@template
def train_cars(r):
    n, k = r.n(2, 12), r.n(10, 60)
    t = n * k
    free = r.n(2, t - 5)
    off = r.n(1, max(1, t - free - 2))
    q = r.pick(f"A train has {n} cars with {k} seats each. {free} seats are free. At a station {off} people get off. How many people are "
               f"still on the train?",
               f"Each of the {n} cars of a train has {k} seats. When {free} seats are empty the train stops and {off} people leave. How "
               f"many people stay on the train?")
    return q, [f"There are {mul(n, k)} seats.", f"{sub(t, free)} people were on the train.", f"{sub(t - free, off)} stay."]


@template
def factory(r):
    m, k, h = r.n(2, 9), r.n(3, 15), r.n(2, 7)
    t = m * k * h
    bad = r.n(1, t - 1)
    it = r.thing(WARES)
    q = r.pick(f"A factory has {m} machines. Each makes {k} {it} an hour. In {h} hours {bad} of the {it} come out broken. How many good {it} "
               f"are made?",
               f"{m} machines make {k} {it} an hour each. They run for {h} hours and {bad} {it} are thrown away. How many {it} are left?")
    return q, [f"In an hour it is {mul(m, k)} {it}.", f"In {h} hours it is {mul(m * k, h)}.", f"{sub(t, bad)} are good."]


@template
def painting(r):
    w, n, k, p = r.who(), r.n(2, 9), r.n(2, 9), r.n(2, 8)
    t = n * k
    d = r.pick([x for x in range(2, 10) if t % x == 0])
    what = r.pick("walls", "doors", "windows", "fences", "chairs")
    q = r.pick(f"A house has {n} rooms with {k} {what} each. {w} paints {d} {what} a day. How many days does {w.he} need?",
               f"{w} has to paint {k} {what} in each of {n} houses. {w.He} can do {d} {what} in a day. How many days does it take?")
    return q, [f"There are {mul(n, k)} {what}.", f"It takes {div(t, d)} days."]


@template
def library_shelves(r):
    n, k, o = r.n(2, 12), r.n(5, 30), r.n(2, 60)
    m = r.n(2, n * k - 2)
    q = r.pick(f"A library has {n} shelves with {k} books each. {m} books are lent out and {o} come back. How many books are on the shelves "
               f"now?",
               f"There are {k} books on each of {n} shelves. People borrow {m} books and return {o} others. How many books are there then?")
    return q, [f"There were {mul(n, k)} books.", f"{sub(n * k, m)} stayed.", f"Now there are {add(n * k - m, o)}."]


@template
def game_points(r):
    w, n, k, b = r.who(), r.n(2, 10), r.n(3, 20), r.n(5, 60)
    c = r.n(2, n * k + b - 2)
    q = r.pick(f"In a game {w} finishes {n} levels and gets {k} points for each. {w.He} gets {b} bonus points and loses {c} points for "
               f"mistakes. How many points does {w.he} have?",
               f"{w} hits the target {n} times for {k} points each, wins {b} extra points and then loses {c}. What is the score?")
    return q, [f"That gives {mul(n, k)} points.", f"With the bonus it is {add(n * k, b)}.", f"The score is {sub(n * k + b, c)}."]


@template
def two_teams(r):
    a, b, c, d = r.n(2, 9), r.n(2, 3), r.n(2, 9), r.n(2, 3)
    x, y = r.two(["Lions", "Tigers", "Bears", "Eagles", "Sharks", "Wolves", "Hawks", "Foxes"])
    p, q2 = a * b + r.n(5, 40), c * d
    more = p - a * b
    q = f"The {x} have {more} points and then score {a} times for {b} points each. The {y} score {c} times for {d} points each. "
    if p > q2:
        return q + f"By how many points do the {x} lead?", \
            [f"The {x} add {mul(a, b)} points.", f"They have {add(more, a * b)}.", f"The {y} have {mul(c, d)}.",
             f"The lead is {sub(p, q2)}."]
    return q + "How many points do both teams have together?", \
        [f"The {x} add {mul(a, b)} points.", f"They have {add(more, a * b)}.", f"The {y} have {mul(c, d)}.", f"Together {add(p, q2)}."]


@template
def album(r):
    w, it, n, k = r.who(), r.pick("stickers", "photos", "stamps", "cards", "postcards"), r.n(3, 20), r.n(3, 12)
    e = r.n(2, n * k - 2)
    q = r.pick(f"{w}'s album has {n} pages with room for {k} {it} each. {w.He} has {e} {it}. How many more {it} fit in?",
               f"{w} puts {k} {it} on each page of an album. The album has {n} pages. {e} {it} are in it already. How many {it} are still "
               f"needed to fill it?")
    return q, [f"There is room for {mul(n, k)} {it}.", f"{sub(n * k, e)} more fit in."]


@template
def parking(r):
    n, k = r.n(2, 8), r.n(10, 50)
    a = r.n(5, n * k - 3)
    b = r.n(2, a)
    q = r.pick(f"A parking house has {n} floors with {k} places each. {a} cars are parked. Then {b} of them leave. How many places are free "
               f"now?",
               f"On {n} floors with {k} places each there are {a} parked cars. After {b} cars drive away, how many places are free?")
    return q, [f"There are {mul(n, k)} places.", f"{sub(a, b)} cars stay.", f"{sub(n * k, a - b)} places are free."]


@template
def puzzle_pieces(r):
    w, k, h, more = r.who(), r.n(5, 30), r.n(2, 7), r.n(5, 150)
    v = r.who(w)
    j = r.n(5, 30)
    t = (k + j) * h + more
    q = f"{w} and {v} do a puzzle of {t} pieces. {w} places {k} pieces an hour and {v} places {j} pieces an hour. How many pieces are left " \
        f"after {h} hours?"
    return q, [f"In an hour they place {add(k, j)} pieces.", f"In {h} hours they place {mul(k + j, h)}.", f"{sub(t, (k + j) * h)} are left."]


@template
def work_together(r):
    w = r.who()
    v, k, j, h, it = r.who(w), r.n(2, 15), r.n(2, 15), r.n(2, 9), r.pick("letters", "parcels", "dumplings", "bracelets", "sandwiches", "cards")
    q = r.pick(f"{w} makes {k} {it} an hour and {v} makes {j}. How many {it} do they make together in {h} hours?",
               f"In one hour {w} finishes {k} {it} while {v} finishes {j} {it}. How many {it} do both finish in {h} hours?")
    return q, [f"In an hour they make {add(k, j)} {it}.", f"In {h} hours they make {mul(k + j, h)}."]


@template
def for_every(r):
    k, j, n = r.n(2, 9), r.n(2, 9), r.n(2, 12)
    a, b = r.two(["teachers", "children", "dogs", "cats", "boats", "sailors", "tables", "chairs", "bikes", "cars", "trees", "birds"])
    q = r.pick(f"For every {k} {a} there are {j} {b}. There are {k * n} {a}. How many {b} are there?",
               f"In a town there are {j} {b} for every {k} {a}. How many {b} are there if there are {k * n} {a}?")
    if r.random() < 0.4:
        q = q.replace(f"How many {b} are there?", f"How many {a} and {b} are there together?") \
             .replace(f"How many {b} are there if there are {k * n} {a}?", f"If there are {k * n} {a}, how many {a} and {b} are there together?")
        return q, [f"There are {div(k * n, k)} groups.", f"That makes {mul(n, j)} {b}.", f"Together {add(k * n, n * j)}."]
    return q, [f"There are {div(k * n, k)} groups.", f"That makes {mul(n, j)} {b}."]


@template
def gym_sets(r):
    w, a, b, c, d = r.who(), r.n(2, 8), r.n(5, 20), r.n(2, 8), r.n(5, 20)
    x, y = r.two(["push-ups", "sit-ups", "squats", "jumps", "pull-ups", "lunges"])
    q = r.pick(f"{w} does {a} sets of {b} {x} and {c} sets of {d} {y}. How many exercises is that in total?",
               f"Every morning {w} does {a} times {b} {x} and {c} times {d} {y}. How many {x} and {y} is that together?")
    return q, [f"{mul(a, b)} {x}.", f"{mul(c, d)} {y}.", f"Together {add(a * b, c * d)}."]


@template
def knitting(r):
    w, k, n = r.who(), r.n(2, 9), r.n(2, 9)
    have, p = r.n(1, k * n - 1), r.n(2, 9)
    it = r.pick("scarf", "hat", "blanket", "sweater")
    q = f"A {it} takes {k} balls of wool. {w} wants to knit {n} of them and has {have} {'ball' if have == 1 else 'balls'} of wool. "
    if r.random() < 0.5:
        return q + "How many more balls does {} need?".format(w.he), [f"{w} needs {mul(n, k)} balls.", f"{sub(n * k, have)} are missing."]
    return q + f"A ball costs ${p}. How much does {w.he} pay for the missing balls?", \
        [f"{w} needs {mul(n, k)} balls.", f"{sub(n * k, have)} are missing.", f"They cost {mul(n * k - have, p)} dollars."]


@template
def candy_bags(r):
    w, it, k, n, p = r.who(), r.thing(SMALL), r.n(2, 12), r.n(2, 15), r.n(2, 9)
    q = r.pick(f"{w} has {k * n} {it}. {w.He} puts {k} into each bag and sells the bags for ${p} each. How much money does {w.he} get?",
               f"{w} packs {k * n} {it} into bags of {k}. Each bag sells for ${p}. How many dollars does {w.he} earn?")
    return q, [f"There are {div(k * n, k)} bags.", f"{w} gets {mul(n, p)} dollars."]


@template
def dozen(r):
    w, it, n = r.who(), r.pick("eggs", "rolls", "bagels", "roses", "pencils", "cupcakes", "donuts"), r.n(2, 12)
    e = r.n(2, 12 * n - 2)
    m = r.n(2, 30)
    if r.random() < 0.5:
        q = f"{w} buys {n} dozen {it} and uses {e} of them. How many {it} are left?"
        return q, [f"{n} dozen are {mul(n, 12)}.", f"{sub(12 * n, e)} are left."]
    q = f"{w} buys {n} dozen {it} and gets {m} more for free. How many {it} does {w.he} have?"
    return q, [f"{n} dozen are {mul(n, 12)}.", f"Together {add(12 * n, m)}."]


@template
def girls_and_boys(r):
    g, k = r.n(5, 40), r.n(2, 4)
    pl = r.pick("class", "club", "choir", "camp", "team")
    a, b = r.pick(("girls", "boys"), ("boys", "girls"), ("adults", "children"), ("dancers", "singers"))
    d = r.n(2, 20)
    if r.random() < 0.5:
        q = f"There are {g} {a} in a {pl} and {TIMES[k]} as many {b}. How many people are in the {pl}?"
        return q, [f"There are {mul(g, k)} {b}.", f"Together {add(g, g * k)}."]
    q = f"There are {g} {a} in a {pl} and {d} more {b} than {a}. {k} of the {b} are ill today. How many {b} are there today?"
    return q, [f"There are {add(g, d)} {b}.", f"{sub(g + d, k)} are there today."]


@template
def groups_from_people(r):
    k, n = r.n(3, 9), r.n(2, 12)
    t = k * n
    a = r.n(2, t - 2)
    pl = r.pick("trip", "game", "dance", "contest", "boat ride")
    q = r.pick(f"{a} girls and {t - a} boys go on a {pl}. They form groups of {k}. How many groups are there?",
               f"For a {pl}, {a} children from one school and {t - a} from another make teams of {k}. How many teams do they make?")
    return q, [f"There are {add(a, t - a)} children.", f"They make {div(t, k)}."]


@template
def candles_left(r):
    w, n, k = r.who(), r.n(2, 9), r.n(3, 12)
    d = r.n(2, min(9, n * k - 1))
    u = r.n(1, (n * k - 1) // d)
    it = r.pick("candles", "tea bags", "pills", "matches", "napkins", "diapers", "batteries")
    q = r.pick(f"{w} has {n} boxes of {k} {it} and uses {u} a day. How many {it} are left after {d} days?",
               f"There are {n} boxes with {k} {it} each. Each day {u} {'is' if u == 1 else 'are'} used. How many {it} remain after {d} days?")
    return q, [f"There are {mul(n, k)} {it}.", f"In {d} days it is {mul(d, u)}.", f"{sub(n * k, u * d)} are left."]


@template
def fraction_sold(r):
    w, it, k, m = r.who(), r.thing(SMALL), r.n(2, 5), r.n(3, 40)
    t = k * m
    left = t - m
    e = r.n(1, left - 1)
    q = r.pick(f"{w} has {t} {it}. {w.He} sells {PART[k]} of them and gives {e} to a friend. How many {it} are left?",
               f"Of {t} {it}, {PART[k]} are red. The others are blue. {w} takes away {e} blue ones. How many blue ones are left?")
    first = "sold" if q.startswith(w.name) else "red"
    return q, [f"{div(t, k)} are {first}.", f"{sub(t, m)} are {'left' if first == 'sold' else 'blue'}.", f"Then {sub(left, e)} are left."]


@template
def hotel(r):
    f, k, p = r.n(2, 9), r.n(4, 20), r.n(1, 3)
    e = r.n(1, f * k - 2)
    q = r.pick(f"A hotel has {f} floors with {k} rooms each. {e} rooms are empty. In every other room there {'is' if p == 1 else 'are'} {p} "
               f"{'guest' if p == 1 else 'guests'}. How many guests are in the hotel?",
               f"In a hotel with {f} floors of {k} rooms, all rooms but {e} are taken by {p} {'guest' if p == 1 else 'guests'} each. How many "
               f"guests are there?")
    return q, [f"There are {mul(f, k)} rooms.", f"{sub(f * k, e)} are taken.", f"They hold {mul(f * k - e, p)} guests."]


@template
def fishing(r):
    x = r.who()
    y, it = r.who(x), r.pick("fish", "crabs", "mushrooms", "berries", "shells")
    a, n = r.n(3, 30), r.n(2, 6)
    d = r.n(1, a - 1)
    b = a - d
    q = r.pick(f"{x} finds {a} {it} a day. {y} finds {d} fewer each day. How many {it} do they find together in {n} days?",
               f"Every day {x} brings home {a} {it} and {y} brings home {d} fewer than {x}. How many {it} is that in {n} days?")
    return q, [f"{y} finds {sub(a, d)} {it} a day.", f"Together {add(a, b)} a day.", f"In {n} days it is {mul(a + b, n)}."]


@template
def letters_left(r):
    w, n, k, s = r.who(), r.n(2, 8), r.n(5, 25), r.n(2, 6)
    t = n * k
    d = r.n(1, t // s) if t // s > 1 else 1
    if s * d >= t:
        s, d = 1, r.n(2, t - 1)
    it = r.pick("letters", "parcels", "flyers", "newspapers", "invitations")
    if s == 1:
        q = f"{w} has {n} stacks of {k} {it} and delivers {d}. How many {it} are left?"
        return q, [f"There are {mul(n, k)} {it}.", f"{sub(t, d)} are left."]
    q = f"{w} has {n} stacks of {k} {it}. {w.He} delivers {d} {it} in each of {s} streets. How many {it} are left?"
    return q, [f"There are {mul(n, k)} {it}.", f"{w} delivers {mul(s, d)}.", f"{sub(t, s * d)} are left."]


# ---------------------------------------------------------------------------------------------------------------------
# Rates, prices, groups: first alone in one step (drill), then as the start of a story
# ---------------------------------------------------------------------------------------------------------------------
RATES = [("reads", "read", "pages"), ("writes", "write", "pages"), ("bakes", "bake", "cakes"), ("walks", "walk", "km"), ("runs", "run", "miles"),
         ("earns", "earn", "dollars"), ("saves", "save", "dollars"), ("spends", "spend", "dollars"), ("makes", "make", "bracelets"),
         ("plants", "plant", "trees"), ("solves", "solve", "puzzles"), ("collects", "collect", "shells"), ("paints", "paint", "walls"),
         ("drinks", "drink", "glasses of water"), ("eats", "eat", "apples"), ("washes", "wash", "cars"), ("draws", "draw", "pictures"),
         ("sells", "sell", "tickets"), ("learns", "learn", "words"), ("picks", "pick", "cherries"), ("folds", "fold", "napkins"),
         ("drives", "drive", "miles"), ("swims", "swim", "laps"), ("builds", "build", "boxes"), ("types", "type", "lines")]


def rate(r):
    """(person, "Mia reads 12 pages a day", verb, unit, period, periods, per period)"""
    w, (does, do, unit), t, p, n = r.who(), r.pick(RATES), r.pick("day", "hour", "week", "minute", "month"), r.n(2, 40), r.n(2, 12)
    much = f"${p}" if unit == "dollars" else f"{p} {unit}"
    a = "an" if t == "hour" else "a"
    return w, f"{w} {does} {much} " + r.pick(f"{a} {t}", f"{a} {t}", f"every {t}", f"each {t}", f"per {t}"), do, unit, t, n, p


def how_much(unit):
    return "How much" if unit == "dollars" else f"How many {unit}"


def one_step(r):
    kind, w, it = r.n(0, 9), r.who(), r.thing(SMALL)
    n, k = r.n(2, 12), r.n(2, 20)
    if kind <= 1:
        w, says, do, unit, t, n, p = rate(r)
        if r.random() < 0.5:
            q = r.pick(f"{says}. {how_much(unit)} does {w.he} {do} in {n} {t}s?", f"If {says}, {how_much(unit).lower()} does {w.he} {do} in {n} {t}s?",
                       f"{says}. {how_much(unit)} is that in {n} {t}s?")
            return q, [f"In {n} {t}s it is {mul(n, p)} {unit}."]
        q = r.pick(f"{says}. How many {t}s does {w.he} need for {n * p} {unit}?",
                   f"{says}. How many {t}s does it take {w.him} to {do} {n * p} {unit}?")
        return q, [f"That takes {div(n * p, p)} {t}s."]
    if kind <= 3:
        it = r.thing(r.pick([WARES, SMALL]))
        price = r.pick(f"One {one(it)} costs ${k}.", f"{it.capitalize()} cost ${k} each.", f"The price of each {one(it)} is ${k}.")
        if r.random() < 0.6:
            q = r.pick(f"{price} How much do {n} {it} cost?", f"{price} How much does {w} pay for {n} {it}?",
                       f"{w} buys {n} {it} at ${k} each. How much does {w.he} pay?", f"{w} buys {n} {it} for ${k} each. How much is that?",
                       f"If each {one(it)} costs ${k}, how much do {n} {it} cost?")
            return q, [f"{n} {it} cost {mul(n, k)} dollars."]
        q = r.pick(f"{price} How many {it} can {w} buy with ${n * k}?", f"{price} {w} has ${n * k}. How many {it} can {w.he} buy?")
        return q, [f"{w} can buy {div(n * k, k)} {it}."]
    if kind <= 5:
        bx = r.thing(BOXES)
        b = one(bx)
        m = r.n(0, 2)
        if m == 0:
            q = r.pick(f"A {b} holds {k} {it}. How many {it} are in {n} {bx}?", f"There are {n} {bx} with {k} {it} each. How many {it} are there?",
                       f"{w} has {n} {bx} of {k} {it}. How many {it} does {w.he} have?", f"{w} puts {k} {it} in each of {n} {bx}. How many {it} "
                       f"is that?")
            return q, [f"The {bx} hold {mul(n, k)} {it}."]
        if m == 1:
            q = r.pick(f"A {b} holds {k} {it}. How many {bx} are needed for {n * k} {it}?", f"{w} puts {n * k} {it} into {bx} of {k}. How many "
                       f"{bx} does {w.he} need?", f"{w} packs {n * k} {it}. Each {b} holds {k}. How many {bx} does {w.he} fill?")
            return q, [f"They fill {div(n * k, k)} {bx}."]
        q = r.pick(f"{w} puts {n * k} {it} into {n} {bx}, the same number in each. How many {it} are in each {b}?",
                   f"{n} {bx} hold {n * k} {it}. How many {it} are in one {b}?")
        return q, [f"In each there are {div(n * k, n)} {it}."]
    if kind == 6:
        who = r.pick("students", "children", "people", "players", "kids", "guests", "dancers", "girls", "boys")
        if r.random() < 0.5:
            q = r.pick(f"There are {n * k} {who}. They form groups of {k}. How many groups are there?", f"{n * k} {who} are split into teams of {k}. "
                       f"How many teams are there?", f"{n * k} {who} sit at tables of {k}. How many tables are there?")
            return q, [f"There are {div(n * k, k)}."]
        q = r.pick(f"{n * k} {who} form {n} equal groups. How many {who} are in each group?", f"{w} shares {n * k} {it} equally among {n} {who}. "
                   f"How many {it} does each one get?", f"{n} {who} share {n * k} {it} equally. How many does each get?")
        return q, [f"Each gets {div(n * k, n)}." if "share" in q else f"Each has {div(n * k, n)}."]
    if kind == 7:
        v, a = r.who(w), r.n(3, 90)
        b, m, t = r.n(2, a - 1), r.n(0, 3), r.n(2, 5)
        if m == 0:
            return f"{w} has {a} {it}. {v} has {b} more than {w}. How many {it} does {v} have?", [f"{v} has {add(a, b)} {it}."]
        if m == 1:
            return f"{w} has {a} {it}. {v} has {b} fewer than {w}. How many {it} does {v} have?", [f"{v} has {sub(a, b)} {it}."]
        if m == 2:
            return f"{w} has {a} {it}. {v} has {TIMES[t]} as many. How many {it} does {v} have?", [f"{v} has {mul(a, t)} {it}."]
        return r.pick(f"{w} has {a} {it} and {v} has {b}. How many more does {w} have than {v}?",
                      f"{w} has {a} {it}. {v} has {b} {it}. How many more {it} does {w} have?"), [f"The difference is {sub(a, b)}."]
    if kind == 8:
        v, a, b = r.who(w), r.n(2, 200), r.n(2, 200)
        x, y = r.two(["red", "blue", "green", "yellow", "white", "black", "big", "small", "old", "new"])
        q = r.pick(f"There are {a} {x} and {b} {y} {it} in a bag. How many {it} are in the bag?", f"{w} has {a} {it} and {v} has {b}. How many {it} "
                   f"do they have together?", f"{w} has {a} {x} {it} and {b} {y} {it}. How many {it} does {w.he} have?")
        return q, [f"Together {add(a, b)} {it}."]
    a, t = r.pick("cows", "dogs", "cats", "horses", "goats"), 4
    if r.random() < 0.5:
        a, t = r.pick("chickens", "ducks", "birds", "geese", "children"), 2
    return r.pick(f"How many legs do {k} {a} have?", f"{w} sees {k} {a}. How many legs do they have?"), [f"They have {mul(k, t)} legs."]


@template
def rate_and_before(r):
    w, says, do, unit, t, n, p = rate(r)
    x = r.n(2, 90)
    if r.random() < 0.5:
        total = n * p + x
        q = f"{says}. After {n} {t}s, how many {unit} are left to reach {total} {unit}?"
        return q, [f"In {n} {t}s it is {mul(n, p)} {unit}.", f"{sub(total, n * p)} {unit} are left."]
    q = f"{says}. The {t} before that it was {x} {unit}. {how_much(unit)} is that together with the next {n} {t}s?"
    return q, [f"In {n} {t}s it is {mul(n, p)} {unit}.", f"Together {add(x, n * p)}."]


@template
def rates_of_two(r):
    w, says, do, unit, t, n, p = rate(r)
    v, m = r.who(w), r.n(2, 40)
    if m > p:
        m = p - 1
    if m == 1 or r.random() < 0.5:
        m = r.n(2, 40)
        q = r.pick(f"{says}, and {v} does {m}. {how_much(unit)} is that together in {n} {t}s?", f"{says}. {v} does {m} in the same time. "
                   f"{how_much(unit)} do they {do} together in {n} {t}s?")
        return q, [f"Together it is {add(p, m)} {unit} a {t}." if t != "hour" else f"Together it is {add(p, m)} {unit} an hour.",
                   f"In {n} {t}s it is {mul(p + m, n)}."]
    q = f"{says}. {v} does only {m}. " + (f"How much more does {w} {do} than {v} in {n} {t}s?" if unit == "dollars" else
                                          f"How many more {unit} does {w} {do} than {v} in {n} {t}s?")
    return q, [f"The difference is {sub(p, m)} {unit} " + ("an hour." if t == "hour" else f"a {t}."), f"In {n} {t}s it is {mul(p - m, n)}."]


@template
def pay_with_note(r):
    w, it, n, p = r.who(), r.thing(r.pick([WARES, SMALL])), r.n(2, 12), r.n(2, 20)
    pay = next(x for x in (20, 50, 100, 200, 300) if x > n * p)
    q = r.pick(f"{w} buys {n} {it} at ${p} each and pays with ${pay}. How much change does {w.he} get?",
               f"One {one(it)} costs ${p}. {w} takes {n} and gives the seller ${pay}. How much money does {w.he} get back?",
               f"{it.capitalize()} cost ${p} each. How much of ${pay} is left after {w} buys {n} {it}?")
    return q, [f"{n} {it} cost {mul(n, p)} dollars.", f"{sub(pay, n * p)} dollars are left."]


@template
def two_buyers(r):
    w, n, p, m, c = r.who(), r.n(2, 12), r.n(2, 15), r.n(2, 12), r.n(2, 15)
    v = r.who(w)
    a, b = r.two(WARES)
    x, y = n * p, m * c
    s = f"{w} buys {n} {a} at ${p} each. {v} buys {m} {b} at ${c} each. "
    if x == y or r.random() < 0.5:
        return s + "How much do they pay together?", [f"{w} pays {mul(n, p)} dollars.", f"{v} pays {mul(m, c)}.", f"Together {add(x, y)}."]
    rich, poor = (w, v) if x > y else (v, w)
    return s + f"How much more does {rich} pay than {poor}?", [f"{w} pays {mul(n, p)} dollars.", f"{v} pays {mul(m, c)}.",
                                                               f"The difference is {sub(max(x, y), min(x, y))}."]


@template
def each_gets(r):
    w, it, n, k = r.who(), r.thing(SMALL), r.n(2, 12), r.n(2, 12)
    who = r.pick("children", "guests", "friends", "students", "players")
    e = r.n(1, 60)
    q = r.pick(f"{w} has {n * k + e} {it} and gives {k} to each of {n} {who}. How many {it} are left?",
               f"Each of {n} {who} gets {k} {it} from {w}. {w} had {n * k + e} {it}. How many {it} does {w.he} have left?",
               f"{n} {who} take {k} {it} each from a pile of {n * k + e}. How many {it} remain?")
    return q, [f"The {who} get {mul(n, k)} {it}.", f"{sub(n * k + e, n * k)} are left."]


@template
def packs_needed(r):
    w, it, k, n = r.who(), r.thing(SMALL), r.n(2, 12), r.n(2, 12)
    have = r.n(2, 60)
    bx, p = r.thing(BOXES), r.n(2, 9)
    q = f"{w} needs {have + n * k} {it} and has {have}. " + r.pick(f"A {one(bx)} holds {k} {it}.", f"The shop sells {it} in {bx} of {k}.",
                                                                  f"There are {k} {it} in every {one(bx)}.")
    steps = [f"{sub(have + n * k, have)} {it} are missing.", f"That is {div(n * k, k)} {bx}."]
    if r.random() < 0.3:
        return q + f" Each {one(bx)} costs ${p}. How much does {w.he} have to pay?", steps + [f"They cost {mul(n, p)} dollars."]
    return q + f" How many {bx} does {w.he} have to buy?", steps


@template
def bag_of_colors(r):
    w, it, a, b = r.who(), r.thing(SMALL), r.n(3, 60), r.n(3, 60)
    x, y, z = r.pick(("red", "blue", "green"), ("white", "black", "gray"), ("big", "small", "tiny"), ("green", "yellow", "red"))
    c = r.n(2, 60)
    m = r.n(0, 2)
    if m == 0:
        q = f"A bag holds {a} {x}, {b} {y} and {c} {z} {it}. How many {it} are in the bag?"
        return q, [f"{add(a, b)}.", f"Together {add(a + b, c)} {it}."]
    if m == 1:
        q = f"There are {a + b + c} {it} in a bag. {a} are {x} and {b} are {y}. The rest are {z}. How many are {z}?"
        return q, [f"{add(a, b)} are {x} or {y}.", f"{sub(a + b + c, a + b)} are {z}."]
    t = r.n(2, 4)
    q = f"{w} has {a} {x} {it} and {TIMES[t]} as many {y} ones. How many {it} does {w.he} have in total?"
    return q, [f"There are {mul(a, t)} {y} ones.", f"Together {add(a, a * t)}."]


# ---------------------------------------------------------------------------------------------------------------------
# Beside the stories
# ---------------------------------------------------------------------------------------------------------------------
def drill(r):
    """A bare calculation or a story of one step, so that arithmetic is also learnt by itself. Not part of problem()."""
    if r.random() < 0.65:
        return one_step(r) if r.random() < 0.75 else gain_lose_chain(r, 1)
    kind = r.n(0, 4)
    if kind == 0:
        a, b = r.n(2, 500), r.n(2, 499)
        e, s = f"{a} + {b}", [add(a, b)]
    elif kind == 1:
        a = r.n(3, 999)
        b = r.n(1, a - 1)
        e, s = f"{a} - {b}", [sub(a, b)]
    elif kind == 2:
        a, b = r.n(2, 99), r.n(2, 12)
        if r.random() < 0.5:
            a, b = b, a
        e, s = f"{a} * {b}", [mul(a, b)]
    elif kind == 3:
        a, b = r.n(2, 80), r.n(2, 12)
        e, s = f"{a * b} / {b}", [div(a * b, b)]
    else:
        a, b, c = r.n(2, 20), r.n(2, 12), r.n(2, 200)
        if r.random() < 0.5 or c >= a * b:
            e, s = f"{a} * {b} + {c}", [mul(a, b), add(a * b, c)]
        else:
            e, s = f"{a} * {b} - {c}", [mul(a, b), sub(a * b, c)]
    return r.pick("What is {}?", "Calculate {}.", "How much is {}?", "{} = ?", "What does {} equal?", "{}").format(e), [x + "." for x in s]


def problem(r):
    """One word problem: (prompt, reply, answer)."""
    prompt, steps = r.pick(TEMPLATES)(r)
    return finish(prompt, steps)


def finish(prompt, steps):
    answer = int(re.findall(r"= (\d+)", steps[-1])[-1])
    return prompt, f"{' '.join(steps)}\nThe answer is {answer}.", answer


ENDING = re.compile(r"The answer is (-?\d+)\.")


def answer_of(reply):
    """The number that a reply ends in, or None. What counts as correct is decided here and nowhere else."""
    found = ENDING.findall(reply)
    return int(found[-1]) if found else None


def check(prompt, reply, answer):
    """Every equation holds, there are one to four of them, the last result is the answer, all numbers are small."""
    equations = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", reply)
    assert 2 <= len(equations) <= 4, (prompt, reply)
    assert reply.count("=") == len(equations)
    for a, op, b, c in equations:
        a, b, c = int(a), int(b), int(c)
        assert c == {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else None}[op], (prompt, reply)
        assert op != "/" or a % b == 0, (prompt, reply)
    assert answer == int(equations[-1][3]) == answer_of(reply) and 0 <= answer < 2000, (prompt, reply)
    assert not re.search(r"[a-z]\d|\d[a-z]|  |\{|\}|None", prompt + reply), (prompt, reply)
    given = {int(x) for x in re.findall(r"\d+", prompt)} | {2, 3, 4, 5, 12}    # half, three times, legs, a dozen ...
    known = set(given)
    for a, op, b, c in equations:
        assert int(a) in known and int(b) in known, ("a number from nowhere", prompt, reply)
        known.add(int(c))


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--n", type=int, default=10)
    p.add_argument("--jsonl", action="store_true", help='print {"prompt","answer"} lines')
    p.add_argument("--check", action="store_true", help="verify instead of printing")
    args = p.parse_args()
    r = Draw(args.seed)
    longest = 0
    for _ in range(args.n):
        prompt, reply, answer = problem(r)
        if args.check:
            check(prompt, reply, answer)
            longest = max(longest, len(prompt))
        elif args.jsonl:
            print(json.dumps({"prompt": prompt, "answer": answer}))
        else:
            print(f"{prompt}\n    {reply.replace(chr(10), chr(10) + '    ')}\n")
    if args.check:
        print(f"{args.n} problems from {len(TEMPLATES)} templates are right; the longest prompt has {longest} characters")


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        sys.exit(0)
