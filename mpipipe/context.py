"""The run that this process is part of: its rank and role, one duplicated communicator, and a clean end of it."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import multiprocessing
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mpipipe import launcher, logs, quiet, signals, trace, watch
from mpipipe.config import Config
from mpipipe.errors import DisagreementError, EnvironmentProblem, MpipipeError
from mpipipe.link import Link
from mpipipe.session import PLACES, SERVER, ClientSession, ServerSession
from mpipipe.trace import Recorder
from mpipipe.transport.base import Transport

if TYPE_CHECKING:
    from mpi4py import MPI

# Seconds for which a rank that knows of an error shared by all waits to be ended by the rank that prints it.
_GRACE = 5.0
# Seconds that MPI may take to end the run.
_ABORT_GRACE = 5.0
# Seconds within which the server ends the run where all ranks got SIGTERM.
_TERM_GRACE = 4.0
# How often a rank asks the server for the time, to put its timeline on the server's clock.
_CLOCK_SAMPLES = 50
# A file of MPICH's shared memory among those that a process has mapped, as long as it has a name.
_MPICH_FILE = re.compile(r" (/dev/shm/mpich_shm_\w+)$", re.MULTILINE)
# What a rank that has come there waits for, in words.
_AT_THE_END = "has not come to the end of its script"


class Context:
    """One rank of a run.

    Args:
        config: the settings.
        transport: this rank's end of the network; not used where the run has one rank only.
        local: (rank, size) among the processes on this host.
    """

    def __init__(self, config: Config, transport: Transport | None, local: tuple[int, int] = (0, 1)) -> None:
        self.config = config
        self.rank, self.size = (transport.rank, transport.size) if transport else (0, 1)
        self.local_rank, self.local_size = local
        self.recorder = Recorder(keep=bool(config.timeline))
        # Where this process is in the middle of training, in words; empty elsewhere.
        self.busy = ""
        # Called when this rank leaves the run.
        self.closers: list[Callable[[], None]] = []
        # Called before the run is ended from outside, or for want of clients: each saves what there is and says, in
        # words, where; nothing, if there is nothing to save.
        self.savers: list[Callable[[], str]] = []
        # The clients whose processes have died, or that have been given up, while the others go on.
        self.lost: list[int] = []
        self.watch = watch.Watch(self)
        # What sys.exit was called with.
        self.exit_code: Any = None
        # The network as the server has measured it, once in a run.
        self.link: Link | None = None
        self._transport = transport
        self._sessions: list[ClientSession | ServerSession] = []
        self._early: dict[int, list[tuple[int, dict[str, Any]]]] = {}  # messages for sessions yet to come
        self._lock = threading.Lock()
        self._departed: dict[int, dict[str, int]] = {}
        self._bye = threading.Event()
        self._left: set[int] = set()  # the clients that need nothing more from this rank
        self._gone: set[int] = set()  # those that have died after their script had ended
        self._leaving: dict[int, str] = {}  # whom this rank waits for at the end
        # The clients' timelines, with what to add to their clocks; and what the server's clock said, and when.
        self._timelines: dict[int, tuple[dict[str, Any], float]] = {}
        self._times: queue.SimpleQueue[tuple[float, float]] = queue.SimpleQueue()
        self._finalized = self._closed = False
        if transport is not None:
            transport.on_control(self._dispatch)
            transport.on_lost(lambda rank: self.lose(rank, "its process has died"))

    @property
    def alone(self) -> bool:
        """Whether there is nobody to train with."""
        return self.size == 1

    @property
    def is_server(self) -> bool:
        """Whether this rank serves."""
        return self.rank == SERVER

    @property
    def clients(self) -> range:
        """The ranks that train."""
        return range(1, self.size) if self.size > 1 else range(1)

    @property
    def remaining(self) -> list[int]:
        """The clients that have not been lost."""
        return [client for client in self.clients if client not in self.lost]

    @property
    def transport(self) -> Transport:
        """The network. There is none where this rank is alone."""
        assert self._transport is not None
        return self._transport

    def new_session(self) -> ClientSession | ServerSession:
        """A session for one more optimizer. All ranks make theirs in the same order."""
        with self._lock:
            number = len(self._sessions)
            session = ServerSession(self, number) if self.is_server else ClientSession(self, number)
            self._sessions.append(session)
            for source, message in self._early.pop(number, []):
                session.receive(source, message)
            if isinstance(session, ServerSession):
                for client, steps in self._departed.items():
                    session.client_departs(client, steps.get(str(number)))
        return session

    def waiting(self) -> dict[int, tuple[int, str]]:
        """At the server: the clients that wait in a round, in which optimizer's and what round."""
        with self._lock:
            sessions = {session.number: session.inbox.waiting() for session in self._sessions}
            for number, messages in self._early.items():
                sessions[number] = {source: message["kind"] for source, message in messages}
        return {source: (number, kind) for number, waiting in sessions.items() for source, kind in waiting.items()}

    def awaited(self) -> dict[int, str]:
        """Whom this rank waits for at present, and what for, in words."""
        with self._lock:
            sessions = list(self._sessions)
        awaited = dict(self._leaving)
        for session in sessions:
            awaited |= {**session.awaited, **session.owing}
        return {rank: what for rank, what in awaited.items() if rank not in self.lost}

    def lose(self, rank: int, why: str) -> None:
        """A rank is not there any more: go on without it, or end this rank."""
        if not self.is_server:
            if rank == SERVER and not self._bye.is_set():
                self.fail(f"the server (rank 0) is lost: {why}")
            return
        with self._lock:
            if rank in self._departed:
                self._gone.add(rank)
                self._left.add(rank)
                return
            if rank in self.lost:
                return
            self.lost.append(rank)
            sessions = [session for session in self._sessions if isinstance(session, ServerSession)]
        left = self.remaining
        begun = [session.engine.steps_begun for session in sessions if session.engine is not None]
        if not begun:
            self.fail(f"rank {rank} is lost before training began: {why}")
        when = f"in step {begun[-1] - 1}" if begun[-1] else "before the first step"
        if not left:
            saved = self.save()
            self.fail(f"rank {rank} is lost {when}: {why}; no client is left{saved}")
        logs.logger.warning(
            "rank %d is lost %s: %s; %d of %d clients go on: %s",
            rank, when, why, len(left), len(self.clients), ", ".join(f"rank {client}" for client in left),
        )  # fmt: skip
        for session in sessions:
            session.client_lost(rank)

    def give_up(self, rank: int, why: str) -> None:
        """A rank is not expected to do anything any more."""
        if self.is_server and self.transport.survives:
            self.transport.send_control(rank, {"kind": "lost", "why": why})
            self.transport.forget(rank)
            self.lose(rank, why)
        else:
            self.fail(f"{why}: ending the run on all ranks{self.save()}")

    def save(self) -> str:
        """Save what there is to save; where, in words that go on a sentence."""
        saved = [where for saver in self.savers if (where := saver())]
        return f"; saved to {' and '.join(saved)}" if saved else ""

    def on_signal(self, number: int) -> None:
        """This process has got SIGTERM or SIGINT. On a thread of its own."""
        if self._finalized:
            os._exit(128 + number)
        name = signal.Signals(number).name
        if self.is_server:
            saved = self.save() if number == signal.SIGTERM else ""
            self.fail(f"{name}: ending the run on all ranks{saved}", 128 + number)
        if number == signal.SIGTERM:
            time.sleep(_TERM_GRACE)  # the server has got it too, and ends the run when it has saved what there is
            if self.transport.survives:
                self.end_alone(f"{name}: ending this rank")
            self.transport.send_control(SERVER, {"kind": "term"})
            time.sleep(_TERM_GRACE)
        self.abort(128 + number)

    def _answer(self) -> dict[str, Any]:
        """What this rank says when it is asked whether it is there."""
        engines = [session.engine for session in self._sessions if isinstance(session, ClientSession)]
        in_step = any(engine is not None and engine.in_step for engine in engines)
        return {"kind": "here", "where": watch.place(), "in_step": in_step}

    def _dispatch(self, source: int, message: dict[str, Any]) -> None:
        if self.is_server and source in self.lost:
            return  # it has been given up, and has not heard of it yet
        if message["kind"] == "ask":
            self.transport.send_control(source, self._answer())
        elif message["kind"] == "here":
            self.watch.answered(source, message)
        elif message["kind"] == "lost":
            self.end_alone(f"the server (rank 0) goes on without this rank: {message['why']}")
        elif message["kind"] == "depart":
            with self._lock:
                if "timeline" in message:
                    self._timelines[source] = message["timeline"], message["offset"]
                self._client_departs(source, message["steps"])
        elif message["kind"] == "clock":
            self.transport.send_control(source, {"kind": "time", "time": time.monotonic()})
        elif message["kind"] == "time":
            self._times.put((message["time"], time.monotonic()))
        elif message["kind"] == "bye":
            self.lost = message["lost"]
            self._bye.set()
        elif message["kind"] == "left":
            self._left.add(source)
        elif message["kind"] == "term":
            name, code = signal.SIGTERM.name, 128 + signal.SIGTERM
            self.fail(f"rank {source} has got {name}: ending the run on all ranks{self.save()}", code)
        else:
            with self._lock:
                if message["session"] < len(self._sessions):
                    self._sessions[message["session"]].receive(source, message)
                else:
                    self._early.setdefault(message["session"], []).append((source, message))

    def _client_departs(self, client: int, steps: dict[str, int]) -> None:
        self._departed[client] = steps
        for session in self._sessions:
            if isinstance(session, ServerSession):
                session.client_departs(client, steps.get(str(session.number)))

    def fail(self, message: str, code: int = 1) -> None:
        """Say why and end every process of the run."""
        logs.print_lines(self.rank, message)
        self.abort(code)

    def end_alone(self, message: str) -> None:
        """Say why and end this process, as if it had died: the others survive that, and go on."""
        logs.print_lines(self.rank, message)
        os.kill(os.getpid(), signal.SIGKILL)

    def abort(self, code: int = 1) -> None:
        """End every process of the run."""
        # Where nobody else is left there is nobody to end, and mpirun would say that all went well.
        if self._transport is not None and len(self.lost) < self.size - 1:
            # Where this host is cut off the launcher cannot be told, and MPI waits until it can, with the interpreter's
            # lock in its hands, so that none of its threads could end this process.
            with open(os.devnull, "w") as nowhere:
                faulthandler.dump_traceback_later(_ABORT_GRACE, exit=True, file=nowhere)
                self._transport.abort(code)
        os._exit(code)

    def end_with(self, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        """Print an exception that nobody caught and end every process of the run."""
        sys.stdout.flush()
        if isinstance(error, DisagreementError) and not self.is_server:
            time.sleep(_GRACE)  # the server prints it and ends the run
        brief = isinstance(error, MpipipeError)
        if isinstance(error, KeyboardInterrupt):
            error, brief = KeyboardInterrupt("interrupted: ending the run on all ranks"), True
        logs.print_exception(self.rank, kind, error, trace, brief=brief)
        self.abort(1)

    @property
    def incomplete(self) -> bool:
        """Whether some ranks are not there any more: MPI_Finalize may wait for them (with Open MPI 5.0, one in 20)."""
        return bool(self.lost or self._gone)

    @property
    def exit_status(self) -> int:
        """What this process ends with."""
        return self.exit_code if isinstance(self.exit_code, int) else int(self.exit_code is not None)

    def finalize(self) -> None:
        """Leave the run in an orderly way; every rank comes here, at the latest when its script has ended."""
        if self._finalized:
            return
        self._finalized = True
        if self.alone:
            return
        if self.exit_code not in (None, 0):
            self.fail(f"this rank called sys.exit({self.exit_code!r}): ending the run on all ranks", self.exit_status)
        if self.busy:
            self.fail(f"this rank's script ended in the middle of {self.busy}: ending the run on all ranks")
        if self.is_server:
            self._wait_for_clients()
            if self.config.timeline:
                path = trace.write(self.config.timeline, {SERVER: (self.recorder.export(), 0.0), **self._timelines})
                logs.logger.info("timeline: %s; see `python -m mpipipe.trace %s`", path, self.config.timeline)
        else:
            self._depart()
        self.watch.stop()
        for close in self.closers:
            close()
        self.transport.close()
        self._closed = True

    def _depart(self) -> None:
        self._leaving = {SERVER: _AT_THE_END}
        steps = {str(s.number): s.steps_done() for s in self._sessions if isinstance(s, ClientSession)}
        content: dict[str, Any] = {"kind": "depart", "steps": steps}
        if self.config.timeline:
            offset, _ = trace.clock_offset([self._ask_the_time() for _ in range(_CLOCK_SAMPLES)])
            content |= {"timeline": self.recorder.export(), "offset": offset}
        self.transport.send_control(SERVER, content)
        self._bye.wait()
        if self.lost:
            self.transport.send_control(SERVER, {"kind": "left"})
        self._leaving = {}

    def _ask_the_time(self) -> tuple[float, float, float]:
        """This rank's clock before, the server's clock, and this rank's clock after."""
        before = time.monotonic()
        self.transport.send_control(SERVER, {"kind": "clock"})
        there, after = self._times.get()
        return before, there, after

    def _wait_for_clients(self) -> None:
        """Wait until the clients' scripts have ended; they may not want anything from the server any more."""
        while there := [client for client in self.remaining if client not in self._departed]:
            self._leaving = dict.fromkeys(there, _AT_THE_END)
            for client, (_, kind) in self.waiting().items():
                self._left_behind(f"rank {client} is {PLACES[kind]}")
            for session in self._sessions:
                if isinstance(session, ServerSession) and session.engine and session.engine.step_waits:
                    self._left_behind("clients go on with another step")
            time.sleep(0.02)
        for client in self._departed:
            self.transport.send_control(client, {"kind": "bye", "lost": [*self.lost, *self._gone]})
        # Where ranks are lost, none waits for the others in MPI_Finalize: the server is the last to leave.
        while self.incomplete and (there := [client for client in self.remaining if client not in self._left]):
            self._leaving = dict.fromkeys(there, _AT_THE_END)
            time.sleep(0.02)
        self._leaving = {}

    def _left_behind(self, what: str) -> None:
        self.fail(
            f"the server's script has ended, but {what}: call optimizer.serve(model) on the server, or "
            "optimizer.finish(model) after the loop on every rank"
        )


_current: Context | None = None


def init(**settings: Any) -> Context:
    """Join the run; implied by the first use of anything else. Later calls must not give other settings.

    Args:
        **settings: see :class:`mpipipe.config.Config`; each can also be given as an environment variable.

    Raises:
        ConfigError: a setting that does not exist, or a value that it cannot have.
        EnvironmentProblem: no MPI library, one that cannot be used from threads, or one that the launcher does not fit.
    """
    global _current
    if _current is not None:
        if settings and Config.make(**settings) != _current.config:
            raise MpipipeError("mpipipe has already been initialised with other settings: call init() first of all")
        return _current
    config = Config.make(**settings)
    late = "mpi4py.MPI" in sys.modules
    prepared = [] if late else launcher.prepare_mpi()
    communicator, local = _join()
    transport = None
    if communicator is not None:
        from mpipipe.transport.mpi import MPITransport

        transport = MPITransport(communicator)
    context = Context(config, transport, local)
    logs.set_up(context.rank, context.size)
    if context.alone:
        logs.logger.info("one rank only: training as plain Keras does (start with `mpirun -np N` for more)")
    elif context.is_server:
        made = [*launcher.prepared, *prepared]
        if made:
            logs.logger.info("set where you had not: %s", " ".join(made))
        if late:
            logs.logger.debug("MPI was initialised before mpipipe, with whatever was set")
    if not config.quiet:
        quiet.unquieten_tensorflow()
    elif not context.is_server:
        logging.getLogger("tensorflow").setLevel(logging.ERROR)
    _install_hooks(context)
    _current = context
    return context


@atexit.register  # with the module, so that it comes after all that was registered later, and that is nearly all
def _end_without_mpi_finalize() -> None:
    """Where ranks are lost, end this process at once, without MPI_Finalize."""
    if _current is None or not _current.incomplete:
        return
    for process in multiprocessing.active_children():
        if process.daemon:
            process.terminate()
        process.join()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_current.exit_status)


