# make train · make test · make lint; each builds .venv first if it is missing.

PYTHON ?= python3
INTEGRATION := .venv/bin/python -m integration

# What would change how our Python starts, reads code or ends.
unexport PYTHONHOME PYTHONINSPECT PYTHONOPTIMIZE PYTHONSTARTUP PYTHONWARNINGS

.PHONY: train test lint clean

train: .venv/.installed
	$(INTEGRATION) train mini

test: .venv/.installed
	$(INTEGRATION) test --full --project

lint: .venv/.installed
	ci/lint

.venv/.installed: pyproject.toml constraints.txt ci/venv ci/pip
	PYTHON=$(PYTHON) ci/venv
	touch $@

clean:
	rm -rf .cache reports
