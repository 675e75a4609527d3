"""What a commit's hash chooses: which cases of a test it runs, and that other commits run the others."""

from __future__ import annotations

import pytest
from commit import case_of, chosen, left_out

CASES = [(f"test_a.py::test_one[{number}]", 2) for number in range(5)]
CASES += [(f"test_b.py::test_one[{number} [x]]", 3) for number in range(3)]
COMMITS = [f"{number:040x}" for number in range(60)]


def test_a_commit_leaves_out_all_but_a_share_of_each_test() -> None:
    for commit in COMMITS:
        left = left_out(CASES, commit)
        assert sum(name.startswith("test_a") for name in left) == 2
        assert sum(name.startswith("test_b") for name in left) == 2
        assert left == left_out(reversed(CASES), commit), "whatever the order"


def test_each_case_has_its_commits() -> None:
    left = [left_out(CASES, commit) for commit in COMMITS]
    for name, share in CASES:
        runs = sum(name not in each for each in left)
        assert 0.2 * len(COMMITS) / share < runs < len(COMMITS), name


def test_a_case_alone_runs() -> None:
    for case in CASES:
        assert not left_out([case], COMMITS[0])


@pytest.mark.xdist_group("commit")
@pytest.mark.parametrize("text", ["a", "b@c"])
def test_a_group_of_processes_changes_no_case(text: str, request: pytest.FixtureRequest) -> None:
    """`make test` gives pytest-xdist groups, and whoever repeats one file does not."""
    assert case_of(request.node).endswith(f"/test_commit.py::test_a_group_of_processes_changes_no_case[{text}]")


@pytest.mark.parametrize("count", range(4))
def test_so_many_are_chosen_whatever_their_order(count: int) -> None:
    names = ["a", "b", "c"]
    assert len(found := chosen(names, count, "x")) == count
    assert found == chosen(names[::-1], count, "x") and set(found) <= set(names)
