"""A session: what the ranks agree on about one optimizer, and the rounds in which they meet outside the steps.

All clients go through the same sequence: *agree* (the same variables? then the server's values everywhere), *open*
(which variables get a gradient? then the plan and the engines), and from then on steps, with a round where a phase
ends. In a round every client says something, the server answers all. A rank that comes to another round than the rest
is an error that names it, not a hang. Plain numpy arrays go in and come out; nothing here knows TensorFlow.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mpipipe import link as links
from mpipipe._version import __version__
from mpipipe.engine import ClientEngine, Deliver, ServerEngine, Wiring
from mpipipe.errors import DisagreementError, NonFiniteError, ProtocolError
from mpipipe.logs import logger
from mpipipe.protocol import messages as m
from mpipipe.protocol import plan as planning
from mpipipe.protocol.plan import Plan, VariableSpec
from mpipipe.transport.base import Buffer, Channel, hold
from mpipipe.wire import plain, reduce

if TYPE_CHECKING:
    from mpipipe.context import Context

Arrays = Sequence[NDArray[Any]]
# What a variable gets in a step: nothing, a gradient for all of it, or one for some of its rows.
Gradient = Literal["none", "whole", "rows"]
Message = dict[str, Any]


class Like(Protocol):
    """What has a shape and a dtype: an array, a ``tf.Variable``."""

    @property
    def shape(self) -> Any:
        """Its sizes."""

    @property
    def dtype(self) -> Any:
        """What has the dtype's name as ``name``."""


SERVER = 0

# How many arrays at most are on their way to a client outside the steps.
_ARRAYS_UNDER_WAY = 4
# What a rank does for which another one waits, in words.
_MEASURES = "is measuring the network"

# Seconds for which the first metrics of an epoch may be late.
_PATIENCE = 0.2

# How many layers are named in a message at most.
_NAMED = 4

# Messages after which a client goes on without an answer.
NO_ANSWER = ("batch", "running", "saves")

# What a client does in each round, for the message that says that two ranks are at different places.
PLACES = {
    "agree": "building its optimizer",
    "open": "computing its first gradients",
    "fit": "starting fit",
    "phase": "at the end of an epoch, or in optimizer.finish()",
    "steps": "beginning to train in fit",
    "state": "exchanging the model's state",
    "logs": "waiting for the metrics of an epoch",
    "batch": "in train_on_batch",
    "vote": "after the callbacks of an epoch",
    "end": "ending fit",
    "ended": "at the end of its script",
}


class Inbox:
    """Messages by sender, in order, for a thread that waits for the next one of a sender."""

    def __init__(self) -> None:
        self._messages: dict[int, deque[Message]] = defaultdict(deque)
        self._ended: set[int] = set()  # senders from which nothing more comes
        self._changed = threading.Condition()

    def put(self, source: int, message: Message) -> None:
        """Add a message."""
        with self._changed:
            self._messages[source].append(message)
            self._changed.notify_all()

    def end(self, source: int) -> None:
        """Note that nothing more comes from a sender."""
        with self._changed:
            self._ended.add(source)
            self._changed.notify_all()

    def lose(self, source: int) -> None:
        """Forget a sender that has died, and what it has said."""
        with self._changed:
            self._messages.pop(source, None)
        self.end(source)

    def discard(self, which: Callable[[Message], bool]) -> None:
        """Forget messages for which this is true."""
        with self._changed:
            for source, messages in self._messages.items():
                self._messages[source] = deque(message for message in messages if not which(message))

    def take(self, source: int, meanwhile: Callable[[], None] = lambda: None) -> Message:
        """Wait for the next message of a sender; one of the kind ``ended`` where none comes any more.

        ``meanwhile`` is called about once a second.
        """
        while True:
            with self._changed:
                # In slices, so that an interrupt gets through.
                self._changed.wait_for(lambda: self._messages[source] or source in self._ended, timeout=1.0)
                if self._messages[source]:
                    return self._messages[source].popleft()
                if source in self._ended:
                    return {"kind": "ended"}
            meanwhile()

    def waiting(self) -> dict[int, str]:
        """The kinds of the messages that senders wait to have answered."""
        with self._changed:
            last = {source: queue[-1]["kind"] for source, queue in self._messages.items() if queue}
        return {source: kind for source, kind in last.items() if kind not in NO_ANSWER}


