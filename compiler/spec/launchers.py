"""Says by the environment whether a launcher started this process as one of several."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """A program that starts processes.

    num_processes, process_id: the environment variables that it sets; an empty one counts as not set. needs: the
    variables from which JAX reads the coordinator's address; without them JAX does not see this launcher.
    """

    name: str
    num_processes: str
    process_id: str
    needs: tuple[str, ...]


# In JAX's own order. Open MPI 5, MPICH and Intel MPI name no address, so JAX does not detect them.
LAUNCHERS = (
    Launcher("ompi", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", ("OMPI_MCA_orte_hnp_uri",)),
    Launcher("slurm", "SLURM_NTASKS", "SLURM_PROCID", ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_LOCALID")),
    Launcher("mpiexec", "PMI_SIZE", "PMI_RANK", ("",)),
)
ADDRESS = "JAX_COORDINATOR_ADDRESS"
POD = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")  # of a pod of an indexed Job


def launcher_of(environment: Mapping[str, str]) -> Launcher | None:
    """Returns the launcher that started this process; None if there is none."""
    return next((each for each in LAUNCHERS if environment.get(each.num_processes, "").strip()), None)


def is_in_pod(environment: Mapping[str, str]) -> bool:
    """Returns True in a pod of an indexed Kubernetes Job."""
    return all(environment.get(name) for name in POD)


def names_others(environment: Mapping[str, str]) -> bool:
    """Returns True if the environment says that there are other processes, or where they meet."""
    launcher = launcher_of(environment)
    is_alone = launcher is None or environment[launcher.num_processes].strip() == "1"
    return not is_alone or bool(environment.get(ADDRESS)) or is_in_pod(environment)
