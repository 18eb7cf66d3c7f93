"""Which collectives a step takes: beside torch's engines as few as torch's own scaler."""

import ranks
from benchmarks import distributed


def test_a_step_takes_no_more_collectives_than_torchs_scaler() -> None:
    for engine in ("DDP", "FSDP2"):
        (rows, _) = ranks.run(distributed.measure, engine, "cpu", 1, 1)
        torchs = rows[distributed.TORCH].counted
        assert rows["O1"].counted.kinds == torchs.kinds
        assert rows["O1"].counted.sent - torchs.sent < 64
        for level in ("O2", "O5"):
            counted = rows[level].counted
            assert sum(counted.kinds.values()) <= sum(torchs.kinds.values())
            assert counted.sent < 0.51 * torchs.sent
            # an overflow of one rank, and the norm; bfloat16 has no scale
            assert counted.small == (0 if engine == "DDP" else 2 if level == "O2" else 1)
