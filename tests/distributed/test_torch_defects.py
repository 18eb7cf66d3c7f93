"""Four defects of torch's scalers (2.13): each is shown to be one, and not to be one here."""

import pytest
import ranks
import torch
import torch_defects

ONES = torch.ones(3)


def test_a_flag_of_two_overflows_skips_as_that_of_one() -> None:
    for torchs, ours in ranks.run(torch_defects.exact_flag):
        assert not torch.equal(torchs, ONES)  # 2.0 is not the 1.0 that the kernel looks for
        assert torch.equal(ours, ONES)


def test_an_overflow_on_one_rank_skips_a_fused_step_on_all() -> None:
    (skipped, lowered), (stepped, kept) = ranks.run(
        torch_defects.sharded_scaler, "AdamW", False, (0,)
    )
    assert torch.equal(skipped, ONES)
    assert not torch.equal(stepped, ONES)
    assert lowered != kept  # silently on
    for weight, scale in ranks.run(torch_defects.ours, "AdamW", (0,)):
        assert torch.equal(weight, ONES)
        assert scale == 2.0


def test_a_fused_step_after_unscaling_is_made() -> None:
    with pytest.raises(ranks.RankError, match="broadcast shape"):
        ranks.run(torch_defects.sharded_scaler, "AdamW", True, ())
    for weight, scale in ranks.run(torch_defects.ours, "AdamW", ()):
        assert not torch.equal(weight, ONES)
        assert torch.isfinite(weight).all()
        assert scale == 4.0


def test_overflows_on_two_ranks_skip_a_fused_step() -> None:
    for weight, _ in ranks.run(torch_defects.sharded_scaler, "SGD", True, (0, 1)):
        assert not torch.isfinite(weight).all()
    for weight, _ in ranks.run(torch_defects.ours, "SGD", (0, 1)):
        assert torch.equal(weight, ONES)


def test_a_float16_loss_is_scaled_in_float32() -> None:
    ((torchs, ours),) = ranks.run(torch_defects.half_loss, size=1)
    assert torchs == float("inf")
    assert ours == 1.5 * 2**16
