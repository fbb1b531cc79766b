# make demo    set up everything and train the example on 4 ranks
# make test    set up everything and run every test
# make parity  print how far a model is from the one that one process trains, feature by feature
# make chaos   kill, stop and interrupt ranks, from seeded schedules, and see that each run ends as it has to
# make bench   measure against the straight line and other ways, on hosts made of network namespaces (as root)

PYTHON ?= python3
# The CPU build, where there is one; on other machines TensorFlow itself.
TENSORFLOW ?= $(if $(filter x86_64,$(shell uname -m)),tensorflow-cpu,tensorflow)
VENV := .venv
BIN := $(VENV)/bin
MPICH := .mpich
OLDEST := .venv-oldest
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

# More ranks than cores, and root in a container, are what Open MPI wants to be asked for.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
MPIRUN := $(BIN)/mpirun --oversubscribe --bind-to none
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo install test test-newest test-oldest lint parity chaos bench bench-broadcast bench-cost clean

demo: install
	$(MPIRUN) -np 4 $(BIN)/python examples/train.py

install: $(VENV)/installed

$(VENV)/installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --editable '.[$(TENSORFLOW),mpi,examples,timeline,dev]'
	touch $@

# The second MPI, beside the first: both wheels have a bin/mpirun and a lib/libmpi.so.
$(MPICH)/installed: | install
	$(BIN)/python $(PIP_INSTALL) --prefix $(MPICH) --ignore-installed --no-deps 'mpich>=4.1,<6'
	touch $@

# The oldest TensorFlow and Keras that setup.cfg allows. They have no wheels for Python 3.13.
$(OLDEST)/installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python $(PIP_INSTALL) --editable '.[$(TENSORFLOW),mpi,examples,dev]' \
	    '$(TENSORFLOW)==2.16.*' 'keras==3.7.*' 'numpy<2'
	touch $@

parity: install $(MPICH)/installed
	$(BIN)/python -m tests.parity $(PARITY)

chaos: install $(MPICH)/installed
	$(BIN)/python -m tests.chaos $(CHAOS)

# For more: make bench BENCH='--full --mpi both --horovod-python PATH'
bench: install $(MPICH)/installed
	$(BIN)/python -m benchmarks $(BENCH)

bench-broadcast: install $(MPICH)/installed
	$(BIN)/python -m benchmarks.broadcast $(BENCH)

bench-cost: install $(MPICH)/installed
	$(BIN)/python -m benchmarks.cost $(BENCH)

test: lint test-newest test-oldest

lint: install
	$(BIN)/ruff check mpipipe tests examples benchmarks docker
	$(BIN)/mypy

test-newest: install $(MPICH)/installed
	$(BIN)/python -m pytest

test-oldest:
	@if $(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then \
	    $(MAKE) --no-print-directory $(OLDEST)/installed && \
	    $(OLDEST)/bin/python -m pytest tests/parity tests/mpi/test_training.py -k 'openmpi and not shape or shard'; \
	else \
	    echo "TensorFlow 2.16 has no wheels for this Python: the oldest versions are not tested"; \
	fi

clean:
	rm -rf $(VENV) $(OLDEST) $(MPICH) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
