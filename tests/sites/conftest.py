"""Collects the notes of coordinators."""

import pytest

from fedpax.training.progress import Progress


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect what coordinators tell."""
    messages: list[str] = []
    monkeypatch.setattr(Progress, "note", lambda _, text: messages.append(text))
    return messages
