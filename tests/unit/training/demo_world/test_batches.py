"""What a training step sees."""

from __future__ import annotations

import pytest
import torch

from training.demo_world.batches import CHUNKS, Batches, RolledOut
from training.demo_world.dataset import CONDITION_FRAMES, FRAMES_PER_CHUNK, LATER_FRAMES, OPENING_FRAMES, Walks
from training.demo_world.prompts import PROMPTS_PER_STYLE

FRAMES = OPENING_FRAMES + LATER_FRAMES
CLIPS = 64
FIRST_AFTER_GAP = OPENING_FRAMES // FRAMES_PER_CHUNK


def _walks(gap: int) -> Walks:
    """Walks whose latents hold the number of their frame."""
    number = torch.arange(FRAMES, dtype=torch.bfloat16).view(1, -1, 1, 1, 1)
    return Walks(
        latents_WTCYX=number.expand(5, -1, 16, 2, 2).contiguous(),
        astray_WTCYX=(number + 100).expand(5, -1, 16, 2, 2).contiguous(),
        conditions_WTCYX=torch.zeros(5, CONDITION_FRAMES, 20, 2, 2, dtype=torch.bfloat16),
        rotations_WT33=torch.eye(3).expand(5, FRAMES, 3, 3).contiguous(),
        translations_WT3=torch.full((5, FRAMES, 3), 0.05),
        poses_WTE=number.float().view(1, -1, 1).expand(5, -1, 2).contiguous(),
        astray_poses_WTE=100 + number.float().view(1, -1, 1).expand(5, -1, 2),
        styles_WT=(torch.arange(FRAMES) // FRAMES_PER_CHUNK % 2).expand(5, -1).contiguous(),
        gap_W=torch.full((5,), gap),
    )


def _batches(gap: int, num_copies: int = 1) -> Batches:
    return Batches(_walks(gap), torch.ones(1, 20, 1, 2, 2), (1.0, 0.9375, 5 / 6, 0.625), num_copies=num_copies)


@pytest.mark.parametrize("gap", [0, 7])
def test_positions_of_a_clip_say_where_its_frames_are(gap: int) -> None:
    torch.manual_seed(0)
    batch = _batches(gap).draw(CLIPS)
    truth = batch.noisy_BCTYX - batch.sigmas_BN.repeat_interleave(3, dim=1)[:, None, :, None, None] * batch.target_BCTYX
    frames = truth[:, 0, :, 0, 0]
    assert batch.positions_BT.shape == (CLIPS, CHUNKS * FRAMES_PER_CHUNK)
    assert (batch.positions_BT.diff(dim=1) >= 1).all()
    torch.testing.assert_close(
        frames[:, :OPENING_FRAMES], batch.positions_BT[:, :OPENING_FRAMES].float(), atol=0.1, rtol=0
    )
    later = batch.positions_BT[:, OPENING_FRAMES] - frames[:, OPENING_FRAMES].round().long()
    # True positions count the gap; the others are anywhere.
    assert (later == FRAMES_PER_CHUNK * gap).sum() >= CLIPS // 4


def test_the_chunk_after_a_gap_teaches_nothing() -> None:
    torch.manual_seed(1)
    joined = _batches(0).draw(CLIPS)
    is_joined = joined.weights_BN[:, FIRST_AFTER_GAP] == 1
    follows = joined.positions_BT[:, OPENING_FRAMES] == OPENING_FRAMES
    assert is_joined.any()
    assert not is_joined.all()
    assert torch.equal(is_joined, follows)
    assert (_batches(3).draw(CLIPS).weights_BN[:, FIRST_AFTER_GAP] == 0).all()


def test_prompts_follow_the_styles_with_one_wording_each() -> None:
    torch.manual_seed(2)
    batch = _batches(0).draw(CLIPS)
    prompts, styles = batch.wordings_Q[batch.prompts_BN], batch.poses_BTE[:, ::3, 0].long() // FRAMES_PER_CHUNK % 2
    assert torch.equal(prompts // PROMPTS_PER_STYLE, styles)
    for row in prompts:
        for style in (0, 1):
            wordings = {int(prompt) for prompt in row if prompt // PROMPTS_PER_STYLE == style}
            assert len(wordings) == 1


def test_copies_are_the_same_clip_at_noise_of_their_own() -> None:
    torch.manual_seed(5)
    batch = _batches(0, num_copies=2).draw(CLIPS)
    sigma = batch.sigmas_BN.repeat_interleave(3, dim=1)[:, None, :, None, None]
    truth = batch.noisy_BCTYX - sigma * batch.target_BCTYX
    first, second = truth.chunk(2, dim=2)
    torch.testing.assert_close(first, second, atol=1e-4, rtol=0)
    torch.testing.assert_close(first[:, 0, :, 0, 0], batch.poses_BTE[..., 0], atol=0.2, rtol=0)
    assert not torch.equal(*batch.sigmas_BN.chunk(2, dim=1))
    assert not torch.equal(*batch.target_BCTYX.chunk(2, dim=2))


def test_translations_are_scaled_by_one_of_three_rules_and_never_by_zero() -> None:
    torch.manual_seed(3)
    lengths = _batches(0).draw(CLIPS).translations_BT3.norm(dim=-1)[:, 1:]
    step = 0.05 * 3**0.5
    torch.testing.assert_close(
        lengths.flatten().unique(), torch.tensor([1.0, step / 0.05]), atol=1e-5, rtol=0, check_dtype=False
    )


def test_histories_of_the_models_own_making_count_only_where_they_are_close_to_the_truth() -> None:
    torch.manual_seed(4)
    errors = torch.full((3, FRAMES // FRAMES_PER_CHUNK), 0.01)
    errors[:, 1] = 0.5
    own = torch.full((3, FRAMES, 16, 2, 2), -7.0, dtype=torch.bfloat16)
    rolled_out = RolledOut(walks_R=torch.tensor([0, 2, 4]), latents_RTCYX=own, errors_RN=errors, num_chunks=CHUNKS)
    batch = _batches(0).draw(CLIPS, rolled_out, num_own=16, max_error=0.1)
    assert (batch.clean_BCTYX[-16:] == -7).all()
    assert (batch.clean_BCTYX[:-16] != -7).all()
    # Where these were seen from is not known.
    assert (batch.history_weights_BN[-16:] == 0).all()
    assert (batch.history_weights_BN[:-16] == 1).all()
    assert (batch.weights_BN[-16:, 2] == 0).all()
    assert (batch.weights_BN[-16:, [0, 1]] == 1).all()
    # Such clips end where the rollout ended.
    assert torch.equal(batch.positions_BT[-16:], torch.arange(CHUNKS * FRAMES_PER_CHUNK).expand(16, -1))
    with pytest.raises(ValueError, match="at least 8 chunks, those of a clip; got 7"):
        RolledOut(walks_R=torch.tensor([0]), latents_RTCYX=own, errors_RN=errors, num_chunks=7)


def test_a_history_astray_leads_to_the_true_target_and_has_poses_of_its_own() -> None:
    torch.manual_seed(6)
    batch = _batches(0).draw(CLIPS, astray_share=0.5)
    is_astray = batch.clean_BCTYX[:, 0, 0].mean(dim=(1, 2)) > 50
    assert 0.25 * CLIPS < is_astray.sum() < 0.75 * CLIPS
    torch.testing.assert_close(
        batch.history_poses_BTE, batch.poses_BTE + 100 * is_astray[:, None, None], atol=0, rtol=0
    )
    frames = FRAMES_PER_CHUNK * (CHUNKS - 1)
    torch.testing.assert_close(
        batch.clean_BCTYX.mean(dim=(1, 3, 4)), batch.history_poses_BTE[:, :frames, 0], atol=0.5, rtol=0
    )
    sigma = batch.sigmas_BN.repeat_interleave(3, dim=1)[:, None, :, None, None]
    truth = batch.noisy_BCTYX - sigma * batch.target_BCTYX
    torch.testing.assert_close(truth[:, 0, :, 0, 0], batch.poses_BTE[..., 0], atol=0.2, rtol=0)


def test_walks_give_way_to_others_in_place() -> None:
    walks, others = _walks(0), _walks(7)
    latents = walks.latents_WTCYX
    others.latents_WTCYX.fill_(-5)
    walks.replace(3, others.part(1, 3))
    assert walks.gap_W.tolist() == [0, 0, 0, 7, 7]
    assert (latents[3:] == -5).all()
    assert (latents[:3] >= 0).all()


def test_steps_are_scaled_as_a_server_scales_them_in_a_share_of_the_clips() -> None:
    torch.manual_seed(6)
    walks = _walks(0)
    walks.translations_WT3[:, ::4] *= 2
    for share, least, most in ((1.0, 1.0, 1.0), (0.0, 0.0, 0.5)):
        batches = Batches(walks, torch.ones(1, 20, 1, 2, 2), (1.0,), served_scale_share=share)
        largest = batches.draw(CLIPS).translations_BT3.norm(dim=-1).unflatten(1, (CHUNKS, -1)).amax(-1)
        of_one = torch.isclose(largest, torch.ones(())).all(dim=1).float().mean().item()
        assert least <= of_one <= most