class _Session:
    """What both sides share: what was agreed, and the arrays that the server sends outside the steps."""

    _owes: str  # in words: what the other side owes, in a step, of some layers
    _arrays: Channel  # for those arrays
    _variables: tuple[VariableSpec, ...] = ()
    # What the server has decided: the sizes, whether buckets may be updated by pieces, the wire formats, ...
    _agreed: Message
    # The positions of variables that the server changes by itself, and clients have to have exactly.
    _exact: tuple[int, ...] = ()

    def __init__(self, context: Context, number: int) -> None:
        self.number = number
        self.inbox = Inbox()
        self.plan: Plan | None = None
        # Whom this rank waits for, if it does, and what for, in words: outside of the steps, and in one.
        self.awaited: dict[int, str] = {}
        self.owing: dict[int, str] = {}
        self._context = context

    @property
    def overlaps(self) -> bool:
        """Whether a step's weights may still be on their way when the next one begins."""
        return bool(self._agreed["overlap"])

    @property
    def sparse(self) -> bool:
        """Whether gradients of some rows of a variable travel by rows."""
        return bool(self._agreed["sparse"])

    @property
    def sums_rows(self) -> bool:
        """Whether the gradients of one row that a client has in a step may be summed before they are sent."""
        return bool(self._agreed["sum_rows"])

    def plan_for(self, gradients: Sequence[Gradient]) -> Plan:
        """The plan for the variables agreed on, if they get such gradients; the same on every rank."""
        sizes = {name: self._agreed[name] for name in ("piece_bytes", "fuse_bytes", "max_buckets", "divisible")}
        rows = [position for position, kind in enumerate(gradients) if kind == "rows"]
        has_gradient = [kind != "none" for kind in gradients]
        return planning.make_plan(self._variables, has_gradient, **sizes, rows=rows, exact=self._exact)

    def _wiring(self, plan: Plan) -> Wiring:
        """How this rank's engine is connected. Collective."""
        shared = {name: self._agreed[name] for name in ("credit_bytes", "wire", "wire_weights", "overlap")}
        shared |= {name: self._agreed[name] for name in ("average", "sum_rows")}
        shared["survive"] = self._context.transport.survives
        channel = self._open_channel()
        recorder = self._context.recorder
        layers = ["+".join(dict.fromkeys(plan.variables[v].layer for v in b.variables)) for b in plan.buckets]
        recorder.describe(self.number, layers, [bucket.nbytes for bucket in plan.buckets])
        return Wiring(plan, channel, recorder, number=self.number, **shared)

    def _open_channel(self) -> Channel:
        others = self._context.remaining if self._context.is_server else [SERVER]
        with self._awaiting(others, "is opening a channel, or has yet to"):
            return self._context.transport.open_channel()

    @contextmanager
    def _awaiting(self, ranks: Iterable[int], what: str) -> Iterator[None]:
        """Meanwhile this rank waits for others, which do, or do not do, this."""
        self.awaited = dict.fromkeys(ranks, what)
        try:
            yield
        finally:
            self.awaited = {}

    def _note_owing(self, step: int, owing: Mapping[int, Collection[int]]) -> None:
        """Nothing has happened for a while, and these ranks owe something. On the engine's thread."""
        self.owing = {rank: f"{self._owes} {self.layers_of(its)} of step {step}" for rank, its in owing.items()}

    def layers_of(self, buckets: Iterable[int]) -> str:
        """The layers in buckets, in words."""
        assert self.plan is not None
        variables = [v for bucket in buckets for v in self.plan.buckets[bucket].variables]
        names = list(dict.fromkeys(self.plan.variables[v].layer for v in variables))
        return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")

    def _say(self, dest: int, kind: str, content: Message) -> None:
        self._context.transport.send_control(dest, {"session": self.number, "kind": kind, **content})


