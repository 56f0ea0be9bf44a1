"""K/V found by number against the chunk and the draft themselves: other sessions, other lengths, other stores."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcache.attention import TorchAttention
from kvcache.attention_backends import ChosenAttention
from kvcache.attention_indexed import GatheredAttention, indexed_name, why_not_indexed
from kvcache.cache import KVCache
from kvcache.errors import CrossStoreEmpty, TransactionClosed
from kvcache.indexed import IndexedKV
from kvcache.spec import AtWindow, Branch, CrossStoreSpec, KVSpec
from kvcache.transaction import ChunkTransaction

SPEC = KVSpec(
    num_layers=3,
    num_kv_heads=2,
    head_dim=4,
    tokens_per_latent_frame=3,
    latent_frames_per_chunk=2,
    sink_latent_frames=0,
    window_latent_frames=8,
    element_bytes=4,
    at_window=AtWindow.RESTART,
    branches=(Branch(name="positive", local_slot=0), Branch(name="negative", local_slot=1)),
    register_tokens=2,
    cross_stores=(
        CrossStoreSpec(name="text", num_tokens=5, num_heads=2),
        CrossStoreSpec(name="image", num_tokens=4, num_heads=2, shared_between_branches=True),
    ),
    rewritable_history=True,
    draft_latent_frames=2,
    shared_layers=1,
)


ONE_BRANCH = KVSpec(
    num_layers=2,
    num_kv_heads=2,
    head_dim=4,
    tokens_per_latent_frame=3,
    latent_frames_per_chunk=2,
    sink_latent_frames=1,
    window_latent_frames=4,
    element_bytes=4,
    cross_stores=(CrossStoreSpec(name="text", num_tokens=6, num_heads=2),),
)


def make_cache(spec: KVSpec = SPEC, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(spec, capacity=2, device="cpu", dtype=dtype)


class Numbers:
    """Random tensors of the shapes that a forward makes."""

    def __init__(self, seed: int) -> None:
        self._rng = torch.Generator().manual_seed(seed)

    def heads(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, SPEC.num_kv_heads, SPEC.head_dim, generator=self._rng)

    def publish(self, chunk: ChunkTransaction) -> None:
        for name, branch, rows in (("text", 0, 5), ("text", 1, 3), ("image", 0, 4)):
            pairs = [(self.heads(rows), self.heads(rows)) for _ in range(SPEC.num_layers)]
            chunk.cross_store(name, branch=branch).publish(pairs)


def test_chunks_and_drafts_of_all_sessions_are_found_by_number() -> None:
    """What one writes the other reads: every layer is written through the numbers and compared with the chunk's own."""
    cache, numbers = make_cache(), Numbers(0)
    shown: dict[str, IndexedKV] = {}
    for name in ("a", "b"):
        cache.open(name)
    for name in ("a", "b", "b", "a", "b", "a"):
        with cache.lease(name) as lease, torch.no_grad():
            chunk = lease.begin_chunk(2)
            if chunk.first_latent_frame == 0:
                numbers.publish(chunk)
            if "chunk" not in shown:
                shown["chunk"] = IndexedKV(SPEC, GatheredAttention(), chunk)
            shown["chunk"].show(chunk)
            draft = None
            for layer in range(SPEC.num_layers):
                streams = SPEC.layer_slots(layer)
                k_BNHD, v_BNHD, q_BNHD = (numbers.heads(streams, 6) for _ in range(3))
                rows = shown["chunk"].rows_to_write_all(layer)
                assert torch.equal(rows.first_rows_F, chunk.rows_to_write_all(layer).first_rows_F)
                shown["chunk"].write_all(layer, k_BNHD, v_BNHD)
                torch.testing.assert_close(
                    shown["chunk"].attend_all(layer, q_BNHD), chunk.attend_all(layer, q_BNHD), atol=1e-5, rtol=1e-5
                )
            draft = chunk.draft(2)
            if "draft" not in shown:
                shown["draft"] = IndexedKV(SPEC, GatheredAttention(), draft, num_registers=2)
            shown["draft"].show(draft)
            for layer in range(SPEC.num_layers):
                streams = SPEC.layer_slots(layer)
                k_BNHD, v_BNHD, q_BNHD = (numbers.heads(streams, 8) for _ in range(3))
                shown["draft"].write_all(layer, k_BNHD[:, :6], v_BNHD[:, :6])
                shown["draft"].write_registers_all(layer, k_BNHD[:, 6:], v_BNHD[:, 6:])
                got = shown["draft"].attend_all(layer, q_BNHD)
                rows = draft.rows_to_write_all(layer, 2)
                assert torch.equal(rows.k_XHD[rows.first_rows_F], k_BNHD.flatten(0, 1))
                torch.testing.assert_close(got, draft.attend_all(layer, q_BNHD), atol=1e-5, rtol=1e-5)
                for store, branch in (("text", 0), ("text", 1), ("image", 0), ("image", 1)):
                    torch.testing.assert_close(
                        shown["draft"].cross_store(store, branch=branch).attend(layer, q_BNHD[0]),
                        draft.cross_store(store, branch=branch).attend(layer, q_BNHD[0]),
                        atol=1e-5,
                        rtol=1e-5,
                    )
            chunk.commit()


