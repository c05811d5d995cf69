"""The text of the demo: seeded generators that write a prompt and the one right answer to it.

Four sources, each a kind of text that a model of two million parameters really learns and that goes on in a way one can
foresee only by looking far back: sums worked step by step, tables in a layout that the prompt asks for, records turned
from one format to another, small programs about names that the prompt gives. Locally the text repeats itself (so a
count table guesses some of it); which name, number, column or format comes next depends on the prompt (so copying the
prompt or counting n-grams guesses less than a drafter that reads the target's features).

An example is a function of (split, source, number) alone: `random.Random("demo/<split>/<source>/<number>")`, which is
the same on every Python 3. Splits: `target` trains the target, `train` are the demo's prompts, `eval` its held-out
prompts. Prompts are distinct across all three. No model, no file and no text of others is read; about 90,000 examples a
CPU second; standard library only.

    python config/demo/recipe.py    # writes prompts/*.jsonl and eval.jsonl beside this file again, byte for byte
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

PROMPTS_PER_SOURCE = {"train": 170, "eval": 20}


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Ada Amir Anna Bela Boris Carla Chen Clara Dana David Elena Emil Eva Farid Flora Greta Hana Hugo Ida Ines Ivan Jana"
    " Jonas Julia Karl Kira Lena Leo Lina Luca Maja Marco Maria Mila Nadia Nils Nora Olga Omar Oscar Paula Petra Rosa"
    " Ruben Sara Simon Sofia Tara Theo Tom Uma Vera Viktor Wanda Yara Zoe"
)
FAMILIES = _words(
    "Arends Bauer Becker Costa Dahl Diaz Engel Falk Garcia Haas Hansen Ito Jensen Keller Klein Kovacs Lang Lindt Marino"
    " Meyer Moreau Nagy Novak Olsen Park Peters Quist Rossi Sato Silva Tanaka Vogel Weber Wolf Young Zeller"
)
CITIES = _words(
    "Athens Basel Berlin Bern Boston Bremen Cairo Dakar Delhi Dublin Geneva Genoa Hanoi Kyoto Lagos Lima Lisbon London"
    " Lyon Madrid Malmo Milan Nairobi Oslo Paris Porto Prague Quito Riga Rome Seoul Tokyo Turin Vienna Zagreb"
)
THINGS = _words(
    "apple bag basket bell book bottle bowl button cable candle card chair clock coat comb cork crate cup door drum fan"
    " flag fork globe glove hammer hat jar key ladder lamp lemon lock map mirror mug nail needle pen pencil pillow pipe"
    " plate plug pump ring rope saw shoe sock spoon stamp stool table tape tent ticket tile towel toy tray vase wheel"
)
FIELDS = _words(
    "age amount area batch code color count cost date delay depth grade group height index label length level limit"
    " mass mode number offset owner phase place power price rank rate ratio region score size slot speed state status"
    " stock target time title total type unit value volume weight width year zone"
)
VERBS = _words(
    "add apply build check clean close count draw fetch fill find load make merge move open parse print read send"
)
COLORS = _words("red blue green black white brown gray pink gold silver orange purple")


def addition(rng: random.Random) -> tuple[str, str]:
    """Two numbers of three or four digits, added digit by digit."""
    digits = rng.choice((3, 3, 4))
    a, b = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
    lines, carry = [f"{a} + {b}"], 0
    for place, name in enumerate(("ones", "tens", "hundreds", "thousands")[:digits]):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        lines.append(f"{name}: {x} + {y} + {carry} = {total}, write {total % 10}, carry {total // 10}")
        carry = total // 10
    lines.append(f"So {a} + {b} = {a + b}.")
    ask = rng.choice(("Add {} and {} digit by digit.", "Work out {} + {}.", "What is {} plus {}? Show the steps."))
    return ask.format(a, b), "\n".join(lines)


def multiplication(rng: random.Random) -> tuple[str, str]:
    """A number of three digits times a digit, by parts."""
    a, b = rng.randrange(101, 1000), rng.randrange(2, 10)
    parts = [int(d) * 10**i for i, d in reversed(list(enumerate(reversed(str(a))))) if d != "0"]
    lines = [f"{a} = " + " + ".join(str(p) for p in parts)]
    lines += [f"{p} x {b} = {p * b}" for p in parts]
    running = parts[0] * b
    for p in parts[1:]:
        lines.append(f"{running} + {p * b} = {running + p * b}")
        running += p * b
    lines.append(f"So {a} x {b} = {running}.")
    ask = rng.choice(("Multiply {} by {}.", "Work out {} x {}.", "What is {} times {}? Show the steps."))
    return ask.format(a, b), "\n".join(lines)


def story(rng: random.Random) -> tuple[str, str]:
    """A person gets and gives things away; the number after each event."""
    name, thing, count = rng.choice(NAMES), rng.choice(THINGS), rng.randrange(20, 80)
    events, lines, start = [], [f"{name} starts with {count} {thing}s."], count
    for _ in range(rng.choice((2, 3, 3))):
        other, change = rng.choice(NAMES), rng.randrange(2, 20)
        if rng.random() < 0.5:
            events.append(f"gets {change} from {other}")
            lines.append(f"{name} gets {change} from {other}: {count} + {change} = {count + change} {thing}s.")
            count += change
        else:
            events.append(f"gives {change} to {other}")
            lines.append(f"{name} gives {change} to {other}: {count} - {change} = {count - change} {thing}s.")
            count -= change
    lines.append(f"{name} has {count} {thing}s now.")
    return f"{name} has {start} {thing}s, " + ", ".join(events) + f". How many {thing}s now?", "\n".join(lines)


def series(rng: random.Random) -> tuple[str, str]:
    """Repeated addition or subtraction, one numbered line a step."""
    start, step, times = rng.randrange(100, 900), rng.randrange(2, 13), rng.randrange(6, 9)
    word, sign, way = rng.choice((("add", "+", 1), ("subtract", "-", -1)))
    lines, value = [], start
    for i in range(1, times + 1):
        lines.append(f"Step {i}: {value} {sign} {step} = {value + way * step}")
        value += way * step
    return f"Start at {start} and {word} {step}, {times} times.", "\n".join([*lines, f"The last number is {value}."])


def _items(rng: random.Random, count: int) -> list[tuple[str, int, int]]:
    """`count` different things, each with an amount and a price."""
    return [(thing, rng.randrange(2, 10), rng.randrange(2, 20)) for thing in rng.sample(THINGS, count)]


def bill(rng: random.Random) -> tuple[str, str]:
    """Items with amount and price; a table with the product of each row, then the sum."""
    items = _items(rng, rng.choice((3, 3, 4)))
    head = rng.choice((("item", "amount", "price", "cost"), ("part", "count", "each", "total")))
    lines = ["| " + " | ".join(head) + " |", "| --- | --- | --- | --- |"]
    lines += [f"| {thing} | {n} | {p} | {n * p} |" for thing, n, p in items]
    running = items[0][1] * items[0][2]
    for _, n, p in items[1:]:
        lines.append(f"{running} + {n * p} = {running + n * p}")
        running += n * p
    lines.append(f"The {head[3]} of all is {running}.")
    ask = f"Bill as a table of {head[0]}, {head[1]}, {head[2]}, {head[3]}: "
    return ask + ", ".join(f"{n} {thing}s at {p}" for thing, n, p in items) + ".", "\n".join(lines)


def _laid_out(layout: str, columns: list[str], rows: list[dict[str, str]]) -> list[str]:
    """The lines of a Markdown table, of comma-separated values or of a numbered list."""
    if layout == "table":
        head = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
        return head + ["| " + " | ".join(row[c] for c in columns) + " |" for row in rows]
    if layout == "csv":
        return [",".join(columns)] + [",".join(row[c] for c in columns) for row in rows]
    return [f"{i}. " + "; ".join(f"{c} = {row[c]}" for c in columns) for i, row in enumerate(rows, 1)]


def people(rng: random.Random) -> tuple[str, str]:
    """Facts about people, in the columns and the two layouts that the prompt asks for."""
    columns = rng.sample(("name", "city", "age", "color", "thing"), 3)
    if "name" not in columns:
        columns[rng.randrange(len(columns))] = "name"
    names = rng.sample(NAMES, 3)
    rows = [
        {
            "name": name,
            "city": rng.choice(CITIES),
            "age": str(rng.randrange(18, 80)),
            "color": rng.choice(COLORS),
            "thing": rng.choice(THINGS),
        }
        for name in names
    ]
    layouts = rng.sample(("table", "csv", "list"), 2)
    said = {"city": "lives in {}", "age": "is {}", "color": "likes {}", "thing": "has a {}"}
    facts = [
        f"{row['name']} " + ", ".join(said[c].format(row[c]) for c in sorted(columns) if c != "name") for row in rows
    ]
    lines = [line for layout in layouts for line in _laid_out(layout, columns, rows)]
    ask = f"Write a {layouts[0]} and a {layouts[1]} of " + ", ".join(columns) + ": "
    return ask + ". ".join(facts) + ".", "\n".join(lines)


def schedule(rng: random.Random) -> tuple[str, str]:
    """Tasks of given lengths after one another; the table of when each starts and ends."""
    hour, tasks = rng.randrange(6, 15), []
    for verb in rng.sample(VERBS, 3):
        tasks.append((f"{verb} the {rng.choice(THINGS)}", rng.choice((10, 15, 20, 30, 40, 45)), rng.choice(NAMES)))
    minutes, lines = hour * 60, ["| start | end | task | who |", "| --- | --- | --- | --- |"]
    for task, length, who in tasks:
        end = minutes + length
        lines.append(f"| {minutes // 60}:{minutes % 60:02d} | {end // 60}:{end % 60:02d} | {task} | {who} |")
        minutes = end
    lines += [f"{who} will {task} for {length} minutes." for task, length, who in tasks]
    said = ", ".join(f"{who} will {task} for {length}" for task, length, who in tasks)
    return f"Plan from {hour}:00: {said}.", "\n".join(lines)


def _fields(rng: random.Random, count: int) -> list[tuple[str, str | int]]:
    """`count` different fields, each with a word or a number."""
    return [
        (key, rng.randrange(10, 1000) if rng.random() < 0.5 else rng.choice((*COLORS, *THINGS)))
        for key in rng.sample(FIELDS, count)
    ]


def _as_json(kind: str, fields: list[tuple[str, str | int]]) -> list[str]:
    body = [f'  "{key}": {json.dumps(value)}' for key, value in fields]
    return ["{", f'  "kind": "{kind}",', *(line + "," for line in body[:-1]), body[-1], "}"]


def _as_xml(kind: str, fields: list[tuple[str, str | int]]) -> list[str]:
    return [f"<{kind}>", *(f"  <{key}>{value}</{key}>" for key, value in fields), f"</{kind}>"]


def _as_ini(kind: str, fields: list[tuple[str, str | int]]) -> list[str]:
    return [f"[{kind}]", *(f"{key} = {value}" for key, value in fields)]


def _as_yaml(kind: str, fields: list[tuple[str, str | int]]) -> list[str]:
    return [f"{kind}:", *(f"  {key}: {value}" for key, value in fields)]


FORMATS: dict[str, Callable[[str, list[tuple[str, str | int]]], list[str]]] = {
    "json": _as_json,
    "xml": _as_xml,
    "ini": _as_ini,
    "yaml": _as_yaml,
}


def convert(rng: random.Random) -> tuple[str, str]:
    """One record, said in words, written in three formats."""
    kind, formats = rng.choice(THINGS), rng.sample(sorted(FORMATS), 3)
    fields = _fields(rng, 3)
    lines = []
    for name in formats:
        lines += [f"As {name}:", *FORMATS[name](kind, fields)]
    said = ", ".join(f"{key} {value}" for key, value in fields)
    return f"Write this {kind} as {formats[0]}, {formats[1]} and {formats[2]}: {said}.", "\n".join(lines)


def card(rng: random.Random) -> tuple[str, str]:
    """A person's card, then the same as a sentence."""
    name, family, city = rng.choice(NAMES), rng.choice(FAMILIES), rng.choice(CITIES)
    age, phone, color = rng.randrange(18, 80), rng.randrange(1000, 10000), rng.choice(COLORS)
    said = [f"city {city}", f"age {age}", f"phone {phone}", f"color {color}"]
    rng.shuffle(said)
    lines = [f"Card of {name} {family}"]
    lines += ["- " + f"{item.split()[0]}: {item.split()[1]}" for item in said]
    lines.append(f"- mail: {name.lower()}.{family.lower()}@{city.lower()}.org")
    lines.append(f"{name} {family} is {age}, lives in {city}, likes {color} and has the phone {phone}.")
    return f"Card for {name} {family}: " + ", ".join(said) + ".", "\n".join(lines)