class ClientSession(_Session):
    """A client's side."""

    _owes = "owes the new weights of"
    engine: ClientEngine | None = None

    def __init__(self, context: Context, number: int) -> None:
        super().__init__(context, number)
        # After how many steps of this session the server wants this phase to end, if it does, and wants to know what
        # this client has of its own.
        self.stop_after: int | None = None
        self.save_at: int | None = None

    def receive(self, source: int, message: Message) -> None:
        """Take a control message, on the transport's thread."""
        if message["kind"] == "stop":
            self.stop_after = message["after"]
        elif message["kind"] == "save":
            self.save_at = message["at"]
        else:
            self.inbox.put(source, message)

    def round(self, kind: str, **content: Any) -> Message:
        """Say something to the server and wait for its answer to all clients.

        Raises:
            DisagreementError: the server found that the ranks do not do the same.
        """
        self._say(SERVER, kind, content)
        return self._answer()

    def _answer(self) -> Message:
        with self._awaiting([SERVER], "owes an answer, for which others may be waited for"):
            answer = self.inbox.take(SERVER)
        if "error" in answer:
            raise DisagreementError(answer["error"])
        return answer

    def agree(self, variables: Sequence[VariableSpec], exact: Sequence[int], rules: Message, **content: Any) -> Message:
        """Compare variables with the server's, and take over what it has decided.

        Args:
            variables: see :meth:`ServerSession.agree`.
            exact: likewise.
            rules: likewise.
            **content: what else to tell the server.

        Returns:
            What the server has decided, and what else it tells.

        Raises:
            DisagreementError: another rank has built a different model, or has other rules.
        """
        told = {"version": __version__, "settings": self._context.config.shared(), "rules": rules, **content}
        answer = self.round("agree", variables=planning.to_json(variables), **told)
        self._exact = tuple(exact)
        # The server's names: Keras may have numbered layers differently here, and they decide what shares a bucket.
        self._variables = planning.from_json(answer["variables"])
        self._arrays = self._open_channel()
        if answer["measures"]:
            with self._awaiting([SERVER], _MEASURES):
                links.take_part(self._arrays, SERVER)
        self._agreed = self._answer()
        return self._agreed

    def open(self, gradients: Sequence[Gradient], unsynchronised: bool, deliver: Deliver) -> bool:
        """Agree on the variables that get a gradient and start the engine.

        Args:
            gradients: for each variable, what gradient this client has for it.
            unsynchronised: whether this client's first gradients come from weights that were not the server's.
            deliver: see :class:`ClientEngine`.

        Returns:
            Whether all ranks throw the first gradients away, because some come from other weights.
        """
        answer = self.round("open", gradients=list(gradients), unsynchronised=unsynchronised)
        self.plan = self.plan_for(gradients)
        if self.plan.digest != answer["digest"]:
            raise ProtocolError("this rank's plan is not the server's: the ranks run different versions of mpipipe")
        self.engine = ClientEngine(self._wiring(self.plan), deliver, self._note_owing, SERVER)
        return bool(answer["skip_first"])

    def receive_arrays(self, like: Sequence[Like]) -> Iterator[NDArray[Any]]:
        """What the server sends by :meth:`ServerSession.send_arrays`, in order; it has to be taken to the end.

        Args:
            like: arrays, or variables, of the shapes and dtypes of those that come.
        """
        coming: deque[tuple[Buffer, threading.Event]] = deque()
        for tag, one in enumerate(like):
            buffer, arrived = np.empty(_nbytes(one), dtype=np.uint8), threading.Event()
            self._arrays.irecv(SERVER, tag, buffer, arrived.set)
            coming.append((buffer, arrived))
            if len(coming) == _ARRAYS_UNDER_WAY:
                yield self._next_array(coming, like[tag + 1 - len(coming)])
        while coming:
            yield self._next_array(coming, like[len(like) - len(coming)])

    def _next_array(self, coming: deque[tuple[Buffer, threading.Event]], like: Like) -> NDArray[Any]:
        buffer, arrived = coming.popleft()
        with self._awaiting([SERVER], "owes the model's weights"):
            while not arrived.wait(timeout=1.0):  # in slices, so that an interrupt gets through
                pass
        return plain.decode(buffer, like.dtype.name).reshape(tuple(like.shape))

    def end_phase(self, state: Arrays, **content: Any) -> Message:
        """Meet the others after this client's last step.

        Args:
            state: this client's part of :meth:`ServerSession.mean_arrays`.
            **content: ``logs`` and ``samples``: this client's metrics, and the number of samples behind them.

        Returns:
            The server's answer. Where it says ``catch_up``, the weights follow: others have gone on for further steps,
            or what was sent in the steps was not exact.
        """
        steps = self.steps_done()
        self._say(SERVER, "phase", {"steps": steps, "state": _shapes(state), **content})
        for tag, array in enumerate(state):
            # Not waited for: the server takes them unless it fails, and says either in its answer.
            buffer = plain.encode(array)
            self._arrays.isend(SERVER, tag, buffer, partial(hold, buffer))
        return self._answer()

    def say(self, kind: str, **content: Any) -> None:
        """Come to a round that the server does not answer."""
        self._say(SERVER, kind, content)

    def next_answer(self) -> Message:
        """What the server says to this client besides its answer."""
        return self._answer()

    def running(self, logs: Message, samples: int) -> None:
        """Let the server know the metrics so far."""
        self._say(SERVER, "running", {"logs": logs, "samples": samples})

    def steps_done(self) -> int:
        """Steps done in all."""
        return self.engine.settle() if self.engine else 0


