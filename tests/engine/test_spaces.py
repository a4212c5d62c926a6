"""Models come and go in one server: none is kept alive by what is known of it; one that comes back is known again."""

from __future__ import annotations

import gc
import shutil
import weakref
from types import SimpleNamespace

import pytest
from mlx_lm import load

from kvstore import Store
from kvstore_mlx.boundaries import Saving
from kvstore_mlx.spaces import Settings, Spaces
from kvstore_mlx.tier import TieredPromptCache
from kvstore_mlx.versions import check_versions


@pytest.fixture
def provider():
    return SimpleNamespace(model=None, draft_model=None)


@pytest.fixture
def spaces(tmp_path, provider):
    with Store.open(tmp_path / "cache") as store:
        yield Spaces(store, provider, Settings(check_versions()))


@pytest.mark.parametrize("drafted", [False, True])
def test_a_model_that_was_swapped_out_is_gone(spaces, provider, tiny_llama, drafted):
    provider.model, _ = load(str(tiny_llama))
    if drafted:
        provider.draft_model, _ = load(str(tiny_llama))
    key = (str(tiny_llama), None, str(tiny_llama) if drafted else None)
    space = spaces.of(key)
    assert len(space.forms[0].plan.make()) == (6 if drafted else 3)
    seen = [weakref.ref(provider.model)] + ([weakref.ref(provider.draft_model)] if drafted else [])
    provider.model = provider.draft_model = None
    gc.collect()
    assert [each() for each in seen] == [None] * len(seen)
    with pytest.raises(ValueError, match="not loaded any more"):
        space.forms[0].plan.make()


def forms(*troubles: str) -> SimpleNamespace:
    return SimpleNamespace(forms=[SimpleNamespace(trouble=trouble) for trouble in troubles])


@pytest.mark.parametrize(
    "keys",
    [
        {("org1/x", None, None): "org1/x", ("org2/x", None, None): "org2/x", ("org1/y", None, None): "y"},
        {("x", None, None): "x", ("/a/x", None, None): "/a/x", ("/b/a/x", None, None): "b/a/x"},
        {
            ("o/x", None, None): "x",
            ("o/x", "/l/one", None): "x with adapter l/one",
            ("o/x", "/m/one", "o/d"): "x with adapter m/one with draft d",
        },
        {("a/x", None, None): "a/x", ("./a/x", None, None): "./a/x"},
        {("/", None, None): "/", ("o/x", None, "d"): "x"},
    ],
)
def test_no_model_hides_behind_another_of_its_name(spaces, keys):
    """One that is off is told, whichever was loaded last."""
    for off in keys:
        spaces._known = {key: None if key == off else forms("", "") for key in keys}
        spaces._off = {off: "it cannot be saved yet"}
        assert spaces.models() == {name: "it cannot be saved yet" if key == off else "" for key, name in keys.items()}


def test_what_pays_is_told_of_each_model(spaces, provider, tiny_llama, tmp_path):
    tier = TieredPromptCache(10, spaces, None, Saving())
    shutil.copytree(tiny_llama, tmp_path / tiny_llama.name)
    gates = {}
    for place, folder in enumerate((tiny_llama, tmp_path / tiny_llama.name)):
        provider.model, _ = load(str(folder))
        # Their namespaces are one: what is measured of one holds for the other.
        gates[place] = tier._gate_of(spaces.of((str(folder), None, None)))
    assert gates[0] is gates[1]
    names = {f"{folder.name}/{tiny_llama.name}" for folder in (tiny_llama.parent, tmp_path)}
    assert tier.restoring == dict.fromkeys(names, gates[0].text)


def test_both_forms_are_looked_at(spaces):
    spaces._known = {("o/x", None, None): forms("", "the disk lies")}
    assert spaces.models() == {"x": "the disk lies"}


def test_a_model_that_was_off_may_be_on_when_it_is_loaded_again(spaces, provider, tiny_llama, monkeypatch, caplog):
    """And why it was off names no file to whoever asks; the log does."""
    key = (str(tiny_llama), None, None)
    told = []
    spaces.made = lambda name, space, why: told.append((name, space is None, why))
    provider.model, _ = load(str(tiny_llama))
    with monkeypatch.context() as patch:
        patch.setattr("kvstore_mlx.spaces.identity_of", failing)
        assert spaces.of(key) is None
    why = "its files could not be identified; the log says why"
    assert spaces.models() == {tiny_llama.name: why}
    assert "/home/me/weights" in caplog.text
    provider.model, _ = load(str(tiny_llama))
    assert spaces.of(key) is not None
    assert spaces.models() == {tiny_llama.name: ""}
    assert told == [(tiny_llama.name, True, why), (tiny_llama.name, False, "")]


def failing(*_):
    raise FileNotFoundError(2, "No such file or directory", "/home/me/weights")


def test_a_model_that_comes_back_has_the_namespace_it_had(spaces, provider, tiny_llama):
    key = (str(tiny_llama), None, None)
    provider.model, _ = load(str(tiny_llama))
    first = spaces.of(key)
    assert spaces.of(key) is first
    provider.model, _ = load(str(tiny_llama))
    gc.collect()
    again = spaces.of(key)
    assert again is not first
    assert again.forms[0].namespace.id == first.forms[0].namespace.id
    assert len(again.forms[0].plan.make()) == 3
