"""A plan is what every save and restore is checked against: classes, dtypes, shapes, and one token count for all."""

from __future__ import annotations

import mlx.core as mx
import pytest
from cache_support import Feed, attention_plan, forward
from mlx_lm.models.cache import ArraysCache, BatchKVCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from kvstore.states import StateTensor
from kvstore_mlx.codecs import Snapshot
from kvstore_mlx.forms import Form, ModelSpace
from kvstore_mlx.live import Live
from kvstore_mlx.plan import Plan, leaves_of, unknown_classes
from kvstore_mlx.restoring import Restoring


def two() -> list:
    return [KVCache(), KVCache()]


def filled(caches: list, tokens: int, dtype=mx.float32) -> list:
    for cache in caches:
        cache.update_and_fetch(*(array.astype(dtype) for array in Feed(tokens).next(tokens)))
    return caches


@pytest.fixture
def plan() -> Plan:
    return attention_plan(two)


def test_layers_that_disagree_are_refused_at_save(plan):
    caches = [*filled([KVCache()], 8), *filled([KVCache()], 7)]
    with pytest.raises(ValueError, match=r"layers hold \[7, 8\] tokens where 8 were computed"):
        _ = Live(plan, caches, None, 8).rows
    # In the middle of speculative decoding a model and its draft model may differ; what both have counts.
    assert Live(plan, caches, None, None).rows.count == 7
    with pytest.raises(ValueError, match="tokens where 9 were computed"):
        _ = Live(plan, filled(two(), 8), None, 9).rows


def test_layers_that_disagree_are_refused_at_restore():
    """A window or a recurrent layer of another length than the rows beside it."""

    def make() -> list:
        return [KVCache(), RotatingKVCache(4)]

    plan = attention_plan(make)
    caches = make()
    for cache in caches:
        forward(cache, Feed(1), 9)
    snapshot = plan.snapshot(caches, None)
    arrays = dict(zip(("0.keys", "0.values"), plan.arrays(caches), strict=True))
    assert plan.rebuild(9, arrays, snapshot)
    with pytest.raises(ValueError, match="saved after 9 tokens instead of 8"):
        plan.rebuild(8, arrays, snapshot)
    with pytest.raises(ValueError, match=r"1\.keys is missing"):
        plan.rebuild(9, arrays, Snapshot())


def test_another_dtype_is_refused(plan):
    caches = filled(two(), 8)
    assert Live(plan, caches, None, 8).rows.count == 8
    half = [caches[0], *filled([KVCache()], 8, mx.bfloat16)]
    with pytest.raises(ValueError, match=r"1.keys is mlx.core.bfloat16"):
        _ = Live(plan, half, None, 8).rows


def test_another_shape_is_refused(plan):
    caches = filled(two(), 8)
    caches[1].keys = mx.zeros((1, 4, 256, 32))
    with pytest.raises(ValueError, match=r"1.keys is mlx.core.float32\[1, 4, 256, 32\]"):
        _ = Live(plan, caches, None, 8).rows