def finalize() -> None:
    """Leave the run; implied by the end of the script. Collective: waits until every rank has come here."""
    if _current is not None:
        _current.finalize()


def _join() -> tuple[MPI.Intracomm | None, tuple[int, int]]:
    """A communicator of our own, or None where there is one rank; and (rank, size) on this host."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise EnvironmentProblem(
            f"no MPI library was found ({reason}): install one with `pip install 'mpipipe[mpi]'`, or load your "
            "cluster's MPI, or name its libmpi.so in MPI4PY_LIBMPI"
        ) from None
    world = MPI.COMM_WORLD
    launched = launcher.rank_and_size()
    if world.Get_size() == 1:
        if launched is not None and launched[1] > 1:
            raise EnvironmentProblem(
                f"the launcher started {launched[1]} processes, but the MPI library "
                f"({MPI.Get_library_version().splitlines()[0]}) sees one: mpirun and libmpi.so belong to different "
                "MPIs (or srun wants --mpi=pmix); use the mpirun of that library, or name the launcher's libmpi.so "
                "in MPI4PY_LIBMPI"
            )
        return None, (0, 1)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise EnvironmentProblem(
            "MPI was initialised for one thread only, and mpipipe calls it from one of its own: initialise it with "
            "MPI_THREAD_MULTIPLE (mpi4py's default), or let mpipipe.init() do it"
        )
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    places = local.Get_rank(), local.Get_size()
    local.Barrier()
    if places[0] == 0:
        _unlink_shared_memory()
    local.Free()
    return world.Dup(), places


def _unlink_shared_memory() -> None:
    """Remove the names of the files that MPICH shares between a host's ranks, once all of them have mapped them.

    Of a job that is killed it would leave the files behind, and the memory that they take. (Open MPI's launcher removes
    its own.)
    """
    with contextlib.suppress(OSError), open("/proc/self/maps") as file:
        for path in set(_MPICH_FILE.findall(file.read())):
            os.unlink(path)


def _install_hooks(context: Context) -> None:
    """Make sure that a rank that ends, however it ends, does not leave the others waiting."""
    atexit.register(context.finalize)
    if context.alone:
        return
    exit_, hook = sys.exit, sys.excepthook

    def remember_code(code: Any = None) -> None:
        context.exit_code = code
        exit_(code)

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if context._finalized:
            context.exit_code = 1
            hook(kind, error, trace)
        else:
            context.end_with(kind, error, trace)

    def on_thread_exception(arguments: threading.ExceptHookArgs) -> None:
        ours = arguments.thread is not None and arguments.thread.name.startswith("mpipipe-")
        if ours and not context._closed:
            context.end_with(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
        else:
            threading.__excepthook__(arguments)

    signals.watch(context.on_signal)
    context.watch.start()
    sys.exit = remember_code  # type: ignore[assignment]
    sys.excepthook = on_exception
    threading.excepthook = on_thread_exception


def rank() -> int:
    """This process's rank: 0 is the server, the others are clients."""
    return init().rank


def size() -> int:
    """The number of ranks, the server included."""
    return init().size


def local_rank() -> int:
    """This process's rank among those on the same host."""
    return init().local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return init().local_size


def is_server() -> bool:
    """Whether this rank serves: true on rank 0, also where it is alone (it then trains too)."""
    return init().is_server


def is_client() -> bool:
    """Whether this rank trains: true on all ranks but the server, and on rank 0 where it is alone."""
    context = init()
    return context.alone or not context.is_server


def num_clients() -> int:
    """The number of ranks that train."""
    return len(init().clients)


def client_index() -> int:
    """This client's number, from 0; the server, which has none, gets 0, the part that it would build a model from."""
    context = init()
    return max(context.rank - 1, 0)