@pytest.mark.parametrize(
    ("dtype", "query_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
    ],
)
def test_a_window_that_slides_and_texts_with_a_bias_are_found_by_number(
    dtype: torch.dtype, query_dtype: torch.dtype
) -> None:
    """Two sessions in a random order, past the slid window; texts of every length, weighted or not."""
    spec = replace(ONE_BRANCH, element_bytes=dtype.itemsize)
    cache, numbers, order = make_cache(spec, dtype), Numbers(3), torch.Generator().manual_seed(4)
    shown: IndexedKV | None = None
    for name in ("a", "b"):
        cache.open(name)
    for turn in range(14):
        with cache.lease("ab"[int(torch.randint(2, (), generator=order))]) as lease, torch.no_grad():
            chunk = lease.begin_chunk(2)
            if chunk.first_latent_frame == 0 or turn % 3 == 0:
                rows = 1 + int(torch.randint(6, (), generator=order))
                pairs = [(numbers.heads(rows).to(dtype), numbers.heads(rows).to(dtype)) for _ in range(spec.num_layers)]
                bias = None if rows == 6 else torch.randn(rows, generator=order)
                chunk.cross_store("text").publish(pairs, bias)
            if shown is None:
                shown = IndexedKV(spec, GatheredAttention(), chunk, biased_stores=("text",))
            shown.show(chunk)
            for layer in range(spec.num_layers):
                k_NHD, v_NHD = (numbers.heads(6).to(dtype) for _ in range(2))
                q_NHD = numbers.heads(6).to(query_dtype)
                rows_to_write = chunk.rows_to_write(layer)
                shown.write(layer, k_NHD, v_NHD)
                index_F = rows_to_write.first_rows_F[:, None] + torch.arange(rows_to_write.tokens_per_frame)
                written = rows_to_write.k_XHD.view(torch.uint8)[index_F.flatten()]
                assert torch.equal(written, k_NHD.view(torch.uint8))
                assert torch.equal(shown.rows_to_write(layer).first_rows_F, index_F.flatten())
                near = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
                torch.testing.assert_close(shown.attend(layer, q_NHD), chunk.attend(layer, q_NHD), **near)
                text_q_NHD = numbers.heads(6).to(torch.bfloat16 if dtype.itemsize == 1 else dtype)
                torch.testing.assert_close(
                    shown.cross_store("text").attend(layer, text_q_NHD),
                    chunk.cross_store("text").attend(layer, text_q_NHD),
                    **near,
                )
            chunk.commit()


def test_a_branch_is_named_in_models_with_one_only() -> None:
    cache, numbers = make_cache(), Numbers(5)
    cache.open("a")
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk(2)
        numbers.publish(chunk)
        kv = IndexedKV(SPEC, GatheredAttention(), chunk)
        with pytest.raises(ValueError, match="layer 1, branch 0: expected a model with one branch, it has 2"):
            kv.attend(1, numbers.heads(6))
        with pytest.raises(ValueError, match=r"expected torch\.float32, got torch\.float16"):
            kv.write_all(0, numbers.heads(1, 6).half(), numbers.heads(1, 6).half())
        chunk.rollback()


def test_what_does_not_fit_is_refused() -> None:
    cache, numbers = make_cache(), Numbers(1)
    cache.open("a")
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk(2)
        with pytest.raises(CrossStoreEmpty):
            IndexedKV(SPEC, GatheredAttention(), chunk)
        numbers.publish(chunk)
        kv = IndexedKV(SPEC, GatheredAttention(), chunk)
        with pytest.raises(ValueError, match="registers: expected 0 tokens, got 1"):
            kv.rows_to_write_all(0, 1)
        with pytest.raises(ValueError, match="registers: expected 0 tokens, got 2"):
            kv.write_registers_all(0, numbers.heads(1, 2), numbers.heads(1, 2))
        with pytest.raises(ValueError, match="queries: expected 2 streams, got 1"):
            kv.attend_all(1, numbers.heads(1, 6))
        with pytest.raises(ValueError, match="unknown cross store 'sound'"):
            kv.cross_store("sound")
        pairs = [(numbers.heads(4), numbers.heads(4)) for _ in range(SPEC.num_layers)]
        chunk.cross_store("image").publish(pairs, torch.zeros(4))
        with pytest.raises(ValueError, match="without a bias in cross store 'image'"):
            kv.show(chunk)
        chunk.rollback()
        with pytest.raises(TransactionClosed):
            kv.show(chunk)
    with cache.lease("a") as lease:
        shorter = lease.begin_chunk(1)
        numbers.publish(shorter)
        with pytest.raises(ValueError, match="a chunk that writes 6 rows, got 3"):
            kv.show(shorter)
        shorter.rollback()
    other = make_cache()
    other.open("a")
    with other.lease("a") as lease:
        elsewhere = lease.begin_chunk(2)
        numbers.publish(elsewhere)
        with pytest.raises(ValueError, match="got one of another cache"):
            kv.show(elsewhere)
        elsewhere.rollback()