def log(rng: random.Random) -> tuple[str, str]:
    """Log lines with a clock that goes on by a given number of seconds."""
    hour, minute, second = rng.randrange(10, 24), rng.randrange(10, 50), rng.randrange(10, 50)
    step, unit, owner = rng.randrange(2, 10), rng.choice(THINGS), rng.choice(NAMES).lower()
    verbs = rng.sample(VERBS, rng.choice((5, 6)))
    clock, lines = hour * 3600 + minute * 60 + second, []
    for verb in verbs:
        at = f"{clock // 3600}:{clock // 60 % 60:02d}:{clock % 60:02d}"
        lines.append(f"{at} {owner} {unit}: {verb} done")
        clock += step
    ask = f"Log of {owner} on {unit} from {hour}:{minute}:{second}, every {step} s: " + ", ".join(verbs) + "."
    return ask, "\n".join(lines)


def record_class(rng: random.Random) -> tuple[str, str]:
    """A class with the given fields, a getter and a setter."""
    name, fields = rng.choice(THINGS).title() + rng.choice(FIELDS).title(), rng.sample(FIELDS, rng.choice((3, 4)))
    (verb, other), shown, changed = rng.sample(VERBS, 2), rng.choice(fields), rng.choice(fields)
    lines = [f"class {name}:", f"    def __init__(self, {', '.join(fields)}):"]
    lines += [f"        self.{field} = {field}" for field in fields]
    lines += ["", f"    def {verb}_{shown}(self):", f"        return self.{shown}"]
    lines += ["", f"    def {other}_{changed}(self, {changed}):", f"        self.{changed} = {changed}"]
    ask = f"Class {name} with {', '.join(fields)}; {verb}_{shown} returns, {other}_{changed} changes."
    return ask, "\n".join(lines)


