# One virtual environment, made on first use and again when pyproject.toml changes. PYTHON chooses the interpreter.
# Most tests wait for a server of their own: JOBS of them run at once.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# protoc of this version makes stubs that run with protobuf 6.31 and every 7.x.
GRPC_TOOLS := grpcio-tools==1.73.1

.PHONY: demo test check bench proto clean

demo: $(READY)  ## a server and a replay of a generated load, about a minute
	$(BIN)/kvstore replay gen:api --seconds 80 --capacity 10% --part-size 64KiB --plot kvstore-demo.png

test: $(READY)  ## every test but the soak, JOBS at once
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

check: $(READY)  ## style, types, import directions, stubs up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_imports.py
	$(VENV)/proto/bin/python scripts/gen_proto.py --check

bench: $(READY)  ## figures as ratios to ceilings of the same run
	$(BIN)/python -m bench

proto: $(READY)  ## message stubs from proto/kvstore/v1
	$(VENV)/proto/bin/python scripts/gen_proto.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[server,test,bench]'
	$(PYTHON) -m venv $(VENV)/proto
	$(VENV)/proto/bin/python -m pip install --quiet --disable-pip-version-check $(GRPC_TOOLS) setuptools
	touch $(READY)
