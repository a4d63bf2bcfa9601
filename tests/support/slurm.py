"""A SLURM of two nodes on this machine, of Debian's packages slurm-wlm and munge: a controller and two daemons."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue")
SECONDS = 60  # until the nodes are idle
MISSING = "no SLURM that this user can start: apt-get install slurm-wlm munge, as root"

# cred_expire: a job that is queued again would wait two minutes else. OverSubscribe: steps of several tests at once.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2
ReturnToService=2
KillWait=60
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs=2 State=UNKNOWN
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
PartitionName=test Nodes=n[0-1] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


@dataclass(frozen=True)
class Slurm:
    """A running SLURM. environment: of the commands that talk to it."""

    environment: dict[str, str]

    def run(self, *words: str) -> str:
        """Returns what a command of SLURM prints."""
        done = subprocess.run(words, env=os.environ | self.environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Returns the state of a job, such as RUNNING, for as long as the controller remembers it."""
        shown = self.run("scontrol", "show", "job", job, "--oneliner")
        return shown.partition("JobState=")[2].partition(" ")[0]

    def wait(self, job: str, *states: str, seconds: float = 300) -> str:
        """Returns the first of these states that the job is in."""
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state} and not {states}"
            time.sleep(0.3)
        return state


def can_start() -> bool:
    return os.geteuid() == 0 and all(map(shutil.which, PROGRAMS))


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Within the `with`, SLURM runs; its files are in `folder`. munged is left alone if it runs already."""
    host, ports = socket.gethostname().partition(".")[0], _free_ports(3)
    (folder / "state").mkdir(parents=True)
    for node in ("n0", "n1"):
        (folder / "spool" / node).mkdir(parents=True)
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=host, folder=folder, port=ports[0], ports=ports[1:]))
    started = Slurm({"SLURM_CONF": str(config)})
    try:
        _start_munge()
        started.run("slurmctld", "-f", str(config))
        for node in ("n0", "n1"):
            started.run("slurmd", "-N", node, "-f", str(config))
        deadline = time.monotonic() + SECONDS
        while started.run("sinfo", "--noheader", "--states=idle", "--format=%D") != "2":
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.2)
        yield started
    finally:
        with suppress(subprocess.CalledProcessError):
            started.run("scancel", "--user=root")
        for pid in folder.glob("*.pid"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(pid.read_text()), 15)


def _start_munge() -> None:
    if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode == 0:
        return
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    subprocess.run(["runuser", "-u", "munge", "--", shutil.which("munged") or "munged"], check=True)
    deadline = time.monotonic() + SECONDS
    while subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
