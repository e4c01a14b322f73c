"""The end of a vLLM worker in which something was raised.

vLLM hands on the exceptions of the worker that answers for all; of another one it logs them and goes on, while the first
waits for that one's part of a sum, for minutes and with nothing said. A worker that ends is noticed at once. Nor does a
worker that waits like that notice that its engine was killed.
"""

import logging
import multiprocessing
import os
import sys

from .errors import die_with_parent

_LOGGER = "vllm.v1.executor.multiproc_executor"
_CAUGHT = "WorkerProc hit an exception."


def _end_process(record: logging.LogRecord) -> bool:
    """A filter, since vLLM's configuring of its loggers in a worker removes their handlers."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    if record.exc_info and _CAUGHT in record.getMessage() and get_tensor_model_parallel_rank() != 0:
        logging.getLogger("vllm").handle(record)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    return True


def end_when_useless() -> None:
    """In a worker process: ends it with its engine's, and when vLLM catches an exception in it, unless it is the one that
    answers. Elsewhere: nothing."""
    # The name, since a process that is spawned knows its parent only after it has imported the main module, and all that this imports.
    if multiprocessing.current_process().name != "MainProcess":
        logging.getLogger(_LOGGER).addFilter(_end_process)
        die_with_parent()
