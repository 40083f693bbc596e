"""The demo's policy learns in FP8 as it does in float32; the whole curves are in docs/fp8.md."""

import pytest

pytestmark = pytest.mark.thorough

STEPS = 20
BAND = 0.15
"""Nats, of held-out losses that fall from 3.4 to below 1.6."""


def test_the_demo_learns_in_fp8_within_a_band_of_float32(root, monkeypatch):
    """Its first phase: deterministic, because no rollouts overlap with it."""
    monkeypatch.syspath_prepend(root / "tools")
    fp8_curve = pytest.importorskip("fp8_curve")
    demo = fp8_curve.load_demo()

    curves = {
        name: fp8_curve.losses(demo, form, STEPS, 0, every=10)
        for name, form in fp8_curve.FORMS.items()
    }

    expected = curves.pop("float32")
    assert expected[0] > 3.2
    assert expected[-1] < 1.6
    for name, found in curves.items():
        assert found == pytest.approx(expected, abs=BAND), name
        assert found != expected, name
