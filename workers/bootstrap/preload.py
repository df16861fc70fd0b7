"""What compute roles import, imported once: the module that a fork server preloads.

`multiprocessing.set_forkserver_preload` takes its name: rollout, logprob and trainer start as
forks of a process that has paid for these imports (about ten seconds of CPU). Importing starts
no thread and computes nothing, so a fork of it is safe; numpy's OpenBLAS alone starts threads, so
the supervisor sets `OPENBLAS_NUM_THREADS=1`. `RLSTREAMS_PRELOAD_MODEL` names the model folder whose
class is imported too; without it each role imports its own. What looks for a GPU asks NVML: CUDA's
driver, once initialised, does not survive a fork (`child.py` starts such children without one).
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import rlstreams.workers.engines.builtin
import rlstreams.workers.engines.builtin_scorer
import rlstreams.workers.model.tokenizer
import rlstreams.workers.weights.file
from rlstreams.workers.model.model import import_library, model_class

MODEL_VARIABLE = "RLSTREAMS_PRELOAD_MODEL"

__all__ = ["MODEL_VARIABLE", "rlstreams"]

import_library()
if os.environ.get(MODEL_VARIABLE):
    model_class(Path(os.environ[MODEL_VARIABLE]))
