"""Is an answer equivalent to the gold answer? Structures are compared item by item, values by `rules`.

Runs in worker processes only: nothing here has a deadline.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

from score_centering.reward.expressions import differ, equivalent, expression, is_about, rounds_to, same_relation
from score_centering.reward.literals import literals_equal
from score_centering.reward.reading import Answer, Group, Value, Word, has_letters, is_variable, read, squeeze
from score_centering.reward.rules import EXPRESSIONS, WRITTEN
from score_centering.reward.spelling import one_spelling

MAX_CHARS = 1000
MAX_DEPTH = 20


class UnparsableGoldError(ValueError):
    """The gold answer is no math that an answer could be compared with."""


def judge(answer: str, gold: str) -> bool:
    """Whether `answer`, the content of a box, is equivalent to `gold`. Raises `UnparsableGoldError`."""
    return refusal(answer, gold) is None


def refusal(answer: str, gold: str) -> str | None:
    """The kind of the rule that refuses `answer`, or None where it is right. Raises `UnparsableGoldError`."""
    answer, gold = one_spelling(answer), one_spelling(gold)
    equal = literals_equal(answer, gold)
    if equal is not None and equal:
        return None
    target = _gold(gold)
    if not _readable(answer):
        return "unread"
    found = read(answer)
    if isinstance(found.body, Group) and found.body.kind == "list" and isinstance(target.body, Value):
        target = _ungrouped(target, gold)
    elif isinstance(target.body, Group) and target.body.kind == "list" and isinstance(found.body, Value):
        found = _ungrouped(found, answer)
    return _answers(found, target)


def is_gold(text: str) -> bool:
    """Whether `text` can be a gold answer."""
    try:
        _gold(one_spelling(text))
    except UnparsableGoldError:
        return False
    return True


def _readable(text: str) -> bool:
    """Whether `text` is short, flat and printable enough to be worth reading; real answers are, by a wide margin."""
    return 0 < len(text) <= MAX_CHARS and text.isprintable() and _depth(text) <= MAX_DEPTH


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


@functools.lru_cache(maxsize=256)
def _gold(text: str) -> Answer:
    if literals_equal(text, text):
        return read(text)
    answer = read(text) if _readable(text) else None
    if answer is None or not _is_math(answer):
        raise UnparsableGoldError(f"gold answer {text[:80]!r} is no math that an answer could be compared with")
    return answer


def _is_math(answer: Answer) -> bool:
    """Whether every value of it can be read."""
    if answer.is_equation:
        return expression(answer.text) is not None
    body = answer.body
    if isinstance(body, Group):
        return all(map(_is_math, body.items))
    if isinstance(body, Word) or body.is_clock or body.number is not None:
        return True
    return not body.is_apart and expression(body.text) is not None


def _ungrouped(answer: Answer, text: str) -> Answer:
    """A number with thousands separators as the list that it may be as well: 10,100."""
    return read(text.replace(",", ", ")) if literals_equal(text, text) else answer


def _answers(answer: Answer, gold: Answer) -> str | None:
    other_name = bool(answer.names and gold.names) and not set(answer.names) & set(gold.names)
    if gold.is_equation or (_is_function(gold) and (answer.is_equation or (other_name and _is_function(answer)))):
        return _relations(answer, gold)
    if other_name:
        return "name"
    if not all(_same(side.body, answer.body) for side in answer.earlier):
        return "equation"
    if answer.about is not None and not _is_about(answer.about.body, answer.body):
        return "equation"
    return _bodies(answer.body, gold.body)


def _is_about(rounded: Word | Value | Group, body: Word | Value | Group) -> bool:
    if not (isinstance(rounded, Value) and isinstance(body, Value) and rounded.number):
        return False
    found = expression(body.text)
    if rounded.unit and rounded.unit != body.unit:
        return False
    return found is not None and is_about(rounded.number, found)


def _is_function(answer: Answer) -> bool:
    """Whether it gives one variable by others: y = 2x + 1, which is an equation in another form too."""
    if len(answer.names) != 1 or not is_variable(answer.names[0]) or answer.earlier:
        return False
    return isinstance(answer.body, Value) and has_letters(answer.body.text)


def _relations(answer: Answer, gold: Answer) -> str | None:
    if not (answer.earlier or answer.names):
        return "equation"
    if squeeze(answer.text) == squeeze(gold.text):
        return None
    if len(answer.names) + len(answer.earlier) > 1 or not isinstance(answer.body, Value):
        return "equation"
    first, second = expression(answer.text), expression(gold.text)
    return None if first is not None and second is not None and same_relation(first, second) else "different"


def _same(first: Word | Value | Group, second: Word | Value | Group) -> bool:
    """Whether two sides of one answer are equal, in whatever form."""
    if isinstance(first, Value) and isinstance(second, Value):
        one, other = expression(first.text), expression(second.text)
        return one is not None and other is not None and equivalent(one, other) and not differ(one, other)
    return _bodies(first, second) is None


def _bodies(answer: Word | Value | Group, gold: Word | Value | Group) -> str | None:
    if isinstance(answer, Word) or isinstance(gold, Word):
        return None if answer == gold else "word"
    if isinstance(answer, Value) and isinstance(gold, Value):
        return _values(answer, gold)
    if isinstance(answer, Group) and isinstance(gold, Group):
        return _groups(answer, gold)
    return _quotient(answer, gold)


def _quotient(answer: Value | Group, gold: Value | Group) -> str | None:
    """A ratio of two numbers against a number."""
    first, second = (_fraction(body) if isinstance(body, Group) else body for body in (answer, gold))
    return "count" if first is None or second is None else _values(first, second)


def _fraction(group: Group) -> Value | None:
    if group.kind != "ratio" or len(group.items) != 2:
        return None
    parts = [item.body for item in group.items]
    if not all(isinstance(part, Value) and part.number is not None for part in parts):
        return None
    return read(rf"\frac{{{parts[0].text}}}{{{parts[1].text}}}").body


_UNORDERED = ("list", "set")


def _groups(answer: Group, gold: Group) -> str | None:
    if (answer.kind in _UNORDERED and gold.kind in _UNORDERED) or answer.kind == gold.kind == "union":
        return _matched(answer.items, gold.items)
    if {answer.kind, gold.kind} == {"list", "tuple"}:
        answer, gold = (_by_name(group) if group.kind == "list" else group for group in (answer, gold))
    if answer.kind != gold.kind or (answer.kind == "tuple" and answer.shape != gold.shape):
        return "brackets"
    if len(answer.items) != len(gold.items) or answer.shape != gold.shape:
        return "count"
    if answer.kind == "ratio":
        answer, gold = _over_first(answer), _over_first(gold)
    kinds = [_answers(*pair) for pair in zip(answer.items, gold.items, strict=True)]
    kind = next(filter(None, kinds), None)
    return "order" if kind is not None and _matched(answer.items, gold.items) is None else kind


def _matched(answer: Sequence[Answer], gold: Sequence[Answer]) -> str | None:
    """Every gold item needs an item of its own; equality is transitive, so the first that fits will do."""
    if len(answer) != len(gold):
        return "count"
    left, kind = list(answer), None
    for target in gold:
        kinds = []
        for index, item in enumerate(left):
            kinds.append(_answers(item, target))
            if kinds[-1] is None:
                del left[index]
                break
        else:
            kind = kinds[0] if len(kinds) == 1 else "different"
            break
    return kind


def _by_name(group: Group) -> Group:
    """A list as a tuple: assignments by the order of their names; without names, where it can't be an interval."""
    names = [item.names[-1] if item.names else "" for item in group.items]
    if all(names) and len(set(names)) == len(names):
        ordered = sorted(zip(names, group.items, strict=True), key=lambda pair: pair[0])
        return Group("tuple", tuple(replace(item, names=()) for _, item in ordered), "()")
    return Group("tuple", group.items, "()") if len(group.items) > 2 and not any(names) else group


def _over_first(ratio: Group) -> Group:
    """Parts of a ratio of numbers over the first of them."""
    numbers = [item.body.number for item in ratio.items if isinstance(item.body, Value) and item.body.number]
    if len(numbers) < len(ratio.items) or not all(number.value for number in numbers):
        return ratio
    return replace(ratio, items=tuple(read(str(number.value / numbers[0].value)) for number in numbers))


def _values(answer: Value, gold: Value) -> str | None:
    for rule in WRITTEN:
        if rule.applies(answer, gold):
            return rule.kind
    if answer.text == gold.text or (answer.number and gold.number):
        return None
    first, second = expression(answer.text), expression(gold.text)
    if answer.number is not None and second is not None:
        return None if rounds_to(answer.number, second) else "number"
    if first is None or second is None:
        return "unread"
    if not equivalent(first, second):
        return "different"
    return next((rule.kind for rule in EXPRESSIONS if rule.applies(answer, gold)), None)
