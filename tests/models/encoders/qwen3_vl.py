"""Qwen3-VL: Bridge's own tower with deepstack features."""

from tests.models.encoder_case import Encoder
from tests.models.encoders.qwen35_vl import Fp32Bridge, bridge_batch
from tests.models.tower import build_tower
from tests.models.workloads import CASES

ENCODER = Encoder(
    27,
    lambda layers: build_tower(layers=layers),
    bridge_batch,
    lambda returned: [returned[0], *returned[1]],
    CASES,
    reference=Fp32Bridge,
)
