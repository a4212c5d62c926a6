"""Models come and go in one server: none is kept alive by what is known of it; one that comes back is known again."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
from mlx_lm import load

from kvstore import Store
from kvstore_mlx.spaces import Settings, Spaces
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