class ServerSession(_Session):
    """The server's side."""

    _owes = "owes"
    engine: ServerEngine | None = None

    def __init__(self, context: Context, number: int) -> None:
        super().__init__(context, number)
        # Each client's latest metrics of this phase: (logs, samples).
        self.latest: dict[int, tuple[Message, int]] = {}
        # How many gradients were not finite, and the client and step of the last one.
        self._nonfinite, self._nonfinite_in = 0, (-1, -1)
        self.stopped = False  # whether a client has stopped in the middle of a phase
        # A client that was seen waiting where nobody answers it; it may just have been on its way.
        self._suspect: tuple[int, int, str] | None = None
        self.saves = Inbox()  # what clients say that they have of their own, for checkpoints
        # What clients did before there was an engine to tell.
        self._before_engine: list[m.ServerEvent] = []
        self._lock = threading.Lock()

    @property
    def clients(self) -> list[int]:
        """The ranks that train: all that have not been lost."""
        return self._context.remaining

    def client_lost(self, client: int) -> None:
        """A client's process has died, or is given up."""
        self._feed(m.ClientLost(client))
        self.latest.pop(client, None)
        self.inbox.lose(client)
        self.saves.end(client)

    def client_departs(self, client: int, steps: int | None) -> None:
        """A client's script has ended, after so many steps of this session; None if it never came to it."""
        if steps is not None:
            self._feed(m.ClientDeparted(client, steps))
        self.inbox.end(client)
        self.saves.end(client)

    def _feed(self, event: m.ServerEvent) -> None:
        with self._lock:
            if self.engine is None:
                self._before_engine.append(event)
            else:
                self.engine.feed(event)

    def receive(self, source: int, message: Message) -> None:
        """Take a control message, on the transport's thread."""
        if message["kind"] == "running":
            self.latest[source] = (message["logs"], message["samples"])
            return
        if message["kind"] == "saves":
            self.saves.put(source, message)
            return
        if message["kind"] == "phase":
            self.latest[source] = (message["logs"], message["samples"])
            self.stopped |= message.get("stopped", False)
            self._feed(m.ClientLeft(source, message["steps"]))
        self.inbox.put(source, message)

    def collect(self, kind: str) -> dict[int, Message]:
        """Wait until every client has come to a round; what each of them said, but for those that are lost.

        Raises:
            DisagreementError: a client is at another round.
        """
        said: dict[int, Message] = {}
        for client in self.clients:
            with self._awaiting([client], f"is awaited {PLACES[kind]}"):
                message = self.inbox.take(client, lambda: self._fail_if_elsewhere([client], PLACES[kind]))  # noqa: B023
            if client in self._context.lost:
                said.pop(client, None)
                continue
            if message["kind"] != kind:
                self.fail(
                    f"rank {client} is {PLACES[message['kind']]} while the server (rank 0) is {PLACES[kind]}: "
                    "every rank must make the same calls in the same order"
                )
            said[client] = message
        return {client: message for client, message in said.items() if client not in self._context.lost}

    def answer(self, kind: str, **content: Any) -> None:
        """Answer a round to all clients."""
        for client in self.clients:
            self._say(client, kind, content)

    def tell(self, client: int, **content: Any) -> None:
        """Say something to one client, besides an answer."""
        self._say(client, "besides", content)

    def save(self, at: int) -> None:
        """Have all clients say what they have of their own after so many steps of this session."""
        self.answer("save", at=at)

    def stop(self, after: int) -> None:
        """Have all clients end the phase after so many steps of this session in all."""
        self.answer("stop", after=after)

    def fail(self, message: str) -> None:
        """End the run on every rank with one message.

        Raises:
            DisagreementError: always.
        """
        self.answer("error", error=message)
        raise DisagreementError(message)

    def agree(
        self,
        variables: Sequence[VariableSpec],
        exact: Sequence[int],
        rules: Message,
        *,
        divisible: bool,
        sum_rows: bool,
        **content: Any,
    ) -> dict[int, Message]:
        """Compare variables with the clients', and decide on sizes.

        Args:
            variables: what is updated.
            exact: the positions of those that the server changes by itself, which travel plain in any wire format.
            rules: settings of the optimizer by name, ``average`` among them, that have to be the same everywhere.
            divisible: whether the optimizer may update variables by pieces.
            sum_rows: whether gradients of rows may be summed (see :func:`mpipipe.wire.rows.mean`).
            **content: what else to tell the clients.

        Returns:
            What the clients said.

        Raises:
            DisagreementError: a client has built a different model, or has other rules; the message names the first
                layer that differs, or the rules.
        """
        said = self.collect("agree")
        self._fail_on(
            {c: f"mpipipe {s['version']}" for c, s in said.items()}, f"mpipipe {__version__}", "the ranks run {} and {}"
        )
        for name, value in self._context.config.shared().items():
            theirs_are = {client: _setting(message["settings"].get(name)) for client, message in said.items()}
            self._fail_on(theirs_are, _setting(value), f"the ranks have different settings: {name} is {{}} and {{}}")
        for name, value in rules.items():
            theirs_are = {client: repr(message["rules"].get(name)) for client, message in said.items()}
            self._fail_on(theirs_are, repr(value), f"the ranks' optimizers have different {name}: {{}} and {{}}")
        theirs = {client: planning.from_json(message["variables"]) for client, message in said.items()}
        unlike = {c: v for c, v in theirs.items() if planning.first_difference(variables, v) is not None}
        if unlike:
            self.fail(_describe_difference(variables, unlike, self.clients))
        self._variables, self._exact = tuple(variables), tuple(exact)
        config, context = self._context.config, self._context
        wanted = {name: getattr(config, name) for name in ("piece_bytes", "fuse_bytes", "credit_bytes")}
        nbytes = sum(variable.nbytes for variable in variables)
        measures = config.piece_bytes is None and context.link is None
        self.answer("agree", variables=planning.to_json(variables), measures=measures)
        self._arrays = self._open_channel()
        if measures:
            with self._awaiting(self.clients, _MEASURES):
                context.link = links.measure(self._arrays, self.clients)
        if config.piece_bytes is None:
            assert context.link is not None
            auto = links.choose_sizes(context.link, nbytes, len(self.clients))
        else:
            auto = links.Sizes.of(config.piece_bytes)
        wanted = {name: getattr(auto, name) if size is None else size for name, size in wanted.items()}
        if measures and context.link is not None:
            logger.info(
                "link: %.4g MB/s each way, %.0f us a message; %.4g MB of weights travel in pieces of %d KiB, "
                "%d KiB under way to a rank",
                context.link.rate / 1e6,
                context.link.overhead * 1e6,
                nbytes / 1e6,
                wanted["piece_bytes"] >> 10,
                wanted["credit_bytes"] >> 10,
            )
        shared = {name: getattr(config, name) for name in ("max_buckets", "wire", "wire_weights", "sparse", "overlap")}
        self._agreed = {**wanted, **shared, "divisible": divisible, "sum_rows": sum_rows, "average": rules["average"]}
        self.answer("agreed", **self._agreed, **content)
        return said

    def open(self, hand_over: Deliver) -> bool:
        """Take over from the clients which variables get a gradient and make the engine, which is yet to be started.

        Args:
            hand_over: see :class:`ServerEngine`.

        Returns:
            Whether all ranks throw the first gradients away, because some come from other weights.
        """
        said = self.collect("open")
        first = said[self.clients[0]]["gradients"]
        for client, message in said.items():
            for variable, ours, theirs in zip(self._variables, first, message["gradients"], strict=True):
                if "none" in (ours, theirs) and ours != theirs:
                    having, lacking = (client, self.clients[0]) if ours == "none" else (self.clients[0], client)
                    self.fail(f"{variable.path} gets a gradient on rank {having} but none on rank {lacking}")
                if ours != theirs:
                    kinds = {"whole": "for all of it", "rows": "for some of its rows"}
                    self.fail(
                        f"{variable.path} gets a gradient {kinds[ours]} on rank {self.clients[0]} but one "
                        f"{kinds[theirs]} on rank {client}"
                    )
        skip_first = any(message["unsynchronised"] for message in said.values())
        self.plan = self.plan_for(first)
        self.answer("open", digest=self.plan.digest, skip_first=skip_first)
        looks = self._context.config.on_nonfinite != "ignore" and not self._exact  # a loss scale is meant to overflow
        engine = ServerEngine(
            self._wiring(self.plan), self.clients, hand_over, self._note_owing, self._note_nonfinite if looks else None
        )
        with self._lock:
            self.engine = engine  # the caller starts it, when there is something to hand over to
            for event in self._before_engine:
                engine.feed(event)
        return skip_first

    def wait_step(self) -> bool:
        """Wait until a client begins the next step (True), or until all have ended the phase (False)."""
        assert self.engine is not None
        while (began := self.engine.wait_step(timeout=1.0)) is None:
            left = self.inbox.waiting()
            training = [c for c in self.clients if left.get(c) != "phase"]
            self.awaited = dict.fromkeys(training, f"has not begun step {self.engine.steps_begun}")
            self._fail_if_elsewhere(training, "waiting for another step")
        self.awaited = {}
        return began

    def _fail_if_elsewhere(self, awaited: Sequence[int], doing: str) -> None:
        """Fail if a client that is awaited here waits itself, in a round that nobody will answer before."""
        waiting = self._context.waiting()
        found = next(((c, *waiting[c]) for c in awaited if c in waiting), None)
        if found is not None and found == self._suspect:
            client, number, kind = found
            other = "" if number == self.number else " of another optimizer"
            self.fail(
                f"rank {client} is {PLACES[kind]}{other} while the server (rank 0) is {doing}: every rank must make "
                "the same calls in the same order, and run a loop with several optimizers on the server too"
            )
        self._suspect = found

    def _note_nonfinite(self, client: int, bucket: int, step: int) -> None:
        """A client's gradient is not finite. On the engine's thread."""
        what = f"rank {client} has sent a gradient of {self.layers_of([bucket])} in step {step} that is not finite"
        wanted = self._context.config.on_nonfinite
        if wanted == "raise":
            raise NonFiniteError(f"{what}: ending the run, as on_nonfinite='raise' asks")
        if (client, step) == self._nonfinite_in:
            return
        self._nonfinite_in, self._nonfinite = (client, step), self._nonfinite + 1
        # Once a step does something of the kind, all that follow may.
        if self._nonfinite & (self._nonfinite - 1) == 0:
            skipped = "; the step is skipped on all ranks" if wanted == "skip" else ""
            logger.warning("%s%s (%d such so far)", what, skipped, self._nonfinite)

    def _note_owing(self, step: int, owing: Mapping[int, Collection[int]]) -> None:
        super()._note_owing(step, owing)
        self._fail_if_owing_elsewhere(owing)

    def _fail_if_owing_elsewhere(self, owing: Iterable[int]) -> None:
        """Fail if a client that owes gradients of a step waits in another optimizer's round."""
        waiting = self._context.waiting()
        for client in owing:
            if client in waiting and waiting[client][0] != self.number:
                raise DisagreementError(
                    f"rank {client} is {PLACES[waiting[client][1]]} of another optimizer while a step of this one "
                    "waits for it: with several optimizers in a loop, every client does the same number of steps"
                )

    def collect_phase(self, state: Arrays) -> dict[int, Message]:
        """What the clients said when they ended the phase; call it once the engine says that all have.

        Raises:
            DisagreementError: a client gave other state than ``state``.
        """
        said = self.collect("phase")
        for client, message in said.items():
            if message["state"] != _shapes(state):
                self.fail(
                    f"rank {client} exchanges {len(message['state'])} variables that are not trained, the server "
                    f"{len(state)}, or of other shapes: give finish() and serve() the same model on every rank"
                )
        return said

    def wait_reports(self) -> None:
        """Wait until every client has reported metrics in this phase, as each does after its first step or none.

        Not for long once a client goes on with another step: it may report less often than after every step.
        """
        assert self.engine is not None
        patience = _PATIENCE
        while len(self.latest) < len(self.clients) and patience > 0:
            time.sleep(1e-3)
            patience -= 1e-3 * self.engine.step_waits

    def answer_phase(
        self, said: dict[int, Message], weights: Callable[[], Iterable[NDArray[Any]]], **content: Any
    ) -> None:
        """Answer the end of a phase: whatever the clients do next, all of them may take part again.

        Args:
            said: what :meth:`collect_phase` has returned.
            weights: called where some client has not got the newest ones: the variables that get a gradient.
            **content: what else to answer.
        """
        # One that has done more of them may be lost by now.
        steps = 0 if self.engine is None else self.engine.steps_begun
        if self.engine is not None:
            self.engine.open_phase()
        self.latest.clear()
        exact = self._agreed["wire_weights"] == "plain"
        exact &= self.engine is None or steps - 1 not in self.engine.redo_steps  # done again after some had it
        behind = [client for client in self.clients if said[client]["steps"] < steps or (steps and not exact)]
        if self.engine is None:
            behind = []
        for client in self.clients:
            self._say(client, "phase", {"steps": steps, "catch_up": client in behind, **content})
        if behind:
            self.send_arrays(weights(), behind)

    def send_arrays(self, arrays: Iterable[NDArray[Any]], clients: Sequence[int] | None = None) -> None:
        """Send arrays to clients, all by default, which call :meth:`ClientSession.receive_arrays`.

        A few at a time, and each is only asked for when it is its turn: there need not be room for copies of all.
        """
        clients = self.clients if clients is None else clients
        may_start = {client: threading.Semaphore(_ARRAYS_UNDER_WAY) for client in clients}
        for tag, array in enumerate(arrays):
            buffer = plain.encode(array)
            for client in clients:
                self._wait_until_taken(client, may_start[client])
                self._arrays.isend(client, tag, buffer, partial(_let_go, buffer, may_start[client]))
        for client in list(may_start) * _ARRAYS_UNDER_WAY:
            self._wait_until_taken(client, may_start[client])

    def _wait_until_taken(self, client: int, semaphore: threading.Semaphore) -> None:
        with self._awaiting([client], "has not taken the model's weights"):
            while not semaphore.acquire(timeout=1.0):  # in slices, so that an interrupt gets through
                pass

    def mean_arrays(self, like: Arrays) -> list[NDArray[Any]]:
        """The mean over clients of the arrays that each sends; of those that are not floats, the first client's.

        Args:
            like: arrays of the shapes and dtypes of those that come.
        """
        parts = self.take_arrays(dict.fromkeys(self.clients, like))
        return [self._mean([part[i] for part in parts.values()], array) for i, array in enumerate(like)]

    def take_arrays(self, like: Mapping[int, Sequence[Like]]) -> dict[int, list[Buffer]]:
        """The bytes of arrays that clients send, of all but those that are lost meanwhile.

        Args:
            like: for each client, arrays of the shapes and dtypes of those that come.
        """
        arrived = {client: threading.Semaphore(0) for client in like}
        parts = {c: [np.empty(_nbytes(one), dtype=np.uint8) for one in of_client] for c, of_client in like.items()}
        for client, buffers in parts.items():
            for tag, buffer in enumerate(buffers):
                self._arrays.irecv(client, tag, buffer, arrived[client].release)
        for client, semaphore in arrived.items():
            with self._awaiting([client], "owes the model's state"):
                for _ in like[client]:
                    while client not in self._context.lost and not semaphore.acquire(timeout=1.0):
                        pass
        return {client: buffers for client, buffers in parts.items() if client not in self._context.lost}

    @staticmethod
    def _mean(parts: list[Buffer], like: NDArray[Any]) -> NDArray[Any]:
        name = like.dtype.name
        # What is the same everywhere stays so: the mean of n equal floats need not be that float.
        equal = all(np.array_equal(part, parts[0]) for part in parts[1:])
        averaged = reduce.mean(parts, name) if "float" in name and not equal else parts[0]
        return plain.decode(averaged, name).reshape(like.shape)

    def mean_logs(self) -> Message:
        """The clients' latest metrics, averaged by the number of samples behind each client's."""
        total: dict[str, float] = defaultdict(float)
        weights: dict[str, float] = defaultdict(float)
        for _, (logs, samples) in sorted(self.latest.items()):
            for name, value in logs.items():
                total[name] += value * samples
                weights[name] += samples
        return {name: total[name] / weights[name] for name in total if weights[name]}

    def _fail_on(self, theirs: dict[int, str], ours: str, text: str) -> None:
        for client, their in theirs.items():
            if their != ours:
                self.fail(text.format(f"{ours} (rank 0)", f"{their} (rank {client})"))


