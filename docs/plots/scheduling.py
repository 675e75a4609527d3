"""Draws the plots of docs/scheduling.md from simulated runs; measures nothing on a device.

pip install -e .[dev] && python docs/plots/scheduling.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

from headrace.engine.bench.host import policies
from headrace.engine.bench.host.policies import DEVICE, TENANTS, ArrivalOutcome, Simulation, simulate

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "headrace", "svg.fonttype": "none", "figure.constrained_layout.use": True})
from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

FOLDER = Path(__file__).parent
RATE = 8.0
LOADS = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
COLOURS = {"first_come": "#c44e52", "all alike": "#8c8c8c"}
OURS = "#4c72b0"


def main() -> None:
    """Write one file for each plot."""
    draw("quiet-tenant", quiet_tenant)
    draw("shares", shares)
    draw("sizes", sizes)
    draw("deadlines", deadlines)


def draw(name: str, plot: Callable[[Axes], None]) -> None:
    """Write what `plot` draws to a file of that name."""
    figure, axes = pyplot.subplots(figsize=(7, 3))
    plot(axes)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FOLDER / f"scheduling-{name}.svg", metadata={"Date": None})
    pyplot.close(figure)


def quiet_tenant(axes: Axes) -> None:
    """When a quiet tenant's requests came, and how long the slowest of each second waited for the first token."""
    quiet = policies.quiet_load(RATE)
    flood = [*quiet, *policies.loud_load(10 * RATE)]
    runs = {
        "first_come": simulate("first_come", flood),
        "fair_share": simulate("fair_share", flood),
        "all alike": simulate("fair_share", [*quiet, *policies.loud_load(RATE)]),
    }
    for name, made in runs.items():
        slowest: dict[int, float] = {}
        for outcome in made.outcomes.values():
            second = int(outcome.arrival.at)
            if outcome.arrival.tenant in TENANTS[1:] and outcome.first is not None:
                slowest[second] = max(slowest.get(second, 0.0), outcome.first)
        seconds = sorted(slowest)
        axes.plot(seconds, [slowest[second] for second in seconds], label=name, color=COLOURS.get(name, OURS))
    axes.set(yscale="log", xlabel="second of arrival", ylabel="slowest TTFT, s", xlim=(0, 60))
    axes.legend(frameon=False)


def shares(axes: Axes) -> None:
    """Tokens that each of four greedy tenants was given."""
    for place, name in enumerate(("first_come", "fair_share")):
        made = simulate(name, policies.greedy_load(RATE))
        given = policies.served(made)
        total = sum(given.values())
        heights = [100 * given[tenant] / total for tenant in TENANTS]
        axes.bar(
            [index + 0.4 * (place - 0.5) for index in range(len(TENANTS))],
            heights,
            0.38,
            label=name,
            color=COLOURS.get(name, OURS),
        )
    axes.set_xticks(range(len(TENANTS)), [f"asks for {2 + 3 * index} times its share" for index in range(len(TENANTS))])
    axes.tick_params(axis="x", labelsize=8)
    axes.set(ylabel="% of all tokens")
    axes.legend(frameon=False)


def sizes(axes: Axes) -> None:
    """Which part of the short and of the long requests had ended after so many seconds."""
    for name in ("first_come", "size_classes"):
        made = simulate(name, policies.mixed_load(10))
        for kind, style in (("short", "-"), ("long", "--")):
            ends = sorted(each.end for each in of(made, kind) if each.end is not None)
            parts = [100 * (index + 1) / len(ends) for index in range(len(ends))]
            chosen = range(0, len(ends), max(1, len(ends) // 150))
            axes.plot(
                [ends[index] for index in chosen],
                [parts[index] for index in chosen],
                style,
                label=f"{kind}, {name}",
                color=COLOURS.get(name, OURS),
            )
    axes.set(xscale="log", xlabel="seconds from arrival to end", ylabel="% ended")
    axes.legend(frameon=False, fontsize=8)


def of(made: Simulation, tenant: str) -> list[ArrivalOutcome]:
    """What became of the requests of one tenant."""
    return [outcome for outcome in made.outcomes.values() if outcome.arrival.tenant == tenant]


def deadlines(axes: Axes) -> None:
    """Answers a second that ended in time, by load."""
    for name in ("first_come", "deadlines"):
        good = [policies.goodput(simulate(name, policies.hurried_load(load * DEVICE))) for load in LOADS]
        axes.plot(LOADS, good, "o-", label=name, color=COLOURS.get(name, OURS))
    axes.axhline(DEVICE, color=COLOURS["all alike"], linestyle=":", label="what the device can do")
    axes.set(xlabel="load, of what the device can do", ylabel="answers in time, 1/s", ylim=(0, None))
    axes.legend(frameon=False)


if __name__ == "__main__":
    main()