class TestStates:
    """Tensors of a boundary state have the dtype and the shape that the model gives them, but for its tokens."""

    @staticmethod
    def make() -> list:
        return [RotatingKVCache(8), ArraysCache(2)]

    def caches(self, tokens: int = 20, dtype=mx.float32, heads: int = 2, slot=(1, 4, 3)) -> list:
        window, recurrent = self.make()
        window.update_and_fetch(*(array.astype(dtype) for array in Feed(tokens, heads=heads).next(tokens)))
        recurrent[1] = mx.zeros(slot, dtype)
        return [window, recurrent]

    @pytest.fixture
    def plan(self) -> Plan:
        return Plan.of(self.make, self.caches(3))

    def test_the_rows_of_a_window_are_as_many_as_there_are_tokens(self, plan):
        for tokens in (1, 7, 8, 300):
            snapshot = plan.snapshot(self.caches(tokens), None)
            assert plan.rebuild(tokens, {}, snapshot)

    def test_what_a_short_pass_leaves_empty_is_not_checked_unless_one_more_token_filled_it(self, plan):
        caches = self.caches()
        caches[1][0] = mx.zeros((1, 9), mx.bfloat16)
        snapshot = plan.snapshot(caches, None)
        assert plan.rebuild(20, {}, snapshot)
        later = self.caches(4)
        later[1][0] = mx.zeros((1, 8), mx.bfloat16)
        seen = plan.after(later, mx.zeros(7))
        assert seen.describe() == plan.describe()
        with pytest.raises(ValueError, match=r"1.0 is mlx.core.bfloat16\[1, 9\]"):
            seen.rebuild(20, {}, snapshot)
        # It may be filled later still.
        assert seen.rebuild(20, {}, plan.snapshot(self.caches(), None))

    def test_what_a_short_pass_fills_is_there(self, plan):
        caches = self.caches()
        snapshot = plan.snapshot(caches, None)
        with pytest.raises(ValueError, match=r"1\.1 is missing"):
            plan.rebuild(20, {}, Snapshot({**snapshot.tensors, "1.1": None}, snapshot.values))
        caches[1][1] = None
        with pytest.raises(ValueError, match=r"1\.1 is missing"):
            plan.snapshot(caches, None)

    @pytest.mark.parametrize(
        "tensor",
        [
            StateTensor("0.keys", "F32", (1, 2, 257, 32)),
            StateTensor("0.keys", "F32", (1, 1 << 37, 8, 32)),
            StateTensor("0.keys", "BF16", (1, 2, 8, 32)),
            StateTensor("0.keys", "F32", (1 << 39,)),
            StateTensor("1.1", "F32", (1, 4, 1 << 37)),
            StateTensor("logits", "F32", (1 << 37,)),
            StateTensor("extra.router", "U8", (1 << 39,)),
            StateTensor("7.anything", "U8", (257 << 20,)),
            StateTensor("extra.router", "F8_E5M2", (1,)),
        ],
        ids=str,
    )
    def test_a_header_that_is_no_state_of_the_model_s_gets_no_memory(self, plan, tensor):
        """Nothing is read yet, and somebody else may have written it."""
        restoring = Restoring(plan.after(self.caches(4), mx.zeros(7)), 20)
        with pytest.raises(ValueError, match="a state has"):
            restoring.allocate_state((tensor,))

    def test_a_header_of_the_model_s_own_gets_memory(self, plan):
        restoring = Restoring(plan.after(self.caches(4), mx.zeros(7)), 20)
        own = (
            StateTensor("0.keys", "F32", (1, 2, 8, 32)),
            StateTensor("1.1", "F32", (1, 4, 3)),
            StateTensor("1.0", "BF16", (1, 9)),
            StateTensor("logits", "F32", (7,)),
            StateTensor("extra.router", "U8", (1 << 20,)),
        )
        memory = restoring.allocate_state(own)
        assert {name: view.nbytes for name, view in memory.items()} == {each.name: each.nbytes for each in own}

    @pytest.mark.parametrize("logits", [mx.zeros(8), mx.zeros((1, 7)), mx.zeros(7, mx.float16)])
    def test_logits_are_one_row_of_the_model_s(self, plan, logits):
        seen = plan.after(self.caches(4), mx.zeros(7))
        seen.check_logits(mx.ones(7))
        with pytest.raises(ValueError, match="logits are"):
            seen.check_logits(logits)

    @pytest.mark.parametrize(
        ("more", "text"),
        [
            ({"dtype": mx.bfloat16}, r"0.keys is mlx.core.bfloat16\[1, 2, 8, 32\]"),
            ({"heads": 4}, r"0.keys is mlx.core.float32\[1, 4, 8, 32\]"),
            ({"slot": (1, 4, 5)}, r"1.1 is mlx.core.float32\[1, 4, 5\]"),
            ({"slot": (1, 12)}, r"1.1 is mlx.core.float32\[1, 12\]"),
        ],
        ids=["dtype", "heads", "size", "rank"],
    )
    def test_others_are_refused_at_save_and_at_restore(self, plan, more, text):
        caches = self.caches(**more)
        with pytest.raises(ValueError, match=text):
            plan.snapshot(caches, None)
        with pytest.raises(ValueError, match=text):
            plan.rebuild(20, {}, Plan.of(self.make, caches).snapshot(caches, None))

    def test_they_tell_namespaces_apart(self, plan):
        others = [
            Plan.of(self.make, self.caches(3, **more)).describe() for more in ({"dtype": mx.float16}, {"heads": 4})
        ]
        assert plan.describe() not in others
        assert plan.describe() == Plan.of(self.make, self.caches(7)).describe()


def test_other_classes_are_refused(plan):
    quantized = [cache.to_quantized(32, 8) for cache in filled(two(), 8)]
    for caches in (quantized, filled([KVCache()], 8), [*filled(two(), 8), KVCache()], [CacheList(*filled(two(), 8))]):
        assert not plan.fits(caches)
        with pytest.raises(ValueError, match="other cache classes than the model makes"):
            _ = Live(plan, caches, None, 8).rows
    assert plan.fits([BatchKVCache([0]), BatchKVCache([0])])
    # Half quantized, as one layer at a time would be.
    assert not plan.fits([quantized[0], filled([KVCache()], 8)[0]])


