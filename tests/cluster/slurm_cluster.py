"""A Slurm cluster on this machine: munged, slurmctld and two virtual nodes, each with 16 CPUs and two GPUs that are only names.

Everything it writes is below one temporary folder, on ports of its own; a Slurm that is already here is left alone.
"""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
NODES = ("node1", "node2")
# A requeued job waits for as long as a credential lasts. Accounting would need a MySQL server; without it the plugin asks squeue.
CONFIGURATION = """
ClusterName=aerie
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=30
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
MinJobAge=3600
KillWait=5
OverTimeLimit=0
ReturnToService=2
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """Started by `with`; stops everything it started at the end, however that comes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "SlurmCluster":
        try:
            self._configure()
            self._start("munged", "--foreground", "--force", *self._munge_options())
            self._wait(lambda: (self.folder / "munge.socket").exists(), "munged")
            self._start("slurmctld", "-D", "-i")
            for node in NODES:
                self._start("slurmd", "-D", "-N", node)
            self._wait(lambda: self.states() == dict.fromkeys(NODES, "idle"), "the nodes")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Cancels all jobs, then ends the daemons, the last first; what slurmd started ends with its job."""
        subprocess.run(["scancel", "--user", getpass.getuser(), "--full", "--signal=KILL"], env=self.environment, capture_output=True)
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
        self.processes = []

    @property
    def environment(self) -> dict[str, str]:
        """For Slurm's commands, and for Snakemake which calls them. Variables of a job that we may be in do not reach it."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": f"{self.folder}/bin:{os.environ['PATH']}"}

    def run(self, *command: str) -> str:
        """What one of Slurm's commands says."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def states(self) -> dict[str, str]:
        """{node: state}"""
        done = subprocess.run(["sinfo", "-h", "-N", "-o", "%N %t"], env=self.environment, capture_output=True, text=True)
        return dict(line.split() for line in done.stdout.splitlines())

    def jobs(self, *states: str) -> list[dict[str, str]]:
        """Jobs in these states (all, if none is named), the oldest first: scontrol's fields, as JobId, Comment, NodeList, JobState."""
        lines = self.run("scontrol", "show", "jobs", "--oneliner").splitlines()
        found = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines if line.startswith("JobId=")]
        return sorted((job for job in found if not states or job["JobState"] in states), key=lambda job: int(job["JobId"]))

    def logs(self) -> str:
        """The end of each daemon's log."""
        return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def _configure(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o600)
        ports = _free_ports(1 + len(NODES))
        host = socket.gethostname().split(".")[0]
        nodes, gpus = [], []
        for node, port in zip(NODES, ports[1:], strict=True):
            nodes.append(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 RealMemory=64000 Gres=gpu:2 State=UNKNOWN"
            )
            for number in range(2):
                device = self.folder / f"{node}-gpu{number}"
                device.symlink_to("/dev/null")  # slurmd wants a device; what it is does not matter
                gpus.append(f"NodeName={node} Name=gpu File={device} Flags=nvidia_gpu_env")
        text = CONFIGURATION.format(host=host, ports=ports, user=getpass.getuser(), folder=self.folder, nodes="\n".join(nodes))
        (self.folder / "slurm.conf").write_text(text)
        # The plugin takes SLURM_CONF out of a job's environment.
        (self.folder / "bin").mkdir()
        for name in ("srun", "squeue"):
            program = self.folder / "bin" / name
            program.write_text(f'#!/bin/sh\nSLURM_CONF={self.folder}/slurm.conf exec {shutil.which(name)} "$@"\n')
            program.chmod(0o755)
        (self.folder / "gres.conf").write_text("\n".join(["AutoDetect=off", *gpus]) + "\n")

    def _munge_options(self) -> list[str]:
        files = {
            "key-file": "munge.key",
            "socket": "munge.socket",
            "pid-file": "munge.pid",
            "log-file": "munge.log",
            "seed-file": "munge.seed",
        }
        return [f"--{option}={self.folder / name}" for option, name in files.items()]

    def _start(self, *command: str) -> None:
        name = "-".join([command[0], *[word for word in command[1:] if word in NODES]])
        # 1,024 open files are the usual limit of a login, and munged closes each of the million that a container may allow.
        with open(self.folder / f"{name}.terminal.log", "wb") as output:
            self.processes.append(
                subprocess.Popen(
                    ["bash", "-c", 'ulimit -n 4096; exec "$@"', "bash", *command],
                    env=self.environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )

    def _wait(self, there, what: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not there():
            ended = [process.args for process in self.processes if process.poll() is not None]
            assert time.monotonic() < end and not ended, f"{what} did not start; ended: {ended}\n{self.states()}\n{self.logs()}"
            time.sleep(0.2)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