def function(rng: random.Random) -> tuple[str, str]:
    """A function over three fields, in steps, and two calls of it with their results."""
    verb, thing = rng.choice(VERBS), rng.choice(THINGS)
    a, b, c, result = rng.sample(FIELDS, 4)
    sign, word = rng.choice((("+", "plus"), ("-", "minus")))
    lines = [
        f"def {verb}_{thing}({a}, {b}, {c}):",
        f"    {result} = {a} * {b}",
        f"    {result} = {result} {sign} {c}",
        f"    return {result}",
    ]
    tries = [tuple(rng.randrange(2, 10) for _ in range(3)) for _ in range(2)]
    for x, y, z in tries:
        value = x * y + z if sign == "+" else x * y - z
        lines += ["", f"# {x} * {y} = {x * y}, {x * y} {sign} {z} = {value}"]
        lines += [f"assert {verb}_{thing}({x}, {y}, {z}) == {value}"]
    asked = " and ".join(f"{x}, {y}, {z}" for x, y, z in tries)
    return f"Function {verb}_{thing}: {result} is {a} times {b} {word} {c}. Try {asked}.", "\n".join(lines)


def query(rng: random.Random) -> tuple[str, str]:
    """A database table of the given columns, one row, a query, a change."""
    table, columns = rng.choice(THINGS) + "s", rng.sample(FIELDS, rng.choice((3, 4)))
    kinds = [rng.choice(("int", "text")) for _ in columns]
    values = [str(rng.randrange(10, 1000)) if k == "int" else f"'{rng.choice(COLORS)}'" for k in kinds]
    lines = [f"create table {table} ("]
    lines += [f"  {c} {k}," for c, k in zip(columns[:-1], kinds[:-1], strict=True)]
    lines += [f"  {columns[-1]} {kinds[-1]}", ");", f"insert into {table} ({', '.join(columns)})"]
    lines += [f"  values ({', '.join(values)});"]
    lines += [f"select {columns[0]} from {table} where {columns[-1]} = {values[-1]};"]
    lines += [f"update {table} set {columns[1]} = {values[1]} where {columns[0]} = {values[0]};"]
    said = ", ".join(f"{c} {k} {v}" for c, k, v in zip(columns, kinds, values, strict=True))
    return f"SQL table {table}: {said}.", "\n".join(lines)