def test_pages_have_no_numbers_of_an_extent() -> None:
    cache = make_cache(replace(SPEC, window_latent_frames=None, at_window=AtWindow.SLIDE, max_latent_frames=8))
    cache.open("a")
    with cache.lease("a") as lease:
        chunk = lease.begin_chunk(2)
        with pytest.raises(ValueError, match="lie in pages"):
            chunk.indexed()
        chunk.rollback()


def test_rows_past_the_end_may_hold_anything() -> None:
    rng = torch.Generator().manual_seed(0)
    k_EXHD, v_EXHD = (torch.randn(3, 7, 2, 4, generator=rng) for _ in range(2))
    q_BNHD = torch.randn(2, 5, 2, 4, generator=rng)
    want = [TorchAttention()(q_BNHD[b], k_EXHD[e, :n], v_EXHD[e, :n]) for b, (e, n) in enumerate(((2, 4), (0, 7)))]
    k_EXHD[2, 4:], v_EXHD[2, 4:] = torch.nan, torch.inf
    got = GatheredAttention()(
        q_BNHD,
        k_EXHD,
        v_EXHD,
        entries_B=torch.tensor([2, 0], dtype=torch.int32),
        num_rows_B=torch.tensor([4, 7], dtype=torch.int32),
    )
    torch.testing.assert_close(got, torch.stack(want), atol=1e-5, rtol=1e-5)


class MultipliesWhatItHides(GatheredAttention):
    """Gives rows past the end the weight 0 and multiplies them all the same, as FlashAttention-3 does within a tile."""

    def __call__(
        self, q_BNHD: torch.Tensor, k_EXHD: torch.Tensor, v_EXHD: torch.Tensor, **places: torch.Tensor
    ) -> torch.Tensor:
        out_BNHD = super().__call__(q_BNHD, k_EXHD, v_EXHD, **places)
        read_BXHD = v_EXHD.index_select(0, places["entries_B"])
        return out_BNHD + 0.0 * read_BXHD.sum(1, keepdim=True)


def test_numbers_that_a_failed_chunk_left_reach_no_later_session() -> None:
    """Chunks and drafts come to nothing in every extent and slot, also in those that the last session gets."""
    cache, numbers = make_cache(), Numbers(2)
    nans = torch.full((2, 6, SPEC.num_kv_heads, SPEC.head_dim), torch.nan)
    text = [(nans[0, :5], nans[0, :5])] * SPEC.num_layers
    for name in ("a", "b", "c", "last"):
        cache.open(name)
        with cache.lease(name) as lease, torch.no_grad():
            chunk = lease.begin_chunk(2)
            if name != "last":
                for part in (chunk, chunk.draft(2)):
                    for layer in range(SPEC.num_layers):
                        spoilt = nans[: SPEC.layer_slots(layer)]
                        part.write_all(layer, spoilt, spoilt)
                for branch in (0, 1):
                    chunk.cross_store("text", branch=branch).publish(text)
                chunk.rollback()
            else:
                numbers.publish(chunk)
                kv = IndexedKV(SPEC, MultipliesWhatItHides(), chunk)
                for layer in range(SPEC.num_layers):
                    streams = SPEC.layer_slots(layer)
                    kv.write_all(layer, numbers.heads(streams, 6), numbers.heads(streams, 6))
                    assert kv.attend_all(layer, numbers.heads(streams, 6)).isfinite().all()
                    assert kv.cross_store("text", branch=1).attend(layer, numbers.heads(6)).isfinite().all()
                chunk.rollback()
        cache.close(name)


def test_only_flash3_with_its_numbers_and_triton_read_by_number() -> None:
    assert why_not_indexed("flash3", torch.bfloat16) is None
    assert why_not_indexed("flash3", torch.float8_e4m3fn) is None
    assert why_not_indexed("flash3", torch.float32) is not None
    assert why_not_indexed("triton", torch.float32) is None
    reason = why_not_indexed("torch_sdpa", torch.bfloat16)
    assert reason == "they need the attention 'flash3' or 'triton', chosen is 'torch_sdpa'"


def test_a_chosen_attention_that_reads_by_number_is_kept_though_another_one_is_faster() -> None:
    class Named(TorchAttention):
        name = "flash3"

    timings_ms = (("torch_sdpa", 4.0), ("flash3", 3.0), ("triton", 2.0))
    assert indexed_name(ChosenAttention(attention=Named(), timings_ms=timings_ms)) == "flash3"
    assert indexed_name(ChosenAttention(attention=TorchAttention(), timings_ms=timings_ms)) == "triton"
    assert indexed_name(ChosenAttention(attention=TorchAttention())) == "torch_sdpa"