def test_a_cache_that_computed_nothing_is_refused(plan):
    with pytest.raises(ValueError, match="a layer has computed nothing"):
        _ = Live(plan, two(), None, 0).rows


def test_tensors_that_cannot_be_cut_by_token_are_refused():
    flat = KVCache()
    flat.keys = flat.values = mx.zeros((1, 5, 8))
    with pytest.raises(ValueError, match=r"0.keys is mlx.core.float32\[1, 5, 8\], which cannot be cut by token"):
        Plan.of(lambda: [KVCache()], [flat])
    odd = KVCache()
    odd.keys = odd.values = mx.zeros((1, 2, 5, 8), mx.complex64)
    with pytest.raises(ValueError, match="cannot be cut by token"):
        Plan.of(lambda: [KVCache()], [odd])


def test_classes_without_codec_are_named():
    class Strange:
        pass

    class Other(KVCache):
        pass

    caches = [KVCache(), CacheList(KVCache(), CacheList(Strange())), Strange(), Other()]
    assert unknown_classes(caches) == "Other, Strange"
    assert unknown_classes([KVCache(), CacheList(RotatingKVCache(4), ArraysCache(2))]) == ""
    with pytest.raises(ValueError, match="no codec for Other, Strange"):
        Plan.of(lambda: caches, caches)


def test_names_say_where_a_cache_is():
    caches = [KVCache(), CacheList(KVCache(), CacheList(KVCache(), KVCache())), KVCache()]
    assert [name for name, _ in leaves_of(caches)] == ["0", "1.0", "1.1.0", "1.1.1", "2"]


def test_what_is_of_a_similar_name_is_not_mixed_up():
    """Layer 1 and layer 10 begin alike."""

    def make() -> list:
        return [ArraysCache(1) for _ in range(11)]

    caches = make()
    for number, cache in enumerate(caches):
        cache[0] = mx.full((1, 2), float(number))
    plan = Plan.of(make, caches)
    rebuilt = plan.rebuild(5, {}, plan.snapshot(caches, None))
    assert [cache[0].tolist() for cache in rebuilt] == [[[float(number)] * 2] for number in range(11)]


def test_a_state_says_when_its_model_counts_nothing():
    caches = [ArraysCache(1)]
    caches[0][0] = mx.zeros((1, 2))
    plan = Plan.of(lambda: [ArraysCache(1)], caches)
    with pytest.raises(ValueError, match="no layer says how many tokens it holds"):
        _ = Live(plan, caches, None, None).count
    assert Live(plan, caches, None, 7).count == 7


def test_what_is_described_tells_models_apart():
    descriptions = [
        attention_plan(make, feed).describe()
        for make, feed in (
            (two, Feed()),
            (lambda: [KVCache()], Feed()),
            (two, Feed(dim=64)),
            (two, Feed(heads=4)),
            (lambda: [KVCache(), RotatingKVCache(8)], Feed()),
            (lambda: [KVCache(), RotatingKVCache(9)], Feed()),
            (lambda: [KVCache(), RotatingKVCache(8, 2)], Feed()),
            (lambda: [QuantizedKVCache(32, 8), KVCache()], Feed()),
            (lambda: [QuantizedKVCache(32, 4), KVCache()], Feed()),
            (lambda: [CacheList(KVCache(), KVCache())], Feed()),
        )
    ]
    descriptions.append(Plan.of(two, filled(two(), 3, mx.float16)).describe())
    assert len({repr(each) for each in descriptions}) == len(descriptions)
    assert attention_plan(two).describe() == descriptions[0]


def test_a_model_of_two_forms_is_seen_in_the_one_it_has():
    plain, quantized = attention_plan(two), attention_plan(lambda: [QuantizedKVCache(32, 8) for _ in range(2)])
    forms = (Form(plain, None), Form(quantized, None, least=100))
    space = ModelSpace(forms, "model")
    caches = filled(two(), 8)
    assert space.look(caches, None, 8)[0] is forms[0]
    assert space.look([cache.to_quantized(32, 8) for cache in filled(two(), 100)], None, 100)[0] is forms[1]
    # Quantized, and then cut to what an uninterrupted run has in plain caches.
    with pytest.raises(ValueError, match="8 tokens are quantized, which an engine does from 100 on"):
        space.look([cache.to_quantized(32, 8) for cache in caches], None, 8)
    with pytest.raises(ValueError, match="other cache classes"):
        space.look([caches[0], caches[1].to_quantized(32, 8)], None, 8)
    forms[0].trouble = "the disk lies"
    assert list(space.usable) == [forms[1]]