SOURCES: dict[str, tuple[Callable[[random.Random], tuple[str, str]], ...]] = {
    "arithmetic": (addition, multiplication, story, series),
    "tables": (bill, people, schedule),
    "records": (convert, card, log),
    "code": (record_class, function, query),
}


def example(split: str, source: str, number: int) -> tuple[str, str]:
    """The prompt and its right answer; the same for the same three arguments, everywhere."""
    rng = random.Random(f"demo/{split}/{source}/{number}")
    kinds = SOURCES[source]
    return kinds[number % len(kinds)](rng)


def prompts(split: str, source: str, taken: set[str]) -> Iterator[tuple[str, str, str]]:
    """The split's examples as (id, prompt, answer), none of them in `taken`, to which they are added."""
    number = count = 0
    while count < PROMPTS_PER_SOURCE[split]:
        prompt, answer = example(split, source, number)
        if prompt not in taken:
            taken.add(prompt)
            count += 1
            yield f"{source}-{split}-{number:04d}", prompt, answer
        number += 1


def demo_prompts() -> dict[str, list[tuple[str, str, str]]]:
    """{"eval": [...], "arithmetic": [...], ...}: the held-out prompts of all sources, then each source's own."""
    taken: set[str] = set()
    out = {"eval": [row for source in SOURCES for row in prompts("eval", source, taken)]}
    return out | {source: list(prompts("train", source, taken)) for source in SOURCES}


def main() -> None:
    """Write the prompt files beside this script."""
    here = Path(__file__).parent
    (here / "prompts").mkdir(exist_ok=True)
    for name, rows in demo_prompts().items():
        path = here / "eval.jsonl" if name == "eval" else here / "prompts" / f"{name}.jsonl"
        lines = [json.dumps({"id": ident, "prompt": prompt}) for ident, prompt, _ in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
