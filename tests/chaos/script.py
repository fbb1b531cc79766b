"""What chaos is done to: a small training with checkpoints. Faults come as ``rank:step:what`` in CHAOS, by commas."""

import faulthandler
import os
import signal
import sys
import threading
import time
import zlib

faulthandler.dump_traceback_later(float(os.environ["MPIPIPE_TEST_LIMIT"]), exit=True)

import mpipipe as mp  # noqa: E402

FOLDER, EVERY = sys.argv[1], int(sys.argv[2])
rank = mp.rank()
print(f"PID {rank} {os.getpid()}", flush=True)

import keras  # noqa: E402
import numpy as np  # noqa: E402


def soon(act):
    """In the middle of the next step or so, whatever the main thread does."""
    threading.Timer(np.random.default_rng().uniform(0, 0.02), act).start()


def die():
    print(f"FAULT {time.time():.3f}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    print(f"FAULT {time.time():.3f}", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def fail():
    print(f"FAULT {time.time():.3f}", flush=True)
    raise ZeroDivisionError("the user's own mistake")


def leave():
    print(f"FAULT {time.time():.3f}", flush=True)
    sys.exit(0)


def dawdle():
    time.sleep(4)


ACTS = {
    "die": die, "stop": stop, "fail": fail, "leave": leave, "dawdle": dawdle,
    "die-soon": lambda: soon(die), "stop-soon": lambda: soon(stop),
}  # fmt: skip
FAULTS = [fault.split(":") for fault in os.environ.get("CHAOS", "").split(",") if fault]
MINE = {int(step): ACTS[what] for who, step, what in FAULTS if int(who) == rank}


class Chaos(keras.callbacks.Callback):
    done = 0

    def on_train_batch_end(self, batch, logs=None):
        self.done += 1
        if rank == 0 and self.done == 10:
            print("UNDER WAY", flush=True)
        if self.done in MINE:
            MINE[self.done]()
        time.sleep(0.005)  # long enough to be hit in the middle


x = np.random.default_rng(0).normal(size=(360, 8)).astype("float32")
x, y = mp.shard(x, x[:, :1])
keras.utils.set_random_seed(1 + rank)
layers = [keras.layers.Dense(24, activation="relu") for _ in range(4)]
normal = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)] if os.environ.get("CHAOS_STATE") else []
model = keras.Sequential([keras.Input((8,)), *layers, *normal, keras.layers.Dense(1)])
model.compile(mp.DistributedOptimizer(keras.optimizers.Adam(1e-3)), "mse")
callbacks = [mp.callbacks.Checkpoint(FOLDER, every=EVERY), Chaos()]
model.fit(x, y, batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
print(f"DONE {rank} {zlib.crc32(b''.join(weight.tobytes() for weight in model.get_weights()))}", flush=True)
