PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help install demo test check format bench conformance clean

CONFORMANCE ?= .conformance
PLANS ?= 500

help:
	@echo "make demo    install into $(VENV) and plan Llama 2 70B on 16x8 H100"
	@echo "make test    install into $(VENV) and run all tests"
	@echo "make check   ruff, formatting, mypy strict"
	@echo "make bench   the solver benchmark table"
	@echo "make conformance   real parsers of all launchers (2 GB of PyPI packages) over PLANS=500 random plans each"

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "parsolve needs Python >= 3.11; run: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	touch $@

install: $(VENV)/.installed

demo: install
	$(BIN)/parsolve solve h100-sxm:16x8 llama2-70b --seq-len 4096 --gbs 1024

test: install
	$(BIN)/python -m pytest -n auto --dist worksteal

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python benchmarks/solve.py

conformance: install
	bash conformance/setup.sh $(CONFORMANCE)
	$(BIN)/python conformance/run.py $(CONFORMANCE) $(PLANS)

clean:
	rm -rf $(VENV) $(CONFORMANCE) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
