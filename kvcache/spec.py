"""The immutable K/V geometry of a model and its byte arithmetic. Plain Python over ints; knows no tensors.

A session's history per branch, in latent frames (one page each):

    | registers | sink: first frames, never evicted | window: recent frames, the chunk in flight included |

The window excludes the sink. A published "window 18 with sink 9" is therefore sink 9, window 9 here, and 18 frames are
visible.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvcache.errors import BudgetTooSmall

RESERVED_PAGES = 2
"""Pages of a page pool that no session ever owns: targets of padded reads and padded writes of fixed-shape kernels."""


class AtWindow(StrEnum):
    """What happens when the window is full: the oldest frames go, or the session must restart at frame 0."""

    SLIDE = "slide"
    RESTART = "restart"


class Storage(StrEnum):
    """EXTENTS: one contiguous ring per session and branch, read as one view. PAGES: single frames, gathered."""

    EXTENTS = "extents"
    PAGES = "pages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One K/V stream of a session. `local_slot` is its place on this worker, None if another rank holds it."""

    name: str
    local_slot: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossStoreSpec:
    """K/V of a cross-attention input, for all layers. `num_tokens` is the most a publication may hold.

    `head_dim=None` means that of self-attention. A store `shared_between_branches` exists once per session.
    """

    name: str
    num_tokens: int
    num_heads: int
    head_dim: int | None = None
    shared_between_branches: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """Everything the cache must know of a model on this worker.

    `window_latent_frames=None` keeps all history; a session then ends at `max_latent_frames`, for which storage is
    reserved (not used with a bounded window; the default is the length of the position table in LingBot-World v2's
    official code, wan/modules/model_fast.py). `register_tokens` is the most non-video tokens a chunk
    adds while it is in flight; they never enter history. `model_owned_bytes` is per session and counts committed and
    in-flight state; `worker_owned_bytes` counts once. `storage=None` means extents for a bounded window, pages
    otherwise. `scratch_pages` per branch come on top of what one chunk in flight needs (pages only).
    `rewritable_history` lets a chunk write history anew (`ChunkTransaction.rewrite_history`, `.restart`), which takes
    storage for one session more. `draft_latent_frames` is the most a chunk may draft after its own frames
    (`ChunkTransaction.draft`). The K/V of the first `shared_layers` layers is the same in every branch and kept once.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    tokens_per_latent_frame: int
    latent_frames_per_chunk: int
    sink_latent_frames: int
    window_latent_frames: int | None
    element_bytes: int
    at_window: AtWindow = AtWindow.SLIDE
    branches: tuple[Branch, ...] = (Branch(name="main", local_slot=0),)
    register_tokens: int = 0
    cross_stores: tuple[CrossStoreSpec, ...] = ()
    model_owned_bytes: int = 0
    worker_owned_bytes: int = 0
    requested_sessions: int = 1
    max_latent_frames: int = 1024
    storage: Storage | None = None
    scratch_pages: int = 0
    rewritable_history: bool = False
    draft_latent_frames: int = 0
    shared_layers: int = 0

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "num_kv_heads",
            "head_dim",
            "tokens_per_latent_frame",
            "latent_frames_per_chunk",
            "element_bytes",
            "requested_sessions",
            "max_latent_frames",
        ):
            _at_least(name, getattr(self, name), 1)
        for name in (
            "sink_latent_frames",
            "register_tokens",
            "model_owned_bytes",
            "worker_owned_bytes",
            "scratch_pages",
            "draft_latent_frames",
            "shared_layers",
        ):
            _at_least(name, getattr(self, name), 0)
        if self.shared_layers > self.num_layers:
            raise ValueError(f"shared_layers must be at most num_layers {self.num_layers}, got {self.shared_layers}")
        self._check_window()
        self._check_branches()
        self._check_cross_stores()

    def _check_window(self) -> None:
        chunk = self.latent_frames_per_chunk
        if self.window_latent_frames is not None:
            # A shorter window would make a chunk overwrite its own first frames.
            _at_least("window_latent_frames", self.window_latent_frames, chunk, why="latent_frames_per_chunk")
        else:
            _at_least("max_latent_frames", self.max_latent_frames, chunk, why="latent_frames_per_chunk")
            if self.storage is Storage.EXTENTS:
                raise ValueError("storage 'extents' needs a bounded window, window_latent_frames is None")
            if self.at_window is AtWindow.RESTART:
                raise ValueError("at_window 'restart' needs a bounded window, window_latent_frames is None")
        self._check_draft()

    def _check_draft(self) -> None:
        if not self.draft_latent_frames:
            return
        if self.window_latent_frames is not None and self.at_window is not AtWindow.RESTART:
            raise ValueError(
                "draft_latent_frames needs at_window 'restart' or an unlimited window: a draft evicts nothing"
            )
        needed = self.latent_frames_per_chunk + self.draft_latent_frames
        if self.session_latent_frames < needed:
            raise ValueError(
                f"sink and window must hold a chunk and its draft, {needed} latent frames, got "
                f"{self.session_latent_frames}"
            )

    def _check_branches(self) -> None:
        names = [branch.name for branch in self.branches]
        if len(set(names)) != len(names):
            raise ValueError(f"branches: names must differ, got {names}")
        slots = sorted(branch.local_slot for branch in self.branches if branch.local_slot is not None)
        if not slots or slots != list(range(len(slots))):
            raise ValueError(f"branches: local slots must be 0, 1, ... without gaps and at least one, got {slots}")

    def _check_cross_stores(self) -> None:
        names = [store.name for store in self.cross_stores]
        if len(set(names)) != len(names):
            raise ValueError(f"cross_stores: names must differ, got {names}")
        for store in self.cross_stores:
            _at_least(f"cross_stores[{store.name}].num_tokens", store.num_tokens, 1)
            _at_least(f"cross_stores[{store.name}].num_heads", store.num_heads, 1)
            if store.head_dim is not None:
                _at_least(f"cross_stores[{store.name}].head_dim", store.head_dim, 1)

    # ---------------------------------------------------------------- geometry

    @property
    def effective_storage(self) -> Storage:
        if self.storage is not None:
            return self.storage
        return Storage.PAGES if self.window_latent_frames is None else Storage.EXTENTS

    @property
    def num_local_branches(self) -> int:
        return sum(branch.local_slot is not None for branch in self.branches)

    @property
    def session_latent_frames(self) -> int:
        """The most frames a session holds per branch: sink + window, or `max_latent_frames` if unlimited."""
        if self.window_latent_frames is None:
            return self.max_latent_frames
        return self.sink_latent_frames + self.window_latent_frames

    @property
    def extent_tokens(self) -> int:
        """Rows of one extent: registers, then sink and window."""
        return self.register_tokens + self.session_latent_frames * self.tokens_per_latent_frame

    def local_slot(self, branch: int) -> int:
        """Return the local slot of `branches[branch]`. Raises ValueError if it is unknown or on another rank."""
        if not 0 <= branch < len(self.branches):
            raise ValueError(f"branch must be 0..{len(self.branches) - 1}, got {branch}")
        slot = self.branches[branch].local_slot
        if slot is None:
            raise ValueError(f"branch {branch} ({self.branches[branch].name!r}) is not on this worker")
        return slot

    def layer_slots(self, layer: int) -> int:
        """Return how many K/V streams a layer has here: 1 if its K/V is shared by the branches."""
        return 1 if layer < self.shared_layers else self.num_local_branches

    def num_pages(self, num_sessions: int) -> int:
        """Pages that `num_sessions` sessions need, without `RESERVED_PAGES`.

        A chunk in flight holds new pages until its commit frees the evicted ones, so a page pool has the pages of one
        chunk on top; an extent writes the chunk where evicted frames lie. A chunk that writes history anew holds a
        whole session's pages on top in both.
        """
        pages = num_sessions * self.session_latent_frames
        if self.rewritable_history:
            pages += self.session_latent_frames
        elif self.effective_storage is Storage.PAGES:
            pages += self.latent_frames_per_chunk
        if self.effective_storage is Storage.PAGES:
            pages += self.draft_latent_frames
        if self.effective_storage is Storage.PAGES:
            pages += self.scratch_pages
        return self.num_local_branches * pages

    def num_extents(self, num_sessions: int) -> int:
        """Extents, of all local branches together each, that `num_sessions` sessions need."""
        return num_sessions + (1 if self.rewritable_history else 0)

    # ---------------------------------------------------------------- bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def cross_attention_bytes(self) -> int:
        """All cross stores of one session."""
        return sum(self._cross_store_bytes(store) for store in self.cross_stores)

    def _cross_store_bytes(self, store: CrossStoreSpec) -> int:
        copies = 1 if store.shared_between_branches else self.num_local_branches
        head_dim = store.head_dim if store.head_dim is not None else self.head_dim
        return 2 * self.num_layers * copies * store.num_tokens * store.num_heads * head_dim * self.element_bytes

    def storage_bytes(self, num_sessions: int) -> int:
        """Bytes of self-attention K/V for `num_sessions` sessions."""
        if self.effective_storage is Storage.EXTENTS:
            streams = sum(self.layer_slots(layer) for layer in range(self.num_layers))
            bytes_per_token = self.kv_bytes_per_token // self.num_layers
            return self.num_extents(num_sessions) * self.extent_tokens * streams * bytes_per_token
        frame_bytes = self.tokens_per_latent_frame * self.kv_bytes_per_token
        register_bytes = self.num_local_branches * self.register_tokens * self.kv_bytes_per_token
        return (self.num_pages(num_sessions) + RESERVED_PAGES) * frame_bytes + register_bytes

    @property
    def staging_bytes(self) -> int:
        """One spare set of cross stores, into which a tick publishes before its commit."""
        return self.cross_attention_bytes

    def required_bytes(self, num_sessions: int) -> int:
        """All memory that `num_sessions` sessions need besides the weights."""
        per_session = self.cross_attention_bytes + self.model_owned_bytes
        shared = self.worker_owned_bytes + self.staging_bytes
        return shared + self.storage_bytes(num_sessions) + num_sessions * per_session

    def capacity(self, free_bytes: int, fraction: float) -> int:
        """Return how many sessions fit, at most `requested_sessions`, at least 1.

        The budget is `fraction` of the free bytes, but never less than one session needs. Raises BudgetTooSmall if one
        session needs more than all free bytes.
        """
        if not 0.0 < fraction <= 1.0:
            raise ValueError(f"fraction must be above 0 and at most 1, got {fraction}")
        one = self.required_bytes(1)
        if one > free_bytes:
            raise BudgetTooSmall(required_bytes=one, free_bytes=free_bytes, detail=self._describe_one_session())
        budget_bytes = max(int(free_bytes * fraction), one)
        # required_bytes is linear in the number of sessions.
        further = (budget_bytes - one) // (self.required_bytes(2) - one)
        return min(1 + further, self.requested_sessions)

    def _describe_one_session(self) -> str:
        return (
            f"K/V {self.storage_bytes(1)} + cross-attention {self.cross_attention_bytes} "
            f"+ model {self.model_owned_bytes} + worker {self.worker_owned_bytes} + staging {self.staging_bytes}"
        )


def _at_least(name: str, value: int, minimum: int, *, why: str | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < minimum:
        reason = f" ({why})" if why else ""
        raise ValueError(f"{name} must be at least {minimum}{reason}, got {value}")
