from __future__ import annotations

import pytest

from shard_ckpt import Naming


def test_the_example_of_the_docstring() -> None:
    naming = Naming(prefix="module.", strip=("_orig_mod",), rename={"head.bias": "lm_head.bias"})
    names = ["module.layers.0._orig_mod.weight", "module.head.bias", "bias"]
    assert naming.table(names, what="the model") == {
        "module.layers.0._orig_mod.weight": "layers.0.weight",
        "module.head.bias": "lm_head.bias",
        "bias": "bias",
    }


def test_a_dot_after_a_component_makes_no_difference() -> None:
    assert Naming(strip=("_orig_mod.",)).table(["_orig_mod.w"], what="m") == {"_orig_mod.w": "w"}


def test_rename_may_be_a_function() -> None:
    assert Naming(rename=str.upper).table(["a.b"], what="m") == {"a.b": "A.B"}


def test_two_names_must_not_become_one() -> None:
    with pytest.raises(ValueError, match=r"a\.w and a\.x\.w would both be called 'a\.w'"):
        Naming(strip=("x",)).table(["a.w", "a.x.w"], what="the model")


def test_what_is_declared_must_be_there() -> None:
    with pytest.raises(ValueError, match=r"rename: the model has no 'b'"):
        Naming(rename={"b": "c"}).table(["a"], what="the model")
    with pytest.raises(ValueError, match=r"ties: the model has no 'b'"):
        Naming(ties={"b": "a"}).table(["a"], what="the model")


def test_ties_do_not_form_chains() -> None:
    with pytest.raises(ValueError, match=r"a is tied to b, which is tied to c"):
        Naming(ties={"a": "b", "b": "c"})


def test_strip_is_no_single_string() -> None:
    with pytest.raises(TypeError, match="expected a tuple of components, got '_orig_mod'"):
        Naming(strip="_orig_mod")  # type: ignore[arg-type]


def test_a_name_needs_something_left() -> None:
    with pytest.raises(ValueError, match="the model: _orig_mod cannot be called ''"):
        Naming(strip=("_orig_mod",)).table(["_orig_mod"], what="the model")
    with pytest.raises(ValueError, match="the model: a cannot be called '__metadata__'"):
        Naming(rename={"a": "__metadata__"}).table(["a"], what="the model")
