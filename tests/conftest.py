"""What all tests share: the library on the path, and the environment of a small machine."""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SCRIPTS = TESTS.parent / "workflow" / "scripts"
sys.path[:0] = [str(SCRIPTS), str(TESTS)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(SCRIPTS), str(TESTS), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests run side by side, and tiny models gain nothing from threads.
os.environ["OMP_NUM_THREADS"] = "1"
# Where threads are used all the same, they must not spin at barriers while another test needs the core.
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
