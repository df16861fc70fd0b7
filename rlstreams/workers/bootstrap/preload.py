"""Imports of the compute roles, made once: the module that a fork server preloads.

`multiprocessing.set_forkserver_preload` takes its name: rollout, logprob and trainer start as
forks of a process that has paid for these imports (about ten seconds of CPU), their own modules
and the broker's client included: each start after a kill would wait for them. Importing starts no
thread and computes nothing, so a fork of it is safe; numpy's OpenBLAS alone starts threads, so
the supervisor sets `OPENBLAS_NUM_THREADS=1`. `RLSTREAMS_PRELOAD_MODEL` names the model folder whose
class is imported too; without it each role imports its own. CUDA's driver, once initialised, does
not survive a fork, so what looks for a GPU here asks NVML; where an import initialised it all the
same, `BEGAN_CUDA` says so, and roles are started without a fork.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import rlstreams.streams.kafka.bus
import rlstreams.workers.bootstrap.parts
import rlstreams.workers.bootstrap.sampling
import rlstreams.workers.compute.score
import rlstreams.workers.engines.builtin
import rlstreams.workers.logprob.worker
import rlstreams.workers.model.tokenizer
import rlstreams.workers.rollout.worker
import rlstreams.workers.trainer.worker
import rlstreams.workers.weights.file
from rlstreams.workers.model.model import import_library, model_class

MODEL_VARIABLE = "RLSTREAMS_PRELOAD_MODEL"

NOT_INITIALISED = 3  # CUDA_ERROR_NOT_INITIALIZED

__all__ = ["BEGAN_CUDA", "MODEL_VARIABLE", "rlstreams"]


def _began_cuda() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # not even loaded
        return False
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != NOT_INITIALISED


import_library()
if os.environ.get(MODEL_VARIABLE):
    model_class(Path(os.environ[MODEL_VARIABLE]))
BEGAN_CUDA = _began_cuda()  # read here: in a fork the driver says "not initialised"
