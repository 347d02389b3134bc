from hypothesis import given
from hypothesis import strategies as st

from score_centering.settings.dotted import by_dotted_key, differing

KEYS = st.sampled_from(["a", "b", "c"])
LEAVES = st.integers() | st.none() | st.text() | st.lists(st.integers())
TREES = st.dictionaries(KEYS, st.recursive(LEAVES, lambda inner: st.dictionaries(KEYS, inner)), max_size=3)


def test_leaves_by_hand():
    tree = {"trainer": {"optim": {"lr": 0.1}, "logger": ["console"], "extra": {}}, "seed": None}
    assert by_dotted_key(tree) == {
        "trainer.optim.lr": 0.1,
        "trainer.logger": ["console"],
        "trainer.extra": {},
        "seed": None,
    }
    assert by_dotted_key({}) == {}


def test_differences_by_hand():
    one, two, three = {"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": None}, {"a": {"b": 1, "c": 2}}
    assert differing([one, two, three]) == {"a.c": [2, 3, 2]}  # d is null or missing everywhere
    assert differing([one, two], absent="-") == {"a.c": [2, 3], "d": ["-", None]}
    assert differing([{"a": {"b": 1}}, {"a": None}]) == {"a.b": [1, None]}
    assert differing([]) == differing([one]) == differing([one, one]) == {}


@given(TREES, TREES)
def test_differences_are_those_that_a_walk_finds(one, two):
    def leaf(tree, name):
        for key in name.split("."):
            tree = tree.get(key, "-") if isinstance(tree, dict) else "-"
        return tree

    found = differing([one, two], absent="-")
    for name, (here, there) in found.items():
        assert here in (leaf(one, name), "-") and there in (leaf(two, name), "-") and here != there
    assert bool(found) == (one != two)
