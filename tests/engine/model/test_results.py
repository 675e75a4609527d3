"""What a device left in host memory becomes the typed result of a step: ids, and what happened in place of some."""

from __future__ import annotations

import math

import numpy as np
import torch

from headrace.engine.model.shared.results import step_result
from headrace.engine.scheduling.result import NoToken
from headrace.engine.scheduling.shaping import Report
from headrace.ops.cpu import sample as cpu_sample
from headrace.ops.cuda.sampling import shape as cuda_shape

REPORT = Report(-1.0, 1, ())


def test_codes_of_a_device_become_what_happened() -> None:
    plain = step_result([5, 0, 7])
    assert plain.ids == [5, 0, 7] and not any(plain[1:])
    special = step_result([5, -1, -4, -2, -9])
    assert special.instead == {1: NoToken.NON_FINITE, 2: NoToken.LATE, 3: NoToken.NOTHING_LEFT}
    assert special.ids[4] == -9, "an id that means nothing must reach the check of the vocabulary"
    codes = NoToken.NON_FINITE.value, NoToken.NOTHING_LEFT.value
    assert codes == (cpu_sample.NON_FINITE, cuda_shape.NOTHING_LEFT)


def test_a_row_without_a_token_has_no_report() -> None:
    result = step_result([-1, 3], reports={0: REPORT, 1: REPORT})
    assert result.reports == {1: REPORT} and result.instead == {0: NoToken.NON_FINITE}


def test_what_the_host_chooses_is_told_whatever_the_device_sampled() -> None:
    result = step_result([4, 3], choices={1: lambda: (9, None)})
    assert result.instead == {1: NoToken.CHOSEN_LATER} and result.choices[1]() == (9, None)


def test_a_pooled_item_fails_by_its_own_vector_and_not_by_the_id_of_another_item() -> None:
    """It samples nothing, so that a device returns the first id for it, whatever that is."""
    broken = torch.tensor([math.inf, 0.0])
    result = step_result([-1, -1, -1], pooled={1: torch.tensor([0.5, 0.25]), 2: broken})
    assert result.instead == {0: NoToken.NON_FINITE, 2: NoToken.NON_FINITE}
    assert isinstance(result.pooled[1], np.ndarray) and result.pooled[1].tolist() == [0.5, 0.25]
