"""What a judgement of closed loops says."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from training.demo_world.judge import Evaluation, on_sheet


def test_a_report_names_the_chunks_it_has_and_the_middle_of_the_drift() -> None:
    by_chunk = [float(chunk) for chunk in range(1, 13)]
    evaluation = Evaluation(
        psnr_db=by_chunk,
        ceiling_db=[28.126] * 12,
        frozen_db=by_chunk,
        sharpness=by_chunk,
        drift={3: np.array([[0.1, 1.0], [0.2, 2.0], [0.9, 6.0]])},
        sheet=Image.new("RGB", (1, 1)),
    )
    report = evaluation.report()
    assert report["chunks"] == [1, 2, 3, 6, 10, 12]
    assert report["psnr_db"] == [1.0, 2.0, 3.0, 6.0, 10.0, 12.0]
    assert report["ceiling_db"] == [28.13] * 6
    assert report["drift_m_deg_at_3"] == pytest.approx([0.2, 0.4, 2.0, 3.0])


def test_a_contact_sheet_shows_no_session_twice() -> None:
    assert [on_sheet(sessions) for sessions in (1, 2, 3, 24)] == [[0], [0, 1], [0, 1, 2], [0, 1, 12, 23]]