def _setting(value: Any) -> str:
    return "auto" if value is None else repr(value)


def _shapes(arrays: Arrays) -> list[list[Any]]:
    """Shapes and dtypes, as they come out of JSON."""
    return [[list(array.shape), array.dtype.name] for array in arrays]


def _nbytes(like: Like) -> int:
    return int(math.prod(like.shape)) * plain.dtype_of(like.dtype.name).itemsize


def _let_go(buffer: Buffer, semaphore: threading.Semaphore) -> None:
    """A buffer's message has left; it was kept until now."""
    semaphore.release()


def _describe_difference(
    ours: Sequence[VariableSpec], unlike: Mapping[int, Sequence[VariableSpec]], clients: list[int]
) -> str:
    """Name the first layer that differs, its variable on each side, and the ranks on each side."""
    at = min(planning.first_difference(ours, theirs) or 0 for theirs in unlike.values())
    having: dict[Any, list[int]] = defaultdict(list)
    named: dict[Any, VariableSpec | None] = {}
    for rank in [SERVER, *clients]:
        side = unlike.get(rank, ours)
        variable = side[at] if at < len(side) else None
        key = variable and (variable.shape, variable.dtype)
        named.setdefault(key, variable)
        having[key].append(rank)
    layer = next(variable.layer for variable in named.values() if variable is not None)
    sides = ", ".join(f"{named[key] or 'no such variable'} on {_ranks(ranks)}" for key, ranks in having.items())
    return f"the ranks have built different models. The first layer that differs is {layer!r} (variable {at}): {sides}"


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
