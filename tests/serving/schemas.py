"""Random JSON schemas, reproducible from a seed: nested objects and arrays, unions, enumerations, bounds."""

import random
from typing import Any

WORDS = ("a", "id", "name", "tags", "größe", "x y", 'q"t', "back\\slash", "n1")
VALUES = (0, -3, 1.5, True, False, None, "red", "two words", "é", "", [1, 2], {"k": "v"})
PATTERNS = ("^[a-z]{1,6}$", "^[0-9]{2}-[0-9]{2}$", "^(on|off)$", "^A+B$")


def random_schema(seed: int) -> dict[str, Any]:
    """One in ten allows white space between tokens, of which a model with random weights writes much."""
    rng = random.Random(seed)
    schema = _object(rng, 3) if rng.random() < 0.6 else _any(rng, 3)
    return schema if rng.random() < 0.1 else schema | {"x-guidance": {"whitespace_flexible": False}}


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves = (_integer, _number, _string, _enumeration, _constant, _simple)
    kinds = leaves if depth == 0 else (*leaves, _object, _object, _array, _union)
    return rng.choice(kinds)(rng, depth)


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    bound = rng.choice(["maximum", "exclusiveMaximum"])
    schema = {"type": "number", "minimum": rng.choice([0, -1.5, 10]), bound: rng.choice([10.5, 100])}
    return schema if rng.random() < 0.2 else schema | {"multipleOf": 0.25}  # otherwise with any number of digits


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"type": "string", "pattern": rng.choice(PATTERNS[:3])}
    low = rng.randint(0, 4)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 6)}


def _enumeration(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(VALUES, rng.randint(1, 5))}


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice(VALUES)}


def _simple(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 4))
    required = [name for name in names if rng.random() < 0.7]
    properties = {name: _any(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
