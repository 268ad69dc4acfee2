"""The picture of a flood."""

from bench.fairness import fairness
from bench.flood import NAMES


def test_a_picture_is_drawn_of_rounds_in_which_some_requests_were_never_served(tmp_path):
    served = {"a": [1.0, 3.0], "b": [1.0, 2.0], "c": [9.0, 30.0]}
    rounds = [
        {"name": name, "victims": [0.1, 0.2, float("inf")], "served": served} for name in NAMES
    ]
    path = tmp_path / "img" / "fairness.png"

    fairness(rounds, path)

    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 60_000
