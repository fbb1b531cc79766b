"""The numbers of a run as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from mpipipe.timeline.analysis import WARM_UP, ClientNumbers, Numbers, ServerNumbers
from mpipipe.timeline.clients import Cause
from mpipipe.timeline.run import Run

_LEGEND = """\
What the numbers mean. Times are medians over the steps, so that a row need not add up.
  step time             from the start of a client's training step to the start of its next one, mean over the clients
  communication hidden  communication: the time in which at least one layer of a client is under way, from when its
                        gradient has been computed until its new weights are in. Hidden: the part of that time in which
                        this client computed
  computing             the client is in a forward or backward pass, and does not wait
  waiting               its forward pass stands still until new weights are in. How long each layer itself takes forward
                        is not measured: it is estimated from its part of the backward pass
  between               from the end of a backward pass to the start of the next step: input, callbacks, metrics
  why it waits          where the weights that it waits for were at the time, in per cent of its waiting in all steps:
    own way in          this client's own gradient was on its way to the server, or waited to be sent
    backward            its own was in, but the client that came last had not computed its gradient yet
    way in              the gradient of the client that came last was on its way to the server, or waited to be sent
    server              all gradients were in: the server summed them and updated the weights
    way out             the new weights were on their way to this client, or waited to be sent
    assign              they were in, but not in the variables yet
  mostly for            the rank that it waited for longest, and in which part of its waiting; unknown: there are no
                        marks of the server
  working               the server has all gradients of a part of a layer, and has not updated it yet
  gathering             it has some gradients, but for each part of a layer at least one client's is missing
  idle                  it has received nothing that it has not updated yet
  last to arrive        the client whose gradients most often were the last ones to come, in how many cases, and how
                        long after those of all others (in the median)
"""

_CAUSES: tuple[Cause, ...] = ("own way in", "backward", "way in", "server", "way out", "assign")


def report(run: Run, numbers: Numbers, session: int = 0) -> str:
    """A table of a run's numbers and a legend that says what each means."""
    lines = [_head(run, numbers, session), ""]
    lines.append(f"step time             {_ms(median(numbers.step_seconds.values())):>8} ms")
    if numbers.hidden:
        lines.append(f"communication hidden  {100 * median(numbers.hidden.values()):8.1f} %")
    if numbers.clients:
        table = _table(_CLIENT_HEAD, [_client(client) for client in numbers.clients])
        lines += ["", _TIMES.ljust(table[0].index(_CAUSES[0])) + "why it waits, in per cent:", *table]
    if numbers.servers:
        lines += ["", _TIMES, *_table(_SERVER_HEAD, [_server(server) for server in numbers.servers])]
    return "\n".join([*lines, "", _LEGEND])


def _head(run: Run, numbers: Numbers, session: int) -> str:
    timeline = run.timeline(session)
    size = f" ({timeline.nbytes / 1e6:.3g} MB)" if timeline.nbytes else ""
    what = [
        _count(len(timeline.servers), "server"),
        _count(len(timeline.clients), "client"),
        _count(len(timeline.buckets), "layer or group of layers", "layers or groups of layers") + size,
    ]
    if len(run.timelines) > 1:
        what.append(f"optimizer {session} of {len(run.timelines)}")
    steps = numbers.steps
    counted = f"step {steps[0]} alone" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
    first = f" (the first {WARM_UP} are left out)" if steps[0] == WARM_UP and len(steps) > 1 else ""
    return f"{', '.join(what)}\ncounted: {counted}{first}"


def _count(number: int, one: str, more: str | None = None) -> str:
    return f"{number} {one if number == 1 else more or one + 's'}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


_TIMES = "        milliseconds:"
_CLIENT_HEAD = ("client", "computing", "waiting", "between", *_CAUSES, "mostly for")
_SERVER_HEAD = ("server", "working", "gathering", "idle", "last to arrive")


def _client(client: ClientNumbers) -> list[str]:
    times = [_ms(seconds) for seconds in (client.computing, client.waiting, client.between)]
    mostly = client.mostly_for
    if mostly is None:
        return [f"rank {client.rank}", *times, *["-"] * len(_CAUSES), "nobody"]
    rank, part = mostly
    whom = "itself" if rank == client.rank else f"rank {rank}" if rank >= 0 else "unknown"
    shares = [f"{100 * client.share(cause):.0f}" for cause in _CAUSES]
    return [f"rank {client.rank}", *times, *shares, f"{whom} ({100 * part:.0f} %)"]


def _server(server: ServerNumbers) -> list[str]:
    times = [_ms(seconds) for seconds in (server.working, server.gathering, server.idle)]
    mostly = server.mostly_for
    if mostly is None:
        return [f"rank {server.rank}", *times, "there is one client"]
    client, part, seconds = mostly
    return [f"rank {server.rank}", *times, f"rank {client} ({100 * part:.0f} %, by {_ms(seconds)} ms)"]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns: the first and the last to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:-1], row[-1]]))
    return lines
