# Two commands for a start: `make demo` and `make test`. Each makes the environment that it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
XLA := .venv-xla
TPU := .venv-tpu
CLIENTS := .venv-clients
PROTO := .venv-proto
PIP := -m pip --disable-pip-version-check install --progress-bar on

.PHONY: setup demo serve test cases fuzz soak check proto setup-xla test-xla tpu-check bench bench-cold \
	bench-storm bench-xla-host bench-xla-decode bench-xla-load bench-xla-overlap \
	bench-flood bench-rotation bench-overload bench-long-prompt bench-failover \
	bench-sim bench-plots clean

setup: $(VENV)/.runtime

demo: $(VENV)/.runtime
	$(BIN)/python -m demo.show

serve: $(VENV)/.runtime
	$(BIN)/loralane serve

# Many processes share the cores here: threads that wait by spinning would only take them away.
test cases soak: export OMP_WAIT_POLICY = PASSIVE
test: $(VENV)/.dev $(CLIENTS)/.ready
	$(BIN)/python -m pytest

setup-xla: $(XLA)/.ready

# The XLA backend on the CPU, and the exactness suite on it.
test-xla: export OMP_WAIT_POLICY = PASSIVE
test-xla bench-xla-host bench-xla-decode bench-xla-load bench-xla-overlap: export PJRT_DEVICE = CPU
EXACTNESS := tests/server/test_exactness.py tests/server/test_exactness_scheduling.py
# Cases of the dev file that ask for this backend; elsewhere they are skipped.
XLA_CASES := 'tests/cases/test_cases.py::test_case[tp-rank-under-shards]' \
	'tests/cases/test_cases.py::test_case[compile-new-shapes]'
test-xla: $(XLA)/.ready
	$(XLA)/bin/python -m pytest --device=xla tests/xla $(EXACTNESS) $(XLA_CASES)

# The shard's graphs, compiled for TPUs without one; nothing is run. Minutes; writes tpu/RESULTS.md.
tpu-check: $(XLA)/.ready $(TPU)/.ready
	PJRT_DEVICE=CPU $(XLA)/bin/python -m tpu.export
	PJRT_DEVICE=CPU $(XLA)/bin/python -m tpu.export --devices 4
	$(TPU)/bin/python -m tpu.check

# A case file over the wire: one line a case, exit status 1 on a failure.
cases: $(VENV)/.dev
	$(BIN)/python -m tests.cases.run $(CASES)

# 220,000 mutated adapters through the reading path; FUZZ="--configs 1 --headers 0 --first 7": one.
fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz.run $(FUZZ)

# Adapters loaded, evicted, unloaded and replaced under load; every token compared.
soak: $(VENV)/.dev
	$(BIN)/python -m tests.soak.run --minutes $(or $(MINUTES),10)

check: $(VENV)/.dev $(PROTO)/.ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(PROTO)/bin/python proto/generate.py --check

proto: $(PROTO)/.ready
	$(PROTO)/bin/python proto/generate.py

bench: $(VENV)/.dev
	$(BIN)/python -m bench.run

# PEER="--peer-url http://127.0.0.1:8001": another server of the same model and adapters, in turns.
bench-cold: $(VENV)/.dev
	$(BIN)/python -m bench.cold $(PEER)

bench-storm: $(VENV)/.dev
	$(BIN)/python -m bench.storm

# What is promised under load; each says what holds, and ends with 1 if anything does not.
bench-flood: $(VENV)/.dev
	$(BIN)/python -m bench.flood

bench-rotation: $(VENV)/.dev
	$(BIN)/python -m bench.rotation

bench-overload: $(VENV)/.dev
	$(BIN)/python -m bench.overload --minutes $(or $(MINUTES),5)

bench-long-prompt: $(VENV)/.dev
	$(BIN)/python -m bench.long_prompt

bench-failover: $(VENV)/.dev
	$(BIN)/python -m bench.failover

# What is promised of XLA on the CPU.
bench-xla-host: $(XLA)/.ready
	$(XLA)/bin/python -m bench.xla_host

bench-xla-load: $(XLA)/.ready
	$(XLA)/bin/python -m bench.xla_load

bench-xla-overlap: $(XLA)/.ready
	$(XLA)/bin/python -m bench.xla_overlap

bench-xla-decode: $(VENV)/.dev $(XLA)/.ready
	$(BIN)/python -m bench.xla_decode --xla $(XLA)/bin/python

# Minutes; the figures do not depend on the machine. SIM="--quick": the table alone, on less.
bench-sim: $(VENV)/.dev
	$(BIN)/python -m bench.sim $(SIM)

# Pictures in docs/img from bench/results.
bench-plots: $(VENV)/.dev
	$(BIN)/python -m bench.plots
	$(BIN)/python -m bench.fairness

clean:
	rm -rf $(VENV) $(XLA) $(TPU) $(CLIENTS) $(PROTO)

$(VENV)/.runtime: pyproject.toml constraints/cpu.txt
	@echo "== $(VENV): installing Loralane and torch for the CPU (about 1 GB; a minute or two)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) -c constraints/cpu.txt pip
	$(BIN)/python $(PIP) -c constraints/cpu.txt --editable '.[cpu]'
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "== $(VENV): installing what the tests compare with (transformers, PEFT, clients) and the linters"
	$(BIN)/python $(PIP) -c constraints/cpu.txt --group dev
	touch $@

$(XLA)/.ready: pyproject.toml constraints/xla.txt
	@echo "== $(XLA): installing torch_xla with its own torch, and what the tests compare with (7 GB; minutes)"
	test -x $(XLA)/bin/python || $(PYTHON) -m venv $(XLA)
	$(XLA)/bin/python $(PIP) -c constraints/xla.txt pip
	$(XLA)/bin/python $(PIP) -c constraints/xla.txt --editable '.[xla,pallas]'
	$(XLA)/bin/python $(PIP) -c constraints/xla.txt --group test
	touch $@

$(TPU)/.ready: constraints/tpu-aot.txt
	@echo "== $(TPU): installing the TPU compiler (libtpu) and jax to speak to it (1 GB; a minute)"
	test -x $(TPU)/bin/python || $(PYTHON) -m venv $(TPU)
	$(TPU)/bin/python $(PIP) -r constraints/tpu-aot.txt
	touch $@

$(CLIENTS)/.ready: constraints/clients.txt
	@echo "== $(CLIENTS): installing lorax-client, which needs an older huggingface_hub than we do"
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python $(PIP) -r constraints/clients.txt
	touch $@

$(PROTO)/.ready: pyproject.toml
	@echo "== $(PROTO): installing the pinned protobuf generator"
	test -x $(PROTO)/bin/python || $(PYTHON) -m venv $(PROTO)
	$(PROTO)/bin/python $(PIP) 'pip>=25.1'
	$(PROTO)/bin/python $(PIP) --group proto
	touch $@
