"""What a notebook shows of a report and of an array: HTML that is safe, short and cheap."""

from __future__ import annotations

import dataclasses
import html.parser

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from quantization.cases import CLASSES

import eformer
from eformer.jaximus import materialization_error
from eformer.model import Leaf, Report, quantize_model, report
from eformer.ops.quantization import quantize

VOID = {"br"}


class Checked(html.parser.HTMLParser):
    """Collects the text; tags must be closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.text = [], ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        del attrs
        assert tag not in ("script", "style", "img")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


# --- reports ---


def test_a_report_shows_the_table():
    before = {"kernel": jnp.ones((256, 512)), "bias": jnp.zeros(512)}
    text = Checked(report(before, quantize_model(before))._repr_html_()).text
    assert "1 of 2 arrays quantized to int4" in text
    assert "75.8 kB" in text
    assert text.index("kernel") < text.index("bias")  # the largest error first


def test_names_in_a_report_are_escaped():
    name = "<img src=x onerror=alert(1)>"
    found = Checked(report({name: jnp.ones(3)}, {name: jnp.ones(3)})._repr_html_())
    assert name in found.text


def test_a_long_report_is_cut():
    leaf = Leaf("w", (2,), "float32", "float32", False, False, 8, 8, None)
    found = Checked(Report(tuple(dataclasses.replace(leaf, path=f"w{i}") for i in range(60)))._repr_html_())
    assert "w49" in found.text
    assert "w50" not in found.text
    assert "and 10 arrays more" in found.text


# --- arrays ---


@pytest.mark.parametrize("form", CLASSES)
def test_an_array_shows_what_it_is(form):
    q = quantize(jnp.linspace(-1, 1, 64 * 64).reshape(64, 64), dtype=form)
    found = Checked(q._repr_html_())
    for part in (type(q).__name__, "64x64", "float32", form, f"{8 * q.nbytes / q.size:.2f} bits", "dense 16.4 kB"):
        assert part in found.text
    values = q.materialize()
    assert f"{values.min():.3g} to {values.max():.3g}" in found.text


def shown(q) -> str:
    return Checked(q._repr_html_()).text


def test_a_large_array_is_not_made_dense():
    q = quantize(jnp.ones((512, 512)), dtype="int8")
    with materialization_error():
        page = q._repr_html_()
    assert "svg" not in page
    assert "512x512" in page


def test_a_small_array_is_decoded_unobserved():
    q = quantize(jnp.ones((8, 8)), dtype="int8")
    with materialization_error():
        assert "svg" in q._repr_html_()


def test_tracers_and_abstract_arrays_show_no_values():
    pages: list[str] = []
    made = jax.eval_shape(lambda x: quantize(x, dtype="nf4"), jax.ShapeDtypeStruct((64, 64), jnp.float32))
    pages.append(made._repr_html_())
    jax.jit(lambda q: pages.append(q._repr_html_()))(quantize(jnp.ones((64, 64)), dtype="nf4"))
    assert all("64x64" in page and "svg" not in page for page in pages)


def test_an_array_that_was_freed_shows_no_values():
    q = quantize(jnp.ones((8, 8)), dtype="int8")
    jax.tree.map(lambda leaf: leaf.delete(), q)
    page = q._repr_html_()
    assert "8x8" in page
    assert "svg" not in page


def test_leaves_that_are_no_arrays():
    q = jax.tree.map(lambda _: "<b>", quantize(jnp.ones((8, 8)), dtype="nf4"))
    assert "ArrayNF4(" in shown(q)


def test_the_sharding_is_shown():
    mesh = Mesh(jax.devices()[:2], ("<x>",))
    q = quantize(jnp.ones((64, 64)), dtype="int8").with_sharding(NamedSharding(mesh, PartitionSpec("<x>", None)))
    assert "'<x>'" in shown(q)


@pytest.mark.parametrize(
    "w", [jnp.zeros((0, 4)), jnp.full((2, 4), jnp.nan), jnp.float32(2.0)], ids=["empty", "nan", "scalar"]
)
def test_odd_arrays(w):
    assert "Array8B" in shown(eformer.quantize(w, dtype="int8", axis=() if not w.ndim else -1))
