"""The simulation where clients are lost, with what the server's engine and its training loop make of it.

A client that dies does nothing more; the server hears of it some time later, and what has come until then has come.
One that is given up lives on, and the server takes nothing more from it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from simulation import SimulatedClient, Simulation

from mpipipe.protocol import messages as m
from mpipipe.protocol.plan import Piece, Plan
from mpipipe.protocol.server import ServerMachine

# Whose gradients are in an update, by piece; None where it was made of zeros to let a step end.
Content = dict[int, tuple[int, ...]] | None


@dataclass(frozen=True)
class Loss:
    """These clients are lost at once, after so many events, or events or commands of the class of that name."""

    clients: tuple[int, ...]
    number: int
    of: str = "event"
    given_up: bool = False


class SimulationWithLosses(Simulation):
    """A run in which clients are lost.

    Args:
        plan: see :class:`Simulation`, as for all that is not named here.
        steps: for each client its number of steps in each phase, while it is there.
        credit_bytes: how much may be under way from one rank to another.
        seed: of the order of everything.
        losses: who is lost when. Those that have not come about at the end do so then.
        together: whether the server's optimizer updates all units at the end of a step.
    """

    def __init__(
        self,
        plan: Plan,
        steps: list[list[int]],
        credit_bytes: int,
        seed: int,
        losses: Sequence[Loss] = (),
        *,
        together: bool = False,
        **kwargs: Any,
    ) -> None:
        self.dead: set[int] = set()  # these do nothing more
        self.lost: set[int] = set()  # of these the server knows
        self._losses = list(losses)
        self._together = together
        super().__init__(plan, steps, credit_bytes, seed, **kwargs)
        self.server = ServerMachine(plan, self.clients, credit_bytes, survive=True)
        self.starts = [0]  # it grows with each end of a phase: who is lost is not known before
        self.happened: Counter[str] = Counter()

        # What has come from whom before it was lost, and what of it was forgotten: pieces by (client, step).
        self.came: dict[tuple[int, int], set[int]] = defaultdict(set)
        self.discarded: set[tuple[int, int, int]] = set()  # (client, piece, step)
        # What the machine has said.
        self.steps_reduced: list[int] = []
        self.redone: list[tuple[int, tuple[int, ...]]] = []
        self._announced: int | None = None  # the step that it will have redone

        # The engine. ``_versions`` are the steps of the newest weights.
        self._summing: set[int] = set()
        self._cancellations = 0
        self._kept: dict[tuple[int, int], int] = {}  # by (client, piece): the step of the gradient
        self._means: list[dict[int, tuple[int, ...]]] = [{} for _ in plan.units]
        self._handed: set[int] = set()
        self._again: set[int] = set()  # steps to be done again, or not to be
        self._not_to_be: set[int] = set()
        self._void: Counter[tuple[int, int]] = Counter()  # (unit, step) of the results that do not count
        self._to_serve: deque[bool] = deque()  # True for a step, False for the end of a phase

        # The server's training loop: gradients by unit, what the weights are made of, and where it stands.
        self._gradients: list[deque[tuple[int, Content]]] = [deque() for _ in plan.units]
        self.weights: list[list[Content]] = [[] for _ in plan.units]  # the updates that count
        self._before: list[list[Content]] = []
        self._results: deque[tuple[int, int]] = deque()
        self.served = 0
        self._goes_on = False
        self._to_update: set[int] | None = None  # units of the step that is being served
        self._started: set[int] = set()
        self._first_time = True

    # ---------------------------------------------------------------------------------------------------------- losses

    def run(self) -> None:
        """Let happen, in random order, all that can happen, and the losses."""
        while not self.failures:
            for loss in [loss for loss in self._losses if self._is_due(loss)]:
                self._losses.remove(loss)
                self.lose(loss.clients, given_up=loss.given_up)
            if self._pool:
                chosen = self.random.randrange(len(self._pool))
                self._pool[chosen], self._pool[-1] = self._pool[-1], self._pool[chosen]
                self._pool.pop()()
            elif self._losses:
                self._check_that_nobody_waits()  # before a loss could help
                self._losses[0] = Loss(self._losses[0].clients, 0, given_up=self._losses[0].given_up)
            else:
                return

    def _is_due(self, loss: Loss) -> bool:
        return (self.events if loss.of == "event" else self.happened[loss.of]) >= loss.number

    def lose(self, clients: Collection[int], *, given_up: bool = False) -> None:
        """These clients are lost now."""
        for client in clients:
            if given_up:
                self._notice(client)
            else:
                self.dead.add(client)
                self._pool.append(partial(self._notice, client))

    def _notice(self, client: int) -> None:
        if client in self.lost:
            return
        self.events += 1
        step = len(self.steps_reduced)
        own = {piece: its for (rank, piece), its in self._buffers.items() if rank == client}
        out = {piece for piece, its in own.items() if piece not in self._summing and its == step}
        whole = self.came[client, step] == set(range(len(self.plan.pieces)))
        later = {piece for piece, its in own.items() if its > step}
        summed = {piece for piece in range(len(self.plan.pieces)) if self.reduced[piece, step]}
        in_it = not whole and bool(summed) and self._has_to(self.clients[client], step)

        self.lost.add(client)
        self._still_come.pop(client, None)
        self._put_off.pop(client, None)
        self._share()
        commands = self.server.handle(m.ClientLost(client))
        discarded = {c.piece.index for c in commands if isinstance(c, m.Discard)}
        assert discarded == (later if whole else out | later), f"{discarded} of rank {client} are forgotten"
        assert not in_it or self._announced == step or m.MustRedo(step) in commands, "it is not said at once"
        for command in commands:
            self._carry_out(command)
        self._after_event()

    def _has_to(self, client: SimulatedClient, step: int) -> bool:
        """Whether a client has been to take part in a step, wherever it stands now."""
        return not client.left and self._takes_part(client, step)

    def _after_event(self) -> None:
        for client in self._served():
            client.receiving.check()
        assert not self.lost & set(self.server.waiting_for()), "the server waits for a client that is lost"

    # --------------------------------------------------------------------------------------------------- what differs

    def _served(self) -> list[SimulatedClient]:
        return [client for client in self.clients.values() if client.rank not in self.lost]

    def _takes_part(self, client: SimulatedClient, step: int) -> bool:
        start = self.starts[client.phase] if client.phase < len(self.starts) else step + 1
        return start <= step < start + client.steps[client.phase]

    def _train(self, client: SimulatedClient) -> None:
        if client.rank not in self.dead:
            super()._train(client)

    def _compute(self, client: SimulatedClient, bucket: int, number: int) -> None:
        if client.rank not in self.dead:
            super()._compute(client, bucket, number)

    def _feed_client(self, client: SimulatedClient, event: m.ClientEvent) -> None:
        if client.rank not in self.dead:
            super()._feed_client(client, event)

    def _answer_phase(self, client: SimulatedClient, steps: int) -> None:
        if client.rank not in self.dead:
            super()._answer_phase(client, steps)

    def _feed_server(self, event: m.ServerEvent) -> None:
        if getattr(event, "client", None) in self.lost:
            if isinstance(event, m.WeightsSent):  # of this the machine may hear
                assert self.server.handle(event) == []
            return
        self.happened[type(event).__name__] += 1
        if isinstance(event, m.GradientReceived):
            assert event.piece.index not in self.came[event.client, event.step], "a gradient has come twice"
            self.came[event.client, event.step].add(event.piece.index)
        super()._feed_server(event)
        self._after_event()

    def _carry_out(self, command: m.ServerCommand) -> None:
        self.happened[type(command).__name__] += 1
        if isinstance(command, m.SendWeights | m.AskFor | m.Pause | m.Resume):
            assert command.client not in self.lost, f"{command} for a client that is lost"
        if isinstance(command, m.StepBegan):
            assert command.step == len(self.steps_begun) == len(self.steps_reduced)
            self.steps_begun.append(command.step)
            # What was not to be, is to be now; nobody is still at it, for a phase has ended meanwhile.
            self._again.discard(command.step)
            self._not_to_be.discard(command.step)
            self._to_serve.append(True)
            self._go_on()
        elif isinstance(command, m.Discard):
            step = self._buffers.pop((command.client, command.piece.index))
            assert command.piece.index not in self._summing, "what is being summed is forgotten"
            self.discarded.add((command.client, command.piece.index, step))
        elif isinstance(command, m.MustRedo):
            assert command.step == len(self.steps_reduced) and self._announced is None
            self._announced = command.step
            self._must_redo(command.step)
        elif isinstance(command, m.Redo):
            assert command.step == self._announced, "a step is to be done again unannounced"
            self._announced = None
            self.redone.append((command.step, command.clients))
            self._redo(command.step, command.clients)
        elif isinstance(command, m.StepReduced):
            assert command.step == len(self.steps_reduced) and self._announced is None
            assert all(self.reduced[piece.index, command.step] == 1 for piece in self.plan.pieces)
            self.steps_reduced.append(command.step)
            self._forget_step()
        else:
            super()._carry_out(command)

    # ------------------------------------------------------------------------------------------------------ the engine

    def _reduce(self, command: m.Reduce) -> None:
        piece, step = command.piece, command.step
        assert step == len(self.steps_reduced), "a gradient is summed before all of the step before are"
        assert piece.index not in self._summing
        assert list(command.clients) == sorted(set(command.clients))
        missing = [c.rank for c in self._served() if c.rank not in command.clients and self._takes_part(c, step)]
        assert not missing, f"{piece} of step {step} is summed without {missing}"
        self.reduced[piece.index, step] += 1
        for client in command.clients:
            assert self._buffers[client, piece.index] == step, "a gradient of another step is summed"
            self.counted[client, piece.index, step] += 1
        self._summing.add(piece.index)
        self._pool.append(partial(self._summed, piece, step, command.clients, self._cancellations))

    def _summed(self, piece: Piece, step: int, clients: tuple[int, ...], cancellations: int) -> None:
        self._summing.discard(piece.index)
        for client in clients:
            del self._buffers[client, piece.index]
        if cancellations == self._cancellations:
            self._kept |= {(client, piece.index): step for client in clients}
            self._means[self.plan.unit_of[piece.index]][piece.index] = clients
        self._feed_server(m.Reduced(piece))

    def _hand_over(self, unit: int, step: int) -> None:
        self._handed.add(unit)
        self._hand(unit, step, self._means[unit])
        self._means[unit] = {}

    def _hand(self, unit: int, step: int, content: Content) -> None:
        wanted = {piece.index for piece in self.plan.units[unit].pieces}
        assert content is None or set(content) == wanted, "a gradient is handed over of which a piece is missing"
        self._gradients[unit].append((step, content))
        self._go_on()

    def _must_redo(self, step: int) -> None:
        self._again.add(step)
        self._void.update((unit, step) for unit, version in enumerate(self._versions) if version < step)

    def _redo(self, step: int, clients: tuple[int, ...]) -> None:
        if clients:
            for client in clients:
                assert all(self._kept[client, piece.index] == step for piece in self.plan.pieces)
            for unit in self.plan.units:
                self._hand(unit.index, step, {piece.index: clients for piece in unit.pieces})
            return
        self._not_to_be.add(step)
        self._versions = [min(version, step - 1) for version in self._versions]
        self._means = [{} for _ in self.plan.units]
        self._cancellations += 1
        for piece in self.plan.pieces:
            del self.reduced[piece.index, step]
        for unit in self.plan.units:
            if unit.index not in self._handed:
                self._hand(unit.index, step, None)
        self.steps_begun.remove(step)
        self._forget_step()

    def _forget_step(self) -> None:
        self._handed.clear()
        self._kept.clear()

    def _take_result(self) -> None:
        unit, step = self._results.popleft()
        if self._void[unit, step]:
            self._void[unit, step] -= 1
        elif self._versions[unit] == step:
            assert step in self._again, "a unit is updated twice"
        else:
            assert self._versions[unit] == step - 1, "the updates of a unit are not in order"
            self._versions[unit] = step
            self._feed_server(m.Updated(unit, step))

    def _end_phase(self, steps: int) -> None:
        assert steps == len(self.steps_begun) == len(self.steps_reduced), "a phase ends in the middle of a step"
        assert all(client.left for client in self._served())
        assert not any(client.receiving.backlog for client in self._served())
        assert all(version == steps - 1 for version in self._versions), "the phase ended before all was updated"
        assert not self._summing
        self.phases_ended.append(steps)
        self._to_serve.append(False)
        self._go_on()

    # ------------------------------------------------------------------------------------- the server's training loop

    def _go_on(self) -> None:
        """Make possible whatever the training loop can do now."""
        if self._to_update is None:
            if self._to_serve and not self._goes_on:
                self._goes_on = True
                self._pool.append(self._next)
            return
        ready = [unit for unit in self._to_update - self._started if self._gradients[unit]]
        if not self._together or len(ready) == len(self._to_update):
            self._started.update(ready)
            self._pool += [partial(self._update, unit) for unit in ready]

    def _next(self) -> None:
        self._goes_on = False
        if self._to_serve.popleft():
            self._before = [list(updates) for updates in self.weights]
            self._serve(first_time=True)
            return
        self._go_on()
        waiting = [client for client in self._served() if not client.ended]
        self.starts.append(self.phases_ended[-1])
        if waiting:
            self._feed_server(m.PhaseOpened())
            steps = self.phases_ended[-1]
            self._inexact |= steps - 1 in self._again  # some have weights that do not count
            for client in waiting:
                self._say(0, client.rank, partial(self._answer_phase, client, steps))

    def _serve(self, *, first_time: bool) -> None:
        self._first_time = first_time
        self._to_update, self._started = set(range(len(self.plan.units))), set()
        self._go_on()

    def _update(self, unit: int) -> None:
        assert self._to_update is not None
        step, content = self._gradients[unit].popleft()
        assert step == self.served == len(self.weights[unit]), "a unit is not updated once a step, step after step"
        assert content is not None or step in self._not_to_be
        self.weights[unit].append(content)
        self._results.append((unit, step))
        self._pool.append(self._take_result)
        self._to_update.discard(unit)
        if not self._to_update:
            self._pool.append(self._end_step)

    def _end_step(self) -> None:
        if self._first_time and self.served in self._again:
            self.weights = [list(updates) for updates in self._before]
            if self.served not in self._not_to_be:
                self._serve(first_time=False)
                return
        else:
            self.served += 1
        self._to_update = None
        self._go_on()

    # --------------------------------------------------------------------------------------------------------- the end

    def _check_that_nobody_waits(self) -> None:
        alive = [client for client in self._served() if client.rank not in self.dead]
        assert all(client.ended for client in alive), f"hangs: {self.where()}"
        assert self.server.waiting_for() == {}
        assert self._announced is None, "a step is not done again"
        assert self._to_update is None and not self._to_serve, "the server's training loop hangs"

    def check_the_end(self) -> None:
        """Nobody waits; every gradient of the clients that are in a step is in it, once, and no other one."""
        self._check_that_nobody_waits()
        pieces = set(range(len(self.plan.pieces)))
        total = len(self.steps_begun)
        assert self.steps_begun == self.steps_reduced == list(range(total))
        assert self.served == total and [len(updates) for updates in self.weights] == [total] * len(self.plan.units)
        assert self.phases_ended[-1:] in ([], [total])
        for step in range(total):
            whole = tuple(client for client in self.clients if self.came[client, step] == pieces)
            assert whole, f"nobody is in step {step}"
            content = {piece: clients for updates in self.weights for piece, clients in (updates[step] or {}).items()}
            assert content == dict.fromkeys(pieces, whole), f"in step {step} are {content}, not {whole}"
            assert not any((client, piece, step) in self.discarded for client in whole for piece in pieces)
        for phase, start in enumerate(self.starts[:-1][: self.phases]):
            for client in self._served():
                for step in range(start, start + client.steps[phase]):
                    assert self.came[client.rank, step] == pieces, f"rank {client.rank} is missing in step {step}"
            own = [
                sum(self.came[c, step] == pieces for step in range(start, self.starts[phase + 1])) for c in self.clients
            ]
            assert self.starts[phase + 1] - start == max(own), "there are steps that nobody has done"
        for client in self._served():
            own = [s for phase, n in enumerate(client.steps) for s in range(self.starts[phase], self.starts[phase] + n)]
            assert client.delivered == [own for _ in self.plan.buckets]
            assert client.machine.steps == total and client.machine.between_steps
            for window in (client.sending, client.receiving):
                assert not window.waiting and not window.under_way
        if len(self.lost) < len(self.clients):
            assert len(self.phases_ended) >= self.phases
        assert not self._buffers and not self._kept and not any(self._void.values()) and not self._results
        assert not any(self._means) and not any(self._gradients)


def play_with_losses(*args: Any, **kwargs: Any) -> SimulationWithLosses:
    """A whole run, to its end."""
    world = SimulationWithLosses(*args, **kwargs)
    world.run()
    assert not world.failures
    world.check_the_end()
    return world
