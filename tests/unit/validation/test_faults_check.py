from pathlib import Path

import pytest

from score_centering.settings import UserError, load_settings
from score_centering.settings.stages import FaultCheckStage
from score_centering.validation.fault_check import check_faults


def test_faults_of_another_engine_are_refused():
    settings = load_settings(["config/config.yaml"], ["actor_rollout_ref.rollout.name=vllm", "runtime.device=cuda"])
    nothing = Path("nothing")
    with pytest.raises(UserError, match=r"rollout\.name = 'vllm': faults damage the cache of the local engine only"):
        next(check_faults(FaultCheckStage.of(settings), nothing, nothing, nothing))
