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

_CAUGHT = "WorkerProc hit an exception."


class _EndProcess(logging.Handler):
    """Comes after vLLM's own handler, which has written the traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        if record.exc_info and _CAUGHT in record.getMessage() and get_tensor_model_parallel_rank() != 0:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def end_when_useless() -> None:
    """In a worker process: ends it with its engine's, and when vLLM catches an exception in it, unless it is the one that
    answers. Elsewhere: nothing."""
    log = logging.getLogger("vllm")
    if multiprocessing.parent_process() is not None and not any(isinstance(handler, _EndProcess) for handler in log.handlers):
        log.addHandler(_EndProcess())
        die_with_parent()
