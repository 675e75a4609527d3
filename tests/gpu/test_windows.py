"""Pages that slid out of every layer's window serve other tokens, on the device under test."""

from __future__ import annotations

from gpu.conftest import Zoo
from gpu.windows import check_windows


def test_a_request_holds_its_window_and_a_page_whatever_its_length(zoo: Zoo, device: str) -> None:
    check_windows(zoo, zoo.judge("mistral"), device)
