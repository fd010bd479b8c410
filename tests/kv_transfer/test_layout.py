from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest

from kv_transfer.layout import KVLayout
from kv_transfer.wire import WireError
from tandem.errors import LayoutMismatch


def with_pages(layout: KVLayout, page_tokens: int) -> KVLayout:
    groups = tuple(replace(group, page_tokens=page_tokens) for group in layout.groups)
    return replace(layout, groups=groups)


def test_layout_survives_the_wire(mha_layout: KVLayout) -> None:
    assert KVLayout.from_wire(mha_layout.to_wire()) == mha_layout
    mha_layout.check_compatible(mha_layout)


def test_digest_names_the_content(mha_layout: KVLayout) -> None:
    assert mha_layout.digest() == KVLayout.from_wire(mha_layout.to_wire()).digest()
    assert mha_layout.digest() != replace(mha_layout, rope="other").digest()


@pytest.mark.parametrize(("ours", "theirs"), [(16, 16), (16, 128), (128, 16), (1, 7)])
def test_pages_that_divide_each_other_are_compatible(
    mha_layout: KVLayout, ours: int, theirs: int
) -> None:
    first, second = with_pages(mha_layout, ours), with_pages(mha_layout, theirs)
    first.check_compatible(second)
    assert first.digest() == second.digest()


@pytest.mark.parametrize(("ours", "theirs"), [(16, 24), (24, 16), (2, 3)])
def test_pages_that_do_not_divide_are_named(mha_layout: KVLayout, ours: int, theirs: int) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        with_pages(mha_layout, ours).check_compatible(with_pages(mha_layout, theirs))
    assert (caught.value.field, caught.value.ours, caught.value.theirs) == (
        "k.page_tokens",
        str(ours),
        str(theirs),
    )


def test_first_differing_field_is_named_with_both_values(mha_layout: KVLayout) -> None:
    theirs = replace(mha_layout, weights_digest="x", rope="y")
    with pytest.raises(LayoutMismatch) as caught:
        mha_layout.check_compatible(theirs)
    assert (caught.value.field, caught.value.ours, caught.value.theirs) == (
        "weights_digest",
        "w",
        "x",
    )


def test_missing_group_is_named(mha_layout: KVLayout) -> None:
    theirs = replace(mha_layout, groups=mha_layout.groups[:1])
    with pytest.raises(LayoutMismatch) as caught:
        mha_layout.check_compatible(theirs)
    assert (caught.value.field, caught.value.ours, caught.value.theirs) == ("groups", "k,v", "k")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("groups", []),
        ("groups", [["k", 1, 16, [2]]]),
        ("groups", [["k", 1, 16, [2], "float32"], ["v", 1, 32, [2], "float32"]]),
        ("groups", [["k", 1, 16, [2], "float32"], []]),
        ("groups", [["k", 0, 16, [2], "float32"]]),
        ("groups", [["k", 1, True, [2], "float32"]]),
        ("groups", [["k", 1, 16, [2] * 9, "float32"]]),
        ("groups", [["k", 1, 16, [2], "float128"]]),
        ("groups", [["k", 1, 16, [2], []]]),
        ("groups", [["", 1, 16, [2], "float32"]]),
        ("groups", [["k", 1, 16, [2], "float32"]] * 17),
        ("model", 3),
        ("protocol_version", -1),
    ],
)
def test_bad_layouts_are_refused(mha_layout: KVLayout, field: str, value: Any) -> None:
    fields = msgpack.unpackb(mha_layout.to_wire())
    with pytest.raises(WireError):
        KVLayout.from_wire(msgpack.packb({**fields, field: value}))
