"""What the page says of a line of the log, in words."""

import pytest

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'dltta[serve]'")

from dltta.serving.page import _reason


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"decision": "accepted"}, "adapted, and the adapted model predicts"),
        (
            {"decision": "accepted", "candidate": "running", "quality": 0.9, "review": False},
            "adapted: the candidate “running” is given, by rehearsal",
        ),
        (
            {"decision": "accepted", "candidate": "running", "quality": 0.4, "review": True},
            "adapted: the candidate “running” is given, by rehearsal; its expected quality is low",
        ),
        ({"decision": "accepted", "candidate": "entropy"}, "adapted: the candidate “entropy” is given"),
        (
            {"decision": "kept", "detail": "OOD score 9, limit 3"},
            "predicted without an update: OOD score 9, limit 3",
        ),
        ({"repeats": "r1"}, "the same image as r1"),
        ({"decision": None}, "predicted"),
    ],
)
def test_a_reason_is_a_sentence(line, said):
    assert _reason(line) == said
