"""The numbers of a report, against NumPy in float64, and how they are shown."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.model import Rule, default_rules, quantize_model, report
from eformer.ops.quantization import quantize

RULES = [Rule("w", "nf4", {"block_size": 4, "axis": -1})]


def normal(*shape: int, dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def one(before: Any, after: Any) -> Any:
    (leaf,) = report({"w": before}, {"w": after}).leaves
    return leaf


@pytest.fixture(scope="module")
def small():
    """Two quantized leaves, one of them a stack, and what is kept."""
    tree = {
        "a.w": normal(6, 10),
        "stack.w": normal(3, 6, 10, seed=1),
        "bias": normal(10),
        "count": jnp.arange(3),
        "f": len,
    }
    return tree, quantize_model(tree, RULES)


@pytest.mark.parametrize(
    ("shape", "dtype", "magnitude"),
    [
        ((6, 10), jnp.float32, 1.0),
        ((6, 10), jnp.bfloat16, 1.0),
        ((3, 70, 70), jnp.float32, 1.0),  # more than one row of sums; a stack
        ((6, 10), jnp.float32, 1e-28),  # squares underflow
        ((6, 10), jnp.float32, 1e37),  # squares overflow
    ],
    ids=str,
)
def test_errors_are_those_of_float64(shape, dtype, magnitude):
    before = (normal(*shape) * magnitude).astype(dtype)
    after = quantize(before, dtype="int8")
    x, y = (np.asarray(a, np.float64) for a in (before, after.materialize()))
    error = np.linalg.norm(y - x) / np.linalg.norm(x)
    leaf = one(before, after)
    # Each product and each of 4096 sums rounds in float32, by half an epsilon at most; the root halves that.
    bound = 4096 * float(jnp.finfo(jnp.float32).eps) / 4
    assert leaf.error == pytest.approx(error, rel=bound)
    assert leaf.snr == pytest.approx(-20 * math.log10(error), abs=20 * math.log10(1 + bound))
    assert leaf.cosine == pytest.approx(np.sum(x * y) / np.linalg.norm(x) / np.linalg.norm(y), rel=2 * bound)
    assert leaf.distance.max_error == np.max(np.abs(y - x))


def test_large_numbers_of_two_signs_do_not_overflow():
    leaf = one(jnp.full((6, 10), 3e38), jnp.full((6, 10), -3e38))
    assert leaf.error == pytest.approx(2.0)
    assert leaf.distance.max_error == pytest.approx(6e38)
    assert leaf.cosine == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (jnp.zeros((6, 10)), jnp.zeros((6, 10)), (0.0, math.inf, 1.0)),
        (jnp.zeros((0, 10)), jnp.zeros((0, 10)), (0.0, math.inf, 1.0)),
        (jnp.ones((6, 10)), jnp.ones((6, 10)), (0.0, math.inf, 1.0)),
        (jnp.ones(()), jnp.zeros(()), (1.0, 0.0, math.nan)),
        (jnp.zeros((6, 10)), jnp.ones((6, 10)), (math.inf, -math.inf, math.nan)),
        (jnp.arange(3), jnp.arange(3), (None, None, None)),
    ],
    ids=["zeros", "empty", "equal", "lost", "from-nothing", "integers"],
)
def test_corners(before, after, expected):
    leaf = one(before, after)
    np.testing.assert_equal((leaf.error, leaf.snr, leaf.cosine), expected)


@pytest.mark.filterwarnings("ignore::eformer.model.NonfiniteWarning")
def test_nan_is_counted_and_left_out():
    w = normal(6, 10).at[0, 0].set(jnp.nan).at[1, 0].set(jnp.inf)
    found = report({"w": w}, quantize_model({"w": w}, RULES))
    (leaf,) = found.leaves
    assert (leaf.distance.nonfinite_before, leaf.distance.nonfinite_after) == (2, 8)  # a block of 4 each
    assert 0 < leaf.error < 0.152 * 2  # the widest half step, times the root of the block's size
    assert found.nonfinite == (leaf,)
    assert "2 -> 8" in found.table()


def test_a_kept_leaf_shows_its_nan_too():
    b = jnp.array([1.0, jnp.nan])
    found = report({"b": b}, {"b": b})
    assert (found.leaves[0].error, found.leaves[0].distance.nonfinite_after) == (0.0, 1)
    assert [leaf.path for leaf in found.nonfinite] == ["b"]


def test_bytes_are_those_of_the_stored_arrays(small):
    before, after = small
    found = report(before, after)
    arrays = [leaf for leaf in jax.tree.leaves(after) if isinstance(leaf, jax.Array)]
    assert found.bytes_after == sum(array.nbytes for array in arrays)
    assert found.bytes_before == sum(leaf.nbytes for leaf in before.values() if isinstance(leaf, jax.Array))
    assert found.size == 60 + 180 + 10 + 3
    assert found.bits == 8 * found.bytes_after / found.size
    # Half a byte a weight and a float32 for each block of 4; a row of 10 has three blocks.
    assert found.leaves[0].bits == 8 * (6 * 5 + 6 * 3 * 4) / 60


def test_the_total_is_of_the_quantized_leaves(small):
    before, after = small
    pairs = [(before[name], after[name].materialize()) for name in ("a.w", "stack.w")]
    x, y = (np.concatenate([np.ravel(pair[i]) for pair in pairs]).astype(np.float64) for i in (0, 1))
    found = report(before, after)
    assert [leaf.path for leaf in found.quantized] == ["a.w", "stack.w"]
    assert found.distance is not None
    assert found.distance.relative_error == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-6)
    assert found.worst == max(found.quantized, key=lambda leaf: leaf.error)


def test_shared_arrays_count_once():
    w = normal(6, 10)
    before = {"w1": w, "w2": w}
    found = report(before, quantize_model(before, RULES))
    assert [leaf.shared for leaf in found.leaves] == [False, True]
    assert (found.bytes_before, found.bytes_after) == (240, found.leaves[0].bytes_after)
    assert "shared" in found.table()


@pytest.mark.parametrize("how", ["freed", "abstract"])
def test_without_the_values_before_there_are_sizes(how):
    tree = {"w": normal(6, 10)}
    after = quantize_model(tree, RULES, donate=how == "freed")
    found = report(jax.eval_shape(lambda: tree) if how == "abstract" else tree, after)
    assert (found.bytes_before, found.bytes_after) == (240, after["w"].nbytes)
    assert (found.leaves[0].error, found.distance, found.worst, found.histogram) == (None, None, None, None)
    assert re.search(r"w +6x10 +nf4 +240 B +102 B +13.60 +\? +\? +\?", found.table())
    assert json.loads(found.to_json())["leaves"][0]["error"] is None


def test_a_leaf_of_two_quantized_forms():
    before, after = quantize(normal(6, 10), dtype="int8"), quantize(normal(6, 10), dtype="nf4")
    assert one(before, after).error == one(before.materialize(), after).error
    assert not one(before, before).quantized


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ({"v": 1}, r"same leaves, but 1 before and 1 after differ in 'v', 'w'"),
        ({"w": jnp.ones((3, 2))}, r"'w' was \[2, 3\] and is \[3, 2\]: that is another array"),
    ],
    ids=["paths", "shapes"],
)
def test_trees_that_do_not_belong_together(after, message):
    with pytest.raises(ValueError, match=message):
        report({"w": jnp.ones((2, 3))}, after)


def test_an_empty_model():
    found = report({}, {})
    assert (found.bytes_before, found.size, found.worst, found.distance) == (0, 0, None, None)
    assert "0 arrays" in str(found)


# --- how it is shown ---


def test_table(small):
    lines = report(*small).table().splitlines()
    assert [line.split()[0] for line in lines[2:-2]] == ["a.w", "bias", "count", "stack.w"]
    assert len({len(line) for line in (lines[0], lines[1], lines[-1])}) == 1
    assert re.fullmatch(r"bias +10 +float32 +40 B +40 B +32.00", lines[3])
    assert re.fullmatch(r"4 arrays +1.01 kB +460 B +14.55 +\d\.\d\d% +\d\d\.\d +0\.9\d{4}", lines[-1])


@pytest.mark.parametrize("sort", ["error", "bytes_before", "bytes_after"])
def test_sorted_table(small, sort):
    found = report(*small)
    paths = [line.split()[0] for line in found.table(sort).splitlines()[2:-2]]
    values = {
        leaf.path: (leaf.error if leaf.quantized else -1) if sort == "error" else getattr(leaf, sort)
        for leaf in found.leaves
    }
    assert [values[path] for path in paths] == sorted(values.values(), reverse=True)


def test_a_sort_that_is_not_there(small):
    with pytest.raises(ValueError, match="`sort='size'` must be None or one of 'error', 'bytes_before', 'bytes_after'"):
        report(*small).table("size")


def test_json(small):
    found = report(*small)
    read = json.loads(found.to_json(), parse_constant=pytest.fail)
    assert read["total"]["bytes_after"] == found.bytes_after
    assert read["total"]["error"] == found.distance.relative_error
    assert [leaf["path"] for leaf in read["leaves"]] == ["a.w", "bias", "count", "stack.w"]
    assert read["leaves"][0]["snr_db"] == found.leaves[0].snr
    assert read["leaves"][1]["snr_db"] is None  # exact, so infinite
    assert read["leaves"][3]["shape"] == [3, 6, 10]


def test_unused_rules_are_listed(small):
    before, after = small
    found = report(before, after, rules=[*RULES, Rule("wv", "int8"), *default_rules()])
    assert found.unused_rules == ("wv=int8",)
    assert "matched nothing: wv=int8" in found.table()
    assert json.loads(found.to_json())["unused_rules"] == ["wv=int8"]


def test_histogram(small):
    before, after = small
    found = report(before, after, histogram="stack.w").histogram
    assert found.path == "stack.w"
    expected = [np.histogram(x, np.array(found.edges))[0] for x in (before["stack.w"], after["stack.w"].materialize())]
    assert [list(found.before), list(found.after)] == [counts.tolist() for counts in expected]
    assert sum(found.before) == sum(found.after) == 180


@pytest.mark.parametrize(
    ("values", "counted"),
    [([2.0, 2.0], 2), ([jnp.nan, 1.0], 1), ([jnp.nan, jnp.inf], None), ([], None)],
    ids=str,
)
def test_histograms_of_little(values, counted):
    x = jnp.array(values, jnp.float32)
    found = report({"x": x}, {"x": x}, histogram="x").histogram
    assert (None if found is None else sum(found.before)) == counted


def test_an_outlier_is_beyond_the_histogram():
    x = normal(6, 10).at[0, 0].set(1e4)
    found = report({"x": x}, {"x": x}, histogram="x").histogram
    assert found.beyond == (1, 1)
    assert sum(found.before) == 59
    assert found.edges[0] == np.min(x)
    assert found.edges[-1] < 1e4


def test_the_histogram_is_of_the_worst_leaf_by_default(small):
    found = report(*small)
    assert found.histogram.path == found.worst.path


def test_a_histogram_of_a_leaf_that_is_not_there(small):
    with pytest.raises(ValueError, match=r"there is no leaf 'v' to count the values of; there are 'a.w', 'bias'"):
        report(*small, histogram="v")


def test_a_page_replaces_a_file_only_if_asked(tmp_path):
    found, path = report({"w": jnp.ones(3)}, {"w": jnp.ones(3)}), tmp_path / "page.html"
    path.write_text("mine")
    with pytest.raises(FileExistsError, match="`overwrite=True` replaces it"):
        found.to_html(path)
    assert path.read_text() == "mine"
    assert found.to_html(path, overwrite=True).read_text() != "mine"
